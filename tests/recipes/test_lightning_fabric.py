"""Lightning Fabric on 4 processes: as one process that attends with torch's own function, without Fabric."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_runs import RECIPES, Run, run_recipe
from torch.utils.data import DataLoader, DistributedSampler

pytest.importorskip("lightning")

NAME = "lightning_fabric.py"


def train_alone() -> Iterator[Run]:
    """Epoch after epoch, on whole batches; Lightning shuffles as torch's DistributedSampler does."""
    recipe: dict[str, Any] = runpy.run_path(str(RECIPES / NAME))
    model, data = recipe["make_model"]("sdpa"), recipe["make_data"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0)
    while True:
        losses = []
        for batch in DataLoader(data, batch_size=recipe["BATCH"], sampler=sampler):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        yield Run(tuple(losses), torch.stack([p.norm() for p in model.parameters()]).norm().item())


@pytest.fixture(scope="module")
def alone() -> tuple[Run, Run]:
    epochs = train_alone()
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
