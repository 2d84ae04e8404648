"""Calls of attention kernels as an executor makes them, and how far a kernel's results may be from float64.

What is demanded follows from the dtype's rounding u: the LSE is float32 throughout; outputs are rounded once after one
product with rounded weights; gradients go through two more products with rounded factors. A mask that is off by one
diagonal in 300 shows as more than 0.05 in the gradients and 0.003 in the LSE.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mesh_attention import causal, documents, full, window
from mesh_attention.kernels.base import CallMask, Gradients, Kernel, RowGradient, Scores
from mesh_attention.kernels.reference import ReferenceKernel
from mesh_attention.masks import Mask

BATCH, HEADS = 2, 4
LSE_TOLERANCE = 2.0**-12
WIDE_ROUNDING = 2.0**-20
"""In float32: what hundreds of additions lose."""


def positions(mask: Mask, q: range, kv: range, seq_q: int, seq_kv: int | None = None) -> CallMask:
    return CallMask("positions", mask, (q,), (kv,), seq_q, seq_q if seq_kv is None else seq_kv)


MASKS = {
    "full": CallMask("full", full(), (range(300),), (range(200),), 300, 200),
    "causal": CallMask("causal", causal(), (range(300),), (range(300),), 300, 300),
    "window": positions(window(64, 0), range(300), range(300), 300),
    "offset window": positions(window(10, 5), range(100, 300), range(250), 300),
    "documents": positions(causal() & documents([0, 70, 71, 200, 300]), range(50, 300), range(260), 300),
    "striped": positions(causal(), range(1, 900, 3), range(2, 900, 3), 900),
    "blind rows": positions(window(1, 0), range(300), range(200, 290), 300),
    "bottom right": positions(causal(), range(200), range(300), 200, 300),
    "tall": positions(window(20, 300), range(600), range(100, 160), 600),
    "mixed strides": positions(causal(), range(300), range(0, 900, 3), 900),
}


class Case(NamedTuple):
    """A call as an executor makes it: Q, K and V, gradients of rows over more keys than the call's, and its scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    row: RowGradient
    scores: Scores


def make_case(
    mask: CallMask,
    dtype: torch.dtype,
    device: str,
    *,
    dims: tuple[int, int] = (128, 128),
    kv_heads: int = HEADS,
    heads: int = HEADS,
) -> Case:
    """Random tensors that lie in records, as buffers do: K beside V, and dO behind its LSE and delta."""
    torch.manual_seed(1)
    d_qk, d_v = dims
    tokens_q, tokens_kv = (sum(map(len, side)) for side in (mask.q, mask.kv))
    q = torch.randn((tokens_q, BATCH, heads, d_qk), device=device).to(dtype).permute(1, 2, 0, 3)
    kv = torch.randn((tokens_kv, BATCH, kv_heads * (d_qk + d_v)), device=device).to(dtype)
    k = kv[..., : kv_heads * d_qk].view(tokens_kv, BATCH, kv_heads, d_qk).permute(1, 2, 0, 3)
    v = kv[..., kv_heads * d_qk :].view(tokens_kv, BATCH, kv_heads, d_v).permute(1, 2, 0, 3)
    record = torch.zeros((tokens_q, BATCH, heads * (8 + d_v * dtype.itemsize)), dtype=torch.uint8, device=device)
    statistics = record[..., : heads * 8].view(torch.float32).view(tokens_q, BATCH, 2, heads).permute(2, 1, 3, 0)
    do = record[..., heads * 8 :].view(dtype).view(tokens_q, BATCH, heads, d_v).permute(1, 2, 0, 3)
    do.copy_(torch.randn(do.shape, device=device))
    scores = Scores(mask, d_qk**-0.5)
    _, lse = exact_forward(q, k, v, scores)
    statistics[0] = torch.logaddexp(lse, lse + torch.randn_like(lse))  # over keys of other calls as well
    statistics[1] = (torch.randn_like(do) * do).sum(-1)
    return Case(q, k, v, RowGradient(do, statistics[0], statistics[1]), scores)


def exact_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    return ReferenceKernel().forward(q.double(), k.double(), v.double(), scores)


def exact_backward(given: Case) -> Gradients:
    row = RowGradient(*(None if x is None else x.double() for x in given.row))
    return ReferenceKernel().backward(given.q.double(), given.k.double(), given.v.double(), row, given.scores)


def error(ours: Tensor, exact: Tensor) -> float:
    """Relative, over the whole tensor."""
    assert not ours.isnan().any()
    return ((ours.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def check(kernel: Kernel, given: Case) -> None:
    rounding = max(torch.finfo(given.q.dtype).eps / 2, WIDE_ROUNDING)
    out, lse = kernel.forward(given.q, given.k, given.v, given.scores)
    exact, exact_lse = exact_forward(given.q, given.k, given.v, given.scores)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=LSE_TOLERANCE)
    assert error(out, exact) <= 2 * rounding
    assert not out.transpose(2, 3)[exact_lse[:, :, None].expand(out.mT.shape) == -torch.inf].any()
    gradients = kernel.backward(given.q, given.k, given.v, given.row, given.scores)
    for mine, due in zip(gradients, exact_backward(given), strict=True):
        assert mine.shape == due.shape
        assert error(mine, due) <= 6 * rounding
