"""Merging and row sums with Triton: one launch and one pass over memory each.

Nothing here imports triton until a kernel is first launched. Outputs are (batch, heads, tokens, dim), with any strides.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

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


@lru_cache(maxsize=64)
def lacks(device: torch.device) -> str | None:
    """The reason why these kernels cannot run on a device; None if they can."""
    if not _is_installed():
        return "needs triton, which is not installed"
    if device.type == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return f"needs compute capability 8.0, not {capability[0]}.{capability[1]}"
    return None


def row_delta(out: Tensor, d_out: Tensor, *, wide: torch.dtype) -> Tensor:
    """`rows.row_delta` of (batch, tokens, heads, dim)."""
    assert out.shape == d_out.shape
    delta = torch.empty(out.shape[:-1], dtype=wide, device=out.device)
    if delta.numel():
        a, b, c = out.transpose(1, 2), d_out.transpose(1, 2), delta.transpose(1, 2)
        a_steps, b_steps, unit = _steps(a.stride(), b.stride(), max(a.itemsize, b.itemsize))
        _launch("dot_rows", a, (a, *a_steps, b, *b_steps, c, *c.stride()), unit, itemsize=wide.itemsize)
    return delta


def stand_in_output(do: Tensor, delta: Tensor) -> Tensor:
    """`rows.stand_in_output`, in memory (batch, tokens, heads, dim)."""
    out = _empty_output(do)
    _stand_in(do, delta, out)
    return out


def stand_in_rows(do: Tensor, delta: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """`rows.stand_in_rows`, in one launch."""
    out, filled = _empty_output(do), torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    _stand_in(do, delta, out, lse, filled)
    return out, filled


def _stand_in(do: Tensor, delta: Tensor, out: Tensor, lse: Tensor | None = None, filled: Tensor | None = None) -> None:
    assert delta.shape == do.shape[:3] == (delta if lse is None else lse).shape
    if not do.numel():
        return
    do_steps, out_steps, unit = _steps(do.stride(), out.stride(), do.itemsize)
    before, after = delta if lse is None else lse, delta if filled is None else filled
    args = (do, *do_steps, delta, *delta.stride(), out, *out_steps, before, *before.stride(), after, *after.stride())
    _launch("stand_in_rows", do, args, unit, lse is not None, itemsize=delta.itemsize)


def _empty_output(do: Tensor) -> Tensor:
    batch, heads, tokens, dim = do.shape
    return torch.empty((batch, tokens, heads, dim), dtype=do.dtype, device=do.device).transpose(1, 2)


def _merge(total: Tensor, total_lse: Tensor, partial: Tensor, lse: Tensor, *, is_first: bool) -> None:
    assert total.shape == partial.shape == (*lse.shape, total.shape[-1])
    assert total_lse.shape == lse.shape
    if not total.numel():
        return
    steps, part_steps, unit = _steps(total.stride(), partial.stride(), max(total.itemsize, partial.itemsize))
    args = (total, *steps, total_lse, *total_lse.stride(), partial, *part_steps, lse, *lse.stride())
    _launch("merge_rows", total, args, unit, is_first, itemsize=total.itemsize)


def _add(total: Tensor, partial: Tensor, *, is_first: bool) -> None:
    assert total.shape == partial.shape
    if not total.numel():
        return
    if total.dim() == 3:  # a statistic: its heads, adjacent in memory, take the place of dim
        total, partial = total.transpose(1, 2)[:, None], partial.transpose(1, 2)[:, None]
    steps, part_steps, unit = _steps(total.stride(), partial.stride(), max(total.itemsize, partial.itemsize))
    _launch("add_rows", total, (total, *steps, partial, *part_steps), unit, is_first, itemsize=max(4, total.itemsize))


# Launching. Everything possible is cached: a small launch takes the host longer than the device.


def _launch(name: str, like: Tensor, args: tuple[Any, ...], *constants: Any, itemsize: int) -> None:
    """Launch a kernel over the rows of `like`; `itemsize` is that of the dtype it computes in."""
    batch, heads, tokens, dim = like.shape
    block, rows = _tile(dim, itemsize)
    tiles = -(-tokens * heads // rows)
    grid, args = (batch * tiles, 1, 1), (*args, tokens, tiles, heads, dim, block, rows, *constants)
    device = like.device
    if device.type != "cuda":
        _kernel(name)[grid](*args)
    elif device.index == torch.cuda.current_device():
        _launch_here(name, grid, args, device.index)
    else:
        with torch.cuda.device(device):  # Triton launches on the current device
            _launch_here(name, grid, args, device.index)


def _launch_here(name: str, grid: tuple[int, int, int], args: tuple[Any, ...], index: int) -> None:
    """Compile once for each form of arguments, then launch the compiled kernel directly: Triton's own lookup takes
    several times as long as the launch."""
    form = (name, index, *(_form(arg) for arg in args[: -_CONSTANTS[name]]), *args[-_CONSTANTS[name] :])
    compiled = _COMPILED.get(form)
    if compiled is None:
        _COMPILED[form] = _kernel(name)[grid](*args)
    else:
        compiled[grid](*args, stream=torch._C._cuda_getCurrentRawStream(index))


_COMPILED: dict[tuple[Any, ...], Any] = {}
_CONSTANTS = {"merge_rows": 6, "add_rows": 6, "dot_rows": 5, "stand_in_rows": 6}
"""Number of a kernel's compile-time constants; they are its last arguments."""


def _form(arg: Any) -> Any:
    """The properties the compiler may specialise on: dtype and alignment; if a number is 1, divisible by 16, or 32
    bits wide."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    return arg == 1, arg % 16 == 0, arg < 2**31


@lru_cache(maxsize=256)
def _tile(dim: int, itemsize: int) -> tuple[int, int]:
    """Dim rounded up to a power of two, and the number of such rows in a program."""
    block = 1 << (dim - 1).bit_length()
    return block, max(1, _TILE_NBYTES // (itemsize * block))


@lru_cache(maxsize=4096)
def _steps(
    strides: tuple[int, ...], others: tuple[int, ...], itemsize: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The strides of two tensors in multiples of a unit, and the unit; the last stride stays in elements.

    The unit is 16 bytes of the wider dtype if that divides all strides, else the largest power of two that does. Both
    tensors share it, so that a thread holds the same elements of both and threads exchange nothing.
    """
    unit = 16 // itemsize
    while any(stride % unit for stride in (*strides[:-1], *others[:-1])):
        unit //= 2
    in_units = [(*(stride // unit for stride in given[:-1]), given[-1]) for given in (strides, others)]
    return in_units[0], in_units[1], unit


@lru_cache(maxsize=1)
def _is_installed() -> bool:
    return find_spec("triton") is not None


@lru_cache(maxsize=16)
def _kernel(name: str) -> Any:
    return getattr(import_module("mesh_attention.kernels.triton_kernels"), name)
