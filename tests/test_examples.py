"""Every example runs and says what it should; the numbered ones are short."""

from __future__ import annotations

from pathlib import Path

import pytest
from pool import run_script

EXAMPLES = Path(__file__).parent.parent / "examples"
MOST_LINES = 60

ALONE = {
    "01_print_a_plan.py": "mesh 2x8: a rank receives at most",
    "02_run_in_one_process.py": "largest difference from torch's attention:",
    "04_training_step.py": "step 4: loss 3.4032",
    "05_a_custom_planner.py": "they give the same results as torch's attention, forward and backward",
}
LONGER = {
    "train_recall.py": (("--steps", "2", "--seq", "64"), "8 new sequences of 64 tokens: loss "),
}
"""Not numbered, not short: flags with which they end soon, and what they say then."""


def run(name: str, *flags: str, ranks: int = 0) -> str:
    """Run an example, which must succeed, and return what it prints."""
    done = run_script(EXAMPLES / name, *flags, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ALONE)
def test_an_example_runs_alone(name: str) -> None:
    assert ALONE[name] in run(name)


def test_the_training_step_is_the_same_on_two_ranks() -> None:
    name = "04_training_step.py"
    assert ALONE[name] in run(name, ranks=2)


def test_an_example_runs_under_torchrun() -> None:
    """With the environment of its ranks: torchrun itself is in tests/test_docs.py."""
    assert "2 processes agree with one" in run("03_run_under_torchrun.py", ranks=2)


@pytest.mark.parametrize("name", LONGER)
def test_a_longer_example_runs(name: str) -> None:
    flags, said = LONGER[name]
    assert said in run(name, *flags)


def test_a_trained_model_is_served_on_ranks(tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "model")
    run("train_recall.py", "--steps", "2", "--seq", "64", "--checkpoint", checkpoint)
    flags = ("--checkpoint", checkpoint, "--prompt", "200", "--turns", "2", "--questions", "3")
    for more in ((), ("--chunk", "64")):
        said = run("serve_long.py", *flags, *more, ranks=3)
        figures = {line[:32].strip(): line[32:].split() for line in said.splitlines()[-5:]}
        assert figures["answers right, %"][0] == figures["answers right, %"][1]
        cached, whole = map(float, figures["cache of a rank, MiB"])
        assert whole / 3 <= cached


def test_every_example_is_run_and_numbered() -> None:
    every = {path.name for path in EXAMPLES.glob("*.py")}
    assert LONGER.keys() <= every
    names = sorted(every - {*LONGER, "serve_long.py"})
    assert names == sorted({*ALONE, "03_run_under_torchrun.py"})
    assert [name[:3] for name in names] == [f"{number:02}_" for number in range(1, len(names) + 1)]


def test_examples_are_short() -> None:
    for path in EXAMPLES.glob("[0-9]*.py"):
        lines = path.read_text().splitlines()
        assert len(lines) <= MOST_LINES, f"{path.name} has {len(lines)} lines"
