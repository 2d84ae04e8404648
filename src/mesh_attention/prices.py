"""Prices: seconds of one transfer, exchange, kernel call or merge on a cluster, and the bytes that these touch.

The planner's costs, the tuner's estimates and the simulator are made of them. Rates are those of `topology`; orders and
overlap are not considered here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_never

from mesh_attention.errors import PlanError
from mesh_attention.masks import BlockKind, Mask, Segment
from mesh_attention.plan import steps
from mesh_attention.plan.assignment import Assignment, Axis
from mesh_attention.plan.blocks import BlockMatrix, token_nbytes
from mesh_attention.plan.kernel_calls import KernelCall
from mesh_attention.plan.schedule import Route
from mesh_attention.plan.steps import AXIS_OF, OUTPUTS, Direction, Item, Kind, Step, running
from mesh_attention.problem import Problem
from mesh_attention.topology import Device, Topology

Number = TypeVar("Number", int, float)
CALLS_PER_MEET = 2
"""Kernel calls per meet under a causal mask, because early and late segments see different keys."""


# Bytes touched


def merge_nbytes(partial: Number, total: Number) -> Number:
    """Adding a partial to its running sum: the partial is read, and the sum is read and written."""
    return partial + 2 * total


def finish_nbytes(total: Number, result: Number) -> Number:
    """Turning a running sum into a result."""
    return total + result


def copy_nbytes(nbytes: Number) -> Number:
    return 2 * nbytes


def added_nbytes(problem: Problem, direction: Direction) -> tuple[int, int]:
    """For each query, and for each key, to add what a kernel call returns to the running sums; over all heads and batch
    entries."""
    touched = problem.batch * merge_nbytes(problem.itemsize, problem.accumulator_itemsize)
    qk, v = problem.head_dim_qk, problem.head_dim_v
    row = touched * problem.heads * (v if direction == "forward" else qk)
    return row, 0 if direction == "forward" else touched * problem.kv_heads * (qk + v)


# Calls


def compute_seconds(problem: Problem, device: Device, direction: Direction) -> float:
    """Kernels of an average rank, at the highest rate."""
    rate = device.rate(direction)
    return max(1e-12, problem.flops(direction) / problem.ranks / (rate.tflops * max(1.0, rate.masked) * 1e12))


def meet_seconds(device: Device, direction: Direction) -> float:
    """The fixed time of a meet: of its kernel calls and their launches."""
    return CALLS_PER_MEET * (device.rate(direction).call_us + device.launch_us) * 1e-6


# Steps


class Prices:
    """Seconds on the compute lane for the steps of one plan."""

    def __init__(self, device: Device, matrix: BlockMatrix, direction: Direction) -> None:
        self.device, self.matrix, self.direction = device, matrix, direction
        problem, shares = matrix.problem, matrix.assignment.head_shares
        self.heads = problem.batch * problem.heads // shares
        self.flops_per_pair = problem.flops(direction, pairs=1) // shares
        self.row_nbytes, self.col_nbytes = (nbytes // shares for nbytes in added_nbytes(problem, direction))

    def step(self, step: Step, calls: Sequence[KernelCall] = ()) -> float:
        match step:
            case steps.Attend():
                return sum(map(self.call, calls))
            case steps.Merge(partial):
                return self.device.touch_seconds(merge_nbytes(self._nbytes(partial), self._nbytes(running(partial))))
            case steps.Decode():
                raise PlanError("a plan over a cache does not say how much is cached; use simulate_decode of the lab")
            case steps.Combine(partials, total):
                return self.device.touch_seconds(sum(map(self._nbytes, partials)) + self._nbytes(total))
            case steps.Pack(_, item) | steps.Unpack(item):
                return self.device.touch_seconds(copy_nbytes(self._nbytes(item)))
            case steps.Finish(item):
                return self.device.touch_seconds(finish_nbytes(self._nbytes(running(item)), self._nbytes(item)))
            case steps.Clear(item):
                return self.device.touch_seconds(self._nbytes(item))
            case steps.Exchange(before, after) if before.form == "home":
                return self.device.touch_seconds(copy_nbytes(self._nbytes(after)))  # staged, or copied as its own piece
            case steps.Recv() | steps.Send() | steps.Collective() | steps.Exchange() | steps.Free():
                return 0.0
            case _:
                assert_never(step)

    def call(self, call: KernelCall) -> float:
        """A kernel call, and adding its results to the running sums."""
        q, kv = (sum(map(len, segments)) for segments in (call.q, call.kv))
        is_full = call.kind is BlockKind.FULL
        problem = self.matrix.problem
        pairs = q * kv if is_full else _pairs(problem.mask, call.q, call.kv, problem.seq_q, problem.seq_kv)
        touched = q * self.row_nbytes + kv * self.col_nbytes
        kernel_s = self.device.call_seconds(
            self.direction,
            heads=self.heads,
            q_tokens=q,
            kv_tokens=kv,
            flops=pairs * self.flops_per_pair,
            is_masked=not is_full,
        )
        return kernel_s + self.device.touch_seconds(touched)

    def _nbytes(self, item: Item) -> int:
        return self.matrix.nbytes(item).total


@lru_cache(maxsize=65536)
def _pairs(mask: Mask, q: tuple[Segment, ...], kv: tuple[Segment, ...], seq_q: int, seq_kv: int) -> int:
    return sum(mask.pairs(a, b, seq_q=seq_q, seq_kv=seq_kv) for a in q for b in kv)


# Links

Counts = NDArray[np.float64]
OUTPUT_KINDS = frozenset(kind for kinds in OUTPUTS.values() for kind in kinds)


class ReceiveTimes(NamedTuple):
    """Seconds that each rank spends receiving from other nodes, and from its own."""

    crossing_s: Counts
    inside_s: Counts


class Links:
    """Times that the ranks of a cluster spend receiving, for one assignment."""

    def __init__(self, problem: Problem, topology: Topology, assignment: Assignment) -> None:
        self.problem, self.topology, self.assignment = problem, topology, assignment
        self.ranks = np.arange(topology.ranks)
        self.nodes, self.nics = topology.node(self.ranks), topology.nic(self.ranks)
        self.none: Counts = np.zeros(topology.ranks)
        self._same: dict[Axis | None, Counts] = {}

    def group_s(self, kind: Kind, route: Route) -> ReceiveTimes:
        """Seconds that each rank spends receiving one kind of item in its group."""
        axis = AXIS_OF[kind]
        size = self.assignment.size(axis)
        if size == 1:
            return self._busy(self.none, self.none, 0.0)
        crossing = size - self._same_node(axis) if route == "direct" else self._ring(axis)
        return self._busy(crossing, size - 1 - crossing, self.shard_nbytes(kind))

    def needed_s(self, kind: Kind, members: NDArray[np.int64], is_needed: NDArray[np.bool_]) -> ReceiveTimes:
        """Like `group_s`, for the shards that a mask leaves a use for; straight from their homes. `members` of each
        place's group, the place first, and whether the place needs the shard of each."""
        ulysses = self.assignment.ulysses_degree
        members, is_needed = members[:, 1:], is_needed[:, 1:]
        home = np.arange(self.assignment.places)
        nodes = [self.topology.node(place * ulysses) for place in (home[:, None], members)]
        crosses = (nodes[0] != nodes[1]) & is_needed
        counts: list[Counts] = []
        for taken in (crosses, is_needed):
            # A partial comes home from every place that needed the shard.
            count = np.bincount(members[taken], minlength=len(home)) if kind in OUTPUT_KINDS else taken.sum(axis=1)
            counts.append(np.repeat(count, ulysses).astype(float))
        crossing, every = counts
        return self._busy(crossing, every - crossing, self.shard_nbytes(kind))

    def exchange_s(self, kind: Kind) -> ReceiveTimes:
        """A Ulysses exchange: a slice of the heads to and from every other rank of the group."""
        ulysses = self.assignment.ulysses_degree
        same = self._same_node(None)
        return self._busy(ulysses - same, same - 1, self.shard_nbytes(kind) / ulysses)

    def nic_s(self, crossing_s: Counts) -> float:
        """Seconds that the busiest NIC receives, summed over the ranks that share it."""
        return float(np.bincount(self.nics, weights=crossing_s).max())

    def shard_nbytes(self, kind: Kind) -> float:
        """Bytes of one head slice of a place's shard, which is as large as one rank's own tokens with all heads."""
        tokens = (self.problem.seq_q if AXIS_OF[kind] == "row" else self.problem.seq_kv) / self.problem.ranks
        return self.problem.batch * tokens * token_nbytes(kind, self.problem)

    def _busy(self, crossing: Counts, inside: Counts, nbytes: float) -> ReceiveTimes:
        topology = self.topology
        return ReceiveTimes(crossing * topology.between.seconds(nbytes), inside * topology.inside.seconds(nbytes))

    def _same_node(self, axis: Axis | None) -> Counts:
        """For each rank, the members of its group that are in its node, itself included; None is the Ulysses group."""
        if axis not in self._same:
            key = self._group(axis) * self.topology.nodes + self.nodes
            _, inverse, counts = np.unique(key, return_inverse=True, return_counts=True)
            self._same[axis] = counts[inverse].astype(float)
        return self._same[axis]

    def _group(self, axis: Axis | None) -> Any:
        """A number for each rank that is the same in a group, and different in others."""
        place, head_slice = divmod(self.ranks, self.assignment.ulysses_degree)
        if axis is None:
            return place
        row, col = self.assignment.coordinates(place)  # type: ignore[arg-type]
        return np.asarray(row if axis == "row" else col) * self.assignment.ulysses_degree + head_slice

    def _ring(self, axis: Axis) -> Counts:
        assignment = self.assignment
        inner, size = assignment.inner_size(axis), assignment.size(axis)
        rings = size // inner
        crossing = (size - rings) * self._crosses(axis, 1) if inner > 1 else np.zeros(len(self.ranks))
        return crossing + (rings - 1) * self._crosses(axis, inner) if rings > 1 else crossing

    def _crosses(self, axis: Axis, offset: int) -> Counts:
        source = self.assignment.peer_rank(axis, self.ranks, offset)
        crosses: Counts = (self.nodes[source] != self.nodes).astype(float)
        return crosses
