"""One pass as plain data: the grid, every rank's program and costs, timelines, and what the mask leaves of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from mesh_attention.errors import UsageError
from mesh_attention.masks import BlockKind, Segment
from mesh_attention.plan.assignment import Axis
from mesh_attention.plan.counts import RankCosts, rank_costs
from mesh_attention.plan.format import format_step
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import AXIS_OF, INPUTS, OUTPUTS, Item
from mesh_attention.problem import Problem
from mesh_attention.timeline import Timeline
from mesh_attention_lab.drawing.trace import Track, rank_tracks

Data = dict[str, Any]
EMPTY, FULL, LOWER, UPPER, PART = "01234"
"""The part of a pair of segments that the mask leaves: none, all, the lower left or upper right triangle, or other."""
FINEST = 4
"""Blocks of shards with at most this many segments are drawn segment by segment."""


def check_shown(plan: Plan) -> None:
    """The scripts follow tiles of known keys and values."""
    if plan.matrix.is_over_cache:
        raise UsageError(
            f"a {plan.method} plan over a cache cannot be shown on the explorer page, which draws known keys; print "
            "the plan, or draw its forecast with drawing.gantt or drawing.trace"
        )


def pass_data(plan: Plan, forecast: Timeline, measured: Timeline | None) -> Data:
    check_shown(plan)
    plan = plan.unrolled()  # so that each program is worked out once
    return {
        "tile": [plan.assignment.tile.rows, plan.assignment.tile.cols],
        "ulysses": plan.assignment.ulysses_degree,
        "waves": plan.assignment.waves,
        "layout": plan.layout.name,
        "keep": list(plan.schedule.keep),
        "rows": _peers(plan, "row"),
        "cols": _peers(plan, "col"),
        "programs": [[format_step(step) for step in program.steps] for program in plan.programs or ()],
        "sizes": _sizes(plan),
        "costs": _costs([rank_costs(plan, rank) for rank in range(plan.problem.ranks)]),
        "forecast": _timeline(forecast),
        "measured": None if measured is None else _timeline(measured),
    }


def _peers(plan: Plan, axis: Axis) -> list[list[int]]:
    """For each place, the members of its group by offset, itself first."""
    assignment = plan.assignment
    sizes = range(assignment.size(axis))
    return [[assignment.peer(axis, place, offset) for offset in sizes] for place in range(assignment.places)]


def _sizes(plan: Plan) -> Data:
    """Bytes of a shard of each kind as it travels between places."""
    places = range(plan.assignment.places)
    kinds = INPUTS[plan.direction] + OUTPUTS[plan.direction]
    return {kind: [plan.matrix.nbytes(Item(kind, place)).total for place in places] for kind in kinds}


def _costs(costs: Sequence[RankCosts]) -> Data:
    """By rank: the bytes received of each kind, and the most memory in use."""
    kinds = [kind for kind in AXIS_OF if any(kind in cost.received for cost in costs)]
    return {
        "received": {
            kind: [cost.received[kind].total if kind in cost.received else 0 for cost in costs] for kind in kinds
        },
        "peak": [cost.peak_nbytes for cost in costs],
    }


def _timeline(timeline: Timeline) -> Data:
    """Times in seconds. A span is its start, its stop, the index of its step if it has one, and its name."""
    by_rank = rank_tracks(timeline) if timeline.spans else {}
    return {
        **{name: _short(getattr(timeline, name)) for name in ("time_s", "compute_s", "exposed_s", "utilisation")},
        "is_exact": timeline.is_exact,
        "stop": [_short(times.stop_s) for times in timeline.ranks],
        "compute": [_short(times.compute_s) for times in timeline.ranks],
        "spans": {
            str(rank): {lane: _spans(tracks) for lane, tracks in lanes.items()} for rank, lanes in by_rank.items()
        },
    }


def _spans(tracks: Sequence[Track]) -> list[tuple[float, float, int | None, str]]:
    spans = sorted(chain(*tracks), key=lambda span: (span.start_s, span.stop_s))
    return [(_short(span.start_s), _short(span.stop_s), span.step, span.name) for span in spans]


def _short(value: float) -> float:
    """Six digits: finer than any screen."""
    return float(f"{value:.6g}")


# Blocks


def block_patterns(plan: Plan) -> list[list[str]]:
    """Row by row, what the mask leaves of each block: rows of pairs of segments, joined by "/"."""
    matrix, places = plan.matrix, range(plan.assignment.places)
    rows = [matrix.segments("row", place) for place in places]
    cols = [matrix.segments("col", place) for place in places]
    if max(map(len, rows + cols)) <= FINEST:
        return [[_pattern(plan.problem, row, col) for col in cols] for row in rows]
    names = {BlockKind.EMPTY: EMPTY, BlockKind.FULL: FULL, BlockKind.PARTIAL: PART}
    return [[names[matrix.kind(row, col)] for col in places] for row in places]


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
