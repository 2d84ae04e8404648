"""One rank's program as jobs: seconds on its compute lane, transfers it posts, and earlier posts it waits for."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_attention.plan.format import format_step
from mesh_attention.plan.kernel_calls import kernel_calls, peak_nbytes
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import stops
from mesh_attention.plan.steps import Free, Item, Recv, Send, Step, effects, in_flight, transfers
from mesh_attention.prices import Prices


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
