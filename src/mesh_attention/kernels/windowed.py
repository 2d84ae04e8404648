"""Shared parts of kernels that take a window: masks as windows, a stand-in output, who makes the other calls."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mesh_attention.kernels.bands import Window, windows
from mesh_attention.kernels.base import CallMask, Demand, Gradients, Kernel, RowGradient, Scores
from mesh_attention.kernels.intervals import IntervalKernel
from mesh_attention.kernels.rows import delta_of, stand_in_rows
from mesh_attention.kernels.sliced import SlicedReferenceKernel

logger = logging.getLogger(__name__)

INTERVALS = IntervalKernel()
SLICED: Kernel = SlicedReferenceKernel()
"""For calls that windows cannot express."""

_SHORT = 2048
"""Queries of a window, on average, up to which several windows take longer than one launch of `INTERVALS`. On an H200,
8192 tokens in documents of 1024 took cuDNN 1.7 ms for both passes and `INTERVALS` 1.2; of 2048, 1.9 and 2.0."""


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
    way = _way(op, scores.mask, q.device.type, q.dtype, q.shape[-1], v.shape[-1])
    if way.is_whole:
        return op.forward(q, k, v, way.cuts[0], scores.scale)
    if way.other is not None:
        return way.other.forward(q, k, v, scores)
    batch, heads, tokens, _ = q.shape
    out = q.new_zeros((batch, tokens, heads, v.shape[-1])).transpose(1, 2)
    lse = torch.full((batch, heads, tokens), -torch.inf, dtype=torch.float32, device=q.device)
    for cut in way.cuts:
        found = op.forward(_run(q, cut.q), _run(k, cut.kv), _run(v, cut.kv), cut, scores.scale)
        _run(out, cut.q).copy_(found[0])
        _run(lse, cut.q).copy_(found[1])
    return out, lse


def backward_by_windows(op: WindowOp, q: Tensor, k: Tensor, v: Tensor, row: RowGradient, scores: Scores) -> Gradients:
    way = _way(op, scores.mask, q.device.type, q.dtype, q.shape[-1], v.shape[-1])
    if way.other is not None:
        return way.other.backward(q, k, v, row, scores)
    flash = _flash_row(row, scores.mask)
    if way.is_whole:
        return op.backward(q, k, v, flash, way.cuts[0], scores.scale)
    sums = Gradients(*(torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v)))
    for cut in way.cuts:
        part = FlashRow(*(_run(x, cut.q) for x in flash))
        found = op.backward(_run(q, cut.q), _run(k, cut.kv), _run(v, cut.kv), part, cut, scores.scale)
        _run(sums.dq, cut.q).copy_(found.dq)
        _run(sums.dk, cut.kv).add_(found.dk)
        _run(sums.dv, cut.kv).add_(found.dv)
    return sums


def prepare_by_windows(op: WindowOp, q: Tensor, v: Tensor, mask: CallMask) -> None:
    """Make what a call with this mask needs on the device, without making the call."""
    if _way(op, mask, q.device.type, q.dtype, q.shape[-1], v.shape[-1]).other is INTERVALS:
        INTERVALS.prepare(q, v, mask)


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


class _Way(NamedTuple):
    """How a call is made: as windows, or by another kernel. `is_whole`: its one window is the whole call."""

    cuts: tuple[Window, ...]
    is_whole: bool
    other: Kernel | None = None


@lru_cache(maxsize=4096)
def _way(op: WindowOp, mask: CallMask, device: str, dtype: torch.dtype, head_dim_qk: int, head_dim_v: int) -> _Way:
    cuts, reason = windows(mask), None
    if cuts is None:
        reason = f"queries with strides {_strides(mask.q)} and keys with strides {_strides(mask.kv)} form no windows"
    else:
        reason = next(filter(None, (op.refuses(cut, head_dim_qk, head_dim_v) for cut in cuts)), None)
    demand = Demand(
        device=device,
        dtype=dtype,
        head_dim_qk=head_dim_qk,
        head_dim_v=head_dim_v,
        softcap=0.0,
        lse_gradient=False,
        deterministic=True,
    )
    takes_all = INTERVALS.supports(demand) is None
    if cuts is not None and reason is None and not (takes_all and _are_short(cuts)):
        return _Way(cuts, len(cuts) == 1 and _is_whole(cuts[0], mask))
    other = INTERVALS if takes_all else SLICED
    _log_once(other.name, reason or "they have several short windows")
    return _Way((), False, other)


def _are_short(cuts: tuple[Window, ...]) -> bool:
    """True for windows that take longer one by one than all in one launch."""
    return len(cuts) > 1 and sum(len(cut.q) for cut in cuts) <= _SHORT * len(cuts)


def _is_whole(cut: Window, mask: CallMask) -> bool:
    """True if the window is the whole call, so that its results are the call's."""
    return len(cut.q) == sum(map(len, mask.q)) and len(cut.kv) == sum(map(len, mask.kv))


@lru_cache(maxsize=64)
def _log_once(name: str, reason: str) -> None:
    logger.info("attention kernel: using %s for some calls: %s", name, reason)


def _strides(segments: tuple[range, ...]) -> str:
    return ",".join(str(segment.step) for segment in segments)


def _run(tensor: Tensor, tokens: range) -> Tensor:
    if len(tokens) == tensor.shape[2]:
        return tensor
    return tensor.narrow(2, tokens.start, len(tokens))
