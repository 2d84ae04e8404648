"""`mesh-attention draw` writes a page and a trace of what was asked for, or says why not."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import test_cli
from page_scenes import unpacked
from test_cli import Run, as_json

from mesh_attention import Plan, Problem, causal, cluster_named, make_plan
from mesh_attention_lab import scenes
from mesh_attention_lab.drawing.page import Scene
from mesh_attention_lab.drawing.trace import to_perfetto
from mesh_attention_lab.scenes import explorer_scenes, scene_of, timelines_of

SIZES = "--seq 4k --heads 8 --kv-heads 4 --head-dim 64 --causal"
DRAW = f"draw --ranks 4 --tile 2x2 {SIZES}"


def plan_of(ranks: int, **options: Any) -> Plan:
    mask = options.pop("mask", causal())
    problem = Problem.self_attention(seq_len=131072, heads=32, kv_heads=8, head_dim=128, ranks=ranks, mask=mask)
    return make_plan(problem, **options)


# The command


run = test_cli.run
"""The fixture."""


@pytest.fixture(autouse=True)
def _few_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "OFFERED_RANKS", (4, 8))


def page_data(path: Path) -> Any:
    found = re.search(r'<script[^>]*id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found is not None
    return unpacked(found[1])


def processes_of(trace: dict[str, Any]) -> list[str]:
    """Their names; tests/test_drawing.py looks at the events."""
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    return [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]


def test_draw_writes_a_page_and_a_trace(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "new" / "pictures"
    code, said, err = run(f"{DRAW} --cluster h100x4 --out", out)
    assert (code, err) == (0, "")
    names = ["explorer.html", "trace.json"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert [line.split()[1] for line in said.splitlines()] == [str(out / name) for name in names]
    processes = processes_of(json.loads((out / "trace.json").read_text()))
    for direction in ("forward", "backward"):
        for rank in range(4):
            assert f"mesh 2x2 {direction}, forecast: rank {rank}" in processes
            assert f"ring 1x4 {direction}, forecast: rank {rank}" in processes
    found = {(scene["ranks"], scene["method"], scene["tile"]) for scene in page_data(out / "explorer.html")["scenes"]}
    assert {
        (4, "ring", "1x4"),
        (4, "mesh", "2x2"),
        (8, "attention2d", "2x4"),
        (8, "ulysses+mesh", "2·2x2"),
    } <= found


def test_draw_says_what_it_drew_in_json(run: Run, tmp_path: Path) -> None:
    answer = as_json(run(f"{DRAW} --json --out", tmp_path))
    assert answer["files"] == {"explorer": str(tmp_path / "explorer.html"), "trace": str(tmp_path / "trace.json")}
    assert answer["cluster"] == "h100x4"
    assert answer["scenes"][0] == {"ranks": 4, "method": "mesh", "tile": "2x2"}
    assert set(answer["digests"]) == {"forward", "backward"}


def test_a_saved_plan_is_drawn_as_it_is(run: Run, tmp_path: Path) -> None:
    problem = Problem.self_attention(seq_len=4096, heads=8, kv_heads=4, head_dim=64, ranks=4, mask=causal())
    plan = make_plan(problem, tile=(4, 1), direction="backward").unrolled()
    file = tmp_path / "plan.txt"
    file.write_text(str(plan))
    answer = as_json(run("draw --cluster h100x4 --json --out", tmp_path / "out", "--plan", file))
    assert answer["digests"] == {"backward": plan.digest}
    found = page_data(tmp_path / "out" / "explorer.html")["scenes"]
    assert (found[0]["method"], found[0]["tile"]) == ("mesh", "4x1")
    assert all(set(scene["passes"]) == {"backward"} for scene in found)


# Traces of forecasts and of what was measured


def test_a_trace_tells_forecast_from_measured_and_forward_from_backward() -> None:
    topology = cluster_named("h100x4")
    both = {direction: plan_of(4, tile=(2, 2), direction=direction) for direction in ("forward", "backward")}
    scene = scene_of(both, topology, report=lambda activity, fraction: None)  # type: ignore[arg-type]
    as_run = Scene(method="mesh", plans=scene.plans, forecasts=scene.forecasts, measured=scene.forecasts)
    names = processes_of(to_perfetto(timelines_of([as_run, scene])))
    assert Counter(name.rpartition(":")[0] for name in names) == {
        f"mesh 2x2 {direction}, {kind}": 4 for direction in ("forward", "backward") for kind in ("forecast", "measured")
    }


def test_the_explorer_offers_no_choice_twice() -> None:
    topology = cluster_named("h100x4")
    first = scene_of({"forward": plan_of(4, tile=(2, 2))}, topology, report=lambda activity, fraction: None)
    found = explorer_scenes([first], topology, report=lambda activity, fraction: None)
    choices = [(scene.ranks, scene.method, scene.tile) for scene in found]
    assert found[0] is first
    assert len(set(choices)) == len(choices)
    assert {ranks for ranks, _, _ in choices} == {4, 8}
