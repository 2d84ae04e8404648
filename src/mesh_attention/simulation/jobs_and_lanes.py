"""What simulators share: a rank's program as jobs, the links of a cluster as lanes, and the recorder they report to.

A job is seconds on its rank's compute lane, transfers that it posts, and earlier posts that it waits for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from mesh_attention.plan.format import format_end, format_step
from mesh_attention.plan.kernel_calls import kernel_calls, peak_nbytes
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import stops
from mesh_attention.plan.steps import Free, Item, Recv, Send, Step, effects, in_flight, transfers
from mesh_attention.prices import Prices
from mesh_attention.timeline import Lane, RankTimes, Span
from mesh_attention.topology import LinkClass, Topology


@dataclass(frozen=True, slots=True)
class Job:
    """A stop of a program: `steps`, of which the first, at `index` of the program, names it.

    `waits` are indices of earlier jobs whose posts must all be over.
    """

    steps: tuple[Step, ...]
    index: int
    seconds: float
    waits: tuple[int, ...]
    sends: tuple[Send, ...] = ()
    recvs: tuple[Recv, ...] = ()

    @property
    def name(self) -> str:
        return format_step(self.steps[0])

    def index_of(self, end: Send | Recv) -> int:
        """The index in the program of the step that posts this transfer."""
        ends = enumerate(map(transfers, self.steps), self.index)
        return next(at for at, (sends, recvs) in ends if end in sends or end in recvs)


@dataclass(frozen=True, slots=True)
class RankJobs:
    """The jobs of a rank, and its peak memory."""

    rank: int
    jobs: tuple[Job, ...]
    peak_nbytes: int


def rank_jobs(plan: Plan, rank: int, prices: Prices) -> RankJobs:
    """A rank's jobs. As in the executor, posts made together end together: waiting for one means waiting for all."""
    every, matrix = plan.steps(rank), plan.matrix
    calls = kernel_calls(every, matrix, matrix.kept(plan.schedule.keep, rank))
    done = list(map(effects, every))
    jobs: list[Job] = []
    arriving: dict[Item, int] = {}
    leaving: dict[Item, set[int]] = {}
    for stop in stops(every, done=done):
        steps = every[stop.span.start : stop.span.stop]
        waits = {arriving[item] for item in stop.arrivals if item in arriving}
        waits.update(index for item in stop.departures for index in leaving.get(item, ()))
        seconds = sum(prices.step(step, calls.get(at, ())) for at, step in zip(stop.span, steps, strict=True))
        ends = list(map(transfers, steps))
        sends = tuple([send for sent, _ in ends for send in sent])
        recvs = tuple([recv for _, received in ends for recv in received])
        if isinstance(steps[0], Free) and not waits:
            continue
        for coming, going in map(in_flight, steps) if sends or recvs else ():  # in an exchange, all may be its own
            arriving.update(dict.fromkeys(coming, len(jobs)))
            for item in going:
                leaving.setdefault(item, set()).add(len(jobs))
        jobs.append(Job(steps, stop.span.start, seconds, tuple(sorted(waits)), sends, recvs))
    return RankJobs(rank, tuple(jobs), peak_nbytes(plan, rank, every, calls, done=done))


# Lanes, and what simulators report


class Path(NamedTuple):
    """The lanes of a transfer, as numbers, and its link class."""

    out_lane: int
    in_lane: int
    link_class: LinkClass


class Network:
    """The lanes of a cluster: ports out, ports in, NICs out, NICs in."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        ranks, nics = topology.ranks, topology.nodes * topology.nics_per_node
        self.num_lanes = 2 * (ranks + nics)
        self.out_ports, self.out_nics = 0, 2 * ranks
        self.in_ports = ranks if topology.full_duplex else self.out_ports
        self.in_nics = 2 * ranks + nics if topology.full_duplex else self.out_nics
        self.is_shared = not topology.full_duplex or topology.nics_per_node < topology.ranks_per_node

    def path(self, source: int, dest: int) -> Path:
        topology = self.topology
        if topology.node(source) == topology.node(dest):
            return Path(self.out_ports + source, self.in_ports + dest, "inside")
        return Path(self.out_nics + topology.nic(source), self.in_nics + topology.nic(dest), "between")


class Recorder:
    """Collects what an engine reports, one rank at a time."""

    def __init__(self, ranks: int, spans_of: Collection[int]) -> None:
        self.spans_of = frozenset(spans_of)
        self.compute_s, self.stop_s = [0.0] * ranks, [0.0] * ranks
        self.out_s, self.in_s = [0.0] * ranks, [0.0] * ranks
        self.sent: dict[LinkClass, int] = {"inside": 0, "between": 0}
        self.spans: list[Span] = []

    def compute(self, rank: int, start: float, stop: float, job: Job) -> None:
        self.compute_s[rank] += stop - start
        self._busy(rank, "compute", start, stop, job)

    def wait(self, rank: int, start: float, stop: float, job: Job) -> None:
        self._busy(rank, "wait", start, stop, job)

    def transfer(self, ends: tuple[int, int], link_class: LinkClass, start: float, stop: float, nbytes: int) -> None:
        """Add a transfer to the totals of both its ends."""
        source, dest = ends
        self.out_s[source] += stop - start
        self.in_s[dest] += stop - start
        self.sent[link_class] += nbytes

    def transfer_span(self, rank: int, job: Job, end: Send | Recv, start: float, stop: float, nbytes: int) -> None:
        """One end of a transfer, which a job of the rank posted."""
        if rank in self.spans_of and stop > start:
            lane: Lane = "send" if isinstance(end, Send) else "recv"
            self.spans.append(Span(rank, lane, start, stop, format_end(end), nbytes, job.index_of(end)))

    def stop(self, rank: int, now: float) -> None:
        self.stop_s[rank] = max(self.stop_s[rank], now)

    def rank_times(self) -> tuple[RankTimes, ...]:
        return tuple(
            RankTimes(
                rank=rank,
                stop_s=stop,
                compute_s=self.compute_s[rank],
                link_s=max(self.out_s[rank], self.in_s[rank]),
            )
            for rank, stop in enumerate(self.stop_s)
        )

    def _busy(self, rank: int, lane: Lane, start: float, stop: float, job: Job) -> None:
        if rank in self.spans_of and stop > start:
            self.spans.append(Span(rank, lane, start, stop, job.name, step=job.index))
