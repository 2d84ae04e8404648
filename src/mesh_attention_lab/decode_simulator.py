"""The simulator of decoded steps: all ranks compute, make a collective together, and compute again.

A collective begins when every rank has posted it. It takes the latency of the slowest link, because its messages are
under way together, and as long as the busiest port or NIC of a rank needs for the bytes. What many small messages cost
besides is left out. A rank that is not priced does what the nearest one that is does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from mesh_attention.plan.blocks import BlockMatrix, token_nbytes
from mesh_attention.plan.kernel_calls import KernelCall
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import Decode, Recv, Send, Step
from mesh_attention.prices import Prices
from mesh_attention.problem import Problem
from mesh_attention.simulation.jobs_and_lanes import Job, RankJobs, Recorder, rank_jobs
from mesh_attention.simulation.lockstep import CLASSES, Floats, Whole
from mesh_attention.simulation.simulate import ALL_RANKS, SAMPLED_RANKS, Simulation
from mesh_attention.timeline import Timeline
from mesh_attention.topology import Device, LinkClass, Topology


def simulate_decode(plan: Plan, topology: Topology, *, attend_s: float, spans_of: Collection[int] = ()) -> Timeline:
    """Forecast a pass over a cache. The plan does not know how much is cached: `attend_s` is how long a rank attends to
    its part."""
    prices = DecodePrices(topology.device, plan.matrix, attend_s)
    simulation = Simulation(plan, topology, prices, spans_of, None, lambda *progress: None)
    ranks, recorder = topology.ranks, Recorder(topology.ranks, spans_of)
    priced, nearest = simulation.priced(ranks if ranks <= ALL_RANKS else SAMPLED_RANKS)
    shown = [rank_jobs(plan, rank, prices) for rank in recorder.spans_of - {own.rank for own in priced}]
    CacheSimulator(priced, nearest, shown, plan.matrix, topology, recorder).run()
    return simulation.timeline(recorder, priced, is_exact=len(priced) == ranks)


def decode_seconds(device: Device, problem: Problem) -> float:
    """A decoded step's attention to what a rank holds, of a problem with all cached and new tokens: reading K and V, or
    computing if many queries share them."""
    read_s = kv_nbytes(problem) / (device.memory_gb_per_s * 1e9)
    compute_s = problem.flops("forward") / problem.ranks / (device.forward.tflops * 1e12)
    return device.forward.call_us * 1e-6 + max(read_s, compute_s)


def kv_nbytes(problem: Problem) -> int:
    """Bytes of K and V of one layer on the rank that holds the most tokens of a problem."""
    return problem.batch * -(-problem.seq_kv // problem.ranks) * token_nbytes("kv", problem)


class DecodePrices(Prices):
    """Prices of a plan over a cache."""

    def __init__(self, device: Device, matrix: BlockMatrix, attend_s: float) -> None:
        super().__init__(device, matrix, "forward")
        self.attend_s = attend_s

    def step(self, step: Step, calls: Sequence[KernelCall] = ()) -> float:
        return self.attend_s if isinstance(step, Decode) else super().step(step, calls)


class _Rank:
    def __init__(self, own: RankJobs, recorder: Recorder) -> None:
        self.rank, self.recorder = own.rank, recorder
        self.jobs = iter(own.jobs)
        self.now = self.over = 0.0  # over: the end of the last collective

    def advance(self) -> Job | None:
        """Compute until a job posts a collective, and return it; None at the end."""
        for job in self.jobs:
            start = max(self.now, self.over) if job.waits else self.now
            self.recorder.wait(self.rank, self.now, start, job)
            self.now = start + job.seconds
            self.recorder.compute(self.rank, start, self.now, job)
            if job.sends or job.recvs:
                return job
        self.now = max(self.now, self.over)
        return None


class CacheSimulator:
    """Runs `priced` ranks, of which `nearest` has the place of each rank's nearest one, and those in `shown`, whose
    spans are recorded; the recorder holds the outcome."""

    def __init__(
        self,
        priced: Sequence[RankJobs],
        nearest: Whole,
        shown: Sequence[RankJobs],
        matrix: BlockMatrix,
        topology: Topology,
        recorder: Recorder,
    ) -> None:
        self.priced, self.matrix, self.topology, self.recorder = priced, matrix, topology, recorder
        self.nearest = nearest
        self.ranks = {own.rank: _Rank(own, recorder) for own in (*priced, *shown)}
        self.nic: Whole = topology.nic(np.arange(topology.ranks))
        self.link_s = np.zeros(topology.ranks)

    def run(self) -> None:
        while posts := {rank: job for rank, state in self.ranks.items() if (job := state.advance()) is not None}:
            begin = max(self.ranks[rank].now for rank in posts)
            took = self._collective_s(posts)
            self.link_s += took
            for rank, job in posts.items():
                self.ranks[rank].over = begin + float(took[rank])
                self._record(rank, job, begin, float(took[rank]))
        self._totals()

    def _collective_s(self, posts: Mapping[int, Job]) -> Floats:
        """Seconds of every rank's part in a collective."""
        topology = self.topology
        moved = np.array([self._moved(own.rank, posts.get(own.rank)) for own in self.priced])[self.nearest]
        took = np.zeros(topology.ranks)
        for number, link_class in enumerate(CLASSES):
            own = moved[:, number]
            self.recorder.sent[link_class] += int(own[:, 0].sum())
            loads = own
            if link_class == "between":
                loads = np.stack([np.bincount(self.nic, way)[self.nic] for way in own.T], axis=1)
            busiest = loads.max(1) if topology.full_duplex else loads.sum(1)
            link = topology.link(link_class)
            seconds = link.latency_us * 1e-6 + busiest / (link.gb_per_s * 1e9)
            took = np.maximum(took, np.where(own.any(1), seconds, 0.0))
        return took

    def _moved(self, rank: int, job: Job | None) -> list[list[int]]:
        """Bytes that a rank sends and receives, by link class."""
        moved = {link_class: [0, 0] for link_class in CLASSES}
        ways: tuple[Sequence[Send | Recv], ...] = (job.sends, job.recvs) if job else ()
        for way, ends in enumerate(ways):
            for end in ends:
                moved[self._link_class(rank, end)][way] += self.matrix.nbytes(end.item).total
        return list(moved.values())

    def _link_class(self, rank: int, end: Send | Recv) -> LinkClass:
        return self.topology.link_class(rank, end.dest if isinstance(end, Send) else end.source)

    def _record(self, rank: int, job: Job, begin: float, took: float) -> None:
        """The transfers of each link as if they shared the time by their bytes, one after the other."""
        if rank not in self.recorder.spans_of:
            return
        total = self._moved(rank, job)
        ways: tuple[Sequence[Send | Recv], ...] = (job.sends, job.recvs)
        for way, ends in enumerate(ways):
            start = dict.fromkeys(CLASSES, begin)
            for end in ends:
                link_class, nbytes = self._link_class(rank, end), self.matrix.nbytes(end.item).total
                stop = start[link_class] + took * nbytes / total[CLASSES.index(link_class)][way]
                self.recorder.transfer_span(rank, job, end, start[link_class], stop, nbytes)
                start[link_class] = stop

    def _totals(self) -> None:
        recorder, like = self.recorder, [self.priced[place].rank for place in self.nearest]
        recorder.compute_s = [recorder.compute_s[rank] for rank in like]
        recorder.stop_s = [self.ranks[rank].now for rank in like]
        recorder.out_s = recorder.in_s = self.link_s.tolist()
