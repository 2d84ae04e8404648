"""A planner that tunes: what `MeshAttention(cluster=…)` plans with."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import DIRECTIONS, Direction
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.cache import cached_tune
from mesh_attention.tuning.tune import tuned_plans


def tuned_planner(topology: Topology, *, memory_nbytes: float | None = None) -> Callable[..., Plan]:
    """``planner(problem, direction=…, layout=…)``: the tuner's choice for both passes, found once a problem."""

    @lru_cache(maxsize=128)
    def plans(problem: Problem, layout: str) -> dict[Direction, Plan]:
        tuning, _ = cached_tune(problem, topology, directions=DIRECTIONS, layout=layout, memory_nbytes=memory_nbytes)
        return tuned_plans(problem, topology, tuning.chosen)

    def planner(problem: Problem, *, direction: Direction, layout: Layout) -> Plan:
        return plans(problem, layout.name)[direction]

    return planner
