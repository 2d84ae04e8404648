"""`mesh-attention draw` writes a page and a trace of what was asked for, or says why not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import test_cli
from page_scenes import unpacked
from test_cli import Run, as_json

from mesh_attention import Plan, Problem, causal, make_plan

SIZES = "--seq 4k --heads 8 --kv-heads 4 --head-dim 64 --causal"
DRAW = f"draw --ranks 4 --tile 2x2 {SIZES}"


def plan_of(ranks: int, **options: Any) -> Plan:
    mask = options.pop("mask", causal())
    problem = Problem.self_attention(seq_len=131072, heads=32, kv_heads=8, head_dim=128, ranks=ranks, mask=mask)
    return make_plan(problem, **options)


# The command


run = test_cli.run
"""The fixture."""


def page_data(path: Path) -> Any:
    found = re.search(r'<script[^>]*id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found is not None
    return unpacked(found[1])


def test_draw_writes_a_page_and_a_trace(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "new" / "pictures"
    code, said, err = run(f"{DRAW} --cluster h100x4 --out", out)
    assert (code, err) == (0, "")
    page, trace = out / "explorer.html", out / "trace.json"
    assert sorted(out.iterdir()) == [page, trace]
    assert said == f"wrote {page} (open it in a browser)\nwrote {trace} (for ui.perfetto.dev)\n"
    names = {event["args"].get("name") for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "M"}
    assert {f"rank {rank}" for rank in range(4)} <= names
    found = {(scene["ranks"], scene["method"], scene["tile"]) for scene in page_data(page)["scenes"]}
    assert {
        (4, "ring", "1x4"),
        (4, "mesh", "2x2"),
        (4, "pass-q", "4x1"),
        (4, "ulysses+mesh", "2·1x2"),
    } <= found


def test_draw_says_what_it_drew_in_json(run: Run, tmp_path: Path) -> None:
    answer = as_json(run(f"{DRAW} --json --out", tmp_path))
    assert answer["files"] == {"explorer": str(tmp_path / "explorer.html"), "trace": str(tmp_path / "trace.json")}
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
