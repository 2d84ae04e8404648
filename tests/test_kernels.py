"""Every kernel is held to dense attention, in float64; and partials merge to what the whole gives."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh_attention import causal, documents, full, window
from mesh_attention.kernels.base import CallMask, Demand, Kernel, RowGradient, Scores
from mesh_attention.kernels.merge import TorchMerging
from mesh_attention.kernels.select import KERNELS, choose_kernel
from mesh_attention.testing.masks import is_unmasked

MASKS = {
    "full": ("full", full(), range(9), range(7)),
    "causal": ("causal", causal(), range(8), range(8)),
    "window": ("positions", window(3, 1), range(4, 12), range(2, 11)),
    "documents": ("positions", causal() & documents([0, 5, 9, 16]), range(2, 12), range(9)),
    "strided": ("positions", causal(), range(1, 16, 3), range(2, 16, 3)),
    "blind": ("positions", window(1, 0), range(12), range(8, 11)),
}


def demand(softcap: float = 0.0, dv: int = 6, lse_gradient: bool = False, dtype: torch.dtype = torch.float64) -> Demand:
    return Demand(device="cpu", dtype=dtype, head_dim_qk=6, head_dim_v=dv, softcap=softcap, lse_gradient=lse_gradient)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("softcap", "dv", "lse_gradient"), [(0.0, 6, False), (1.5, 6, False), (0.0, 4, False), (0.0, 6, True)]
)
def test_a_kernel_is_exact_or_says_why_not(
    kernel: Kernel, mask: str, kv_heads: int, softcap: float, dv: int, lse_gradient: bool
) -> None:
    reason = kernel.supports(demand(softcap, dv, lse_gradient))
    if reason is not None:
        assert reason.split()[0] in ("needs", "has", "cannot", "runs")
        return
    form, value, q_at, kv_at = MASKS[mask]
    torch.manual_seed(0)
    q = torch.randn(2, 4, len(q_at), 6, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, kv_heads, len(kv_at), 6, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, kv_heads, len(kv_at), dv, dtype=torch.float64, requires_grad=True)
    seen = torch.tensor([[is_unmasked(value, x, y, 16, 16) for y in kv_at] for x in q_at])
    scores = q @ k.repeat_interleave(4 // kv_heads, 1).mT * 0.4
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    blind = ~seen.any(1)
    lse = scores.masked_fill(~seen, -torch.inf).masked_fill(blind[:, None], 0.0).logsumexp(-1)
    out = (scores - lse[..., None]).exp().masked_fill(~seen, 0.0) @ v.repeat_interleave(4 // kv_heads, 1)
    do, d_lse = torch.randn_like(out), torch.randn_like(lse) * lse_gradient * ~blind
    due = torch.autograd.grad((out * do).sum() + (lse * d_lse).sum(), (q, k, v))
    call = CallMask(form, value, (q_at,), (kv_at,), 16, 16)  # type: ignore[arg-type]
    q, k, v, out, lse = (t.detach() for t in (q, k, v, out, lse))
    ours, our_lse = kernel.forward(q, k, v, Scores(call, 0.4, softcap))
    torch.testing.assert_close(ours, out, rtol=1e-12, atol=1e-13)
    lse = lse.masked_fill(blind, -torch.inf)
    torch.testing.assert_close(our_lse, lse, rtol=1e-12, atol=1e-13)
    delta = (out * do).sum(-1) - d_lse
    gradients = kernel.backward(q, k, v, RowGradient(do, lse, delta), Scores(call, 0.4, softcap))
    for mine, theirs in zip(gradients, due, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4))
@settings(max_examples=50)
def test_partials_merge_to_the_whole(sizes: list[int]) -> None:
    torch.manual_seed(len(sizes))
    scores = [torch.randn(3, size, dtype=torch.float64) for size in sizes]
    values = [torch.randn(size, 2, dtype=torch.float64) for size in sizes]
    total, total_lse = torch.zeros(3, 2, dtype=torch.float64), torch.full((3,), -torch.inf, dtype=torch.float64)
    nothing = total_lse.clone()
    for s, v in zip(scores, values, strict=True):
        weights = torch.softmax(s, -1) if s.shape[1] else s
        TorchMerging().merge_output(total, total_lse, weights @ v, s.logsumexp(-1) if s.shape[1] else nothing)
    whole = torch.cat(scores, -1)
    expected = torch.softmax(whole, -1) @ torch.cat(values) if whole.shape[1] else torch.zeros(3, 2)
    torch.testing.assert_close(total, expected.double(), rtol=1e-13, atol=1e-14)
    assert not total.isnan().any()


def test_tiny_gradients_do_not_vanish() -> None:
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, 9, 6) for _ in range(4))
    call = CallMask("full", full(), (range(9),), (range(9),), 9, 9)
    kernel, truth = KERNELS[0], KERNELS[-1]
    out, lse = truth.forward(q, k, v, Scores(call, 0.4))
    for size in (1.0, 1e-20, 1e-25):
        delta = (out.double() * do.double() * size).sum(-1).float()
        ours, theirs = (
            one.backward(q, k, v, RowGradient(do * size, lse, delta), Scores(call, 0.4)) for one in (kernel, truth)
        )
        for mine, due in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine / size, due / size, rtol=1e-4, atol=1e-5)


def test_the_choice_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    choose_kernel.cache_clear()
    with caplog.at_level(logging.INFO, logger="mesh_attention"):
        assert choose_kernel(demand()).name == "cpu flash"
        assert choose_kernel(demand(softcap=2.0)).name == "reference"
        assert choose_kernel(demand(dv=4)).name == "reference"
    assert "not cpu flash: it has no softcap" in caplog.text
    assert "not cpu flash: it needs one head size, not 6 and 4" in caplog.text


def test_dense_masks_are_the_definition() -> None:
    for form, value, q_at, kv_at in MASKS.values():
        if form != "full":
            call = CallMask(form, value, (q_at,), (kv_at,), 16, 16)  # type: ignore[arg-type]
            seen = [[is_unmasked(value, x, y, 16, 16) for y in kv_at] for x in q_at]
            assert call.dense(torch.device("cpu")).tolist() == seen
