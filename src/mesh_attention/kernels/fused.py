"""Merging and row sums with Triton: one launch and one pass over memory each.

Outputs are (batch, heads, tokens, dim), with any strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mesh_attention.kernels.launching import Arguments, Launch, lacks, launch

FILE = "triton_kernels"
_TILE_NBYTES = 16384
"""Bytes of the running sum in one program: eight loads of 16 bytes in flight for each of its 128 threads."""


class FusedMerging:
    """Triton kernels. `device_type` differs from "cuda" only under Triton's interpreter."""

    name = "triton"

    def __init__(self, device_type: str = "cuda") -> None:
        self.device_type = device_type

    def supports(self, device: torch.device) -> str | None:
        if device.type != self.device_type:
            return f"runs on {self.device_type}, not on {device.type}"
        return lacks(device)

    def start_output(self, total: Tensor, total_lse: Tensor, partial: Tensor, lse: Tensor) -> None:
        _merge(total, total_lse, partial, lse, is_first=True)

    def merge_output(self, total: Tensor, total_lse: Tensor, partial: Tensor, lse: Tensor) -> None:
        _merge(total, total_lse, partial, lse, is_first=False)

    def copy(self, dest: Tensor, source: Tensor) -> None:
        _add(dest, source, is_first=True)

    def add(self, total: Tensor, partial: Tensor) -> None:
        _add(total, partial, is_first=False)


def row_delta(out: Tensor, d_out: Tensor, *, wide: torch.dtype) -> Tensor:
    """`rows.row_delta` of (batch, tokens, heads, dim)."""
    assert out.shape == d_out.shape
    delta = torch.empty(out.shape[:-1], dtype=wide, device=out.device)
    _launch("dot_rows", (out.transpose(1, 2), d_out.transpose(1, 2), delta.transpose(1, 2)), (), wide.itemsize)
    return delta


def stand_in_output(do: Tensor, delta: Tensor) -> Tensor:
    """`rows.stand_in_output`, in memory (batch, tokens, heads, dim)."""
    assert delta.shape == do.shape[:3]
    out = _empty_output(do)
    _launch("stand_in_rows", (do, delta, out, delta, delta), (False,), delta.itemsize)
    return out


def stand_in_rows(do: Tensor, delta: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """`rows.stand_in_rows`, in one launch."""
    assert delta.shape == do.shape[:3] == lse.shape
    out, filled = _empty_output(do), torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    _launch("stand_in_rows", (do, delta, out, lse, filled), (True,), delta.itemsize)
    return out, filled


def check_marks(largest: Tensor, state: Tensor, seen: Tensor, results: Sequence[Tensor], *, counts: bool) -> None:
    """`execution.alarm.Alarm.check` of up to three results without gaps in memory; `seen` is in pinned host memory."""
    sizes = [*(result.numel() for result in results), 0, 0, 0][:3]
    filled = [*results, state, state, state][:3]  # a rank without tokens has no results

    def arguments(given: Sequence[Any]) -> list[Any]:
        largest, state, seen, *results = given
        return [largest, state, seen, *(x for pair in zip(results, sizes, strict=True) for x in pair), counts, 1024]

    key = ("check_marks", *sizes, counts)
    grid = (_SPOILING, 1, 1)
    launch(key, (largest, state, seen, *filled), lambda: Launch(FILE, "check_marks", grid, arguments))


_SPOILING = 64
"""Programs that fill results with NaN; as a rule they have nothing to do."""


def _empty_output(do: Tensor) -> Tensor:
    batch, heads, tokens, dim = do.shape
    return torch.empty((batch, tokens, heads, dim), dtype=do.dtype, device=do.device).transpose(1, 2)


def _merge(total: Tensor, total_lse: Tensor, partial: Tensor, lse: Tensor, *, is_first: bool) -> None:
    assert total.shape == partial.shape == (*lse.shape, total.shape[-1])
    assert total_lse.shape == lse.shape
    _launch("merge_rows", (total, total_lse, partial, lse), (is_first,), total.itemsize)


def _add(total: Tensor, partial: Tensor, *, is_first: bool) -> None:
    assert total.shape == partial.shape
    _launch("add_rows", (total, partial), (is_first,), max(4, total.itemsize))


def _launch(name: str, tensors: Sequence[Tensor], flags: tuple[bool, ...], itemsize: int) -> None:
    """Launch a kernel over the rows of the first tensor; `itemsize` is that of the dtype it computes in."""
    if tensors[0].numel():
        key = (name, flags, tensors[0].shape)
        launch(key, tensors, lambda: Launch(FILE, name, *_rows_launch(tensors, flags, itemsize)))


def _rows_launch(
    tensors: Sequence[Tensor], flags: tuple[bool, ...], itemsize: int
) -> tuple[tuple[int, int, int], Arguments]:
    """The grid over the rows of the first tensor. Arguments are each tensor and its strides, then sizes and flags.

    If there are statistics only, their heads, adjacent in memory, take the place of dim.
    """
    if tensors[0].dim() == 3:
        tensors = [tensor.transpose(1, 2)[:, None] for tensor in tensors]
    batch, heads, tokens, dim = tensors[0].shape
    block, rows = _tile(dim, itemsize)
    tiles = -(-tokens * heads // rows)
    unit = _unit([tensor for tensor in tensors if tensor.dim() == 4])
    strides = [_in_units(tensor.stride(), unit) for tensor in tensors]
    rest = (tokens, tiles, heads, dim, block, rows, unit, *flags)

    def arguments(given: Sequence[Any]) -> list[Any]:
        return [*(x for each, steps in zip(given, strides, strict=True) for x in (each, *steps)), *rest]

    return (batch * tiles, 1, 1), arguments


def _in_units(strides: tuple[int, ...], unit: int) -> tuple[int, ...]:
    """Strides in units, except over dim; those of statistics stay in elements."""
    return (*(stride // unit for stride in strides[:-1]), strides[-1]) if len(strides) == 4 else strides


def _tile(dim: int, itemsize: int) -> tuple[int, int]:
    """Dim rounded up to a power of two, and the number of such rows in a program."""
    block = 1 << (dim - 1).bit_length()
    return block, max(1, _TILE_NBYTES // (itemsize * block))


def _unit(tensors: Sequence[Tensor]) -> int:
    """Elements in a unit of strides: 16 bytes of the widest dtype if that divides all strides except those of the last
    axis, else the largest power of two that does.

    All tensors share it, so that a thread holds the same elements of each and threads exchange nothing.
    """
    unit = 16 // max(tensor.itemsize for tensor in tensors)
    while any(stride % unit for tensor in tensors for stride in tensor.stride()[:-1]):
        unit //= 2
    return unit
