"""Layouts give every token one home, and masks count their pairs; both are compared with a dense matrix or a list."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import layouts, listed, masks
from torch.distributed.tensor import Shard

from mesh_attention import Problem, Striped, Zigzag, causal, make_plan, window
from mesh_attention.masks import BlockKind, Mask, _floor_sum
from mesh_attention.plan.layout import (
    Cached,
    Chunks,
    Layout,
    inverse_permutation,
    layout_named,
    parse_layout,
    permutation,
    position_ids,
)
from mesh_attention.plan.parse import parse_mask
from mesh_attention_lab.comparison import flops_by_rank, imbalance
from mesh_attention_lab.testing.kernel_conformance import is_unmasked


@given(layouts(), st.integers(0, 200), st.integers(1, 40))
def test_shards_cover_every_token_once_and_differ_by_at_most_one(layout: Layout, tokens: int, ranks: int) -> None:
    shards = [position_ids(layout, rank, seq_len=tokens, ranks=ranks) for rank in range(ranks)]
    assert sorted(position for shard in shards for position in shard) == list(range(tokens))
    assert all(shard == sorted(shard) for shard in shards)
    if layout != Chunks():
        sizes = {len(shard) for shard in shards}
        assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 200), st.integers(1, 40))
def test_chunks_are_those_of_torch_and_of_a_dtensor(tokens: int, ranks: int) -> None:
    whole = torch.arange(tokens)
    due = [chunk.tolist() for chunk in whole.chunk(ranks)]
    due += [[] for _ in range(ranks - len(due))]
    assert [position_ids(Chunks(), rank, seq_len=tokens, ranks=ranks) for rank in range(ranks)] == due
    for rank, shard in enumerate(due):
        size, offset = Shard.local_shard_size_and_offset(tokens, ranks, rank)
        assert list(range(offset, offset + size)) == shard


@given(layouts(), st.integers(1, 200), st.integers(1, 40))
def test_the_inverse_undoes_the_permutation(layout: Layout, tokens: int, ranks: int) -> None:
    order = permutation(layout, seq_len=tokens, ranks=ranks)
    inverse = inverse_permutation(layout, seq_len=tokens, ranks=ranks)
    whole = [f"token {i}" for i in range(tokens)]
    sharded = [whole[p] for p in order]
    assert [sharded[i] for i in inverse] == whole


@pytest.mark.parametrize("layout", [Zigzag(), Striped()])
@pytest.mark.parametrize("ranks", [7, 16])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_causal_work_is_even_to_one_percent(layout: Layout, ranks: int, direction: str) -> None:
    problem = Problem.self_attention(seq_len=4096 * ranks, heads=8, head_dim=64, ranks=ranks, mask=causal())
    for method in ("mesh", "ring"):
        plan = make_plan(problem, method=method, layout=layout, direction=direction)  # type: ignore[arg-type]
        assert imbalance(flops_by_rank(plan)) <= 0.01


def test_contiguous_causal_work_is_uneven() -> None:
    """So that the test above can fail."""
    problem = Problem.self_attention(seq_len=4096 * 16, heads=8, head_dim=64, ranks=16, mask=causal())
    assert imbalance(flops_by_rank(make_plan(problem, method="ring", layout=layout_named("contiguous")))) > 0.9


@given(st.data(), st.integers(1, 60), st.integers(1, 9))
def test_listed_layouts_read_back_and_cover_every_token_once(data: st.DataObject, tokens: int, ranks: int) -> None:
    layout = data.draw(listed(tokens, ranks))
    assert parse_layout(layout.text) == layout
    assert sorted(permutation(layout, seq_len=tokens, ranks=ranks)) == list(range(tokens))
    both = Cached(layout, Zigzag())
    assert parse_layout(both.text) == both
    assert hash(parse_layout(both.text)) == hash(both)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mask, range, range, int, int]:
    seq_q, seq_kv = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    q, kv = (
        range(*sorted(draw(st.tuples(*[st.integers(0, seq)] * 2))), draw(st.integers(1, 6))) for seq in (seq_q, seq_kv)
    )
    return draw(masks(seq_q, seq_kv)), q, kv, seq_q, seq_kv


@given(cases())
def test_counts_and_kinds_equal_the_dense_matrix(case: tuple[Mask, range, range, int, int]) -> None:
    mask, q, kv, seq_q, seq_kv = case
    dense = sum(is_unmasked(mask, x, y, seq_q, seq_kv) for x in q for y in kv)
    assert mask.pairs(q, kv, seq_q=seq_q, seq_kv=seq_kv) == dense
    assert mask.is_empty(q, kv, seq_q=seq_q, seq_kv=seq_kv) == (dense == 0)
    expected = BlockKind.EMPTY if dense == 0 else BlockKind.FULL if dense == len(q) * len(kv) else BlockKind.PARTIAL
    assert mask.kind(q, kv, seq_q=seq_q, seq_kv=seq_kv) is expected


@given(st.integers(0, 40), st.integers(1, 12), st.integers(0, 40), st.integers(0, 40))
def test_floor_sum_equals_the_loop(count: int, divisor: int, slope: int, start: int) -> None:
    expected = sum((slope * i + start) // divisor for i in range(count))
    assert _floor_sum(count, divisor, slope, start) == expected


def test_counting_a_million_tokens_needs_no_matrix() -> None:
    tokens = 1 << 20
    everything = range(tokens)
    assert causal().pairs(everything, everything, seq_q=tokens, seq_kv=tokens) == tokens * (tokens + 1) // 2
    strided = range(3, tokens, 256)
    assert window(100, 0).pairs(strided, strided, seq_q=tokens, seq_kv=tokens) == len(strided)


@given(st.data())
def test_mask_text_reads_back(data: st.DataObject) -> None:
    mask = data.draw(masks(20, 17))
    assert parse_mask(str(mask)) == mask
