"""Merging a partial into a running sum, in place, and what backward needs of each row and head.

Sums are float32, or float64 for float64; their LSE is float64. Outputs are (batch, heads, tokens, dim), with any
strides; LSE has the same shape without the last dimension. With Triton, each operation is one launch and one pass over
memory; plain torch runs anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mesh_attention.kernels.base import RowGradient
from mesh_attention.kernels.launching import Launch, launch, stride_unit, triton_unsupported_reason, with_strides


class TorchMerging:
    """Torch's own operations."""

    name = "torch"

    def unsupported_reason(self, device: torch.device) -> str | None:
        return None

    def start_output(self, total: Tensor, total_lse: Tensor, partial: Tensor, lse: Tensor) -> None:
        total.copy_(partial)
        total_lse.copy_(lse)

    def merge_output(self, total: Tensor, total_lse: Tensor, partial: Tensor, lse: Tensor) -> None:
        # sigmoid(a - b) instead of exp(a - joint): the joint LSE is rounded, and its error would be in both weights.
        joint = torch.logaddexp(total_lse, lse)
        blind = joint == -torch.inf  # -inf - -inf is NaN
        lead = (total_lse - lse).to(total.dtype)
        total.mul_(lead.sigmoid().masked_fill_(blind, 0.0)[..., None])
        total.add_(partial * lead.neg_().sigmoid_().masked_fill_(blind, 0.0)[..., None])
        total_lse.copy_(joint)

    def copy(self, dest: Tensor, source: Tensor) -> None:
        dest.copy_(source)

    def add(self, total: Tensor, partial: Tensor) -> None:
        total.add_(partial)


class FusedMerging:
    """Triton kernels. `device_type` differs from "cuda" only under Triton's interpreter."""

    name = "triton"

    def __init__(self, device_type: str = "cuda") -> None:
        self.device_type = device_type

    def unsupported_reason(self, device: torch.device) -> str | None:
        if device.type != self.device_type:
            return f"runs on {self.device_type}, not on {device.type}"
        return triton_unsupported_reason(device)

    def start_output(self, total: Tensor, total_lse: Tensor, partial: Tensor, lse: Tensor) -> None:
        _merge(total, total_lse, partial, lse, is_first=True)

    def merge_output(self, total: Tensor, total_lse: Tensor, partial: Tensor, lse: Tensor) -> None:
        _merge(total, total_lse, partial, lse, is_first=False)

    def copy(self, dest: Tensor, source: Tensor) -> None:
        _add(dest, source, is_first=True)

    def add(self, total: Tensor, partial: Tensor) -> None:
        _add(total, partial, is_first=False)


def _merge(total: Tensor, total_lse: Tensor, partial: Tensor, lse: Tensor, *, is_first: bool) -> None:
    assert total.shape == partial.shape == (*lse.shape, total.shape[-1])
    assert total_lse.shape == lse.shape
    _launch("merge_rows", (total, total_lse, partial, lse), (is_first,), total.itemsize)


def _add(total: Tensor, partial: Tensor, *, is_first: bool) -> None:
    assert total.shape == partial.shape
    _launch("add_rows", (total, partial), (is_first,), max(4, total.itemsize))


# Per row and head: delta = rowsum(O∘dO), and an output that stands in for O where backward does not have it


def delta_of(row: RowGradient) -> Tensor:
    """Delta as given, or computed from the output."""
    if row.delta is not None:
        return row.delta
    assert row.out is not None, "a row has its delta or its output"
    return row_delta(row.out.transpose(1, 2), row.do.transpose(1, 2), wide=row.lse.dtype).transpose(1, 2)


def output_of(row: RowGradient) -> Tensor:
    """The output as given, or one that stands in for it."""
    return row.out if row.out is not None else stand_in_rows(row.do, delta_of(row), row.lse)[0]


def row_delta(out: Tensor, d_out: Tensor, *, wide: torch.dtype) -> Tensor:
    """rowsum(O∘dO) over the last dimension of (batch, tokens, heads, dim), computed and returned in dtype `wide`."""
    assert out.shape == d_out.shape
    if not _is_fused(out):
        return (out.to(wide) * d_out.to(wide)).sum(-1)
    delta = torch.empty(out.shape[:-1], dtype=wide, device=out.device)
    _launch("dot_rows", (out.transpose(1, 2), d_out.transpose(1, 2), delta.transpose(1, 2)), (), wide.itemsize)
    return delta


def stand_in_rows(do: Tensor, delta: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """An O of shape (batch, heads, tokens, dim) with rowsum(O∘dO) = delta, the only thing a kernel uses O for; and a
    contiguous LSE with 0 for -inf: such rows are masked, and -inf - -inf would be NaN."""
    assert delta.shape == lse.shape == do.shape[:3]
    if _is_fused(do):
        batch, heads, tokens, dim = do.shape
        out = torch.empty((batch, tokens, heads, dim), dtype=do.dtype, device=do.device).transpose(1, 2)
        filled = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
        _launch("stand_in_rows", (do, delta, out, lse, filled), (), delta.itemsize)
        return out, filled
    wide = do.to(delta.dtype)
    # In units of the largest, or squares of tiny gradients would vanish, and those of large ones overflow.
    largest = wide.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(wide.dtype).tiny)
    unit = wide / largest
    norm = (unit * unit).sum(-1, keepdim=True)
    ratio = torch.where(norm > 0, delta[..., None] / largest / norm, 0.0)
    return (unit * ratio).to(do.dtype), lse.masked_fill(lse == -torch.inf, 0.0).contiguous()


def _is_fused(tensor: Tensor) -> bool:
    return tensor.is_cuda and triton_unsupported_reason(tensor.device) is None


# Launches over rows


FILE = "merging_kernels"
_TILE_NBYTES = 16384
"""Bytes of the running sum in one program: eight loads of 16 bytes in flight for each of its 128 threads."""


def _launch(name: str, tensors: Sequence[Tensor], flags: tuple[bool, ...], itemsize: int) -> None:
    """Launch a kernel over the rows of the first tensor; `itemsize` is that of the dtype it computes in."""
    if tensors[0].numel():
        key = (name, flags, tensors[0].shape)
        launch(key, tensors, lambda: _rows_launch(name, tensors, flags, itemsize))


def _rows_launch(name: str, tensors: Sequence[Tensor], flags: tuple[bool, ...], itemsize: int) -> Launch:
    """A program for each tile of rows of the first tensor. Arguments are each tensor and its strides, then sizes and
    flags.

    If there are statistics only, their heads, adjacent in memory, take the place of dim.
    """
    if tensors[0].dim() == 3:
        tensors = [tensor.transpose(1, 2)[:, None] for tensor in tensors]
    batch, heads, tokens, dim = tensors[0].shape
    block, rows = _tile(dim, itemsize)
    tiles = -(-tokens * heads // rows)
    unit = stride_unit([tensor for tensor in tensors if tensor.dim() == 4])
    strides = [_in_units(tensor.stride(), unit) for tensor in tensors]
    rest = (tokens, tiles, heads, dim, block, rows, unit, *flags)
    return Launch(FILE, name, (batch * tiles, 1, 1), with_strides(strides, rest))


def _in_units(strides: tuple[int, ...], unit: int) -> tuple[int, ...]:
    """Strides in units, except over dim; those of statistics stay in elements."""
    return (*(stride // unit for stride in strides[:-1]), strides[-1]) if len(strides) == 4 else strides


def _tile(dim: int, itemsize: int) -> tuple[int, int]:
    """Dim rounded up to a power of two, and the number of such rows in a program."""
    block = 1 << (dim - 1).bit_length()
    return block, max(1, _TILE_NBYTES // (itemsize * block))
