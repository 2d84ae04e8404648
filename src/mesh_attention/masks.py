"""Masks as values, and exact counting on them.

Every mask here is a band inside documents: key y is seen by query x when both belong to the same document and
``-left <= y - x - shift <= right``, where shift aligns the last query of the document with its last key (bottom-right
alignment). Without documents the whole sequence is one document. Masks are combined with ``&`` and compared by meaning.

Segments of positions are Python ranges. Counts come from closed forms, never from a dense matrix.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from operator import index

from mesh_attention.errors import MaskError

Segment = range
"""A run of token positions: start, stop, stride."""


class BlockKind(Enum):
    """The part of a rectangle of queries and keys that a mask leaves."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Documents:
    """Boundaries of packed documents: document d holds queries ``q[d]:q[d+1]`` and keys ``kv[d]:kv[d+1]``."""

    q: tuple[int, ...]
    kv: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """A band inside documents; build it with `full`, `causal`, `window`, `documents` and ``&``."""

    left: int | None = None
    right: int | None = None
    documents: Documents | None = None

    def __post_init__(self) -> None:
        for side, reach in (("left", self.left), ("right", self.right)):
            if reach is not None and (type(reach) is not int or reach < 0):
                raise MaskError(f"{side}={reach!r}: expected a number of tokens, or None for unbounded")

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        return Mask(
            left=_tighter(self.left, other.left),
            right=_tighter(self.right, other.right),
            documents=_intersect(self.documents, other.documents),
        )

    def within(self, seq_q: int, seq_kv: int) -> Mask:
        """The same mask for these lengths in its simplest form: without bounds that exclude nothing."""
        whole = Documents((0, seq_q), (0, seq_kv))
        cuts = self.documents or whole
        ends = dict.fromkeys(zip(cuts.q, cuts.kv, strict=True))  # an empty document ends where the one before it does
        cuts = Documents(tuple(q for q, _ in ends), tuple(kv for _, kv in ends))
        longest_q, longest_kv = (max(b - a for a, b in pairwise(side)) for side in (cuts.q, cuts.kv))
        return Mask(
            left=None if self.left is not None and self.left >= longest_kv - 1 else self.left,
            right=None if self.right is not None and self.right >= longest_q - 1 else self.right,
            documents=None if cuts == whole else cuts,
        )

    def __str__(self) -> str:
        parts = []
        if (self.left, self.right) == (None, 0):
            parts.append("causal")
        elif (self.left, self.right) != (None, None):
            parts.append(f"window({_unbounded(self.left)},{_unbounded(self.right)})")
        if self.documents is not None:
            q, kv = (",".join(map(str, cuts)) for cuts in (self.documents.q, self.documents.kv))
            parts.append(f"documents({q})" if q == kv else f"documents({q}|{kv})")
        return "&".join(parts) or "full"

    def pairs(self, q: Segment, kv: Segment, *, seq_q: int, seq_kv: int) -> int:
        """Number of (query, key) pairs of the two segments that the mask leaves."""
        return sum(_band_pairs(*piece, self.left, self.right) for piece in self.pieces(q, kv, seq_q, seq_kv))

    def kind(self, q: Segment, kv: Segment, *, seq_q: int, seq_kv: int) -> BlockKind:
        if self.documents is None and q and kv:  # the common case: most blocks are far from the edges of the band
            shift = seq_kv - seq_q
            if not _band_any(q, kv, shift, self.left, self.right):
                return BlockKind.EMPTY
            if _band_all(q, kv, shift, self.left, self.right):
                return BlockKind.FULL
        count = self.pairs(q, kv, seq_q=seq_q, seq_kv=seq_kv)
        if count == 0:
            return BlockKind.EMPTY
        return BlockKind.FULL if count == len(q) * len(kv) else BlockKind.PARTIAL

    def is_empty(self, q: Segment, kv: Segment, *, seq_q: int, seq_kv: int) -> bool:
        """True if the mask leaves no pair; cheaper than counting."""
        if self.documents is None:  # the common case, asked for every block
            return not (q and kv and _band_any(q, kv, seq_kv - seq_q, self.left, self.right))
        pieces = self.pieces(q, kv, seq_q, seq_kv)
        return not any(_band_any(*piece, self.left, self.right) for piece in pieces)

    def pieces(self, q: Segment, kv: Segment, seq_q: int, seq_kv: int) -> Iterator[tuple[Segment, Segment, int]]:
        """The rectangle cut by documents: queries, keys and alignment of each document's part."""
        if not q or not kv:
            return
        if self.documents is None:
            yield q, kv, seq_kv - seq_q
            return
        q_cuts, kv_cuts = self.documents.q, self.documents.kv
        first = max(bisect_right(q_cuts, q[0]), bisect_right(kv_cuts, kv[0])) - 1
        last = min(bisect_right(q_cuts, q[-1]), bisect_right(kv_cuts, kv[-1])) - 1
        for d in range(first, last + 1):
            q_piece = _clip(q, q_cuts[d], q_cuts[d + 1])
            kv_piece = _clip(kv, kv_cuts[d], kv_cuts[d + 1])
            if q_piece and kv_piece:
                yield q_piece, kv_piece, kv_cuts[d + 1] - q_cuts[d + 1]


def full() -> Mask:
    """Every query sees every key."""
    return Mask()


def causal() -> Mask:
    """A query sees the keys up to its own position; bottom-right aligned when the lengths differ."""
    return Mask(right=0)


def window(left: int, right: int) -> Mask:
    """A query sees `left` keys before its own position and `right` after it; -1 means unbounded, as in flash-attn."""
    for side, reach in (("left", left), ("right", right)):
        if type(reach) is not int or reach < -1:
            raise MaskError(f"window {side}={reach!r}: expected a number of tokens, or -1 for unbounded")
    return Mask(left=None if left == -1 else left, right=None if right == -1 else right)


def documents(cu_seqlens_q: Sequence[int], cu_seqlens_k: Sequence[int] | None = None) -> Mask:
    """Packed documents that do not see each other. With causal or window, each document is aligned by itself."""
    q = boundaries("cu_seqlens_q", cu_seqlens_q)
    kv = q if cu_seqlens_k is None else boundaries("cu_seqlens_k", cu_seqlens_k)
    if len(q) != len(kv):
        raise MaskError(
            f"cu_seqlens_q has {len(q) - 1} documents and cu_seqlens_k has {len(kv) - 1}; "
            "each document needs an entry in both (a length of zero is allowed)"
        )
    return Mask(documents=Documents(q, kv))


def boundaries(name: str, totals: Iterable[int]) -> tuple[int, ...]:
    """Document boundaries as numbers: running totals that start at 0. Reading a tensor waits for its device."""
    try:
        cuts = tuple(index(cut) for cut in (totals.tolist() if hasattr(totals, "tolist") else totals))
    except (TypeError, NotImplementedError):  # the second for a tensor on meta
        raise MaskError(f"{name}={totals!r}: expected running totals, whole numbers in one dimension") from None
    if len(cuts) < 2 or cuts[0] != 0 or any(a > b for a, b in pairwise(cuts)):
        raise MaskError(f"{name}={shorten_boundaries(cuts)}: expected running totals that start at 0 and never fall")
    return cuts


def shorten_boundaries(cuts: Sequence[int]) -> str:
    shown = ", ".join(map(str, cuts[:8]))
    return f"({shown}{', …' if len(cuts) > 8 else ''})"


def _tighter(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def _intersect(a: Documents | None, b: Documents | None) -> Documents | None:
    if a is None or b is None or a == b:
        return b if a is None else a
    if a.q != a.kv or b.q != b.kv:
        raise MaskError(
            "two document masks with different query and key boundaries cannot be combined: "
            "where the documents overlap, their alignment is ambiguous; give one `documents(...)`"
        )
    cuts = tuple(sorted(set(a.q) | set(b.q)))
    return Documents(cuts, cuts)


def _unbounded(reach: int | None) -> int:
    return -1 if reach is None else reach


def _clip(segment: Segment, low: int, high: int) -> Segment:
    """The part of a segment inside low:high."""
    return segment[bisect_left(segment, low) : bisect_left(segment, high)]


def _band_any(q: Segment, kv: Segment, shift: int, left: int | None, right: int | None) -> bool:
    nearest = kv[0] - q[-1] - shift
    farthest = kv[-1] - q[0] - shift
    if (right is not None and nearest > right) or (left is not None and farthest < -left):
        return False
    # The extremes are attained, so a one-sided band that overlaps the span is hit; so is any band without gaps.
    if left is None or right is None or (q.step == 1 and kv.step == 1):
        return True
    return _band_pairs(q, kv, shift, left, right) > 0


def _band_all(q: Segment, kv: Segment, shift: int, left: int | None, right: int | None) -> bool:
    is_before_end = right is None or kv[-1] - q[0] - shift <= right
    return is_before_end and (left is None or kv[0] - q[-1] - shift >= -left)


def _band_pairs(q: Segment, kv: Segment, shift: int, left: int | None, right: int | None) -> int:
    lead = q[0] + shift - kv[0]
    shape = (len(q), q.step, len(kv), kv.step)
    upper = len(q) * len(kv) if right is None else _pairs_up_to(lead + right, *shape)
    lower = 0 if left is None else _pairs_up_to(lead - left - 1, *shape)
    return max(0, upper - lower)


@lru_cache(maxsize=65536)
def _pairs_up_to(lead: int, num_q: int, q_step: int, num_kv: int, kv_step: int) -> int:
    """Number of pairs (u, w) with ``w * kv_step <= lead + u * q_step``, for u below num_q and w below num_kv."""
    first = min(num_q, max(0, -(lead // q_step)))  # the first u that reaches any w
    whole = min(num_q, max(0, -((lead - (num_kv - 1) * kv_step) // q_step)))  # the first u that reaches all
    partly = whole - first  # the number of u that reach some w, but not all
    start = lead + first * q_step
    return _floor_sum(partly, kv_step, q_step, start) + partly + (num_q - whole) * num_kv


def _floor_sum(count: int, divisor: int, slope: int, start: int) -> int:
    """``sum((slope * i + start) // divisor for i in range(count))`` for start >= 0, by Euclid's algorithm."""
    total = 0
    while count > 0:
        total += count * (count - 1) // 2 * (slope // divisor) + count * (start // divisor)
        slope %= divisor
        start %= divisor
        top = slope * count + start
        if top < divisor:
            break
        # Count lattice points under the line the other way round: rows become columns.
        count, start, divisor, slope = top // divisor, top % divisor, slope, divisor
    return total
