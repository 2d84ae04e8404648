"""The training of the Lightning recipes in one process, by torch alone."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from typing import Any

import torch
from recipe_runs import RECIPES, Run
from torch.utils.data import DataLoader, DistributedSampler


def train_alone(name: str) -> Iterator[Run]:
    """Epoch after epoch, on whole batches; Lightning shuffles as torch's DistributedSampler does."""
    recipe: dict[str, Any] = runpy.run_path(str(RECIPES / name))
    model, data = recipe["make_model"](), recipe["make_data"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0)
    while True:
        losses = []
        for batch in DataLoader(data, batch_size=recipe["BATCH"], sampler=sampler):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["MAX_NORM"])
            optimizer.step()
            losses.append(loss.item())
        yield Run(tuple(losses), torch.stack([p.norm() for p in model.parameters()]).norm().item())
