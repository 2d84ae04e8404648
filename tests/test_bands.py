"""Masks as windows: for any mask and any run of tokens, what flash-attn 2 sees is what the mask says."""

from __future__ import annotations

import strategies
import torch
from flash_fakes import seen_by_flash2, seen_in
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh_attention import causal, full, window
from mesh_attention.kernels.base import CallMask
from mesh_attention.kernels.windowed import Window, windows
from mesh_attention_lab.testing.kernel_conformance import is_unmasked

CPU = torch.device("cpu")


@st.composite
def calls(draw: st.DrawFn) -> CallMask:
    seq_q, seq_kv = draw(st.integers(1, 26)), draw(st.integers(1, 26))
    step = draw(st.sampled_from([1, 1, 2, 3]))
    q, kv = (
        range(start := draw(st.integers(0, n - 1)), draw(st.integers(start + 1, n)), step) for n in (seq_q, seq_kv)
    )
    return CallMask("positions", draw(strategies.masks(seq_q, seq_kv)), (q,), (kv,), seq_q, seq_kv)


@given(calls())
@settings(max_examples=600)
def test_windows_are_the_mask(call: CallMask) -> None:
    found = windows(call)
    assert found is not None
    seen = torch.zeros(len(call.q[0]), len(call.kv[0]), dtype=torch.bool)
    rows = [row for cut in found for row in cut.q]
    assert len(rows) == len(set(rows)), "windows share no query"
    for cut in found:
        part = seen_in(cut)
        assert part.any(1).all(), "every query of a window sees a key"
        assert part.any(0).all(), "every key of a window is seen"
        seen[cut.q.start : cut.q.stop, cut.kv.start : cut.kv.stop] = part
    assert torch.equal(seen, call.dense(CPU))
    assert len(found) <= 3 or call.mask.documents is not None


@given(calls())
@settings(max_examples=100)
def test_dense_masks_are_the_definition(call: CallMask) -> None:
    seen = [[is_unmasked(call.mask, x, y, call.seq_q, call.seq_kv) for y in call.kv[0]] for x in call.q[0]]
    assert call.dense(CPU).tolist() == seen


def test_plain_forms_are_one_window() -> None:
    tokens = range(5, 14)
    whole = range(9)
    for form, mask, right in (("full", full(), None), ("causal", causal(), 0), ("positions", causal(), 0)):
        call = CallMask(form, mask, (tokens,), (tokens,), 20, 20)  # type: ignore[arg-type]
        assert windows(call) == (Window(whole, whole, None, right),)
    assert Window(whole, whole, None, 0).is_causal
    assert Window(whole, whole, None, None).is_full


def test_stripes_are_aligned_causal_windows() -> None:
    """Every rank of a striped layout has causal calls, or such less the first query and the last key."""
    for row in range(3):
        for col in range(3):
            call = CallMask("positions", causal(), (range(row, 30, 3),), (range(col, 30, 3),), 30, 30)
            assert windows(call) is not None
            (found,) = windows(call) or ()
            assert found.is_causal
            assert len(found.q) == (10 if col <= row else 9)


def test_what_has_no_windows_says_so() -> None:
    for q, kv in (((range(9),), (range(0, 18, 2),)), ((range(4), range(6, 9)), (range(9),))):
        assert windows(CallMask("positions", causal(), q, kv, 18, 18)) is None
    one = CallMask("positions", causal(), (range(7, 8),), (range(0, 18, 2),), 18, 18)
    assert windows(one) == (Window(range(1), range(4), None, None),)


def test_no_tokens_are_no_windows() -> None:
    assert windows(CallMask("full", full(), (range(0),), (range(4),), 4, 4)) == ()
    assert windows(CallMask("positions", window(1, 0), (range(9, 12),), (range(3),), 12, 12)) == ()
    assert windows(CallMask("positions", window(0, 0), (range(0, 12, 3),), (range(1, 12, 3),), 12, 12)) == ()


def test_the_fake_window_is_the_documented_one() -> None:
    """flash-attn's README: seqlen_q = 5, seqlen_k = 2, causal; and the reach it takes for unbounded."""
    assert seen_by_flash2(5, 2, -1, 0).int().tolist() == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]
    assert seen_by_flash2(5, 2, -1, 2).all(), "asked for two to the right of the diagonal, it shows all"
