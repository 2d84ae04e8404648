"""`mesh-attention demo` with real processes: right answers, the plan's counts, and errors that are shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_draw import page_data

from mesh_attention import LocalGroup, MeshAttention, Problem, causal, make_plan, rank_costs
from mesh_attention.machine.fit import CallTime, Measurement, MemoryTimes
from mesh_attention_lab.cli import demo as demo_command_module
from mesh_attention_lab.cli.demo import _methods, _problem, write_report
from mesh_attention_lab.cli.demo_worker import MethodResult, RankResults, make_inputs
from mesh_attention_lab.cli.main import main
from mesh_attention_lab.launch import WorkerError, run_processes
from mesh_attention_lab.recording import record

PROGRAM = "import sys; from mesh_attention_lab.cli.main import main; sys.exit(main())"
COMMAND = [sys.executable, "-c", PROGRAM, "demo"]
METHODS = {
    "ring": {"method": "ring"},
    "attention2d": {"method": "attention2d", "tile": "2x2"},
    "mesh": {"method": "mesh", "tile": "2x2"},
    "ulysses+mesh": {"method": "mesh", "tile": "1x2", "ulysses_degree": 2},
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """One run for all tests: what it said, and where it ran."""
    folder = tmp_path_factory.mktemp("demo")
    arguments = ["--ranks", "4", "--seq", "512", "--json"]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder


def test_the_demo_is_right_and_moves_what_the_plans_say(demo: tuple[dict[str, Any], Path]) -> None:
    answer, _ = demo
    assert answer["ok"]
    assert [row["method"] for row in answer["methods"]] == list(METHODS)
    problem = Problem.self_attention(
        seq_len=512, heads=8, kv_heads=4, head_dim=64, ranks=4, dtype="float32", mask=causal()
    )
    for row in answer["methods"]:
        assert row["is_as_planned"]
        assert 0 < row["forward_error"] < 1e-5
        assert 0 < row["gradient_error"] < 1e-5
        plans = [make_plan(problem, direction=d, **METHODS[row["method"]]) for d in ("forward", "backward")]  # type: ignore[arg-type]
        costs = [[rank_costs(plan, rank) for plan in plans] for rank in range(4)]
        assert row["received_nbytes"] == max(sum(cost.received_nbytes for cost in rank) for rank in costs)
        assert row["sent_nbytes"] == max(sum(cost.sent_nbytes for cost in rank) for rank in costs)
        assert row["messages"] == max(sum(cost.messages for cost in rank) for rank in costs)
        assert row["peak_nbytes"] == max(cost.peak_nbytes for rank in costs for cost in rank)
        assert row["time_s"] > 0


def test_the_demo_leaves_a_report_of_what_it_measured(demo: tuple[dict[str, Any], Path]) -> None:
    answer, cwd = demo
    folder = cwd / "mesh-attention-report"
    assert {path.name for path in folder.iterdir()} == {"report.html", "trace.json"}
    assert answer["report"] == "mesh-attention-report/report.html"
    assert "rank 3" in (folder / "trace.json").read_text()
    report = folder / "report.html"
    best = min(answer["methods"], key=lambda row: row["received_nbytes"])["method"]
    assert best != "ring"  # the first
    assert f"Shown first: {best} " in report.read_text()
    data = page_data(report)["scenes"]
    assert data[0]["method"] == best
    assert {(scene["ranks"], scene["method"]) for scene in data} == {(4, method) for method in METHODS}
    for scene in data:
        for one in scene["passes"].values():
            assert one["measured"], scene["method"]


def write_local_report(folder: Path) -> None:
    """The report of what a local group recorded, without processes."""
    problem = _problem(2, 64)
    methods, measured = _methods(problem), []
    for name, choice in methods.items():
        attention = MeshAttention(LocalGroup(2), choice=choice)
        q, k, v, _ = ([shard.requires_grad_() for shard in attention.shard(t)] for t in make_inputs(problem))
        with record(attention) as recording:
            out = attention(q, k, v, causal=True)
            torch.autograd.grad([o.sum() for o in out], [*q, *k, *v])
        passes = tuple((one.plan, one.timeline) for one in recording.passes())
        measured.append(MethodResult(**NOTHING | {"method": name}, passes=passes))
    seen = RankResults(methods=measured, calibration=NONSENSE)
    write_report(folder, problem, seen, best="mesh", report=lambda activity, fraction: None)


NOTHING: Any = dict.fromkeys(("forward_error", "gradient_error"), 0.0) | {
    "sent_nbytes": 0,
    "received_nbytes": 0,
    "messages": 0,
    "peak_nbytes": 0,
    "is_as_planned": True,
    "tile": "1x4",
    "time_s": 1.0,
}
NONSENSE = Measurement(
    device="cpu",
    threads=1,
    kernel="any",
    width=1,
    calls=tuple(
        CallTime(direction=d, heads=8, q_tokens=n, kv_tokens=n, is_causal=False, flops=n**2, time_s=1 / n)  # type: ignore[arg-type]
        for d in ("forward", "backward")
        for n in (64, 128)
    ),
    memory=MemoryTimes(nbytes=2**20, large_s=1e-3, tiny_s=1e-5, memory_gib=1.0),
    messages=(),
)
"""More work takes less time, as it may seem on a busy machine."""


def test_inconsistent_times_are_replaced_and_that_is_said(tmp_path: Path) -> None:
    write_local_report(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "by the laptop preset, because the measured times are inconsistent" in text


@pytest.mark.parametrize("options", [["--no-report"], ["--ranks", "1"]])
def test_without_recordings_there_is_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = RankResults(methods=[MethodResult(**NOTHING | {"method": name}) for name in METHODS], calibration=None)
    monkeypatch.setattr(demo_command_module, "run_processes", lambda *_, **__: [seen] * 4)
    assert main(["demo", "--seq", "512", *options]) == 0
    assert "report" not in capsys.readouterr().out
    assert not [*tmp_path.iterdir()]


def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("mine")
    assert main(["demo", "--report", str(tmp_path / "taken")]) == 2
    assert "taken: cannot be written: file exists; write elsewhere" in capsys.readouterr().err


def fail_on_rank_1() -> str:
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 was told to fail")
    return "fine"


def test_a_process_that_fails_is_named_with_its_error() -> None:
    with pytest.raises(WorkerError, match=r"(?s)^rank 1 failed: .*ValueError: rank 1 was told to fail"):
        run_processes(fail_on_rank_1, ranks=2)


def test_a_process_that_fails_is_exit_code_1_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> list[RankResults]:
        raise WorkerError("rank 1 failed: Traceback\n  line 2")

    monkeypatch.setattr(demo_command_module, "run_processes", fail)
    assert main(["demo", "--ranks", "4"]) == 1
    assert capsys.readouterr() == ("", "rank 1 failed: Traceback\n  line 2\n")
