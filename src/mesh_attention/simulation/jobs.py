"""One rank's program as jobs: seconds on its compute lane, transfers it posts, and earlier posts it waits for.

Kernel calls are priced by shape and mask, everything else by the memory it touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from typing_extensions import assert_never

from mesh_attention.errors import PlanError
from mesh_attention.masks import BlockKind, Mask, Segment
from mesh_attention.plan import steps
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.footprint import kv_nbytes
from mesh_attention.plan.format import format_step
from mesh_attention.plan.kernel_calls import KernelCall, kernel_calls, peak_nbytes
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import stops
from mesh_attention.plan.steps import Direction, Free, Item, Recv, Send, Step, effects, in_flight, running, transfers
from mesh_attention.problem import Problem
from mesh_attention.topology import Device


class Prices:
    """Seconds on the compute lane for the steps of one plan."""

    def __init__(
        self, device: Device, matrix: BlockMatrix, direction: Direction, *, attend_s: float | None = None
    ) -> None:
        """Over a cache, `attend_s` is how long a rank attends to what it holds, which a plan leaves open."""
        if matrix.is_over_cache and attend_s is None:
            raise PlanError("a plan over a cache does not know how much is cached: give attend_s, in seconds")
        self.device, self.matrix, self.direction, self.attend_s = device, matrix, direction, attend_s or 0.0
        problem, shares = matrix.problem, matrix.assignment.head_shares
        self.heads = problem.batch * problem.heads // shares
        self.flops_per_pair = problem.flops(direction, pairs=1) // shares
        self.row_nbytes, self.col_nbytes = (nbytes // shares for nbytes in problem.added_nbytes(direction))

    def step(self, step: Step, calls: Sequence[KernelCall] = ()) -> float:
        match step:
            case steps.Attend():
                return sum(map(self.call, calls))
            case steps.Merge(partial):
                return self.device.touch_seconds(2 * self._nbytes(running(partial)) + self._nbytes(partial))
            case steps.Decode():
                return self.attend_s
            case steps.Combine(partials, total):
                return self.device.touch_seconds(sum(map(self._nbytes, partials)) + self._nbytes(total))
            case steps.Pack(_, after):
                return self.device.touch_seconds(2 * self._nbytes(after))
            case steps.Finish(item):
                return self.device.touch_seconds(self._nbytes(running(item)) + self._nbytes(item))
            case steps.Clear(item):
                return self.device.touch_seconds(self._nbytes(item))
            case steps.Exchange(before, after) if before.form == "home":
                return self.device.touch_seconds(2 * self._nbytes(after))  # staged, or copied as its own piece
            case steps.Unpack(before):
                return self.device.touch_seconds(2 * self._nbytes(before))
            case steps.Recv() | steps.Send() | steps.Collective() | steps.Exchange() | steps.Free():
                return 0.0
            case _:
                assert_never(step)

    def call(self, call: KernelCall) -> float:
        """A kernel call, and adding its results to the running sums."""
        q, kv = _tokens(call.q), _tokens(call.kv)
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


def decode_seconds(device: Device, problem: Problem) -> float:
    """A decoded step's attention to what a rank holds, of a problem with all cached and new tokens: reading K and V, or
    computing if many queries share them."""
    read_s = kv_nbytes(problem) / (device.memory_gb_per_s * 1e9)
    compute_s = problem.flops("forward") / problem.ranks / (device.forward.tflops * 1e12)
    return device.forward.call_us * 1e-6 + max(read_s, compute_s)


def _tokens(segments: Sequence[Segment]) -> int:
    return sum(map(len, segments))


@lru_cache(maxsize=65536)
def _pairs(mask: Mask, q: tuple[Segment, ...], kv: tuple[Segment, ...], seq_q: int, seq_kv: int) -> int:
    return sum(mask.pairs(a, b, seq_q=seq_q, seq_kv=seq_kv) for a in q for b in kv)


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
