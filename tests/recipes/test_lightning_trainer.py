"""Lightning's Trainer on 4 processes: as one process that attends with torch's own function, without Lightning."""

from __future__ import annotations

import pytest
from lightning_alone import train_alone
from recipe_runs import Run, run_recipe

pytest.importorskip("lightning")

NAME = "lightning_trainer.py"


@pytest.fixture(scope="module")
def alone() -> Run:
    return next(train_alone(NAME))


@pytest.mark.parametrize("flags", [(), ("--cp", "2")], ids=["cp 4", "dp 2 × cp 2"])
def test_four_processes_train_as_one(alone: Run, flags: tuple[str, ...]) -> None:
    run = run_recipe(NAME, *flags)
    assert len(run.losses) == 4
    assert run.losses == pytest.approx(alone.losses, abs=2e-6)  # transformers computes losses in float32
    assert run.weights == pytest.approx(alone.weights, abs=1e-9)
