"""Counting against a dense matrix, which only the tests build."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from strategies import masks

from mesh_attention import causal, window
from mesh_attention.masks import BlockKind, Mask, _floor_sum
from mesh_attention.plan.parse import parse_mask
from mesh_attention_lab.testing.kernel_conformance import is_unmasked


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
