"""`simulate`: the forecast of a plan on a cluster. Chooses the simulator and states how exact the forecast is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mesh_attention.errors import TopologyError
from mesh_attention.plan.plan import Plan
from mesh_attention.prices import Prices
from mesh_attention.simulation import lockstep
from mesh_attention.simulation.event_driven import EventSimulator
from mesh_attention.simulation.jobs_and_lanes import Network, RankJobs, Recorder, rank_jobs
from mesh_attention.timeline import Timeline
from mesh_attention.topology import Topology
from mesh_attention.units import Progress

ALL_RANKS = 64
MANY_RANKS = 2048
"""From here on, the program of one rank takes up to seconds to build, and few are."""
SAMPLED_RANKS = 8


def simulate(
    plan: Plan,
    topology: Topology,
    *,
    spans_of: Collection[int] = (),
    priced_ranks: int | None = None,
    on_progress: Progress | None = None,
) -> Timeline:
    """Forecast a pass on the cluster: times of all ranks, bytes by link class, peak memory, spans of some ranks.

    Uniform plans, in which all ranks run the same steps (full masks, and causal ones on zigzag and striped layouts),
    are simulated for all ranks at once. On more than `ALL_RANKS` ranks, the calls of `priced_ranks` evenly spread
    ranks are priced and represent those of their neighbours; waiting and links are simulated for every rank. From
    `MANY_RANKS` on, the last rank's calls represent all by default. Any other plan is simulated rank by rank.
    """
    prices = Prices(topology.device, plan.matrix, plan.direction)
    simulation = Simulation(plan, topology, prices, spans_of, priced_ranks, on_progress or (lambda *progress: None))
    if plan.programs is None and plan.matrix.is_uniform:
        try:
            return simulation.in_lockstep()
        except lockstep.NotUniformError:
            pass
    return simulation.by_events()


@dataclass(frozen=True, slots=True)
class Simulation:
    """What `simulate` was asked for, and the simulators that can answer it."""

    plan: Plan
    topology: Topology
    prices: Prices
    spans_of: Collection[int]
    priced_ranks: int | None
    report: Progress

    def __post_init__(self) -> None:
        ranks, topology = self.plan.problem.ranks, self.topology
        if ranks != topology.ranks:
            raise TopologyError(
                f"the plan has {ranks} ranks and {topology.name} has {topology.ranks}; "
                f"use topology.with_ranks({ranks}) or plan for {topology.ranks} ranks"
            )
        if self.priced_ranks is not None and (type(self.priced_ranks) is not int or self.priced_ranks < 1):
            raise TopologyError(f"priced_ranks={self.priced_ranks!r}: expected a whole number of at least 1, or None")
        wrong = [rank for rank in self.spans_of if not 0 <= rank < topology.ranks]
        if wrong:
            raise TopologyError(f"spans_of names rank {wrong[0]}: expected ranks 0 to {topology.ranks - 1}")

    def in_lockstep(self) -> Timeline:
        plan, topology, ranks = self.plan, self.topology, self.topology.ranks
        priced, nearest = self.priced(ranks if ranks <= ALL_RANKS else SAMPLED_RANKS if ranks < MANY_RANKS else 1)
        shapes = {tuple((len(job.recvs), len(job.sends), job.waits) for job in t.jobs) for t in priced}
        if len(shapes) > 1:
            raise lockstep.NotUniformError("jobs of different kinds")
        recorder, network = Recorder(ranks, self.spans_of), Network(topology)
        jobs_of = {each.rank: each.jobs for each in priced}
        shown = {rank: jobs_of.get(rank) or rank_jobs(plan, rank, self.prices).jobs for rank in recorder.spans_of}
        is_folded = len(priced) == 1 and not network.is_shared
        classes = lockstep.singleton_classes(topology)
        if is_folded:
            classes = lockstep.classes_by_timeline(plan.assignment, topology)
        lockstep.LockstepSimulator(priced, nearest, plan.matrix, network, recorder, shown, classes).run()
        is_even = plan.problem.seq_q % ranks == 0 and plan.problem.seq_kv % ranks == 0
        return self.timeline(recorder, priced, is_exact=is_even and len(priced) == ranks)

    def by_events(self) -> Timeline:
        recorder, priced = Recorder(self.topology.ranks, self.spans_of), self._jobs(range(self.topology.ranks))
        EventSimulator(priced, self.plan.matrix, Network(self.topology), recorder).run()
        return self.timeline(recorder, priced, is_exact=True)

    def priced(self, default: int) -> tuple[list[RankJobs], NDArray[np.int64]]:
        """Evenly spread ranks, and the place among them of the nearest one to each rank."""
        ranks = self.topology.ranks
        # From the last one: under a causal mask the first has the fewest calls.
        spread = np.linspace(ranks - 1, 0, min(self.priced_ranks or default, ranks))
        sampled = np.unique(spread.round().astype(int))
        priced = self._jobs(sampled.tolist())
        self.report(f"simulating {self.plan.method}", 1.0)
        return priced, np.abs(np.arange(ranks)[:, None] - sampled[None, :]).argmin(axis=1)

    def _jobs(self, ranks: Sequence[int]) -> list[RankJobs]:
        jobs: list[RankJobs] = []
        for rank in ranks:
            self.report(f"pricing {self.plan.method}", len(jobs) / len(ranks))
            jobs.append(rank_jobs(self.plan, rank, self.prices))
        return jobs

    def timeline(self, recorder: Recorder, priced: list[RankJobs], *, is_exact: bool) -> Timeline:
        plan = self.plan
        return Timeline(
            name=f"{plan.method} {plan.assignment} {plan.direction}",
            ranks=recorder.rank_times(),
            sent_nbytes=recorder.sent,
            peak_nbytes=max(each.peak_nbytes for each in priced),
            flops=plan.problem.flops(plan.direction),
            spans=tuple(sorted(recorder.spans, key=lambda span: (span.rank, span.start_s))),
            is_exact=is_exact,
        )
