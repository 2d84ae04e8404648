"""What the mask leaves of each block, as the pattern it is drawn with."""

from __future__ import annotations

from mesh_attention.masks import BlockKind, Segment
from mesh_attention.plan.plan import Plan
from mesh_attention.problem import Problem

EMPTY, FULL, LOWER, UPPER, PART = "01234"
"""Of a pair of segments: nothing, all, the lower left triangle, the upper right one, some other part."""
FINEST = 4
"""Segments a shard up to which a block is drawn segment by segment."""
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def block_patterns(plan: Plan) -> dict[str, object]:
    """`patterns` are rows of segment pairs, joined by "/"; `cells` has a letter a block, row by row, that picks one."""
    cells = _fine_cells(plan)
    if cells is None or len(set(cells)) > len(LETTERS):
        cells = _coarse_cells(plan)
    letters = dict(zip(dict.fromkeys(cells), LETTERS, strict=False))
    return {"patterns": list(letters), "cells": "".join(letters[cell] for cell in cells)}


def _fine_cells(plan: Plan) -> list[str] | None:
    """Segment by segment; None where shards have too many."""
    matrix, places = plan.matrix, range(plan.assignment.places)
    rows = [matrix.segments("row", place) for place in places]
    cols = [matrix.segments("col", place) for place in places]
    if max(map(len, rows + cols)) > FINEST:
        return None
    return [_pattern(plan.problem, row, col) for row in rows for col in cols]


def _coarse_cells(plan: Plan) -> list[str]:
    places = range(plan.assignment.places)
    names = {BlockKind.EMPTY: EMPTY, BlockKind.FULL: FULL, BlockKind.PARTIAL: PART}
    return [names[plan.matrix.kind(row, col)] for row in places for col in places]


def _pattern(problem: Problem, row: tuple[Segment, ...], col: tuple[Segment, ...]) -> str:
    pattern = "/".join("".join(_pair(problem, q, kv) for kv in col) for q in row)
    return (
        pattern[0] if pattern and set(pattern) <= {pattern[0], "/"} and pattern[0] in EMPTY + FULL else pattern or EMPTY
    )


def _pair(problem: Problem, q: Segment, kv: Segment) -> str:
    lengths = {"seq_q": problem.seq_q, "seq_kv": problem.seq_kv}
    kind = problem.mask.kind(q, kv, **lengths)
    if kind is not BlockKind.PARTIAL:
        return FULL if kind is BlockKind.FULL else EMPTY
    lower = problem.mask.pairs(q[-1:], kv[:1], **lengths) > 0
    upper = problem.mask.pairs(q[:1], kv[-1:], **lengths) > 0
    return PART if lower == upper else LOWER if lower else UPPER
