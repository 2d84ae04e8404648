"""What a mask leaves of every block of a grid, in closed form, for all places at once.

For estimates: strided segments count as if they had no gaps, and windows inside documents as if they had no ends.
`plan.blocks` has the exact answers, one block at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mesh_attention.masks import causal
from mesh_attention.plan.assignment import Assignment, Axis, Tile
from mesh_attention.plan.blocks import BlockMatrix, block_matrix
from mesh_attention.plan.layout import Layout
from mesh_attention.problem import Problem

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def pairs_of(problem: Problem, layout: Layout, assignment: Assignment, place: int) -> tuple[float, float]:
    """Pairs of one place's calls without a mask, and with one. For masks without documents; as `needs` counts them."""
    matrix = _of_degree(problem, layout, assignment.ulysses_degree)
    q, kv = (_segments(matrix, axis, assignment.group(axis, place)) for axis in ("row", "col"))
    return tuple(float(part.sum()) for part in _cut(problem, q, kv))  # type: ignore[return-value]


class Needs(NamedTuple):
    """For each place, the members of its groups, and whether it needs the shard of each."""

    members: dict[Axis, NDArray[np.int64]]
    is_needed: dict[Axis, Flags]
    whole_pairs: Floats
    masked_pairs: Floats
    live_blocks: Floats


class Segments(NamedTuple):
    """The place, and the start and length, of every segment."""

    place: NDArray[np.int64]
    spans: Floats


@lru_cache(maxsize=64)
def _work(problem: Problem, layout: Layout, ulysses: int) -> tuple[Floats, Floats]:
    """Pairs of every block, query place by key/value place: of calls without a mask, and of calls with one."""
    places = problem.ranks // ulysses
    matrix = _of_degree(problem, layout, ulysses)
    q, kv = (_segments(matrix, axis, range(places)) for axis in ("row", "col"))
    whole, masked = (_by_place(part, q.place, kv.place, places) for part in _cut(problem, q, kv))
    return whole, masked


def _of_degree(problem: Problem, layout: Layout, ulysses: int) -> BlockMatrix:
    """A matrix with the shards of every tile of a Ulysses degree."""
    return block_matrix(problem, layout, Assignment(Tile(1, problem.ranks // ulysses), ulysses))


def _cut(problem: Problem, q: Segments, kv: Segments) -> tuple[Floats, Floats]:
    """Pairs of every two segments: of those that the mask leaves whole, and of the others."""
    whole: Floats = q.spans[:, 1, None] * kv.spans[None, :, 1]
    docs = problem.mask.documents
    if docs is not None and docs.q == docs.kv:
        left = _pairs_in_documents(q.spans, docs.q, is_causal=problem.mask.right is not None)
    else:
        left = _pairs_in_band(q.spans, kv.spans, problem, whole)
    is_whole = left == whole
    if problem.mask == causal() and problem.seq_q == problem.seq_kv:  # a place attends its own block in one masked call
        is_whole &= q.place[:, None] != kv.place[None, :]
    return left * is_whole, left * ~is_whole


def _pairs_in_band(q: Floats, kv: Floats, problem: Problem, whole: Floats) -> Floats:
    mask = problem.mask
    lead: Floats = q[:, None, 0] + problem.seq_kv - problem.seq_q - kv[None, :, 0]
    lengths: tuple[Floats, Floats] = q[:, 1, None], kv[None, :, 1]
    pairs = whole if mask.right is None else _pairs_up_to(lead + mask.right, *lengths)
    if mask.left is not None:
        pairs = np.maximum(0.0, pairs - _pairs_up_to(lead - mask.left - 1, *lengths))
    return pairs


def _pairs_in_documents(segments: Floats, boundaries: tuple[int, ...], *, is_causal: bool) -> Floats:
    """Pairs of every two segments of the same tokens. Two that differ share at most the document between them."""
    cuts = np.unique(np.array(boundaries, dtype=float))
    start, stop = segments[:, 0], segments[:, 0] + segments[:, 1]
    first, last = (np.searchsorted(cuts, at, side="right") - 1 for at in (start, stop - 1))
    head = np.minimum(stop, cuts[first + 1]) - start  # tokens in the segment's first document, and in its last
    tail = stop - np.maximum(start, cuts[last])
    pairs: Floats = (
        head[:, None] * tail[None, :] * (first[:, None] == last[None, :]) * (start[:, None] > start[None, :])
    )
    if not is_causal:
        pairs = pairs + pairs.T
    for index, (low, high) in enumerate(zip(start, stop, strict=True)):
        lengths = np.diff(np.clip(cuts[first[index] : last[index] + 2], low, high))
        pairs[index, index] = float((lengths * (lengths + 1) / 2 if is_causal else lengths**2).sum())
    return pairs


def _segments(matrix: BlockMatrix, axis: Axis, places: Iterable[int]) -> Segments:
    rows = [(place, s[0], s[-1] + 1 - s[0]) for place in places for s in matrix.segments(axis, place)]
    table = np.array(rows, dtype=float).reshape(-1, 3)
    return Segments(table[:, 0].astype(int), table[:, 1:])


def _pairs_up_to(lead: Floats, queries: Floats, keys: Floats) -> Floats:
    """Number of pairs (u, w) with ``w <= lead + u``, for u below queries and w below keys."""
    pairs: Floats = _triangle(lead + queries, keys) - _triangle(lead, keys)
    return pairs


def _triangle(top: Floats, keys: Floats) -> Floats:
    """``sum(min(t, keys) for t in range(1, top + 1))``, 0 for a top below 1."""
    inside = np.clip(top, 0.0, keys)
    total: Floats = inside * (inside + 1) / 2 + np.maximum(0.0, top - keys) * keys
    return total


def _by_place(pairs: Floats, q_place: Any, kv_place: Any, places: int) -> Floats:
    flat = (q_place[:, None] * places + kv_place[None, :]).ravel()
    summed: Any = np.bincount(flat, weights=pairs.ravel(), minlength=places * places)
    by_place: Floats = summed.reshape(places, places)
    return by_place


@lru_cache(maxsize=256)
def needs(problem: Problem, layout: Layout, assignment: Assignment) -> Needs:
    places = np.arange(assignment.places)
    rows, cols = (
        np.stack([np.asarray(assignment.peer(axis, places, k)) for k in range(assignment.size(axis))], axis=1)  # type: ignore[arg-type]
        for axis in ("row", "col")
    )
    blocks = rows[:, :, None], cols[:, None, :]
    whole, masked = (part[blocks] for part in _work(problem, layout, assignment.ulysses_degree))
    is_live = (whole + masked) > 0
    return Needs(
        members={"row": rows, "col": cols},
        is_needed={"row": is_live.any(axis=2), "col": is_live.any(axis=1)},
        whole_pairs=whole.sum(axis=(1, 2)),
        masked_pairs=masked.sum(axis=(1, 2)),
        live_blocks=is_live.sum(axis=(1, 2)).astype(float),
    )
