"""Pictures say what the plan says, nothing in them collides, and `mesh-attention draw` writes them or says why not."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import combinations, pairwise
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mesh_attention import Plan, Problem, causal, cluster_named, make_plan, plan_to_json, simulate, window
from mesh_attention.cli import scenes
from mesh_attention.cli.main import main
from mesh_attention.cli.pictures import PICTURES, traced
from mesh_attention.cli.scenes import explorer_scenes, rival_scenes, scene_of, shown_ranks
from mesh_attention.drawing.against import Contender, against_chart
from mesh_attention.drawing.lanes import LANE_COLOURS
from mesh_attention.drawing.matrix import Cell, cells_of, matrix_chart
from mesh_attention.drawing.page import Scene
from mesh_attention.drawing.passes import passes_chart
from mesh_attention.drawing.steps import score_of, steps_chart
from mesh_attention.drawing.trace import to_perfetto
from mesh_attention.errors import UsageError
from mesh_attention.plan.steps import Attend, Free, transfers
from mesh_attention.plan.text import format_item, format_step
from mesh_attention.plan.waits import stops
from mesh_attention.testing.strategies import plans

SIZES = "--seq 4k --heads 8 --kv-heads 4 --head-dim 64 --causal"
DRAW = f"draw --ranks 4 --tile 2x2 {SIZES}"


def plan_of(ranks: int, **options: Any) -> Plan:
    mask = options.pop("mask", causal())
    problem = Problem.self_attention(seq=131072, heads=32, kv_heads=8, head_dim=128, ranks=ranks, mask=mask)
    return make_plan(problem, **options)


SHAPES = {
    "4": {"ranks": 4, "tile": (2, 2)},
    "4 backward": {"ranks": 4, "tile": (2, 2), "direction": "backward"},
    "16": {"ranks": 16, "tile": (4, 4), "direction": "backward"},
    "16 collective": {"ranks": 16, "method": "attention2d", "tile": (2, 4), "ulysses_degree": 2},
    "16 windowed": {"ranks": 16, "tile": (2, 8), "mask": window(20000, 0)},
    "64": {"ranks": 64, "tile": (8, 8)},
    "64 ring": {"ranks": 64, "method": "ring"},
    "64 grouped": {"ranks": 64, "tile": (4, 16), "blocks_per_call": 8, "inner": (2, 4)},
}


@pytest.fixture(params=SHAPES, scope="module")
def plan(request: pytest.FixtureRequest) -> Plan:
    return plan_of(**SHAPES[request.param])


# Matrix


@given(plans(max_ranks=8))
@settings(max_examples=60)
def test_a_block_belongs_to_whoever_attends_it(plan: Plan) -> None:
    attended = {
        (row.shard, col.shard): plan.assignment.place(program.rank)
        for program in plan.all_programs()
        for step in program.steps
        if isinstance(step, Attend)
        for row in step.rows
        for col in step.cols
        if plan.matrix.is_live(row.shard, col.shard)
    }
    cells = cells_of(plan)
    assert len(cells) == plan.assignment.places**2
    assert {(cell.row, cell.col): cell.place for cell in cells if cell.shapes} == attended


def area(cell: Cell) -> float:
    total = 0.0
    for shape in cell.shapes:
        corners = zip(shape, (*shape[1:], shape[0]), strict=True)
        total += abs(sum(a[0] * b[1] - b[0] * a[1] for a, b in corners)) / 2
    return total


def test_colour_is_the_share_that_the_mask_leaves() -> None:
    plan = plan_of(4, tile=(2, 2))
    tokens = plan.problem.seq_q // 4
    for cell in cells_of(plan):
        assert area(cell) == pytest.approx(plan.matrix.pairs(cell.row, cell.col) / tokens**2, abs=1e-4)


def test_the_matrix_marks_one_ranks_tile_and_groups(plan: Plan) -> None:
    rank = plan.problem.ranks - 3
    place = plan.assignment.place(rank)
    (axes,) = matrix_chart(plan, rank=rank).axes
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    q_rows = sorted(bar.get_y() for bar in bars if bar.get_label() == "Q group")
    kv_cols = sorted(bar.get_x() for bar in bars if bar.get_label() == "KV group")
    assert q_rows == sorted(plan.assignment.group("row", place))
    assert kv_cols == sorted(plan.assignment.group("col", place))
    blocks, work = (c for c in axes.collections if isinstance(c, PolyCollection))
    cells = cells_of(plan)
    assert len(blocks.get_paths()) == len(cells)
    own = [shape for cell in cells if cell.place == place for shape in cell.shapes]
    dark = [colour for colour in work.get_facecolors() if min(colour[:3]) < 0.3]
    assert len(work.get_paths()) == sum(len(cell.shapes) for cell in cells)
    assert len(dark) == len(own) > 0


# Steps


@given(plans(max_ranks=8), st.data())
@settings(max_examples=60)
def test_a_score_has_every_attend_and_every_transfer_in_order(plan: Plan, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, plan.problem.ranks - 1))
    steps = plan.program(rank).steps
    score = score_of(plan, rank)
    attends = [box for box in score.boxes if box.look == "attend"]
    assert len(attends) == sum(isinstance(step, Attend) for step in steps)
    assert [box.at for box in score.boxes] == sorted(box.at for box in score.boxes)
    sends = [send for step in steps for send in transfers(step)[0]]
    recvs = [recv for step in steps for recv in transfers(step)[1]]
    assert [span.name for span in score.sends] == [f"{format_item(s.item)} → {s.dest}" for s in sends]
    assert [span.name for span in score.recvs] == [f"{format_item(r.item)} ← {r.source}" for r in recvs]
    assert score.length == sum(not isinstance(steps[stop.span.start], Free) for stop in stops(steps))


def test_a_receive_ends_where_it_is_first_needed() -> None:
    """Rank 1 of a 2x2 mesh attends its own block while q0 comes, and then needs it."""
    score = score_of(plan_of(4, tile=(2, 2)), 1)
    needed = {"q0 ← 0": "q0 × kv1", "kv3 ← 3": "q0 × kv3", "o1@0 ← 0": "add o1@0"}
    at = {box.label: box.at for box in score.boxes}
    assert {span.name: span.stop_s for span in score.recvs} == {name: at[label] for name, label in needed.items()}


def test_a_program_is_drawn_box_by_box(plan: Plan) -> None:
    figure = steps_chart(plan, rank=1)
    score = score_of(plan, 1)
    texts = Counter(text.get_text() for axes in figure.axes for text in axes.texts)
    assert not Counter(box.label for box in score.boxes) - texts
    drawn = [c.get_facecolor()[0] for axes in figure.axes for c in axes.collections]
    blue = tuple(int(LANE_COLOURS["compute"][i : i + 2], 16) / 255 for i in (1, 3, 5))
    assert sum(tuple(colour[:3]) == pytest.approx(blue) for colour in drawn) == sum(
        box.look == "attend" for box in score.boxes
    )


# Timelines and bars


def forecasts_of(ranks: int) -> dict[str, Any]:
    topology = cluster_named(f"h100x{ranks}")
    return {
        direction: simulate(plan_of(ranks, direction=direction).unrolled(), topology, spans_of=range(ranks))
        for direction in ("forward", "backward")
    }


def test_passes_share_one_time_scale() -> None:
    timelines = forecasts_of(4)
    figure = passes_chart(timelines, ranks=(0, 3), title="a title")
    assert len(figure.axes) == 2
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    assert figure.axes[0].get_xlim()[1] >= max(timeline.time_s for timeline in timelines.values())
    for axes, timeline in zip(figure.axes, timelines.values(), strict=True):
        bars = sum(len(collection.get_paths()) for collection in axes.collections)
        assert bars == sum(span.rank in (0, 3) for span in timeline.spans)
    said = " ".join(text.get_text() for text in figure.texts)
    assert "forward" in said
    assert "backward" in said


CONTENDERS = [
    Contender(name="ring 1x16", received_nbytes=960 << 20, time_s=0.064, exposed_s=0.03, measured_s=0.07),
    Contender(name="mesh 4x4", received_nbytes=480 << 20, time_s=0.044, exposed_s=0.0, measured_s=0.14),
    Contender(name="a method with a long name 1x16", received_nbytes=0, time_s=0.1, exposed_s=0.1),
]


def test_bars_are_as_long_as_what_they_stand_for() -> None:
    figure = against_chart(CONTENDERS, passes="forward", title="Against ring")
    received, times = ([(p.get_width(), p.get_x()) for p in axes.patches] for axes in figure.axes)
    assert [width for width, _ in received] == [960, 480, 0]
    ends = [width + left for width, left in times]
    for contender in CONTENDERS:
        assert any(end == pytest.approx(contender.time_s) for end in ends)
        assert contender.measured_s is None or any(end == pytest.approx(contender.measured_s) for end in ends)
    labels = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert "480  0.50×" in labels
    assert "140 ms  2.00×" in labels


def boxes_of(figure: Figure) -> list[Any]:
    figure.canvas.draw()
    texts = [*figure.texts, *(text for axes in figure.axes for text in (*axes.texts, *axes.get_yticklabels()))]
    texts += [label for axes in figure.axes for label in (*axes.get_xticklabels(), axes.xaxis.label, axes.yaxis.label)]
    return [text.get_window_extent() for text in texts if text.get_text() and text.get_visible()]


@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_no_words_collide_or_leave_the_sheet(ranks: int) -> None:
    plan = plan_of(ranks)
    timelines = forecasts_of(min(ranks, 16))
    figures = {
        "matrix": matrix_chart(plan, rank=1),
        "steps": steps_chart(plan, rank=1),
        "passes": passes_chart(timelines, ranks=(0, 1), title="what ranks do when", below="and where"),
        "against": against_chart(CONTENDERS, passes="forward", title="Against ring", below="and where"),
    }
    for name, figure in figures.items():
        boxes = boxes_of(figure)
        wide, high = figure.get_size_inches() * figure.dpi
        for box in boxes:
            assert -1 <= box.x0 <= box.x1 <= wide + 1, f"{name}: {box}"
            assert -1 <= box.y0 <= box.y1 <= high + 1, f"{name}: {box}"
        for one, other in combinations(boxes, 2):
            apart = one.x1 <= other.x0 + 1.5 or other.x1 <= one.x0 + 1.5
            assert apart or one.y1 <= other.y0 + 1.5 or other.y1 <= one.y0 + 1.5, f"{name}: {one} and {other}"


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: matrix_chart(plan_of(256)), "has 256 × 256 blocks; a picture holds at most 128 a side"),
        (lambda: matrix_chart(plan_of(4), rank=4), "rank 4: the plan has ranks 0 to 3"),
        (lambda: steps_chart(plan_of(512, method="ring")), "stops, more than the 400 that a picture holds"),
        (lambda: passes_chart({}, ranks=(0,)), "no timelines came"),
        (lambda: passes_chart(forecasts_of(4), ranks=(9,)), "has no spans of ranks \\[9\\]"),
        (lambda: against_chart([], passes="forward"), "no contenders came"),
        (
            lambda: against_chart([Contender(name="x", received_nbytes=1, time_s=inf, exposed_s=0)], passes="forward"),
            "expected bytes and seconds, 0 or above",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw: Callable[[], Figure], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        draw()


def test_a_rank_without_tokens_has_no_steps_to_draw() -> None:
    problem = Problem.self_attention(seq=2, heads=1, head_dim=8, ranks=4)
    with pytest.raises(UsageError, match="has no steps: it is home to no tokens; draw another rank's"):
        steps_chart(make_plan(problem, method="ring"), rank=3)


# Scenes


def test_the_main_methods_are_scenes() -> None:
    problem = plan_of(16).problem
    found = list(
        rival_scenes(
            problem, cluster_named("h100x16"), layout=None, directions=("forward",), report=lambda doing, fraction: None
        )
    )
    chosen = [(scene.method, scene.tile) for scene in found]
    assert chosen == [
        ("ring", "1x16"),
        ("attention2d", "2x8"),
        ("mesh", "2x8"),
        ("mesh", "4x4"),
        ("mesh", "8x2"),
        ("ulysses × mesh", "4·2x2"),
    ]
    for scene in found:
        spans = scene.forecasts["forward"].spans
        assert {span.rank for span in spans} == set(range(16))
        names = {span.name for span in spans if span.rank == 5 and span.name.startswith("attend")}
        steps = scene.plans["forward"].program(5).steps
        assert names == {format_step(step) for step in steps if isinstance(step, Attend)}


def test_of_many_ranks_some_are_shown() -> None:
    assert shown_ranks(16) == tuple(range(16))
    assert shown_ranks(128)[0] == 0
    assert shown_ranks(128)[-1] == 127
    assert len(set(shown_ranks(128))) == 8


# The command


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(scenes, "OFFERED_RANKS", (4, 8))

    def run_line(line: str, *more: object) -> Outcome:
        code = main([*line.split(), *map(str, more)])
        return Outcome(code, *capsys.readouterr())

    return run_line


def page_data(path: Path) -> Any:
    found = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', path.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def check_trace(trace: dict[str, Any]) -> list[str]:
    """By the rules of the trace event format; gives the names of the processes."""
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    named: dict[str, dict[Any, str]] = {"process_name": {}, "thread_name": {}}
    busy: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is int
        if event["ph"] == "M":
            (argument,) = event["args"]
            assert event["name"].endswith(argument)  # process_name: name, thread_sort_index: sort_index
            key = (event["pid"], event["tid"]) if event["name"].startswith("thread") else event["pid"]
            if event["name"] in named:
                assert named[event["name"]].setdefault(key, event["args"]["name"]) == event["args"]["name"]
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
            assert isinstance(event["args"], dict)
            busy[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
    assert set(busy) <= set(named["thread_name"])
    assert {pid for pid, _ in busy} <= set(named["process_name"])
    for spans in busy.values():
        for (start, length), (following, _) in pairwise(spans):
            assert start + length <= following + 1e-6
    names = list(named["process_name"].values())
    assert len(set(names)) == len(names)
    return names


def test_draw_writes_all_of_it(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "new" / "pictures"
    code, said, err = run(f"{DRAW} --cluster h100x4 --rank 1 --out", out)
    assert (code, err) == (0, "")
    names = ["matrix.png", "steps.png", "timeline.png", "against_ring.png", "trace.json", "explorer.html"]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    assert [line.split()[1] for line in said.splitlines()] == [str(out / name) for name in names]
    for name in names[:4]:
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    processes = check_trace(json.loads((out / "trace.json").read_text()))
    for direction in ("forward", "backward"):
        for rank in range(4):
            assert f"mesh 2x2 {direction}, forecast: rank {rank}" in processes
            assert f"ring 1x4 {direction}, forecast: rank {rank}" in processes
    found = {(scene["ranks"], scene["method"], scene["tile"]) for scene in page_data(out / "explorer.html")["scenes"]}
    assert {
        (4, "ring", "1x4"),
        (4, "mesh", "2x2"),
        (8, "attention2d", "2x4"),
        (8, "ulysses × mesh", "2·2x2"),
    } <= found


def test_draw_draws_what_was_chosen_and_says_so_in_json(run: Run, tmp_path: Path) -> None:
    code, said, err = run(f"{DRAW} --only steps,matrix --format svg --json --out", tmp_path)
    assert (code, err) == (0, "")
    answer = json.loads(said)
    assert answer["files"] == {"matrix": str(tmp_path / "matrix.svg"), "steps": str(tmp_path / "steps.svg")}
    assert {path.name for path in tmp_path.iterdir()} == {"matrix.svg", "steps.svg"}
    assert "<svg" in (tmp_path / "matrix.svg").read_text()
    assert answer["cluster"] == "h100x4"
    assert answer["scenes"] == [{"ranks": 4, "method": "mesh", "tile": "2x2"}]
    assert set(answer["digests"]) == {"forward", "backward"}


def test_a_saved_plan_is_drawn_as_it_is(run: Run, tmp_path: Path) -> None:
    problem = Problem.self_attention(seq=4096, heads=8, kv_heads=4, head_dim=64, ranks=4, mask=causal())
    plan = make_plan(problem, tile=(4, 1), direction="backward").unrolled()
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_to_json(plan)))
    answer = json.loads(run("draw --cluster h100x4 --json --out", tmp_path / "out", "--plan", file).out)
    assert answer["digests"] == {"backward": plan.digest}
    assert set(answer["files"]) == set(PICTURES)
    found = page_data(tmp_path / "out" / "explorer.html")["scenes"]
    assert (found[0]["method"], found[0]["tile"]) == ("mesh", "4x1")
    assert all(set(scene["passes"]) == {"backward"} for scene in found)


def test_a_broken_plan_is_not_drawn(run: Run, tmp_path: Path) -> None:
    problem = Problem.self_attention(seq=4096, heads=8, head_dim=64, ranks=4)
    broken = plan_to_json(make_plan(problem, tile=(2, 2)).unrolled())
    broken["programs"][1]["steps"] = broken["programs"][1]["steps"][:-3]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(broken))
    code, out, err = run("draw --cluster h100x4 --out", tmp_path / "out", "--plan", file)
    assert (code, out) == (1, "")
    assert "of the rules, the first:" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{DRAW} --only matrix,film", "--only 'matrix,film': expected some of matrix,steps,"),
        (f"{DRAW} --format gif", "--format 'gif': expected one of png, svg, pdf"),
        (f"{DRAW} --rank 4", "--rank 4: there are ranks 0 to 3"),
        (f"{DRAW} --rank one", "--rank 'one': expected a whole number"),
        ("draw --ranks 4 --heads 8", "Missing option '--seq'; give the problem, or a plan file instead"),
        (f"draw --ranks 256 {SIZES}", "256 ranks are more than a picture holds; expected at most 128"),
        (f"draw --ranks 4 --tile 3x2 {SIZES}", "4 ranks cannot form a 3x2 tile"),
        (f"draw --cluster h1000 {SIZES}", "cluster 'h1000'"),
        ("draw --plan nowhere.json", "nowhere.json: expected a plan file"),
        ("draw --plan nowhere.json --seq 4k", "--seq came beside nowhere.json, which says that; leave it out"),
    ],
)
def test_what_draw_cannot_do_it_refuses_before_it_writes(run: Run, tmp_path: Path, line: str, message: str) -> None:
    out = tmp_path / "out"
    code, said, err = run(f"{line} --out", out)
    assert (code, said) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not out.exists()


def test_a_folder_that_is_a_file_is_refused(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "taken.txt"
    file.write_text("mine")
    code, _, err = run(f"{DRAW} --out", file)
    assert code == 2
    assert "is a file; give a folder" in err
    assert run(f"{DRAW} --out", file / "below").code == 2
    assert file.read_text() == "mine"


# Traces of forecasts and of what was measured


def test_a_trace_tells_forecast_from_measured_and_forward_from_backward() -> None:
    topology = cluster_named("h100x4")
    both = {direction: plan_of(4, tile=(2, 2), direction=direction) for direction in ("forward", "backward")}
    scene = scene_of(both, topology, report=lambda doing, fraction: None)  # type: ignore[arg-type]
    as_run = Scene(method="mesh", plans=scene.plans, forecasts=scene.forecasts, measured=scene.forecasts)
    names = check_trace(to_perfetto(traced([as_run, scene])))
    assert Counter(name.rpartition(":")[0] for name in names) == {
        f"mesh 2x2 {direction}, {kind}": 4 for direction in ("forward", "backward") for kind in ("forecast", "measured")
    }


def test_the_explorer_offers_no_choice_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "OFFERED_RANKS", (4, 8))
    topology = cluster_named("h100x4")
    first = scene_of({"forward": plan_of(4, tile=(2, 2))}, topology, report=lambda doing, fraction: None)
    found = explorer_scenes([first], topology, report=lambda doing, fraction: None)
    choices = [(scene.ranks, scene.method, scene.tile) for scene in found]
    assert found[0] is first
    assert len(set(choices)) == len(choices)
    assert {ranks for ranks, _, _ in choices} == {4, 8}
