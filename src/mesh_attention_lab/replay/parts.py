"""The parts of a replay: for each method asked for, the plans that the tuner chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mesh_attention.errors import UsageError
from mesh_attention.plan.steps import Direction
from mesh_attention.planning.choice import FAMILIES
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.result import Trial
from mesh_attention.tuning.tune import tune, tuned_plans

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
    layout: str | None = None,
    on_progress: Callable[[str, float], None] | None = None,
) -> list[Part]:
    """One part for each method, in the order asked for."""
    unknown = [method for method in methods if method not in (*FAMILIES, BEST)]
    if unknown:
        raise UsageError(f"method {unknown[0]!r}: expected some of {', '.join((*FAMILIES, BEST))}")
    tuning = tune(problem, topology, directions=directions, layout=layout, on_progress=on_progress)
    trials: dict[str, Trial] = {trial.family: trial for trial in reversed(tuning.trials) if not trial.is_bound}
    parts: list[Part] = []
    for method in dict.fromkeys(methods):
        trial = tuning.trials[0] if method == BEST else trials.get(method)
        if trial is None:
            raise UsageError(f"method {method}: {tuning.left_out.get(method, 'has no plan for this problem')}")
        description = "; ".join(dict.fromkeys(str(replace(choice, layout=None)) for choice in trial.choices.values()))
        if all(part.description != description for part in parts):
            parts.append(Part(name=trial.family, description=description, plans=tuned_plans(problem, topology, trial)))
    return parts
