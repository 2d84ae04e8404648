"""`mesh-attention demo` with real processes: right answers, the plan's counts, and errors that are shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_attention import Problem, causal, make_plan, rank_costs
from mesh_attention.cli.demo import WorkerError, run_processes
from mesh_attention.cli.main import main

pytestmark = pytest.mark.xdist_group("processes")
COMMAND = [sys.executable, "-c", "import sys; from mesh_attention.cli.main import main; sys.exit(main())", "demo"]
METHODS = {
    "ring": {"method": "ring"},
    "attention2d": {"method": "attention2d", "tile": "2x2"},
    "mesh": {"method": "mesh", "tile": "2x2"},
    "ulysses × mesh": {"method": "mesh", "tile": "1x2", "ulysses_degree": 2},
}


def test_the_demo_is_right_and_moves_what_the_plans_say() -> None:
    arguments = ["--ranks", "4", "--seq", "512", "--json"]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["ok"]
    assert [row["method"] for row in answer["methods"]] == list(METHODS)
    problem = Problem.self_attention(seq=512, heads=8, kv_heads=4, head_dim=64, ranks=4, dtype="float32", mask=causal())
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


def fail_on_rank_1(progress_file: Path) -> str:
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 was told to fail")
    return "fine"


def test_a_process_that_fails_is_named_with_its_error() -> None:
    with pytest.raises(WorkerError, match=r"(?s)^rank 1 failed: .*ValueError: rank 1 was told to fail"):
        run_processes(fail_on_rank_1, ranks=2, report=lambda doing, fraction: None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks '0': expected a whole number, 1 or more"),
        (["--ranks", "65"], "--ranks 65: expected at most 64"),
        (["--seq", "4q"], "--seq '4q': expected a whole number such as 4096"),
        (["--seq", "1m"], "--seq 1048576: expected at most 65536"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert message in said.err
