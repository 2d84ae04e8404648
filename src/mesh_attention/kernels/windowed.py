"""Shared parts of kernels that take a window: masks as windows, a stand-in output, aligned tensors."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mesh_attention.kernels.bands import Window, windows
from mesh_attention.kernels.base import CallMask, Demand, Gradients, RowGradient, Scores
from mesh_attention.kernels.rows import delta_of, stand_in_rows
from mesh_attention.kernels.sliced import SlicedReferenceKernel

logger = logging.getLogger(__name__)

_SLICED = SlicedReferenceKernel()


class FlashRow(NamedTuple):
    """The inputs of a flash backward for its queries, besides Q.

    `out` is a stand-in with rowsum(out∘do) = delta. `lse` is 0 where a query sees no key at all.
    """

    do: Tensor
    out: Tensor
    lse: Tensor


class WindowOp(Protocol):
    """Attention over one window's queries and keys; tensors are (batch, heads, tokens, dim), with any strides."""

    def __hash__(self) -> int: ...

    def refuses(self, window: Window, head_dim_qk: int, head_dim_v: int) -> str | None:
        """None if it takes that window; otherwise the reason."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float) -> tuple[Tensor, Tensor]:
        """Output and LSE, (batch, heads, queries) in float32."""

    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: FlashRow, window: Window, scale: float) -> Gradients: ...


def unfit(demand: Demand) -> str | None:
    """The reason why no flash kernel can meet the demand; None if one might."""
    if demand.device != "cuda":
        return f"runs on cuda, not on {demand.device}"
    if demand.dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, not {demand.dtype}"
    if demand.head_dim_qk % 8 or demand.head_dim_v % 8:
        return f"needs head sizes that are multiples of 8, not {demand.head_dim_qk} and {demand.head_dim_v}"
    if demand.softcap:
        return "has no softcap"
    if demand.lse_gradient:
        return "cannot take a gradient into the LSE in rows where dO is zero"
    return None


def forward_by_windows(op: WindowOp, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    cuts = _cuts(op, scores.mask, q.shape[-1], v.shape[-1])
    if cuts is None:
        return _SLICED.forward(q, k, v, scores)
    if _is_whole(cuts, scores.mask):
        return op.forward(q, k, v, cuts[0], scores.scale)
    batch, heads, tokens, _ = q.shape
    out = q.new_zeros((batch, tokens, heads, v.shape[-1])).transpose(1, 2)
    lse = torch.full((batch, heads, tokens), -torch.inf, dtype=torch.float32, device=q.device)
    for cut in cuts:
        found = op.forward(_run(q, cut.q), _run(k, cut.kv), _run(v, cut.kv), cut, scores.scale)
        _run(out, cut.q).copy_(found[0])
        _run(lse, cut.q).copy_(found[1])
    return out, lse


def backward_by_windows(op: WindowOp, q: Tensor, k: Tensor, v: Tensor, row: RowGradient, scores: Scores) -> Gradients:
    cuts = _cuts(op, scores.mask, q.shape[-1], v.shape[-1])
    if cuts is None:
        return _SLICED.backward(q, k, v, row, scores)
    flash = _flash_row(row, scores.mask)
    if _is_whole(cuts, scores.mask):
        return op.backward(q, k, v, flash, cuts[0], scores.scale)
    sums = Gradients(*(torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v)))
    for cut in cuts:
        part = FlashRow(*(_run(x, cut.q) for x in flash))
        found = op.backward(_run(q, cut.q), _run(k, cut.kv), _run(v, cut.kv), part, cut, scores.scale)
        _run(sums.dq, cut.q).copy_(found.dq)
        _run(sums.dk, cut.kv).add_(found.dk)
        _run(sums.dv, cut.kv).add_(found.dv)
    return sums


def _flash_row(row: RowGradient, mask: CallMask) -> FlashRow:
    if row.out is None:
        return FlashRow(row.do, *stand_in_rows(row.do, delta_of(row), row.lse))
    if mask.form == "positions":  # some rows may see nothing
        return FlashRow(row.do, row.out, row.lse.masked_fill(row.lse == -torch.inf, 0.0))
    return FlashRow(row.do, row.out, row.lse)


def without_infinity(lse: Tensor) -> Tensor:
    """The LSE with -inf for +inf, in place: flash-attn 2's sign for rows without a score above -inf.

    It is also its sign for NaN, but then the output is NaN, and merging leaves it so.
    """
    return lse.nan_to_num_(nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it, in which every head of every token is contiguous and aligned to 16 bytes.

    Fused kernels load 16 bytes at a time; buffers store statistics before dO, and a window may start at any token.
    """
    if not tensor.data_ptr() % 16 and _has_aligned_rows(tensor.shape, tensor.stride(), tensor.itemsize):
        return tensor
    return tokens_first(tensor)


def all_aligned(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if `aligned` would copy none of the three."""
    is_at_16 = not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16
    return is_at_16 and _have_aligned_rows(q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.itemsize)


@lru_cache(maxsize=4096)
def _have_aligned_rows(*forms: Any) -> bool:
    *pairs, itemsize = forms
    return all(_has_aligned_rows(pairs[at], pairs[at + 1], itemsize) for at in range(0, len(pairs), 2))


@lru_cache(maxsize=4096)
def _has_aligned_rows(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    if strides[-1] != 1 or (0 in strides and 1 in strides[:-1]):
        return False  # torch lays out results like Q, K and V; with both, their last axis might not be contiguous
    outer = zip(shape[:-1], strides[:-1], strict=True)
    return all(size == 1 or stride * itemsize % 16 == 0 for size, stride in outer)


def tokens_first(tensor: Tensor) -> Tensor:
    """A copy whose memory order is (batch, tokens, heads, dim)."""
    return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


@lru_cache(maxsize=4096)
def _cuts(op: WindowOp, mask: CallMask, head_dim_qk: int, head_dim_v: int) -> tuple[Window, ...] | None:
    """The call as windows that the op takes, or None, with a log message, if it does not take them."""
    cuts = windows(mask)
    if cuts is None:
        _log_once(f"queries with strides {_strides(mask.q)} and keys with strides {_strides(mask.kv)} form no windows")
        return None
    for cut in cuts:
        reason = op.refuses(cut, head_dim_qk, head_dim_v)
        if reason is not None:
            _log_once(reason)
            return None
    return cuts


@lru_cache(maxsize=4096)
def _is_whole(cuts: tuple[Window, ...], mask: CallMask) -> bool:
    """True if one window is the whole call, so that its results are the call's."""
    sides = ((len(cuts[0].q), mask.q), (len(cuts[0].kv), mask.kv)) if len(cuts) == 1 else ()
    return bool(sides) and all(count == sum(map(len, side)) for count, side in sides)


@lru_cache(maxsize=64)
def _log_once(reason: str) -> None:
    logger.info("attention kernel: using %s for some calls: %s", _SLICED.name, reason)


def _strides(segments: tuple[range, ...]) -> str:
    return ",".join(str(segment.step) for segment in segments)


def _run(tensor: Tensor, tokens: range) -> Tensor:
    if len(tokens) == tensor.shape[2]:
        return tensor
    return tensor.narrow(2, tokens.start, len(tokens))
