"""The simulator of any plan: discrete events, with every rank and every transfer on its own.

A rank walks its jobs in order. A transfer begins when both ends have posted it, both have finished what they posted
before it in the same direction and on the same kind of link (links serve in order), and its lanes are free.

A lane serves one transfer at a time. Inside a node a transfer occupies the sender's outgoing port and the receiver's
incoming one; between nodes, the outgoing side of the sender's NIC and the incoming side of the receiver's. Where links
are not duplex, the two sides are one lane. The lockstep engine has the same lanes, and reports to the same `Recorder`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

from mesh_attention.errors import PlanError
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.steps import Item, Recv, Send
from mesh_attention.simulation.jobs_and_lanes import Job, Network, Path, RankJobs, Recorder


class _Transfer:
    """One item under way; `posted` are its ends that have posted it, each with its rank and the index of its job."""

    __slots__ = ("ends", "nbytes", "path", "posted", "start")

    def __init__(self, ends: tuple[int, int], path: Path, nbytes: int) -> None:
        self.ends, self.path, self.nbytes = ends, path, nbytes
        self.posted: list[tuple[int, int, Send | Recv]] = []
        self.start: float | None = None


class _Rank:
    def __init__(self, own: RankJobs) -> None:
        self.jobs: Sequence[Job] = own.jobs
        self.at = 0
        self.now = 0.0
        self.is_computing = False
        self.pending = [0] * len(own.jobs)  # unfinished posts of each job


Queue = deque[_Transfer]


class EventSimulator:
    """Runs the jobs of all ranks; the recorder holds the outcome."""

    def __init__(self, ranks: Sequence[RankJobs], matrix: BlockMatrix, network: Network, recorder: Recorder) -> None:
        self.ranks = [_Rank(own) for own in ranks]
        self.matrix, self.network, self.recorder = matrix, network, recorder
        self.events: list[tuple[float, int, _Transfer | int]] = []
        self.order = count()
        self.unmatched: dict[tuple[int, int, Item, bool], Queue] = {}
        self.queues: dict[tuple[int, bool, str], Queue] = {}
        self.is_busy = [False] * network.num_lanes
        self.blocked: dict[int, list[_Transfer]] = {}  # by lane: transfers that wait for it alone

    def run(self) -> None:
        for rank in range(len(self.ranks)):
            self._advance(rank, 0.0)
        while self.events:
            now, _, what = heappop(self.events)
            if isinstance(what, _Transfer):
                self._finish(what, now)
            else:
                self._post(what, now)
        stuck = [rank for rank, state in enumerate(self.ranks) if state.at < len(state.jobs)]
        if stuck:
            job = self.ranks[stuck[0]].jobs[self.ranks[stuck[0]].at]
            raise PlanError(
                f"the plan deadlocks: {len(stuck)} ranks never finish, rank {stuck[0]} stops at "
                f"'{job.name}'; links serve transfers in the order they are posted, so change the order of the plan's "
                "transfers"
            )

    def _advance(self, rank: int, now: float) -> None:
        """Go on from the current job if everything it waits for is over."""
        state = self.ranks[rank]
        if state.is_computing or state.at == len(state.jobs):
            return
        job = state.jobs[state.at]
        if any(state.pending[index] for index in job.waits):
            return
        self.recorder.wait(rank, state.now, now, job)
        state.is_computing = True
        state.now = now + job.seconds
        self.recorder.compute(rank, now, state.now, job)
        heappush(self.events, (state.now, next(self.order), rank))

    def _post(self, rank: int, now: float) -> None:
        """The job's compute is over: post its transfers and go on."""
        state = self.ranks[rank]
        job = state.jobs[state.at]
        posted = [self._posted(rank, recv) for recv in job.recvs] + [self._posted(rank, send) for send in job.sends]
        state.pending[state.at] = len(posted)
        for transfer in posted:
            self._try(transfer, now)
        state.at += 1
        state.is_computing = False
        self.recorder.stop(rank, now)
        self._advance(rank, now)

    def _posted(self, rank: int, end: Send | Recv) -> _Transfer:
        """The transfer this end belongs to, with this end posted."""
        is_send, item = isinstance(end, Send), end.item
        source, dest = (rank, end.dest) if isinstance(end, Send) else (end.source, rank)
        # A partial that arrived is told apart by its source; on its way it is the item its sender has.
        sent = item if item.form == "piece" else item._replace(source=None)
        waiting = self.unmatched.setdefault((source, dest, sent, not is_send), deque())
        if waiting:
            transfer = waiting.popleft()
        else:
            path = self.network.path(source, dest)
            transfer = _Transfer((source, dest), path, self.matrix.nbytes(item).total)
            self.unmatched.setdefault((source, dest, sent, is_send), deque()).append(transfer)
        transfer.posted.append((rank, self.ranks[rank].at, end))
        self.queues.setdefault((rank, is_send, transfer.path.link_class), deque()).append(transfer)
        return transfer

    def _try(self, transfer: _Transfer, now: float) -> None:
        if transfer.start is not None or len(transfer.posted) < 2:
            return
        (source, dest), link_class = transfer.ends, transfer.path.link_class
        if self.queues[source, True, link_class][0] is not transfer:
            return
        if self.queues[dest, False, link_class][0] is not transfer:
            return
        lanes = (transfer.path.out_lane, transfer.path.in_lane)
        for lane in lanes:
            if self.is_busy[lane]:
                self.blocked.setdefault(lane, []).append(transfer)
                return
        for lane in lanes:
            self.is_busy[lane] = True
        transfer.start = now
        stop = now + self.network.topology.link(link_class).seconds(transfer.nbytes)
        heappush(self.events, (stop, next(self.order), transfer))

    def _finish(self, transfer: _Transfer, now: float) -> None:
        (source, dest), path = transfer.ends, transfer.path
        assert transfer.start is not None  # only started transfers end
        self.recorder.transfer(transfer.ends, path.link_class, transfer.start, now, transfer.nbytes)
        queues = [self.queues[source, True, path.link_class], self.queues[dest, False, path.link_class]]
        candidates: list[_Transfer] = []
        for queue in queues:
            queue.popleft()
            candidates += list(queue)[:1]
        for lane in (path.out_lane, path.in_lane):
            self.is_busy[lane] = False
            candidates = self.blocked.pop(lane, []) + candidates
        for rank, index, end in transfer.posted:
            job = self.ranks[rank].jobs[index]
            self.recorder.transfer_span(rank, job, end, transfer.start, now, transfer.nbytes)
            self._end_of_post(rank, index, now)
        for candidate in candidates:
            self._try(candidate, now)

    def _end_of_post(self, rank: int, index: int, now: float) -> None:
        state = self.ranks[rank]
        state.pending[index] -= 1
        self.recorder.stop(rank, now)
        if not state.pending[index]:
            self._advance(rank, now)
