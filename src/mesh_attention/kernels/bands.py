"""Masks as windows: cuts a masked call into rectangles that a flash kernel's window describes exactly.

Every mask here is a band inside documents, so for tokens of equal stride on both sides a document's part of a call is a
band in the call's own indices. Rows that see nothing and keys that no query sees are cut away first; the rest
always has a window whose two reaches are at or above zero, which flash kernels can express.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mesh_attention.kernels.base import CallMask
from mesh_attention.masks import Segment


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
    found = []
    for q_part, kv_part, shift in mask.mask.pieces(q, kv, mask.seq_q, mask.seq_kv):
        rows, cols = _indices(q, q_part), _indices(kv, kv_part)
        reach = q_part[0] + shift - kv_part[0]  # a query's own position, relative to the first key
        left, right = mask.mask.left, mask.mask.right
        low = 1 - len(rows) if left is None else -((left - reach) // q.step)
        high = len(cols) - 1 if right is None else (reach + right) // q.step
        found += _cut(rows, cols, low, high)
    return tuple(found)


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
    found = []
    for rows in (range(right_ends), range(right_ends, left_starts), range(left_starts, len(q))):
        if rows:
            found += _cut(q[rows.start : rows.stop], kv, low + rows.start, high + rows.start)
    return found
