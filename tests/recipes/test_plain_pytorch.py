"""The plain training loop: on 4 processes as in one, which attends with torch's own function."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
import torch
from recipe_runs import RECIPES, Run, run_recipe
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, DistributedSampler

NAME = "plain_pytorch.py"


class Alone:
    """Attention in one process, by torch."""

    def position_ids(self, seq_len: int) -> Tensor:
        return torch.arange(seq_len)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, seq_len: int) -> Tensor:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        return scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True).transpose(1, 2)


@pytest.fixture(scope="module")
def alone() -> Run:
    """The same training without mesh-attention, FSDP2 and checkpointing, on whole batches."""
    recipe = runpy.run_path(str(RECIPES / NAME))
    model = recipe["make_model"](Alone())
    for layer in model[1:3]:
        layer.forward = layer.run
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    losses = []
    sampler: DistributedSampler[Any] = DistributedSampler(recipe["DATA"], num_replicas=1, rank=0)
    for ids, labels in DataLoader(recipe["DATA"], batch_size=recipe["BATCH"], sampler=sampler):
        loss = cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.34)
        optimizer.step()
        losses.append(loss.item())
    return Run(tuple(losses), torch.stack([p.norm() for p in model.parameters()]).norm().item())


COMPILED = pytest.param(("--cp", "2", "--compile", "aot_eager"), marks=pytest.mark.slow)


@pytest.mark.parametrize("flags", [(), COMPILED], ids=["cp 4", "dp 2 × cp 2, compiled"])
def test_four_processes_train_as_one(alone: Run, flags: tuple[str, ...]) -> None:
    run = run_recipe(NAME, *flags)
    assert len(run.losses) == 5
    assert run.losses == pytest.approx(alone.losses, abs=1e-10)
    assert run.weights == pytest.approx(alone.weights, abs=1e-9)
