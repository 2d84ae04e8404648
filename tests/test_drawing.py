"""Traces show what the timeline says: every span once, where it was."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh_attention.timeline import LANES, RankTimes, Span, Timeline, joined
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


def thread_names(trace: dict[str, Any]) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events(trace, "M")
        if event["name"] == "thread_name"
    }


# Traces


def test_a_trace_has_microseconds_bytes_and_rates() -> None:
    trace = to_perfetto(SMALL)
    shown = {event["name"]: event for event in events(trace, "X") if event["cat"] == "recv"}
    assert shown["kv1"]["ts"] == 0.0
    assert shown["kv1"]["dur"] == 2500.0
    assert shown["kv1"]["args"] == {"bytes": 100_000_000, "GB/s": 40.0}
    (second,) = [event for event in events(trace, "X") if event["name"] == "q3 kv1"]
    assert (second["ts"], second["dur"], second["args"]) == (2500.0, 2500.0, {})


def test_a_rank_is_a_process_and_a_lane_a_thread() -> None:
    trace = to_perfetto(SMALL)
    assert list(process_names(trace).values()) == ["rank 0", "rank 3"]
    threads = thread_names(trace)
    lanes = ["compute", "wait", "send", "recv", "compute", "wait", "send", "send 2", "recv"]
    assert list(threads.values()) == lanes
    for event in events(trace, "X"):
        assert threads[event["pid"], event["tid"]].split()[0] == event["cat"]


def test_viewers_are_told_the_order() -> None:
    trace = to_perfetto(SMALL)
    for kind, names in (("process", process_names(trace)), ("thread", thread_names(trace))):
        order = [e["args"]["sort_index"] for e in events(trace, "M") if e["name"] == f"{kind}_sort_index"]
        assert order == sorted(set(order))
        assert len(order) == len(names)


def test_two_threads_never_share_an_id() -> None:
    ids = [tid for _, tid in thread_names(to_perfetto(SMALL))]
    assert len(set(ids)) == len(ids)


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
    spans = events(to_perfetto(timeline), "X")
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


def test_the_exposed_time_of_joined_passes_is_the_sum_of_theirs() -> None:
    """Also where another rank is the busiest in each."""
    first = timeline_of([Span(0, "compute", 0.0, 1.0, "q"), Span(1, "compute", 0.0, 3.0, "q")])
    second = timeline_of([Span(0, "compute", 1.0, 6.0, "q"), Span(1, "compute", 0.0, 4.0, "q")])
    both = joined([first, second])
    assert both.time_s == first.time_s + second.time_s
    assert both.compute_s == first.compute_s + second.compute_s > max(rank.compute_s for rank in both.ranks)
    assert both.exposed_s == first.exposed_s + second.exposed_s == 1.0
    assert joined([both, first]).exposed_s == both.exposed_s + first.exposed_s
