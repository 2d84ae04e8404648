"""Traces and charts show what the timeline says: every span once, where it was, and nothing that cannot be read."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from test_imports import modules_after

from mesh_attention.errors import UsageError
from mesh_attention.timeline import LANES, RankTimes, Span, Timeline
from mesh_attention_lab.drawing.charts import ChartPoint, save_chart, time_chart
from mesh_attention_lab.drawing.trace import rank_tracks, to_perfetto, write_trace

TWO_NS_IN_US = 0.002
"""A trace counts whole nanoseconds, and spans that touch do so in it as well."""


def timeline_of(spans: list[Span], *, name: str = "mesh 2x2 forward") -> Timeline:
    """With the totals that the spans have."""
    totals: dict[tuple[int, str], float] = defaultdict(float)
    stops: dict[int, float] = defaultdict(float)
    for span in spans:
        totals[span.rank, span.lane] += span.stop_s - span.start_s
        stops[span.rank] = max(stops[span.rank], span.stop_s)
    ranks = tuple(
        RankTimes(
            rank=rank,
            stop_s=stops[rank],
            compute_s=totals[rank, "compute"],
            link_s=max(totals[rank, "send"], totals[rank, "recv"]),
        )
        for rank in sorted(stops)
    )
    return Timeline(name=name, ranks=ranks, sent_nbytes={}, peak_nbytes=0, flops=0, spans=tuple(spans))


# Rank 3 computes, waits and computes again while two transfers run at once.
SPANS = [
    Span(3, "compute", 0.0, 0.002, "q3 kv3"),
    Span(3, "wait", 0.002, 0.0025, "kv1"),
    Span(3, "compute", 0.0025, 0.005, "q3 kv1"),
    Span(3, "recv", 0.0, 0.0025, "kv1", 100_000_000),
    Span(3, "send", 0.0, 0.002, "kv3", 50_000_000),
    Span(3, "send", 0.001, 0.003, "kv2", 50_000_000),
    Span(0, "compute", 0.0, 0.004, "q0 kv0"),
]
SMALL = timeline_of(SPANS)


ANY_TEXT = st.text(max_size=8)


@st.composite
def timelines(draw: st.DrawFn, *, names: st.SearchStrategy[str] = ANY_TEXT) -> Timeline:
    """Any spans, overlapping, touching or empty, of a few ranks, from nanoseconds to minutes."""
    scale = draw(st.sampled_from((1e-7, 1e-6, 1e-3, 1.0, 60.0)))
    spans = []
    for number in range(draw(st.integers(1, 24))):
        start = draw(st.floats(0, 10)) * scale
        stop = start + draw(st.sampled_from((0.0, 1e-3, 1.0)) | st.floats(0, 3)) * scale
        lane = draw(st.sampled_from(LANES))
        nbytes = draw(st.integers(0, 2**40)) if lane in ("send", "recv") else 0
        spans.append(Span(draw(st.sampled_from((0, 1, 7, 4095))), lane, start, stop, f"{number} {draw(names)}", nbytes))
        if draw(st.booleans()):  # a span that begins where this one ends
            spans.append(Span(spans[-1].rank, lane, stop, stop + scale, f"{number} next", nbytes))
    return timeline_of(spans)


def events(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def process_names(trace: dict[str, Any]) -> dict[int, str]:
    return {event["pid"]: event["args"]["name"] for event in events(trace, "M") if event["name"] == "process_name"}


# Traces


@given(timelines())
@settings(max_examples=100)
def test_a_trace_has_every_span_once_where_it_was(timeline: Timeline) -> None:
    trace = json.loads(json.dumps(to_perfetto(timeline), allow_nan=False))
    names = process_names(trace)
    shown = {event["name"]: event for event in events(trace, "X")}
    assert len(shown) == len(events(trace, "X")) == len(timeline.spans)
    for span in timeline.spans:
        event = shown[span.name]
        assert (names[event["pid"]], event["cat"]) == (f"rank {span.rank}", span.lane)
        assert event["ts"] == pytest.approx(span.start_s * 1e6, abs=TWO_NS_IN_US)
        assert event["dur"] == pytest.approx((span.stop_s - span.start_s) * 1e6, abs=TWO_NS_IN_US)
        assert event["args"].get("bytes", 0) == span.nbytes


@given(timelines())
@settings(max_examples=100)
def test_a_trace_adds_up_to_the_totals(timeline: Timeline) -> None:
    trace = to_perfetto(timeline)
    names = process_names(trace)
    busy_us: dict[tuple[str, str], float] = defaultdict(float)
    for event in events(trace, "X"):
        busy_us[names[event["pid"]], event["cat"]] += event["dur"]
    error_us = TWO_NS_IN_US * len(timeline.spans)
    for rank in timeline.ranks:
        assert busy_us[f"rank {rank.rank}", "compute"] == pytest.approx(rank.compute_s * 1e6, abs=error_us)
    assert max(e["ts"] + e["dur"] for e in events(trace, "X")) == pytest.approx(timeline.time_s * 1e6, abs=error_us)


@given(timelines())
@settings(max_examples=100)
def test_events_are_sorted_and_those_of_a_thread_never_overlap(timeline: Timeline) -> None:
    trace = to_perfetto(timeline)
    spans = events(trace, "X")
    assert len(set(process_names(trace).values())) == len(timeline.ranks)
    assert {event["pid"] for event in spans} <= set(process_names(trace))
    assert [event["ts"] for event in spans] == sorted(event["ts"] for event in spans)
    threads: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in spans:
        threads[event["tid"]].append(event)
    for thread in threads.values():
        for before, after in pairwise(thread):
            assert round((before["ts"] + before["dur"]) * 1000) <= round(after["ts"] * 1000)


def test_spans_that_touch_but_for_rounding_share_a_thread() -> None:
    chain = [Span(0, "recv", i * 0.1, i * 0.1 + 0.1, f"kv{i}") for i in range(30)]
    assert any(before.stop_s > after.start_s for before, after in pairwise(chain)), "no rounding to test with"
    assert len(rank_tracks(timeline_of(chain))[0]["recv"]) == 1
    hair = [Span(0, "recv", 0.0, 1.6e-9, "kv0"), Span(0, "recv", 0.7e-9, 5e-9, "kv1")]
    first, second = events(to_perfetto(timeline_of(hair)), "X")
    assert first["tid"] == second["tid"]
    assert first["ts"] + first["dur"] == second["ts"]


def test_a_trace_file_is_compact_json(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", SMALL)
    text = (tmp_path / "trace.json").read_text(encoding="utf-8")
    assert json.loads(text) == to_perfetto(SMALL)
    assert ", " not in text
    assert text.count("\n") == 1


# What is drawn


def texts(figure: Figure) -> list[Text]:
    """All that is shown, as it is placed when drawn."""
    figure.draw_without_rendering()
    axes = figure.axes[0]
    beyond = {*axes.get_xticklabels(), *axes.get_yticklabels()} - {*tick_labels(axes.xaxis), *tick_labels(axes.yaxis)}
    found = [text for text in figure.findobj(Text) if isinstance(text, Text) and text not in beyond]
    return [text for text in found if text.get_visible() and text.get_text()]


def tick_labels(axis: Axis) -> list[Text]:
    """Those in view; locators make some beyond it."""
    low, high = sorted(axis.get_view_interval())
    pairs = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
    return [label for at, label in pairs if low * (1 - 1e-9) <= at <= high * (1 + 1e-9)]


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in texts(figure)]


def assert_nothing_is_cut_off(figure: Figure) -> None:
    sheet = figure.bbox
    for text in texts(figure):
        box = text.get_window_extent()
        assert box.x0 >= sheet.x0 - 1, f"{text.get_text()!r} leaves the sheet on the left"
        assert box.x1 <= sheet.x1 + 1, f"{text.get_text()!r} leaves the sheet on the right"
        assert box.y0 >= sheet.y0 - 1, f"{text.get_text()!r} leaves the sheet below"
        assert box.y1 <= sheet.y1 + 1, f"{text.get_text()!r} leaves the sheet above"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(4e-6, "4 µs"), (5e-4, "500 µs"), (0.02, "20 ms"), (3.0, "3 s"), (100.0, "100 s")]
)
def test_times_have_the_unit_of_their_size(seconds: float, shown: str) -> None:
    assert shown in words(time_chart([ChartPoint("a", 8, seconds, 0.0)], x="ranks"))


def scaling(methods: int = 6, *, unit_s: float = 0.1) -> list[ChartPoint]:
    return [
        ChartPoint(f"method {m}", ranks, unit_s * (8 / ranks + 0.1 * m), unit_s * 0.1 * m)
        for m in range(methods)
        for ranks in (8, 16, 32, 64, 128, 256)
    ]


def lines(figure: Figure) -> dict[str, list[tuple[float, float]]]:
    return {
        str(line.get_label()): [(float(x), float(y)) for x, y in line.get_xydata()]  # type: ignore[union-attr]
        for line in figure.axes[0].lines
    }


def test_tiles_stand_in_the_order_in_which_they_come() -> None:
    tiles = ["1x16", "16x1", "4x4"]
    figure = time_chart([ChartPoint("mesh", tile, 2.0 + len(tile), 0.5) for tile in tiles], x="tile")
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == tiles
    assert lines(figure)["mesh: time"] == [(0.0, 6.0), (1.0, 6.0), (2.0, 5.0)]


def test_a_time_chart_has_a_solid_and_a_dashed_line_a_method() -> None:
    points = scaling()
    figure = time_chart(reversed(points), x="ranks", title="Forward")
    drawn = lines(figure)
    assert len(drawn) == 12
    for method in {point.method for point in points}:
        own = [point for point in points if point.method == method]
        assert drawn[f"{method}: time"] == [(p.x, p.time_s) for p in own]
        assert drawn[f"{method}: exposed communication"] == [(p.x, p.exposed_s) for p in own]
    for line in figure.axes[0].lines:
        assert line.is_dashed() == str(line.get_label()).endswith("exposed communication")
    assert {"Forward", "time", "exposed communication", "ranks"} <= set(words(figure))


def test_lengths_are_written_as_people_write_them() -> None:
    figure = time_chart([ChartPoint("ring", 2**n, 4.0**n * 1e-9, 0.0) for n in range(17, 23)], x="seq")
    assert figure.axes[0].get_xscale() == "log"
    ticks = [label.get_text() for label in tick_labels(figure.axes[0].xaxis)]
    assert ticks == ["128k", "256k", "512k", "1m", "2m", "4m"]


def test_times_far_apart_are_on_a_log_axis_that_shows_zero() -> None:
    near = time_chart([ChartPoint("a", 8, 2.0, 0.5), ChartPoint("a", 16, 1.0, 0.0)], x="ranks").axes[0]
    far = time_chart([ChartPoint("a", 8, 20.0, 0.5), ChartPoint("a", 16, 1.0, 0.2)], x="ranks").axes[0]
    zero = time_chart([ChartPoint("a", 8, 20.0, 0.5), ChartPoint("a", 16, 1.0, 0.0)], x="ranks").axes[0]
    assert [axes.get_yscale() for axes in (near, far, zero)] == ["linear", "symlog", "symlog"]
    assert "0 s" in [label.get_text() for label in zero.get_yticklabels()]
    assert all(axes.get_ylim()[0] <= 0.0 for axes in (near, zero))


def test_methods_are_told_apart() -> None:
    drawn = time_chart(scaling(20), x="ranks").axes[0].lines
    assert len({(line.get_color(), line.get_marker()) for line in drawn}) == 20


@st.composite
def point_sets(draw: st.DrawFn) -> tuple[str, list[ChartPoint]]:
    x = draw(st.sampled_from(("ranks", "seq")))
    xs = {
        "ranks": [1, 3, 8, 12, 16, 64, 100, 256, 1024],
        "seq": [1000, 2**17, 100_000, 2**20, 3 * 2**19, 2**24],
    }[x]
    scale = draw(st.sampled_from((1e-6, 1e-3, 1.0, 600.0)))
    points = []
    for number in range(draw(st.sampled_from((1, 2, 8, 12)))):
        for place in draw(st.lists(st.sampled_from(xs), min_size=1, unique=True)):
            time_s = draw(st.floats(0.5, 2) | st.floats(1e-3, 1e3)) * scale
            exposed_s = draw(st.sampled_from((0.0, -1e-17 * time_s, time_s)) | st.floats(0, 1).map(time_s.__mul__))
            points.append(ChartPoint(f"method {number}", place, time_s, exposed_s))
    return x, points


@given(point_sets())
@settings(max_examples=40, phases=(Phase.explicit, Phase.generate))  # a chart takes too long to look for a smaller one
def test_any_points_make_a_readable_chart(drawn: tuple[Any, list[ChartPoint]]) -> None:
    x, points = drawn
    figure = time_chart(points, x=x, title="Forward, 32 heads of 128, causal")
    assert_nothing_is_cut_off(figure)
    assert sum(map(len, lines(figure).values())) == 2 * len(points)
    assert_apart(legend_texts(figure))
    assert_apart(tick_labels(figure.axes[0].yaxis))
    if not any(label.get_rotation() for label in figure.axes[0].get_xticklabels()):
        assert_apart(tick_labels(figure.axes[0].xaxis))


def assert_apart(labels: list[Text]) -> None:
    for one, other in combinations(labels, 2):
        first, second = Text.get_window_extent(one), Text.get_window_extent(other)  # without the stroke to the line
        overlap = (
            min(first.x1, second.x1) - max(first.x0, second.x0),
            min(first.y1, second.y1) - max(first.y0, second.y0),
        )
        assert min(overlap) <= 2, f"{one.get_text()!r} covers {other.get_text()!r}"


def legend_texts(figure: Figure) -> list[Text]:
    legend = figure.axes[0].get_legend()
    assert legend is not None
    return legend.get_texts()


def test_every_method_is_named_beside_the_axes_in_the_order_of_its_end() -> None:
    figure = time_chart([*scaling(3), ChartPoint("ulysses", 8, 0.1, 0.0)], x="ranks")
    legend, drawn = figure.axes[0].get_legend(), {line.get_label(): line for line in figure.axes[0].lines}
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["time", "exposed communication", "ulysses", "method 2", "method 1", "method 0"]
    for name, handle in list(zip(names, legend.get_lines(), strict=True))[2:]:
        assert handle.get_color() == drawn[f"{name}: time"].get_color()


def test_long_names_and_titles_are_kept_on_the_sheet() -> None:
    points = [ChartPoint("a method with a name far too long to stand beside a line", 8, 1.0, 0.5)]
    title = "A title that says everything there is " * 5
    figure = time_chart(points, x="ranks", title=title)
    assert_nothing_is_cut_off(figure)
    assert figure.axes[0].get_position().width > 0.5
    (shown,) = [text for text in texts(figure) if text.get_text().startswith("A title")]
    assert shown.get_fontsize() >= 7


def test_nothing_at_all_can_be_drawn() -> None:
    assert_nothing_is_cut_off(time_chart([ChartPoint("ring", 8, 0.0, 0.0)], x="ranks"))


def test_dollars_are_not_formulas() -> None:
    figure = time_chart([ChartPoint(r"$\ring$", 8, 1.0, 0.5)], x="ranks", title=r"$\mesh$")
    assert {r"$\ring$", r"$\mesh$"} <= set(words(figure))


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_the_same_chart_is_the_same_file(tmp_path: Path, suffix: str, start: bytes) -> None:
    files = [tmp_path / f"{number}{suffix}" for number in range(2)]
    for file in files:
        save_chart(time_chart(scaling(), x="ranks"), str(file))
    assert files[0].read_bytes().startswith(start)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert not any(word in files[0].read_bytes() for word in (b"CreationDate", b"<dc:date>", b"Software"))


def test_drawing_imports_matplotlib_only_when_it_draws() -> None:
    loaded = modules_after("import mesh_attention_lab.drawing.charts, mesh_attention_lab.drawing.trace")
    assert "matplotlib" not in loaded.split()
    draw = "from mesh_attention_lab.drawing.charts import *\ntime_chart([ChartPoint('ring', 8, 1, 0)], x='ranks')"
    loaded = modules_after(draw).split()
    assert "matplotlib" in loaded
    assert "matplotlib.pyplot" not in loaded


def test_without_matplotlib_one_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hidden:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name.split(".")[0] == "matplotlib":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hidden, *sys.meta_path])
    with pytest.raises(UsageError, match=r"matplotlib is not installed; pip install 'mesh-attention\[charts\]'"):
        time_chart([ChartPoint("ring", 8, 1.0, 0.0)], x="ranks")
    to_perfetto(SMALL)  # needs none
