"""What is replayed and what was measured: plans, times and memory, by pass and as rows of a table. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from mesh_attention.errors import UsageError
from mesh_attention.plan.layout import Layout
from mesh_attention.planning.choice import FAMILIES
from mesh_attention.problem import Direction, Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.result import Trial
from mesh_attention.tuning.tune import tune, tuned_plans
from mesh_attention.units import Report

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh_attention.plan.plan import Plan


BEST = "best"
"""Name that stands for the method that the tuner chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A plan for each pass, under a name."""

    name: str
    description: str
    plans: Mapping[Direction, Plan]


def tuned_parts(
    problem: Problem,
    topology: Topology,
    methods: Sequence[str],
    *,
    directions: Sequence[Direction],
    layout: Layout | None = None,
    on_progress: Report | None = None,
) -> list[Part]:
    """One part for each method, in the order asked for."""
    unknown = [method for method in methods if method not in (*FAMILIES, BEST)]
    if unknown:
        raise UsageError(f"method {unknown[0]!r}: expected some of {', '.join((*FAMILIES, BEST))}")
    tuning = tune(problem, topology, directions=directions, layout=layout, on_progress=on_progress)
    trials: dict[str, Trial] = {trial.family: trial for trial in reversed(tuning.trials)}
    parts: list[Part] = []
    for method in dict.fromkeys(methods):
        trial = tuning.trials[0] if method == BEST else trials.get(method)
        if trial is None:
            raise UsageError(f"method {method}: {tuning.left_out.get(method, 'has no plan for this problem')}")
        description = "; ".join(dict.fromkeys(str(replace(choice, layout=None)) for choice in trial.choices.values()))
        if all(part.description != description for part in parts):
            parts.append(Part(name=trial.family, description=description, plans=tuned_plans(problem, topology, trial)))
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPass:
    """One kernel call by itself. `times_s` has the seconds of every round."""

    direction: Direction
    flops: int
    times_s: tuple[float, ...]

    @property
    def time_s(self) -> float:
        return median(self.times_s)

    @property
    def tflops(self) -> float:
        return self.flops / self.time_s / 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass(KernelPass):
    """One pass of one plan, as one rank runs it, in the same rounds.

    `compute_s` is the pass without transfers, `host_s` the time to queue it, `forecast_s` the simulator's answer for
    that rank. `plan_nbytes` is the memory that the plan states, `peak_nbytes` the measured memory.
    """

    compute_s: float
    host_s: float
    forecast_s: float
    plan_nbytes: int
    peak_nbytes: int | None

    @property
    def exposed_s(self) -> float:
        """The time that transfers add."""
        return max(0.0, self.time_s - self.compute_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A method's passes, forward first."""

    name: str
    description: str
    passes: tuple[Pass, ...]

    def plan_words(self, direction: Direction) -> str:
        """The plan of one pass; descriptions of passes that differ follow each other."""
        texts = self.description.split("; ")
        at = [timed.direction for timed in self.passes].index(direction)
        return texts[at] if len(texts) == len(self.passes) else self.description


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The contenders and the one kernel, measured in the same rounds."""

    rank: int
    contenders: tuple[Contender, ...]
    kernel: tuple[KernelPass, ...]

    def share(self, passes: Sequence[Pass]) -> float:
        """Rate of these passes, relative to the one kernel on the same work."""
        rates = {timed.direction: timed.tflops * 1e12 for timed in self.kernel}
        return sum(timed.flops / rates[timed.direction] for timed in passes) / sum(timed.time_s for timed in passes)


# Rows: each pass of a method, and both together


What = Literal["forward", "backward", "both"]
BASE = "ring"
"""The method that the others are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRow:
    """One pass of a method, or both one after the other; `times_s` has every round.

    `share` is relative to one kernel's rate, `times_ring` the speed relative to ring. For both passes, the memory is
    that of the larger one.
    """

    method: str
    plan: str
    what: What
    flops: int
    times_s: tuple[float, ...]
    time_s: float
    share: float
    times_ring: float | None
    exposed_s: float
    compute_s: float
    host_s: float
    plan_nbytes: int
    peak_nbytes: int | None
    forecast_s: float

    @property
    def tflops(self) -> float:
        return self.flops / self.time_s / 1e12

    @property
    def forecast_tflops(self) -> float:
        return self.flops / self.forecast_s / 1e12

    @property
    def spread(self) -> float:
        """Half the difference between the fastest and the slowest round, as a share of the median."""
        return (max(self.times_s) - min(self.times_s)) / 2 / self.time_s

    @property
    def forecast_error(self) -> float:
        return self.forecast_s / self.time_s - 1

    @property
    def memory_error(self) -> float | None:
        """Relative error of the memory that the plan states; None where it was not measured."""
        return None if not self.peak_nbytes else self.plan_nbytes / self.peak_nbytes - 1


def rows_of(replayed: Replayed) -> list[ReplayRow]:
    """Rows of each method: forward, backward, and both if both were played."""
    ring = next((contender for contender in replayed.contenders if contender.name == BASE), None)
    ring_s = {} if ring is None else {what: sum(timed.time_s for timed in passes) for what, passes in _takes(ring)}
    return [
        _row(contender, what, passes, ring_s=ring_s.get(what), share=replayed.share(passes))
        for contender in replayed.contenders
        for what, passes in _takes(contender)
    ]


def _takes(contender: Contender) -> list[tuple[What, tuple[Pass, ...]]]:
    takes: list[tuple[What, tuple[Pass, ...]]] = [(timed.direction, (timed,)) for timed in contender.passes]
    return takes if len(takes) == 1 else [*takes, ("both", contender.passes)]


def _row(
    contender: Contender, what: What, passes: tuple[Pass, ...], *, ring_s: float | None, share: float
) -> ReplayRow:
    summed = ("flops", "time_s", "exposed_s", "compute_s", "host_s", "forecast_s")
    totals: dict[str, Any] = {name: sum(getattr(timed, name) for timed in passes) for name in summed}
    largest = max(passes, key=lambda timed: timed.plan_nbytes)
    return ReplayRow(
        method=contender.name,
        plan="" if what == "both" else contender.plan_words(what),
        what=what,
        times_s=tuple(map(sum, zip(*(timed.times_s for timed in passes), strict=True))),
        share=share,
        times_ring=None if ring_s is None else ring_s / totals["time_s"],
        plan_nbytes=largest.plan_nbytes,
        peak_nbytes=largest.peak_nbytes,
        **totals,
    )


def row_as_json(row: ReplayRow) -> dict[str, Any]:
    figures = ("tflops", "spread", "forecast_tflops", "forecast_error", "memory_error")
    return asdict(row) | {name: getattr(row, name) for name in figures}


def kernel_as_json(timed: KernelPass) -> dict[str, Any]:
    return asdict(timed) | {"time_s": timed.time_s, "tflops": timed.tflops}
