"""One pass as plain data: the grid, every rank's program and costs, the timelines in whole ticks, and masked blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from math import floor, log10
from typing import Any

from typing_extensions import assert_never

from mesh_attention.errors import UsageError
from mesh_attention.masks import BlockKind, Segment
from mesh_attention.plan import steps
from mesh_attention.plan.assignment import Assignment, Axis
from mesh_attention.plan.counts import RankCosts, rank_costs
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import Program
from mesh_attention.plan.steps import AXIS_OF, INPUTS, OUTPUTS, Item, Kind, Step, transfers
from mesh_attention.plan.text import format_end, format_step
from mesh_attention.problem import Problem
from mesh_attention.timeline import LANES, Lane, Span, Timeline
from mesh_attention_lab.drawing.tracks import rank_tracks

Data = dict[str, Any]
TICKS = 1e5
"""A timeline has at least this many ticks; finer than any screen."""
EMPTY, FULL, LOWER, UPPER, PART = "01234"
"""The part of a pair of segments that the mask leaves: none, all, the lower left or upper right triangle, or other."""
FINEST = 4
"""Blocks of shards with at most this many segments are drawn segment by segment."""
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def pass_data(plan: Plan, forecast: Timeline, measured: Timeline | None) -> Data:
    plan = plan.unrolled()  # so that each program is worked out once
    programs = plan.programs or ()
    text_of = [program_text(plan.assignment, program) for program in programs]
    texts = list(dict.fromkeys(text_of))
    return {
        "tile": [plan.assignment.tile.rows, plan.assignment.tile.cols],
        "ulysses": plan.assignment.ulysses_degree,
        "waves": plan.assignment.waves,
        "layout": plan.layout.name,
        "keep": list(plan.schedule.keep),
        "rows": _peers(plan, "row"),
        "cols": _peers(plan, "col"),
        "texts": texts,
        "text_of": even([texts.index(text) for text in text_of]),
        "sizes": _sizes(plan),
        "costs": _costs([rank_costs(plan, rank) for rank in range(plan.problem.ranks)]),
        "forecast": timeline_data(forecast, programs),
        "measured": None if measured is None else timeline_data(measured, programs),
    }


def even(values: Sequence[int]) -> int | list[int]:
    """One number if all are the same."""
    return values[0] if len(set(values)) == 1 else list(values)


def _peers(plan: Plan, axis: Axis) -> list[list[int]]:
    """For each place, the members of its group by offset, itself first."""
    assignment = plan.assignment
    sizes = range(assignment.size(axis))
    return [[assignment.peer(axis, place, offset) for offset in sizes] for place in range(assignment.places)]


def _sizes(plan: Plan) -> Data:
    """Bytes of a shard of each kind as it travels between places."""
    places = range(plan.assignment.places)
    kinds = INPUTS[plan.direction] + OUTPUTS[plan.direction]
    return {kind: even([plan.matrix.nbytes(Item(kind, place)).total for place in places]) for kind in kinds}


def _costs(costs: Sequence[RankCosts]) -> Data:
    kinds: list[Kind] = [kind for kind in AXIS_OF if any(kind in cost.received or kind in cost.sent for cost in costs)]
    return {
        "received": {kind: even([_total(cost.received, kind) for cost in costs]) for kind in kinds},
        "sent": {kind: even([_total(cost.sent, kind) for cost in costs]) for kind in kinds},
        "flops": even([cost.flops for cost in costs]),
        "peak": even([cost.peak_nbytes for cost in costs]),
        "calls": even([cost.kernel_calls for cost in costs]),
        "messages": even([cost.messages for cost in costs]),
    }


def _total(by_kind: Any, kind: Kind) -> int:
    return by_kind[kind].total if kind in by_kind else 0


def timeline_data(timeline: Timeline, programs: Sequence[Program]) -> Data:
    """Times in ticks of `tick_s`. A span is three numbers: what, how long after the last began, how long.

    What: the index of the step, or of the transfer among the program's sends or receives; below 0, of a name, where a
    span has no step.
    """
    tick_s = 10.0 ** floor(log10(timeline.time_s / TICKS)) if timeline.time_s else 1.0
    names: dict[str, int] = {}
    by_rank = rank_tracks(timeline) if timeline.spans else {}
    spans = {
        str(rank): _lanes([s for tracks in lanes.values() for s in chain(*tracks)], programs[rank].steps, tick_s, names)
        for rank, lanes in by_rank.items()
    }
    return {
        "tick_s": tick_s,
        **{name: _short(getattr(timeline, name)) for name in ("time_s", "compute_s", "exposed_s", "tflops")},
        **{name: _short(getattr(timeline, name)) for name in ("overlap", "utilisation")},
        "is_exact": timeline.is_exact,
        "stop": even([round(times.stop_s / tick_s) for times in timeline.ranks]),
        "compute": even([round(times.compute_s / tick_s) for times in timeline.ranks]),
        "names": list(names),
        "spans": spans,
    }


def _lanes(spans: Iterable[Span], steps: Sequence[Step], tick_s: float, names: dict[str, int]) -> Data:
    lanes: dict[Lane, list[int]] = {lane: [] for lane in LANES}
    begun = dict.fromkeys(LANES, 0)
    moved = _numbered(steps)
    for span in sorted(spans, key=lambda span: (span.start_s, span.stop_s)):
        if span.step is not None and span.step not in range(len(steps)):
            raise UsageError(f"{span}: rank {span.rank} has {len(steps)} steps; expected a timeline of the same plan")
        place = moved.get((span.lane, span.step, span.name)) if span.lane in ("send", "recv") else span.step
        what = -1 - names.setdefault(span.name, len(names)) if place is None else place
        start, stop = round(span.start_s / tick_s), round(span.stop_s / tick_s)
        lanes[span.lane] += [what, start - begun[span.lane], stop - start]
        begun[span.lane] = start
    return {lane: numbers for lane, numbers in lanes.items() if numbers}


def _numbered(steps: Sequence[Step]) -> dict[tuple[Lane, int | None, str], int]:
    """The number of each transfer among the program's sends, or among its receives."""
    sends = [(at, format_end(send)) for at, step in enumerate(steps) for send in transfers(step)[0]]
    recvs = [(at, format_end(recv)) for at, step in enumerate(steps) for recv in transfers(step)[1]]
    numbers: dict[tuple[Lane, int | None, str], int] = {("send", *send): number for number, send in enumerate(sends)}
    return numbers | {("recv", *recv): number for number, recv in enumerate(recvs)}


def _short(value: float) -> float:
    """Six digits; the page shows three."""
    return float(f"{value:.6g}")


# Blocks


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


AS_IT_IS = "="
"""First letter of a program's text whose numbers are not offsets."""


class _NotRelativeError(Exception):
    """A number is not an offset of this rank."""


def program_text(assignment: Assignment, program: Program) -> str:
    """One line for each step, in offsets if every number has one."""
    view = _View(assignment, program.rank)
    try:
        return "\n".join(view.text(step) for step in program.steps)
    except _NotRelativeError:
        return AS_IT_IS + "\n".join(map(format_step, program.steps))


@dataclass(frozen=True)
class _View:
    """The grid as one rank sees it."""

    assignment: Assignment
    rank: int

    @property
    def place(self) -> int:
        return self.assignment.place(self.rank)

    @cached_property
    def offsets(self) -> dict[Axis, dict[int, int]]:
        axes: tuple[Axis, ...] = ("row", "col")
        return {
            axis: {self.assignment.peer(axis, self.place, k): k for k in range(self.assignment.size(axis))}
            for axis in axes
        }

    def text(self, step: steps.Step) -> str:
        match step:
            case steps.Recv() | steps.Send():
                return format_step(self._transfer(step))
            case steps.Collective():
                return self._collective(step)
            case steps.Exchange():
                return self._exchange(step)
            case steps.Attend(rows, cols, grads):
                return format_step(steps.Attend(self._rising(rows), self._rising(cols), self._rising(grads)))
            case steps.Pack(before, after) | steps.Unpack(before, after):
                return format_step(type(step)(self._item(before), self._item(after)))
            case steps.Merge(item) | steps.Clear(item) | steps.Finish(item) | steps.Free(item):
                return format_step(type(step)(self._item(item)))
            case _:
                assert_never(step)

    def _transfer(self, step: steps.Recv | steps.Send) -> steps.Recv | steps.Send:
        item = self._item(step.item)
        if isinstance(step, steps.Recv):
            return steps.Recv(item, self._peer(step.item.kind, step.source))
        return steps.Send(item, self._peer(step.item.kind, step.dest))

    def _collective(self, step: steps.Collective) -> str:
        transfers: tuple[steps.Send | steps.Recv, ...] = (*step.sends, *step.recvs)
        axis = steps.AXIS_OF[transfers[0].item.kind] if transfers else "row"
        places = self.assignment.group(axis, self.place)
        head_slice = self.assignment.head_slice(self.rank)
        if step.group != tuple(self.assignment.rank(place, head_slice=head_slice) for place in places):
            raise _NotRelativeError
        moved = "; ".join(format_step(self._transfer(transfer)) for transfer in transfers)
        return f"{step.op} over {axis}: {moved}".rstrip()

    def _exchange(self, step: steps.Exchange) -> str:
        if step.group != tuple(self.assignment.ulysses_group(self.rank)):
            raise _NotRelativeError
        sends = tuple(steps.Send(self._piece(send.item), self._distance(send.dest)) for send in step.sends)
        recvs = tuple(steps.Recv(self._piece(recv.item), self._distance(recv.source)) for recv in step.recvs)
        return format_step(steps.Exchange(self._item(step.before), self._item(step.after), (0,), sends, recvs))

    # Numbers

    def _rising(self, items: tuple[steps.Item, ...]) -> tuple[steps.Item, ...]:
        """The items by offset. They must be in order of shard, so that the page can restore that order."""
        if any(a.shard > b.shard for a, b in pairwise(items)):
            raise _NotRelativeError
        return tuple(sorted(map(self._item, items), key=lambda item: item.shard))

    def _item(self, item: steps.Item) -> steps.Item:
        if item.form in ("home", "staged"):
            return item._replace(shard=self._own(item.shard))
        if item.form == "piece":
            raise _NotRelativeError
        source = None if item.source is None else self._peer(item.kind, item.source)
        return item._replace(shard=self._offset(item.kind, item.shard), source=source)

    def _piece(self, item: steps.Item) -> steps.Item:
        if item.form != "piece" or item.source is None:
            raise _NotRelativeError
        turned = (item.source - self.assignment.head_slice(self.rank)) % self.assignment.ulysses_degree
        return item._replace(shard=self._distance(item.shard), source=turned)

    def _own(self, rank: int) -> int:
        if rank != self.rank:
            raise _NotRelativeError
        return 0

    def _offset(self, kind: steps.Kind, place: int) -> int:
        offset = self.offsets[steps.AXIS_OF[kind]].get(place)
        if offset is None:
            raise _NotRelativeError
        return offset

    def _peer(self, kind: steps.Kind, rank: int) -> int:
        """The offset of a rank that computes the same heads."""
        if self.assignment.head_slice(rank) != self.assignment.head_slice(self.rank):
            raise _NotRelativeError
        return self._offset(kind, self.assignment.place(rank))

    def _distance(self, rank: int) -> int:
        """The number of ranks by which a rank of the Ulysses group is ahead of this one."""
        group = self.assignment.ulysses_group(self.rank)
        if rank not in group:
            raise _NotRelativeError
        return (rank - self.rank) % len(group)
