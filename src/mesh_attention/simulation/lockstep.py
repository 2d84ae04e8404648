"""The simulator of uniform plans: the rules of the event-driven one, for all ranks at once.

Where every rank needs every shard of its groups, all ranks run the same jobs with other peers. Arrays over the ranks
replace the single numbers of the event engine. Peers follow from the assignment: if one rank receives from `offset`
before it in a group, every rank does. A shared NIC serves the transfers of one job by rank here and by readiness there;
everything else is the same, and tests compare the two engines.

If all ranks also compute alike, most of them have the same timeline: those at the same place of their nodes. Then one
rank of each kind is simulated, and a cluster of any size takes as long as a few of its nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mesh_attention.plan.assignment import AXES, Assignment, Axis, divisors
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.steps import Send
from mesh_attention.simulation.jobs_and_lanes import Job, Network, RankJobs, Recorder
from mesh_attention.topology import LinkClass, Topology

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
CLASSES: tuple[LinkClass, ...] = ("inside", "between")


class Delta(NamedTuple):
    """A peer's position relative to any rank: `offset` before it on an axis, or in its Ulysses group (axis None)."""

    axis: Axis | None
    offset: int


@dataclass(frozen=True, slots=True)
class PeerTransfer:
    """One transfer to every rank: its source, its lanes, and rounds in which no lane is used twice."""

    source: Whole
    out_lane: Whole
    in_lane: Whole
    is_between: NDArray[np.bool_]
    rounds: tuple[Whole, ...]


class RankClasses(NamedTuple):
    """Ranks in classes of equal size: the class of every rank, and one rank of every class."""

    class_of: Whole
    first_ranks: Whole


def singleton_classes(topology: Topology) -> RankClasses:
    """Every rank in a class of its own."""
    return RankClasses(np.arange(topology.ranks), np.arange(topology.ranks))


def classes_by_timeline(assignment: Assignment, topology: Topology) -> RankClasses:
    """Ranks that have the same timeline if all compute alike, and no link is shared.

    Two ranks are in one class if some shift of the grid along its rings takes one to the other, and whole nodes to
    whole nodes.
    """
    ranks = np.arange(topology.ranks)
    place, head_slice = divmod(ranks, assignment.ulysses_degree)
    row, col = assignment.coordinates(place)  # type: ignore[arg-type]
    rows, cols = (_shift(assignment, axis, topology) for axis in ("col", "row"))
    _, first_ranks, class_of = np.unique(
        (row % rows * cols + col % cols) * assignment.ulysses_degree + head_slice,
        return_index=True,
        return_inverse=True,
    )
    return RankClasses(class_of, first_ranks)


def _shift(assignment: Assignment, axis: Axis, topology: Topology) -> int:
    """The shortest move of the grid along an axis that takes nodes to nodes."""
    size, inner = assignment.size(axis), assignment.inner_size(axis)
    if topology.ranks % topology.ranks_per_node:
        return size
    for offset in divisors(size):
        if 1 < inner < size and offset % inner:
            continue
        moved = assignment.peer_rank(axis, np.arange(topology.ranks), offset)
        nodes = topology.node(moved).reshape(topology.nodes, topology.ranks_per_node)
        if (nodes == nodes[:, :1]).all():
            return offset
    return size


class NotUniformError(Exception):
    """The ranks' programs differ in more than their peers."""


class LockstepSimulator:
    """Runs the jobs of `priced[0]` on all ranks; rank r takes as long as `priced[seconds_of[r]]`.

    `shown` holds the jobs of the ranks whose spans are recorded, which name the spans. Arrays are over `classes`.
    """

    def __init__(
        self,
        priced: Sequence[RankJobs],
        seconds_of: Whole,
        matrix: BlockMatrix,
        network: Network,
        recorder: Recorder,
        shown: Mapping[int, Sequence[Job]],
        classes: RankClasses,
    ) -> None:
        self.shown, (self.class_of, self.first_ranks) = shown, classes
        self.jobs, self.rank = priced[0].jobs, priced[0].rank
        self.matrix, self.network, self.recorder = matrix, network, recorder
        self.seconds = np.array([[job.seconds for job in rank.jobs] for rank in priced])[seconds_of[self.first_ranks]].T
        self.all = np.arange(len(self.first_ranks))
        self.deltas = self._deltas()
        self.transfers: dict[Delta, PeerTransfer] = {}

    def run(self) -> None:
        """Raise NotUniformError if the jobs turn out to differ between ranks."""
        count = len(self.all)
        now = np.zeros(count)
        free = np.zeros(self.network.num_lanes)
        over: dict[int, Floats] = {}
        computed, stopped = np.zeros(count), np.zeros(count)
        self.out_s, self.in_s = np.zeros(count), np.zeros(count)
        for index, job in enumerate(self.jobs):
            start = now
            for earlier in job.waits:
                start = np.maximum(start, over[earlier])
            self._record_compute(index, now, start)
            now = start + self.seconds[index]
            computed += self.seconds[index]
            if job.recvs or job.sends:
                over[index] = self._post(index, now, free)
                stopped = np.maximum(stopped, over[index])
        self._totals(computed, np.maximum(stopped, now))

    def _post(self, index: int, now: Floats, free: Floats) -> Floats:
        """The times at which everything that each rank posts with this job is over."""
        job = self.jobs[index]
        received = Counter((recv.item.kind, self.deltas[recv.source]) for recv in job.recvs)
        sent = Counter((send.item.kind, self._from(self.deltas[send.dest])) for send in job.sends)
        if received != sent:
            raise NotUniformError(f"'{job.name}': ranks do not send the same items that they receive")
        over = now
        for number in range(len(job.recvs)):
            over = np.maximum(over, self._move(index, number, now, free))
        return over

    def _move(self, index: int, number: int, now: Floats, free: Floats) -> Floats:
        recv = self.jobs[index].recvs[number]
        transfer = self._transfer(self.deltas[recv.source])
        nbytes = self.matrix.nbytes(recv.item).total
        times = [self.network.topology.link(link_class).seconds(nbytes) for link_class in CLASSES]
        starts, stop = np.empty(len(self.all)), np.empty(len(self.all))
        between = transfer.is_between.astype(int)
        for dest in transfer.rounds:
            source, out_lane, in_lane = transfer.source[dest], transfer.out_lane[dest], transfer.in_lane[dest]
            start = np.maximum(np.maximum(now[source], now[dest]), np.maximum(free[out_lane], free[in_lane]))
            end = start + np.where(between[dest], times[1], times[0])
            free[out_lane] = free[in_lane] = end
            starts[dest], stop[dest] = start, end
        self._record_transfers(index, number, transfer, starts, stop, nbytes)
        self.in_s += stop - starts
        # Each rank sends to one other: the transfers out are the transfers in, in another order.
        self.out_s[transfer.source] += stop - starts
        over: Floats = stop.copy()
        over[transfer.source] = np.maximum(over[transfer.source], stop)
        return over

    # Peers

    def _deltas(self) -> dict[int, Delta]:
        """The relative position of every rank that this one may receive from."""
        assignment = self.matrix.assignment
        sizes: dict[Axis | None, int] = {axis: assignment.size(axis) for axis in AXES}
        sizes[None] = assignment.ulysses_degree
        deltas = [Delta(axis, offset) for axis, size in sizes.items() for offset in range(1, size)]
        return {assignment.peer_rank(delta.axis, self.rank, delta.offset): delta for delta in deltas}

    def _from(self, delta: Delta) -> Delta:
        """The sender's position as seen from its receiver, when the receiver is `delta` before the sender."""
        return Delta(delta.axis, self.matrix.assignment.offset_back(*delta))

    def _transfer(self, delta: Delta) -> PeerTransfer:
        if delta not in self.transfers:
            self.transfers[delta] = self._new_transfer(delta)
        return self.transfers[delta]

    def _new_transfer(self, delta: Delta) -> PeerTransfer:
        network, topology, ranks = self.network, self.network.topology, self.first_ranks
        sender = self.matrix.assignment.peer_rank(delta.axis, ranks, delta.offset)
        is_between = topology.node(sender) != topology.node(ranks)
        source = self.class_of[sender]
        alike = ranks[source]  # as the sender, which has lanes of its own
        out_lane = np.where(is_between, network.out_nics + topology.nic(alike), network.out_ports + alike)
        in_lane = np.where(is_between, network.in_nics + topology.nic(ranks), network.in_ports + ranks)
        rounds = _rounds(out_lane, in_lane) if network.is_shared else (self.all,)
        return PeerTransfer(source, out_lane, in_lane, is_between, rounds)

    # Recording

    def _record_compute(self, index: int, now: Floats, start: Floats) -> None:
        for rank, jobs in self.shown.items():
            kind = self.class_of[rank]
            self.recorder.wait(rank, now[kind], start[kind], jobs[index])
            self.recorder.compute(rank, start[kind], start[kind] + self.seconds[index, kind], jobs[index])

    def _record_transfers(
        self, index: int, number: int, transfer: PeerTransfer, start: Floats, stop: Floats, nbytes: int
    ) -> None:
        alike = len(self.class_of) // len(self.first_ranks)
        count = int(transfer.is_between.sum())
        self.recorder.sent["between"] += alike * count * nbytes
        self.recorder.sent["inside"] += alike * (len(self.all) - count) * nbytes
        back = self._from(self.deltas[self.jobs[index].recvs[number].source])
        for rank, jobs in self.shown.items():
            job, dest = jobs[index], self.matrix.assignment.peer_rank(back.axis, rank, back.offset)
            here, there = self.class_of[[rank, dest]]
            self.recorder.transfer_span(rank, job, job.recvs[number], start[here], stop[here], nbytes)
            self.recorder.transfer_span(rank, job, self._send(job, number, dest), start[there], stop[there], nbytes)

    def _send(self, job: Job, number: int, dest: int) -> Send:
        """The send that is to `dest` what the receive of this number is to the rank itself."""
        recv, earlier = job.recvs[number], job.recvs[:number]
        before = sum((other.item.kind, other.source) == (recv.item.kind, recv.source) for other in earlier)
        sends = (send for send in job.sends if (send.item.kind, send.dest) == (recv.item.kind, dest))
        return next(islice(sends, before, None))

    def _totals(self, computed: Floats, stopped: Floats) -> None:
        times = (computed, stopped, self.out_s, self.in_s)
        recorder = self.recorder
        recorder.compute_s, recorder.stop_s, recorder.out_s, recorder.in_s = (t[self.class_of].tolist() for t in times)


def _rounds(out_lane: Whole, in_lane: Whole) -> tuple[Whole, ...]:
    """Receivers in rounds, such that no round uses a lane twice."""
    taken: list[set[int]] = []
    rounds: list[list[int]] = []
    for rank in range(len(out_lane)):
        lanes = {int(out_lane[rank]), int(in_lane[rank])}
        at = next((i for i, used in enumerate(taken) if not used & lanes), len(taken))
        if at == len(taken):
            taken.append(set())
            rounds.append([])
        taken[at] |= lanes
        rounds[at].append(rank)
    return tuple(np.array(members) for members in rounds)
