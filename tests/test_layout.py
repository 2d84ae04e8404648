from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import layouts, listed
from torch.distributed.tensor import Shard

from mesh_attention import Contiguous, Problem, Striped, Zigzag, causal, full, make_plan, window
from mesh_attention.masks import Mask
from mesh_attention.plan.layout import (
    Cached,
    Chunks,
    Layout,
    TypicalTurn,
    inverse_permutation,
    layout_named,
    parse_layout,
    permutation,
    position_ids,
)
from mesh_attention_lab.comparison import flops_by_rank, imbalance


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


def test_zigzag_gives_a_rank_one_run_from_each_end() -> None:
    assert Zigzag().segments(1, seq_len=80, ranks=4) == (range(10, 20), range(60, 70))


def test_segments_of_a_rank_without_tokens_are_none() -> None:
    assert all(Zigzag().segments(rank, seq_len=0, ranks=3) == () for rank in range(3))
    assert Striped().segments(5, seq_len=4, ranks=8) == ()


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


def test_a_turn_puts_new_tokens_in_zigzag_after_cached_ones() -> None:
    problem = Problem(seq_q=8, seq_kv=24, heads=1, kv_heads=1, head_dim_qk=1, head_dim_v=1, ranks=2, mask=causal())
    queries, keys = (TypicalTurn().along(axis, problem) for axis in ("row", "col"))  # type: ignore[arg-type]
    assert queries.segments(0, seq_len=8, ranks=2) == (range(2), range(6, 8))
    assert keys.segments(0, seq_len=24, ranks=2) == (range(4), range(12, 18), range(22, 24))


def test_the_default_layout_suits_the_mask() -> None:
    def default(mask: Mask) -> Layout:
        return make_plan(Problem.self_attention(seq_len=96, heads=8, head_dim=4, ranks=12, mask=mask)).layout

    assert (default(causal()), default(full()), default(window(4, 0))) == (Zigzag(), Contiguous(), Contiguous())
