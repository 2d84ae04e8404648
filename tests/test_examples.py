"""Every example runs and says what it should; the numbered ones are short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("processes")
EXAMPLES = Path(__file__).parent.parent / "examples"
MOST_LINES = 60

ALONE = {
    "01_print_a_plan.py": "mesh 2x8: a rank receives at most",
    "02_run_in_one_process.py": "largest difference from torch's attention:",
    "04_training_step.py": "step 4: loss 3.4032",
    "05_a_custom_planner.py": "and give what torch's attention gives, forward and backward",
}
UNDER_TORCHRUN = {
    "03_run_under_torchrun.py": "2 processes agree with one",
    "04_training_step.py": "step 4: loss 3.4032",
}
LONGER = {
    "train_recall.py": (("--steps", "2", "--seq", "64"), "8 fresh sequences of 64 tokens: loss "),
}
"""Not numbered, not short: flags with which they end soon, and what they say then."""


def run(*command: str) -> str:
    """What a command prints; it must end well."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ALONE)
def test_an_example_runs_alone(name: str) -> None:
    assert ALONE[name] in run(str(EXAMPLES / name))


@pytest.mark.parametrize("name", UNDER_TORCHRUN)
def test_an_example_runs_under_torchrun(name: str) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert UNDER_TORCHRUN[name] in run(*torchrun, str(EXAMPLES / name))


@pytest.mark.parametrize("name", LONGER)
def test_a_longer_example_runs(name: str) -> None:
    flags, said = LONGER[name]
    assert said in run(str(EXAMPLES / name), *flags)


def test_every_example_is_run_and_numbered() -> None:
    every = {path.name for path in EXAMPLES.glob("*.py")}
    assert LONGER.keys() <= every
    names = sorted(every - LONGER.keys())
    assert names == sorted({*ALONE, *UNDER_TORCHRUN})
    assert [name[:3] for name in names] == [f"{number:02}_" for number in range(1, len(names) + 1)]


def test_examples_are_short() -> None:
    for path in EXAMPLES.glob("[0-9]*.py"):
        lines = path.read_text().splitlines()
        assert len(lines) <= MOST_LINES, f"{path.name} has {len(lines)} lines"
