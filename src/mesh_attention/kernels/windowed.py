"""Kernels that take a window: masked calls cut into rectangles that a flash kernel's window describes exactly.

Every mask here is a band inside documents, so for tokens of equal stride on both sides a document's part of a call is a
band in the call's own indices. Rows that see nothing and keys that no query sees are cut away first; the rest
always has a window whose two reaches are at or above zero, which flash kernels can express. Other calls go to another
kernel.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mesh_attention.kernels.base import CallMask, Demand, Gradients, Kernel, RowGradient, Scores
from mesh_attention.kernels.intervals import INTERVALS
from mesh_attention.kernels.merging import delta_of, stand_in_rows
from mesh_attention.kernels.reference import REFERENCE
from mesh_attention.masks import Segment

logger = logging.getLogger(__name__)

_SHORT_WINDOW = 2048
"""Queries of a window, on average, up to which several windows take longer than one launch of `INTERVALS`. On an H200,
8192 tokens in documents of 1024 took cuDNN 1.7 ms for both passes and `INTERVALS` 1.2; of 2048, 1.9 and 2.0."""


class Window(NamedTuple):
    """A rectangle of a call: queries `q` and keys `kv` by index, and how far each query sees in it.

    It is aligned at the bottom right, as in flash-attn: query i sees the keys from i + shift - left to i + shift +
    right, where shift is the number of keys minus the number of queries. None means unbounded. Every query sees a key.
    """

    q: range
    kv: range
    left: int | None
    right: int | None

    @property
    def is_full(self) -> bool:
        return self.left is None and self.right is None

    @property
    def is_causal(self) -> bool:
        """True if query i sees the keys up to i, with as many queries as keys."""
        return self.left is None and self.right == 0 and len(self.q) == len(self.kv)


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

    def unsupported_reason(self, window: Window, head_dim_qk: int, head_dim_v: int) -> str | None:
        """None if it takes that window; otherwise the reason."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float) -> tuple[Tensor, Tensor]:
        """Output and LSE, (batch, heads, queries) in float32."""

    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: FlashRow, window: Window, scale: float) -> Gradients: ...


class WindowedKernel:
    """A kernel made of window operators: each window of a call goes to the first that takes it.

    Calls without windows, or with many short ones, go to `INTERVALS` or the reference. If it is not deterministic,
    backward adds up dQ in no fixed order.
    """

    def __init__(
        self,
        name: str,
        ops: tuple[WindowOp, ...],
        *,
        backward_ops: tuple[WindowOp, ...] | None = None,
        is_deterministic: bool = False,
    ) -> None:
        self.name, self.is_deterministic = name, is_deterministic
        self._forward_ops, self._backward_ops = ops, ops if backward_ops is None else backward_ops

    def unsupported_reason(self, demand: Demand) -> str | None:
        """What no flash kernel can do, or what this one cannot."""
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
        if demand.deterministic and not self.is_deterministic:
            return "adds up dQ in no fixed order"
        return self._further_reason(demand)

    def _further_reason(self, demand: Demand) -> str | None:
        """What this kernel cannot do, but another one might."""
        return None

    def prepare(self, q: Tensor, v: Tensor, mask: CallMask) -> None:
        """Make what a call with this mask needs on the device, without making the call."""
        if _dispatch(self._forward_ops, mask, q.device.type, q.dtype, q.shape[-1], v.shape[-1]).fallback is INTERVALS:
            INTERVALS.prepare(q, v, mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        dispatch = _dispatch(self._forward_ops, scores.mask, q.device.type, q.dtype, q.shape[-1], v.shape[-1])
        if dispatch.fallback is not None:
            return dispatch.fallback.forward(q, k, v, scores)
        if dispatch.is_whole:
            window, op = dispatch.calls[0]
            return op.forward(q, k, v, window, scores.scale)
        batch, heads, tokens, _ = q.shape
        out = q.new_zeros((batch, tokens, heads, v.shape[-1])).transpose(1, 2)
        lse = torch.full((batch, heads, tokens), -torch.inf, dtype=torch.float32, device=q.device)
        for window, op in dispatch.calls:
            part = op.forward(_run(q, window.q), _run(k, window.kv), _run(v, window.kv), window, scores.scale)
            _run(out, window.q).copy_(part[0])
            _run(lse, window.q).copy_(part[1])
        return out, lse

    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: RowGradient, scores: Scores) -> Gradients:
        dispatch = _dispatch(self._backward_ops, scores.mask, q.device.type, q.dtype, q.shape[-1], v.shape[-1])
        if dispatch.fallback is not None:
            return dispatch.fallback.backward(q, k, v, row, scores)
        flash = _flash_row(row, scores.mask)
        if dispatch.is_whole:
            window, op = dispatch.calls[0]
            return op.backward(q, k, v, flash, window, scores.scale)
        sums = Gradients(*(torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v)))
        for window, op in dispatch.calls:
            rows = FlashRow(*(_run(x, window.q) for x in flash))
            part = op.backward(_run(q, window.q), _run(k, window.kv), _run(v, window.kv), rows, window, scores.scale)
            _run(sums.dq, window.q).copy_(part.dq)
            _run(sums.dk, window.kv).add_(part.dk)
            _run(sums.dv, window.kv).add_(part.dv)
        return sums


def _flash_row(row: RowGradient, mask: CallMask) -> FlashRow:
    if row.out is None:
        return FlashRow(row.do, *stand_in_rows(row.do, delta_of(row), row.lse))
    if mask.form == "positions":  # some rows may see nothing
        return FlashRow(row.do, row.out, row.lse.masked_fill(row.lse == -torch.inf, 0.0))
    return FlashRow(row.do, row.out, row.lse)


def fix_empty_row_lse(lse: Tensor) -> Tensor:
    """The LSE with -inf for +inf, in place: flash-attn 2's sign for rows without a score above -inf.

    It is also its sign for NaN, but then the output is NaN, and merging leaves it so.
    """
    return lse.nan_to_num_(nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf)


class _Dispatch(NamedTuple):
    """How a call is made: as windows, or by another kernel. `is_whole`: its one window is the whole call."""

    calls: tuple[tuple[Window, WindowOp], ...]
    is_whole: bool
    fallback: Kernel | None = None


@lru_cache(maxsize=4096)
def _dispatch(
    ops: tuple[WindowOp, ...], mask: CallMask, device: str, dtype: torch.dtype, head_dim_qk: int, head_dim_v: int
) -> _Dispatch:
    cuts, choices, reason = windows(mask), [], None
    if cuts is None:
        reason = f"queries with strides {_strides(mask.q)} and keys with strides {_strides(mask.kv)} form no windows"
    else:
        choices = [_first_op(ops, cut, head_dim_qk, head_dim_v) for cut in cuts]
        reason = next((choice for choice in choices if isinstance(choice, str)), None)
    demand = Demand(device=device, dtype=dtype, head_dim_qk=head_dim_qk, head_dim_v=head_dim_v, deterministic=True)
    takes_all = INTERVALS.unsupported_reason(demand) is None
    if cuts is not None and reason is None and not (takes_all and _are_short(cuts)):
        calls = tuple((cut, op) for cut, op in zip(cuts, choices, strict=True) if not isinstance(op, str))
        sizes = sum(map(len, mask.q)), sum(map(len, mask.kv))
        return _Dispatch(calls, len(cuts) == 1 and (len(cuts[0].q), len(cuts[0].kv)) == sizes)
    fallback = INTERVALS if takes_all else REFERENCE
    _log_once(fallback.name, reason or "they have several short windows")
    return _Dispatch((), False, fallback)


def _first_op(ops: tuple[WindowOp, ...], window: Window, head_dim_qk: int, head_dim_v: int) -> WindowOp | str:
    """The first operator that takes a window, or why the last one does not."""
    for op in ops:
        reason = op.unsupported_reason(window, head_dim_qk, head_dim_v)
        if reason is None:
            return op
    assert reason is not None
    return reason


def _are_short(cuts: tuple[Window, ...]) -> bool:
    """True for windows that take longer one by one than all in one launch."""
    return len(cuts) > 1 and sum(len(cut.q) for cut in cuts) <= _SHORT_WINDOW * len(cuts)


@lru_cache(maxsize=64)
def _log_once(name: str, reason: str) -> None:
    logger.info("attention kernel: using %s for some calls: %s", name, reason)


def _strides(segments: tuple[range, ...]) -> str:
    return ",".join(str(segment.step) for segment in segments)


def _run(tensor: Tensor, tokens: range) -> Tensor:
    if len(tokens) == tensor.shape[2]:
        return tensor
    return tensor.narrow(2, tokens.start, len(tokens))


# Masks as windows


@lru_cache(maxsize=4096)
def windows(mask: CallMask) -> tuple[Window, ...] | None:
    """A call as windows that share no query (they may share keys), or None if it has no such form.

    It has one if the tokens of both sides have the same stride.
    """
    queries, keys = (range(sum(map(len, side))) for side in (mask.q, mask.kv))
    if not queries or not keys:
        return ()
    if mask.form == "full":
        return (Window(queries, keys, None, None),)
    if mask.form == "causal":
        return tuple(_cut(queries, keys, 1 - len(queries), 0))
    if len(mask.q) > 1 or len(mask.kv) > 1:
        return None
    q, kv = _at_one_stride(mask.q[0], mask.kv[0])
    if q.step != kv.step:
        return None
    cuts = []
    for q_part, kv_part, shift in mask.mask.pieces(q, kv, mask.seq_q, mask.seq_kv):
        rows, cols = _indices(q, q_part), _indices(kv, kv_part)
        reach = q_part[0] + shift - kv_part[0]  # a query's own position, relative to the first key
        left, right = mask.mask.left, mask.mask.right
        low = 1 - len(rows) if left is None else -((left - reach) // q.step)
        high = len(cols) - 1 if right is None else (reach + right) // q.step
        cuts += _cut(rows, cols, low, high)
    return tuple(cuts)


def _at_one_stride(q: Segment, kv: Segment) -> tuple[Segment, Segment]:
    """The segments, where a single token takes the stride of the other side."""
    if len(q) == 1:
        q = range(q[0], q[0] + kv.step, kv.step)
    elif len(kv) == 1:
        kv = range(kv[0], kv[0] + q.step, q.step)
    return q, kv


def _indices(whole: Segment, part: Segment) -> range:
    start = whole.index(part[0])
    return range(start, start + len(part))


def _cut(q: range, kv: range, low: int, high: int) -> list[Window]:
    """The windows of a band: the i-th query sees the j-th key when low <= j - i <= high."""
    if low > high:
        return []
    rows = range(max(0, -high), min(len(q), len(kv) - low))
    if not rows:
        return []
    cols = range(max(0, rows[0] + low), min(len(kv), rows[-1] + high + 1))
    q, kv = q[rows.start : rows.stop], kv[cols.start : cols.stop]
    low, high = low + rows.start - cols.start, high + rows.start - cols.start
    shift = len(kv) - len(q)
    left = None if low <= 1 - len(q) else shift - low
    right = None if high >= len(kv) - 1 else high - shift
    # flash-attn 2 treats a right reach of at least the number of keys as unbounded, and an unbounded one beside a left
    # reach as that many keys. With many more queries than keys, both are wrong for the first queries.
    if len(q) > len(kv) + 1 and not (left is None and right is None):
        return _cut_rows(q, kv, low, high)
    return [Window(q, kv, left, right)]


def _cut_rows(q: range, kv: range, low: int, high: int) -> list[Window]:
    """Windows of the queries that the right edge cuts, of those that see all keys, and of those that only the left edge
    cuts."""
    right_ends = min(len(q), max(0, len(kv) - 1 - high))
    left_starts = min(len(q), max(right_ends, 1 - low))
    cuts = []
    for rows in (range(right_ends), range(right_ends, left_starts), range(left_starts, len(q))):
        if rows:
            cuts += _cut(q[rows.start : rows.stop], kv, low + rows.start, high + rows.start)
    return cuts
