"""Scenes for the explorer page: a plan, and the main methods on the same problem, each forecast on a cluster."""

from __future__ import annotations

from collections.abc import Mapping

from mesh_attention.plan.plan import Plan
from mesh_attention.planners.choice import Choice
from mesh_attention.problem import Direction, Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.timeline import Timeline
from mesh_attention.topology import Topology
from mesh_attention.units import Progress, part_report
from mesh_attention_lab.comparison import rivals, sampled_ranks, single_block_plan, usual_ring_plan
from mesh_attention_lab.drawing.page import Scene

ALL_SPANS, SOME_SPANS = 16, 8
"""Spans of all ranks are kept up to this many ranks; of more ranks, those of a few."""


def method_name(plan: Plan) -> str:
    return f"ulysses+{plan.method}" if plan.assignment.ulysses_degree > 1 and plan.method != "ulysses" else plan.method


def scene_of(
    plans: Mapping[Direction, Plan],
    topology: Topology,
    *,
    report: Progress,
    measured: Mapping[Direction, Timeline] | None = None,
    method: str | None = None,
) -> Scene:
    """The plans with all their steps, simulated on the cluster."""
    spans_of = sampled_ranks(topology.ranks, all_up_to=ALL_SPANS, sample=SOME_SPANS)
    return Scene(
        method=method_name(next(iter(plans.values()))) if method is None else method,
        plans={direction: plan.unrolled() for direction, plan in plans.items()},
        forecasts={d: simulate(plan, topology, spans_of=spans_of, on_progress=report) for d, plan in plans.items()},
        measured=dict(measured or {}),
    )


def _plan(problem: Problem, topology: Topology, direction: Direction, choice: Choice) -> Plan:
    plan = single_block_plan(topology, problem, choice, direction)
    return usual_ring_plan(plan, topology) if plan.method == "ring" else plan


def with_rivals(subject: Scene, topology: Topology, *, report: Progress) -> list[Scene]:
    """The scene, and the main methods on the same problem, as far as they fit it."""
    plan = next(iter(subject.plans.values()))
    scenes = {(subject.method, subject.tile): subject}
    choices = list(rivals(plan.problem, Choice(layout=plan.layout)))
    for number, choice in enumerate(choices):
        plans = {d: _plan(plan.problem, topology, d, choice) for d in subject.directions}
        scene = scene_of(plans, topology, report=part_report(report, number, len(choices), f"{choice.method}: "))
        scenes.setdefault((scene.method, scene.tile), scene)
    return list(scenes.values())
