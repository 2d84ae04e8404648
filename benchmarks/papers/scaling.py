"""The scaling experiments of the Mesh-Attention paper, simulated: Ring and Mesh on 32 to 256 GPUs.

The paper's way, as far as planners here have it: striped, one block a call, everything passed on along rings, the
greedy order with the costs of the cluster. Its backward sends O along; ours sends delta instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mesh_attention.masks import causal
from mesh_attention.plan.assignment import Tile
from mesh_attention.plan.steps import DIRECTIONS, Direction
from mesh_attention.planners.choice import Choice, Method
from mesh_attention.problem import Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.topology import Topology
from mesh_attention.tuning.bounds import plan_on
from papers.figures import PUBLISHED, SCALING_TILES, Quantity

Contender = Literal["ring", "mesh"]
Progress = Callable[[str, float], None]
STRONG_SEQ = 1 << 20
WEAK_SEQ = {32: 1 << 19, 256: 256 * 5792}
"""Tokens by GPUs: 512K and 1.414M, the same compute a GPU."""


class Run(NamedTuple):
    contender: Contender
    ranks: int
    seq: int


class Seconds(NamedTuple):
    time_s: float
    compute_s: float

    @property
    def wait_s(self) -> float:
        return self.time_s - self.compute_s


CONTENDERS: tuple[Contender, ...] = ("ring", "mesh")
RUNS = tuple(
    Run(contender, ranks, seq)
    for ranks, seq in (*((ranks, STRONG_SEQ) for ranks in SCALING_TILES), *WEAK_SEQ.items())
    for contender in CONTENDERS
)
Measured = Mapping[Run, Mapping[Direction, Seconds]]


def scaling_problem(run: Run) -> Problem:
    return Problem.self_attention(seq_len=run.seq, heads=32, head_dim=128, ranks=run.ranks, mask=causal())


def run_experiments(cluster: Topology, *, on_progress: Progress | None = None) -> Measured:
    """Every run, both passes. `cluster` is taken with as many ranks as each run has."""
    measured: dict[Run, dict[Direction, Seconds]] = {}
    for index, run in enumerate(RUNS):
        if on_progress is not None:
            on_progress(f"simulating {run.contender} on {run.ranks} GPUs", index / len(RUNS))
        topology = cluster.with_ranks(run.ranks)
        measured[run] = {direction: _simulated(run, topology, direction) for direction in DIRECTIONS}
    return measured


def _simulated(run: Run, topology: Topology, direction: Direction) -> Seconds:
    problem = scaling_problem(run)
    tile = Tile(1, run.ranks) if run.contender == "ring" else SCALING_TILES[run.ranks]
    method: Method = "ring" if run.contender == "ring" else "mesh"
    choice = Choice.of(method=method, tile=tile, layout="striped", route="ring", partials="ring", blocks_per_call=1)
    plan = plan_on(topology, problem, choice, direction)
    # Striped ranks do alike: the calls of one stand for all.
    timeline = simulate(plan, topology, priced_ranks=1)
    return Seconds(timeline.time_s, timeline.compute_s)


# What is read off them


@dataclass(frozen=True, slots=True)
class Scaling:
    """All runs, with the passes that are taken to be timed."""

    seconds: Mapping[Run, Seconds]

    @classmethod
    def of(cls, measured: Measured, passes: tuple[Direction, ...]) -> Scaling:
        return cls(
            {
                run: Seconds(sum(by[d].time_s for d in passes), sum(by[d].compute_s for d in passes))
                for run, by in measured.items()
            }
        )

    def strong(self, contender: Contender) -> dict[int, Seconds]:
        """1M tokens, by GPUs."""
        return {ranks: self.seconds[Run(contender, ranks, STRONG_SEQ)] for ranks in SCALING_TILES}

    def growth(self, contender: Contender) -> float:
        first, last = (self.seconds[Run(contender, ranks, seq)].time_s for ranks, seq in WEAK_SEQ.items())
        return last / first

    def best(self, contender: Contender) -> int:
        times = self.strong(contender)
        return min(times, key=lambda ranks: times[ranks].time_s)

    def excess(self, contender: Contender, ranks: int) -> float:
        """How much longer this many GPUs take than the best number of GPUs."""
        times = self.strong(contender)
        return times[ranks].time_s / times[self.best(contender)].time_s - 1

    def values(self) -> dict[Quantity, float]:
        """The quantities, in the units they are published in."""
        ring, mesh = self.strong("ring"), self.strong("mesh")
        speedups = [ring[ranks].time_s / mesh[ranks].time_s for ranks in SCALING_TILES]
        # A ring that never waits has nothing to cut.
        cuts = [1 - mesh[n].wait_s / ring[n].wait_s for n in SCALING_TILES if ring[n].wait_s > 0] or [0.0]
        return {
            "ring time": ring[round(PUBLISHED["ring best"])].time_s,
            "mesh time": mesh[round(PUBLISHED["mesh best"])].time_s,
            "ring best": self.best("ring"),
            "mesh best": self.best("mesh"),
            "most speedup": max(speedups),
            "average speedup": sum(speedups) / len(speedups),
            "ring growth": self.growth("ring"),
            "mesh growth": self.growth("mesh"),
            "most wait cut": 100 * max(cuts),
            "wait share": 100 * mesh[256].wait_s / mesh[256].time_s,
        }
