"""The Triton attention kernel: its intervals here, and its results where test_interpreted.py runs this file again.

A GPU meets every check in tests/gpu.
"""

from __future__ import annotations

import os

import pytest
import strategies
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mesh_attention import causal
from mesh_attention.kernels import intervals, launching
from mesh_attention.kernels.base import CallMask, RowGradient, Scores
from mesh_attention.kernels.intervals import SMALL_TILES, TILES, IntervalKernel, ProgramTile, is_ascending
from mesh_attention.kernels.reference import ReferenceKernel
from mesh_attention_lab.testing import kernel_conformance as conformance
from mesh_attention_lab.testing.kernel_conformance import Check, Setting

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU = torch.device("cpu")
KERNEL = IntervalKernel("cpu", {name: {256: ProgramTile(16, 16, 4, 1)} for name in TILES})
CHECKS: tuple[Check, ...] = (
    conformance.bands_are_exact,
    conformance.tokens_in_several_segments_are_exact,
    conformance.rows_that_see_nothing_have_output_0_and_lse_minus_infinity,
    conformance.a_gradient_into_the_lse_is_exact_where_do_is_zero,
)
"""Those that take the interpreter a few seconds at most, and see another part of the kernels than the others."""

interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="needs Triton's interpreter")
in_plain_python = pytest.mark.skipif(IS_INTERPRETED, reason="already interpreted")


@st.composite
def masks(draw: st.DrawFn) -> CallMask:
    """Of one or two segments of any stride on each side, in the order of their positions."""
    seq_q, seq_kv = (draw(st.integers(1, 60)) for _ in range(2))
    mask, q, kv = draw(strategies.masks(seq_q, seq_kv)), draw(segments(seq_q)), draw(segments(seq_kv))
    return CallMask("positions", mask, q, kv, seq_q, seq_kv)


@st.composite
def segments(draw: st.DrawFn, end: int) -> tuple[range, ...]:
    cut = draw(st.integers(0, end))
    parts = (range(draw(st.integers(0, cut)), cut), range(cut, end))
    return tuple(part[:: draw(st.integers(1, 3))] for part in parts)


@in_plain_python
@given(mask=masks())
@settings(max_examples=200)
def test_intervals_are_the_mask(mask: CallMask) -> None:
    assert is_ascending(mask)
    seen, keys = mask.dense(CPU), torch.arange(sum(map(len, mask.kv)))
    queries = torch.arange(sum(map(len, mask.q)))
    found = intervals.intervals(mask, CPU)
    assert torch.equal((keys >= found.key_start[:, None]) & (keys < found.key_stop[:, None]), seen)
    is_seen_by = (queries >= found.query_start[:, None]) & (queries < found.query_stop[:, None])
    assert torch.equal(is_seen_by, seen.T)
    assert all((end.diff() >= 0).all() and end.dtype == torch.int32 for end in found)
    assert intervals.intervals(mask, CPU) is found


@in_plain_python
def test_tokens_in_another_order_have_no_intervals() -> None:
    """They go to the reference, and do not start Triton."""
    tokens = (range(4, 8), range(4))
    mask = CallMask("positions", causal(), tokens, tokens, 8, 8)
    assert not is_ascending(mask)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 8, 8).unbind(0)
    scores = Scores(mask, 0.3)
    due, _ = ReferenceKernel().forward(q, k, v, scores)
    torch.testing.assert_close(KERNEL.forward(q, k, v, scores)[0], due)


@in_plain_python
def test_tiles_suit_the_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        shared_memory_per_block_optin = shared_memory_per_multiprocessor = 0

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    for nbytes, tiles in ((101376, SMALL_TILES), (166912, TILES), (232448, TILES)):  # 8.9, 8.0, 9.0
        Properties.shared_memory_per_block_optin = nbytes
        launching.shared_nbytes.cache_clear()
        assert intervals._tiles(torch.device("cuda", 0)) is tiles
    launching.shared_nbytes.cache_clear()


@interpreted
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Check) -> None:
    check(KERNEL, Setting(dtype=torch.float16, head_dim=16, head_dim_v=24, seq_len=20))


@interpreted
@given(mask=masks(), groups=st.sampled_from((1, 3)), softcap=st.sampled_from((0.0, 1.5)), seed=st.integers(0, 99))
@settings(max_examples=5, phases=[Phase.generate])  # shrinking takes the interpreter minutes
def test_every_mask_is_exact(mask: CallMask, groups: int, softcap: float, seed: int) -> None:
    """Also where dO is zero and delta is not, and in rows that see nothing."""
    torch.manual_seed(seed)
    queries, keys = (sum(map(len, side)) for side in (mask.q, mask.kv))
    q, do = (torch.randn(1, groups, queries, 16).half() for _ in range(2))
    k, v = (torch.randn(1, 1, keys, 16).half() for _ in range(2))
    do[:, :, ::3] = 0
    scores = Scores(mask, 0.3, softcap)
    out, lse = ReferenceKernel().forward(q, k, v, scores)
    ours, our_lse = KERNEL.forward(q, k, v, scores)
    torch.testing.assert_close(ours.float(), out, rtol=0, atol=5e-3)
    torch.testing.assert_close(our_lse, lse, rtol=0, atol=1e-4)
    row = RowGradient(do, torch.logaddexp(lse, torch.randn(lse.shape)), torch.randn(lse.shape))
    gradients, exact = (one.backward(q, k, v, row, scores) for one in (KERNEL, ReferenceKernel()))
    for mine, due in zip(gradients, exact, strict=True):
        torch.testing.assert_close(mine.float(), due, rtol=1e-2, atol=1e-2)
