"""Per row and head: delta = rowsum(O∘dO), and an output that stands in for O where backward does not have it.

With Triton on CUDA, each is one pass over memory; elsewhere plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mesh_attention.kernels import fused
from mesh_attention.kernels.base import RowGradient
from mesh_attention.kernels.launching import lacks


def row_delta(out: Tensor, d_out: Tensor, *, wide: torch.dtype) -> Tensor:
    """rowsum(O∘dO) over the last dimension of (batch, tokens, heads, dim), computed and returned in dtype `wide`."""
    if _is_fused(out):
        return fused.row_delta(out, d_out, wide=wide)
    return (out.to(wide) * d_out.to(wide)).sum(-1)


def stand_in_output(do: Tensor, delta: Tensor) -> Tensor:
    """An O of shape (batch, heads, tokens, dim) with rowsum(O∘dO) = delta, the only thing the kernel uses O for."""
    if _is_fused(do):
        return fused.stand_in_output(do, delta)
    wide = do.to(delta.dtype)
    # In units of the largest, or squares of tiny gradients would vanish, and those of large ones overflow.
    largest = wide.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(wide.dtype).tiny)
    unit = wide / largest
    norm = (unit * unit).sum(-1, keepdim=True)
    ratio = torch.where(norm > 0, delta[..., None] / largest / norm, 0.0)
    return (unit * ratio).to(do.dtype)


def stand_in_rows(do: Tensor, delta: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """`stand_in_output`, and a contiguous LSE with 0 for -inf: such rows are masked, and -inf - -inf would be NaN."""
    if _is_fused(do):
        return fused.stand_in_rows(do, delta, lse)
    return stand_in_output(do, delta), lse.masked_fill(lse == -torch.inf, 0.0).contiguous()


def delta_of(row: RowGradient) -> Tensor:
    """Delta as given, or computed from the output."""
    if row.delta is not None:
        return row.delta
    assert row.out is not None, "a row has its delta or its output"
    return row_delta(row.out.transpose(1, 2), row.do.transpose(1, 2), wide=row.lse.dtype).transpose(1, 2)


def output_of(row: RowGradient) -> Tensor:
    """The output as given, or one that stands in for it."""
    return row.out if row.out is not None else stand_in_output(row.do, delta_of(row))


def _is_fused(tensor: Tensor) -> bool:
    return tensor.is_cuda and lacks(tensor.device) is None
