"""A rank's part of a batch, and one loss from all ranks: exact for any split of the tokens, and hard to get wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from pool import said
from run_ranks import RankPool
from torch import Tensor

from mesh_attention import LocalGroup, UsageError
from mesh_attention.api import MeshAttention
from mesh_attention.batches import reduce_loss, shard_batch
from mesh_attention.plan.layout import LAYOUTS


def cut(batch: dict[str, Any], ranks: int, layout: str = "zigzag") -> list[dict[str, Any]]:
    """What each rank would get; without comparing, since no two of them run at once here."""
    group = LocalGroup(ranks)
    attentions = [MeshAttention(group.comm(rank), layout=layout) for rank in range(ranks)]
    return [shard_batch(attention, batch, is_compared=False) for attention in attentions]


def joined(parts: list[dict[str, Any]], name: str, layout: str = "zigzag") -> Tensor:
    whole: Tensor = MeshAttention(LocalGroup(len(parts)), layout=layout).unshard([part[name] for part in parts])
    return whole


@st.composite
def batches(draw: st.DrawFn) -> tuple[dict[str, Any], int, str]:
    ranks = draw(st.integers(1, 5))
    rows, seq = draw(st.integers(1, 3)), draw(st.integers(ranks, 17))
    ids = torch.arange(1, rows * seq + 1).reshape(rows, seq)
    labels = torch.where(torch.rand(rows, seq, generator=torch.Generator().manual_seed(seq)) < 0.3, -100, ids)
    return {"input_ids": ids, "labels": labels}, ranks, draw(st.sampled_from(sorted(LAYOUTS)))


@given(batches())
def test_every_token_is_beside_its_label_and_position(case: tuple[dict[str, Any], int, str]) -> None:
    batch, ranks, layout = case
    if (batch["labels"][:, 1:] == -100).all():
        with pytest.raises(UsageError, match="every label is -100 or padding"):
            cut(batch, ranks, layout)
        return
    parts = cut(batch, ranks, layout)
    seq = batch["input_ids"].shape[1]
    assert torch.equal(joined(parts, "input_ids", layout), batch["input_ids"])
    assert torch.equal(joined(parts, "position_ids", layout), torch.arange(seq)[None])
    shifted = joined(parts, "shift_labels", layout)
    assert torch.equal(shifted[:, :-1], batch["labels"][:, 1:])
    assert (shifted[:, -1] == -100).all()
    labelled = int((shifted != -100).sum())
    for part in parts:
        assert part["num_items_in_batch"] == labelled
        assert (part["labels"] == -100).all()
        assert part["cu_seq_lens_q"] == tuple(range(0, batch["input_ids"].numel() + 1, seq))
        assert not part["use_cache"]


# What is refused; tests/golden/python/batches.txt has the messages

IDS = torch.ones(2, 8, dtype=torch.long)


def cut_differently(group: Any, difference: str) -> str:
    odd = dist.get_rank(group) == 1
    batch: dict[str, Any] = {"input_ids": torch.arange(16).reshape(2, 8)}
    if odd and difference == "order":
        batch["input_ids"] = batch["input_ids"].flip(1)
    if difference == "mask":
        batch["attention_mask"] = torch.ones(2, 8)
        batch["attention_mask"][0, : 3 if odd else 2] = 0
        batch["attention_mask"] = batch["attention_mask"].long()
    if odd and difference == "refusal":
        batch["colour"] = 3
    return said(lambda: shard_batch(MeshAttention(group), batch))


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ("order", "input_ids is (2, 8) torch.int64 #"),
        ("mask", "attention_mask is (2, 8) torch.int64 #"),
    ],
)
def test_ranks_with_different_batches_are_told(pool: RankPool, difference: str, message: str) -> None:
    for answer in pool.run(3, cut_differently, difference):
        assert answer.startswith("DisagreementError")
        assert message in answer
        assert "must get the same whole batch" in answer


def test_a_refusal_on_one_rank_reaches_the_others(pool: RankPool) -> None:
    answers = pool.run(3, cut_differently, "refusal")
    assert [answer.startswith("UsageError: shard_batch does not know how to cut 'colour'") for answer in answers] == [
        0,
        1,
        0,
    ]
    assert all("rank 1 refused the call" in answer for answer in (answers[0], answers[2]))


# Loss; of models on a mesh in test_composition.py


def reduce(group: Any, items: list[int], gradients: str, as_tensor: bool) -> tuple[float, float]:
    rank = dist.get_rank(group)
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    loss_sum = weight * items[rank] * (rank + 1)
    count: Any = torch.tensor(items[rank]) if as_tensor else items[rank]
    loss = reduce_loss(loss_sum, count, group=group, gradients=gradients)  # type: ignore[arg-type]
    (loss * 3).backward()
    assert weight.grad is not None
    return loss.item(), weight.grad.item()


@pytest.mark.parametrize("gradients", ["averaged", "summed"])
def test_the_mean_is_over_the_tokens_of_all_ranks(pool: RankPool, gradients: str) -> None:
    items = [5, 0, 7]
    mean = 2 * (5 * 1 + 7 * 3) / 12
    factor = 3 if gradients == "averaged" else 1
    for rank, (loss, gradient) in enumerate(pool.run(3, reduce, items, gradients, gradients == "summed")):
        assert loss == pytest.approx(mean, rel=1e-15)
        assert gradient == pytest.approx(3 * factor * items[rank] * (rank + 1) / 12, rel=1e-15)


def test_the_mean_of_no_tokens_is_nan_and_moves_nothing(pool: RankPool) -> None:
    for loss, gradient in pool.run(2, reduce, [0, 0], "averaged", False):
        assert loss != loss
        assert gradient == 0
