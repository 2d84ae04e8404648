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


def test_padding_predicts_nothing_and_its_mask_stays_whole() -> None:
    ids = torch.arange(1, 17).reshape(2, 8)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0]])
    parts = cut({"input_ids": ids, "labels": ids, "attention_mask": mask}, 2)
    assert torch.equal(
        joined(parts, "shift_labels") != -100, torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0], [1] * 5 + [0] * 3]) > 0
    )
    for part in parts:
        assert torch.equal(part["attention_mask"], mask)
        assert part["num_items_in_batch"] == 10


def test_position_ids_that_restart_are_documents() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])
    for part in cut({"input_ids": torch.ones(2, 8, dtype=torch.long), "position_ids": positions}, 2):
        assert part["cu_seq_lens_q"] == part["cu_seq_lens_k"] == (0, 3, 5, 8, 16)
        assert part["max_length_q"] == part["max_length_k"] == 8
        assert "labels" not in part
        assert part["position_ids"].shape == (2, 4)


@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
def test_the_last_token_of_a_document_predicts_nothing(by: str) -> None:
    ids = torch.arange(1, 17).reshape(2, 8)
    marks: dict[str, Any] = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])}
    if by == "cu_seq_lens":
        marks = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), (0, 3, 5, 8, 16))
    parts = cut({"input_ids": ids, "labels": ids, **marks}, 2)
    none = -100
    due = [[2, 3, none, 5, none, 7, 8, none], [10, 11, 12, 13, 14, 15, 16, none]]
    assert joined(parts, "shift_labels").tolist() == due
    assert all(part["num_items_in_batch"] == 12 for part in parts)
    parts = cut({"input_ids": ids, "shift_labels": ids, **marks}, 2)
    assert torch.equal(joined(parts, "shift_labels"), ids)  # these say themselves what each token predicts


def test_position_ids_of_left_padding_are_no_documents() -> None:
    positions, mask = torch.tensor([[1, 1, 0, 1, 2, 3]]), torch.tensor([[0, 0, 1, 1, 1, 1]])
    ids = torch.ones(1, 6, dtype=torch.long)
    (part,) = cut({"input_ids": ids, "position_ids": positions, "attention_mask": mask}, 1)
    assert part["cu_seq_lens_q"] == (0, 6)


def test_embeddings_and_shifted_labels_are_taken_as_well() -> None:
    embeddings, shifted = torch.randn(2, 7, 3), torch.randint(0, 9, (2, 7))
    parts = cut({"inputs_embeds": embeddings, "shift_labels": shifted}, 3)
    assert torch.equal(joined(parts, "inputs_embeds"), embeddings)
    assert torch.equal(joined(parts, "shift_labels"), shifted)
    assert all(part["num_items_in_batch"] == 14 for part in parts)


# What is refused; tests/golden/python/batches.txt has the messages

IDS = torch.ones(2, 8, dtype=torch.long)


def test_a_batch_may_lack_labels_if_others_have_some() -> None:
    attention = MeshAttention(LocalGroup(2).comm(0))
    batch = {"input_ids": IDS, "labels": torch.full_like(IDS, -100)}
    local = shard_batch(attention, batch, is_compared=False, may_lack_labels=True)
    assert local["num_items_in_batch"] == 0
    assert (local["shift_labels"] == -100).all()


def test_labels_of_the_tokens_themselves_are_not_shifted() -> None:
    attention = MeshAttention(LocalGroup(2).comm(0))
    labels, mask = torch.arange(16).reshape(2, 8), torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    batch = {"input_ids": IDS, "labels": labels, "attention_mask": mask}
    local = shard_batch(attention, batch, shift_labels=False, is_compared=False)
    assert torch.equal(local["labels"], attention.shard(labels.masked_fill(mask == 0, -100)))
    assert "shift_labels" not in local
    assert local["num_items_in_batch"] == 13


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
