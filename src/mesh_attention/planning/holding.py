"""Estimates the peak memory of a list of moves, relative to holding the whole tile at once.

It follows the rules of `plan.buffers`, in offsets. Rows that meet in one call share a buffer, from the fetch of the
first until the last is complete; their running sums share one from the first meet on. The same holds for columns. The
results of a call count while it runs. Partials that are being sent do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mesh_attention.plan.assignment import Axis
from mesh_attention.plan.schedule import Fetch, Meet, Move
from mesh_attention.plan.steps import AXIS_OF, INPUTS, KINDS, OUTPUTS, Direction, Kind

Sizes = tuple[tuple[Kind, float], ...]
"""Size of a shard of each kind, in any unit."""
ONE_SIZE: Sizes = tuple((kind, 1.0) for kind in KINDS)
SUM_WIDTH = 2
"""Size of a running sum (float32) relative to the 16-bit item that travels."""


def held_share(moves: Sequence[Move], direction: Direction, *, sizes: Sizes) -> float:
    """Peak memory, divided by the memory of the inputs and running sums of all rows and columns."""
    change = [0.0] * (len(moves) + 1)  # in what is held, at each move
    size = dict(sizes)
    whole = 0.0
    axes: tuple[Axis, ...] = ("row", "col")
    for axis in axes:
        inputs = sum(size[kind] for kind in INPUTS[direction] if AXIS_OF[kind] == axis)
        sums = SUM_WIDTH * sum(size[kind] for kind in OUTPUTS[direction] if AXIS_OF[kind] == axis)
        fetched, met, last = _times(moves, axis)
        for group in _groups(moves, axis):
            stop = max(last[offset] for offset in group)
            change[min(fetched.get(offset, 0) for offset in group)] += len(group) * inputs
            change[min(met[offset] for offset in group)] += len(group) * sums
            change[stop + 1] -= len(group) * (inputs + sums)
            whole += len(group) * (inputs + sums)
    return _peak(moves, change, direction, size) / whole


def _times(moves: Sequence[Move], axis: Axis) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """For each offset, the moves at which it is fetched, meets first and meets last."""
    fetched: dict[int, int] = {}
    met: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, move in enumerate(moves):
        if isinstance(move, Fetch) and AXIS_OF[move.kind] == axis:
            fetched.setdefault(move.offset, index)
        elif isinstance(move, Meet):
            for offset in move.rows if axis == "row" else move.cols:
                met.setdefault(offset, index)
                last[offset] = index
    return fetched, met, last


def _groups(moves: Iterable[Move], axis: Axis) -> list[set[int]]:
    """Offsets that share a buffer."""
    group_of: dict[int, set[int]] = {}
    sides = [move.rows if axis == "row" else move.cols for move in moves if isinstance(move, Meet)]
    for side in dict.fromkeys(sides):
        known = {id(group): group for group in (group_of.get(offset) for offset in side) if group is not None}
        joined = set(side).union(*known.values())
        group_of.update(dict.fromkeys(joined, joined))
    return list({id(group): group for group in group_of.values()}.values())


def _peak(moves: Sequence[Move], change: Sequence[float], direction: Direction, size: Mapping[Kind, float]) -> float:
    """The peak of what is held plus what a call needs, as `plan.calls` counts it."""
    row, col = size["o"], 0.0
    if direction == "backward":
        every_head = size["q"] + size["o"]  # of K and V, where queries share their heads
        row, col = 3 * size["dq"] + 2 * size["o"], size["dkv"] + (every_head if every_head > size["dkv"] else 0.0)
    held = peak = 0.0
    for move, difference in zip(moves, change, strict=False):
        held += difference
        if isinstance(move, Meet):
            peak = max(peak, held + len(move.rows) * row + len(move.cols) * col)
    return peak
