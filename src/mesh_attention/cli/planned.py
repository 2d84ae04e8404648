"""Plans in the order that suits a cluster."""

from __future__ import annotations

from typing import Any

from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import Direction
from mesh_attention.planning.registry import COLLECTIVE_METHODS, make_plan
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.candidates import Candidate
from mesh_attention.tuning.traffic import costs_on


def plan_on(problem: Problem, topology: Topology, direction: Direction, options: dict[str, Any]) -> Plan:
    """As the tuner plans: in the order that suits the cluster's links."""
    plan = make_plan(problem, direction=direction, **options)
    if plan.method in COLLECTIVE_METHODS:
        return plan
    candidate = Candidate(
        order="greedy",
        assignment=plan.assignment,
        layout=plan.layout.name,
        route=plan.schedule.route,
        partials=plan.schedule.partials,
        blocks_per_call=options.get("blocks_per_call") or 1,
        keep=plan.schedule.keep,
    )
    costs = costs_on(topology, problem, candidate, direction)
    return make_plan(problem, direction=direction, **options, costs=costs)


def ring_like(plan: Plan, topology: Topology) -> Plan:
    """Ring-Attention as it is usually run, with the plan's layout and what it keeps."""
    options = {"method": "ring", "layout": plan.layout, "route": "ring", "partials": "ring"}
    options |= {"blocks_per_call": None, "keep": plan.schedule.keep}
    return plan_on(plan.problem, topology, plan.direction, options)
