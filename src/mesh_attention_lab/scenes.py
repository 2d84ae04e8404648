"""Scenes for the explorer page: a plan, and the main methods on the same problem, each forecast on a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Plan
from mesh_attention.planners.choice import Choice, default_layout
from mesh_attention.problem import Direction, Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.timeline import Timeline
from mesh_attention.topology import Topology
from mesh_attention.units import Progress, part_report
from mesh_attention_lab.comparison import rivals, sampled_ranks, single_block_plan, usual_ring_plan
from mesh_attention_lab.drawing.page import Scene

OFFERED_RANKS = (4, 16, 64)
"""Numbers of ranks on the explorer page, besides the one that was asked for."""
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


def rival_scenes(
    problem: Problem,
    topology: Topology,
    *,
    layout: Layout | None,
    directions: Sequence[Direction],
    report: Progress,
) -> Iterator[Scene]:
    """The main methods, as far as they fit the problem."""
    choices = list(rivals(problem, Choice(layout=layout or default_layout(problem))))
    for number, choice in enumerate(choices):
        plans = {direction: _plan(problem, topology, direction, choice) for direction in directions}
        prefix = f"{problem.ranks} ranks: "
        yield scene_of(plans, topology, report=part_report(report, number, len(choices), prefix))


def _plan(problem: Problem, topology: Topology, direction: Direction, choice: Choice) -> Plan:
    plan = single_block_plan(topology, problem, choice, direction)
    return usual_ring_plan(plan, topology) if plan.method == "ring" else plan


def explorer_scenes(first: Sequence[Scene], topology: Topology, *, report: Progress) -> list[Scene]:
    """These scenes, and the main methods on the same problem, on this and other numbers of ranks."""
    plan = next(iter(first[0].plans.values()))
    problem, directions = plan.problem, first[0].directions
    tokens = min(problem.seq_q, problem.seq_kv)
    counts = [topology.ranks, *(n for n in OFFERED_RANKS if n != topology.ranks and n <= tokens)]
    scenes = {(scene.ranks, scene.method, scene.tile): scene for scene in first}
    for number, ranks in enumerate(counts):
        rescaled = replace(problem, ranks=ranks)
        cluster = topology.with_ranks(ranks)
        part = part_report(report, number, len(counts))
        rivals = rival_scenes(rescaled, cluster, layout=plan.layout, directions=directions, report=part)
        for scene in rivals:
            scenes.setdefault((scene.ranks, scene.method, scene.tile), scene)
    return list(scenes.values())
