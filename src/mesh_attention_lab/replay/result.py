"""What is replayed and what was measured: plans, times and memory, by pass and as rows of a table. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from mesh_attention.errors import UsageError
from mesh_attention.plan.layout import Layout
from mesh_attention.planners.over_cache import Queries
from mesh_attention.problem import Direction, Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.result import Trial
from mesh_attention.tuning.tune import tune, tuned_plans
from mesh_attention.units import Progress
from mesh_attention_lab.comparison import decode_plans

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mesh_attention.plan.plan import Plan


BEST = "best"
"""Name that stands for the method that the tuner chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A plan for each pass, under a name, and how each was chosen."""

    name: str
    choices: Mapping[Direction, str]
    plans: Mapping[Direction, Plan]


def tuned_parts(
    problem: Problem,
    topology: Topology,
    methods: Sequence[str],
    *,
    directions: Sequence[Direction],
    layout: Layout | None = None,
    on_progress: Progress | None = None,
) -> list[Part]:
    """One part for each method, in the order asked for."""
    tuning = tune(problem, topology, directions=directions, layout=layout, on_progress=on_progress)
    trials: dict[str, Trial] = {trial.family: trial for trial in reversed(tuning.trials)}
    parts: list[Part] = []
    for method in dict.fromkeys(methods):
        trial = tuning.trials[0] if method == BEST else trials.get(method)
        if trial is None:
            raise UsageError(f"method {method}: {tuning.left_out.get(method, 'has no plan for this problem')}")
        choices = {direction: str(replace(choice, layout=None)) for direction, choice in trial.choices.items()}
        if all(part.choices != choices for part in parts):
            parts.append(Part(name=trial.family, choices=choices, plans=tuned_plans(problem, topology, trial)))
    return parts


def decoded_parts(problem: Problem, *, queries: Queries | None = None) -> list[Part]:
    """One part for each way to plan a decoded step."""
    plans = decode_plans(problem, queries=queries)
    return [Part(name=name, choices={"forward": ""}, plans={"forward": plan}) for name, plan in plans.items()]


What = Literal["forward", "backward", "both"]
BASE = "ring"
"""The method that the others are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """FLOPs, and the seconds of every round."""

    flops: int
    times_s: tuple[float, ...]

    @property
    def time_s(self) -> float:
        return median(self.times_s)

    @property
    def tflops(self) -> float:
        return self.flops / self.time_s / 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPass(Timed):
    """One kernel call by itself."""

    direction: Direction
    tokens: int
    kv_tokens: int

    @property
    def words(self) -> str:
        """The shape of the call."""
        keys = "" if self.tokens == self.kv_tokens else f" on {self.kv_tokens:,}"
        return f"a call of {self.tokens:,}{keys} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRow(Timed):
    """One pass of a method as one rank runs it, or both one after the other.

    `compute_s` is the pass without transfers, `forecast_s` the simulator's answer for
    that rank. `kernel_s` is the time of the same FLOPs at one kernel's rate, `ring_s` that of ring. `plan_nbytes` is
    the memory that the plan states, `peak_nbytes` the measured memory; for both passes, that of the larger one.
    """

    method: str
    plan: str
    what: What
    compute_s: float
    forecast_s: float
    kernel_s: float
    ring_s: float | None = None
    plan_nbytes: int
    peak_nbytes: int | None

    @property
    def exposed_s(self) -> float:
        """The time that transfers add."""
        return max(0.0, self.time_s - self.compute_s)

    @property
    def share(self) -> float:
        """Rate relative to one kernel."""
        return self.kernel_s / self.time_s

    @property
    def times_ring(self) -> float | None:
        """Speed relative to ring."""
        return None if self.ring_s is None else self.ring_s / self.time_s

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Every pass of every method, and the one kernel, measured in the same rounds."""

    rank: int
    passes: tuple[ReplayRow, ...]
    kernel: tuple[KernelPass, ...]


def rows_of(replayed: Replayed) -> list[ReplayRow]:
    """Rows of each method: its passes, and both if both were played."""
    rows: list[ReplayRow] = []
    for method in dict.fromkeys(timed.method for timed in replayed.passes):
        passes = [timed for timed in replayed.passes if timed.method == method]
        rows += passes if len(passes) == 1 else [*passes, _both(passes)]
    ring_s = {row.what: row.time_s for row in rows if row.method == BASE}
    return [replace(row, ring_s=ring_s.get(row.what)) for row in rows]


def _both(passes: Sequence[ReplayRow]) -> ReplayRow:
    summed = ("flops", "compute_s", "forecast_s", "kernel_s")
    totals: dict[str, Any] = {name: sum(getattr(timed, name) for timed in passes) for name in summed}
    times_s = tuple(map(sum, zip(*(timed.times_s for timed in passes), strict=True)))
    largest = max(passes, key=lambda timed: timed.plan_nbytes)
    return replace(largest, plan="", what="both", times_s=times_s, **totals)


def facts(timed: Timed) -> dict[str, Any]:
    figures = ("time_s", "exposed_s", "share", "times_ring", "tflops", "spread", "forecast_error", "memory_error")
    return asdict(timed) | {name: getattr(timed, name) for name in figures if hasattr(timed, name)}
