"""Plans for a cluster: a planner that tunes, for `MeshAttention(cluster=…)`, and plans of a given choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import DIRECTIONS, Direction
from mesh_attention.planning.choice import Choice
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.cache import cached_tune
from mesh_attention.tuning.traffic import plan_on
from mesh_attention.tuning.tune import tuned_plans


def tuned_planner(topology: Topology, *, memory_nbytes: float | None = None) -> Callable[..., Plan]:
    """``planner(problem, direction=…, layout=…, needs_gradient=…)``: the tuner's choice, made once for each problem.

    Both passes are tuned together. Without gradients only forward is tuned, and backward, which never runs, copies it.
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


def block_plan_on(topology: Topology, problem: Problem, choice: Choice, direction: Direction) -> Plan:
    """`plan_on` with one block per call, unless the choice states another number."""
    if choice.blocks_per_call is None and not choice.is_collective:
        choice = replace(choice, blocks_per_call=1)
    return plan_on(topology, problem, choice, direction)


def ring_like(plan: Plan, topology: Topology) -> Plan:
    """Ring-Attention as it is usually run: shards and partials travel along the ring, one block per call."""
    choice = Choice(method="ring", layout=plan.layout, route="ring", partials="ring", keep=plan.schedule.keep)
    return block_plan_on(topology, plan.problem, choice, plan.direction)
