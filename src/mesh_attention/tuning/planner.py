"""A planner that tunes: what `MeshAttention(cluster=…)` plans with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import DIRECTIONS, Direction
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.cache import cached_tune
from mesh_attention.tuning.tune import tuned_plans


def tuned_planner(topology: Topology, *, memory_nbytes: float | None = None) -> Callable[..., Plan]:
    """``planner(problem, direction=…, layout=…, needs_gradient=…)``: the tuner's choice, found once a problem.

    For both passes together; without gradients for forward alone, and backward, which nobody runs then, is like it.
    """

    @lru_cache(maxsize=128)
    def plans(problem: Problem, layout: str, needs_gradient: bool) -> dict[Direction, Plan]:
        directions = DIRECTIONS if needs_gradient else DIRECTIONS[:1]
        tuning, _ = cached_tune(problem, topology, directions=directions, layout=layout, memory_nbytes=memory_nbytes)
        chosen = tuning.chosen
        choices = {direction: chosen.choices.get(direction, chosen.choices["forward"]) for direction in DIRECTIONS}
        return tuned_plans(problem, topology, replace(chosen, choices=choices))

    def planner(problem: Problem, *, direction: Direction, layout: Layout, needs_gradient: bool = True) -> Plan:
        return plans(problem, layout.name, needs_gradient)[direction]

    return planner
