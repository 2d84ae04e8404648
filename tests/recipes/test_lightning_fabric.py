"""Lightning Fabric on 4 processes: as one process that attends with torch's own function, without Fabric."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning_alone import train_alone
from recipe_runs import Run, run_recipe

pytest.importorskip("lightning")

NAME = "lightning_fabric.py"


@pytest.fixture(scope="module")
def alone() -> tuple[Run, Run]:
    epochs = train_alone(NAME)
    return next(epochs), next(epochs)


def assert_same(run: Run, due: Run) -> None:
    assert len(run.losses) == 2
    assert run.losses == pytest.approx(due.losses, abs=2e-6)  # transformers computes losses in float32
    assert run.weights == pytest.approx(due.weights, abs=1e-9)


def test_four_processes_train_as_one(alone: tuple[Run, Run]) -> None:
    assert_same(run_recipe(NAME), alone[0])


def test_two_processes_continue_from_a_checkpoint_of_four(alone: tuple[Run, Run], tmp_path: Path) -> None:
    assert_same(run_recipe(NAME, "--cp", "2", "--save", str(tmp_path / "checkpoint")), alone[0])
    assert_same(run_recipe(NAME, "--load", str(tmp_path / "checkpoint"), ranks=2), alone[1])
