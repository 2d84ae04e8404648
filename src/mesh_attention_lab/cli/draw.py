"""`mesh-attention draw`: a plan as a page: who computes what, in which order and when, next to the other methods."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from mesh_attention.errors import UsageError
from mesh_attention.plan.assignment import tiles_of
from mesh_attention.plan.plan import Plan
from mesh_attention.planners.choice import Choice
from mesh_attention.planners.costs import least_volume_tile
from mesh_attention.problem import Direction
from mesh_attention.simulation.simulate import simulate
from mesh_attention.timeline import Timeline
from mesh_attention.topology import Topology
from mesh_attention.units import Progress, count, part_report
from mesh_attention_lab.cli import options as opt
from mesh_attention_lab.cli.terminal import cluster_words, progress
from mesh_attention_lab.comparison import rivals, sampled_ranks, single_block_plan
from mesh_attention_lab.drawing import writing
from mesh_attention_lab.drawing.page import Scene, write_page
from mesh_attention_lab.drawing.trace import joined, write_trace

MOST_RANKS = 128
ALL_SPANS, SOME_SPANS = 16, 8
"""Spans of all ranks are kept up to this many ranks; of more ranks, those of a few."""


@dataclass(frozen=True, kw_only=True)
class DrawOptions(opt.PlannedOptions):
    file: Annotated[
        Path | None, opt.option("A plan file, instead of a problem and a choice.", "FILE", None, opt.PLAN, "--plan")
    ] = None
    cluster: opt.Cluster = "h100"
    out: Annotated[Path, opt.option("The folder to write into.", "FOLDER", panel=opt.OUTPUT)] = Path("pictures")
    json: opt.AsJson = False


def draw_command(options: DrawOptions) -> None:
    """Draw a plan: one page to explore it next to the other methods, and a trace.

    Exit code 0: done. 1: the plan file breaks a rule. 2: invalid input.
    """
    topology = options.topology
    if topology.ranks > MOST_RANKS:
        raise UsageError(
            f"{topology.ranks:,} ranks are more than the page shows; expected at most {MOST_RANKS}: use fewer --ranks, "
            "or see 'mesh-attention simulate' for numbers"
        )
    with progress("planners") as report:
        plans = options.plans(report, both=not options.is_turn)
        with writing(options.out):
            options.out.mkdir(parents=True, exist_ok=True)
        page, trace = options.out / "explorer.html", options.out / "trace.json"
        subject = scene_of(plans, topology, report=report)
        scenes = with_rivals(subject, topology, report=report)
        write_trace(trace, joined(subject.forecasts.values()))
        write_page(
            page,
            scenes,
            title=f"{subject.method} {subject.tile} over {count(topology.ranks, 'rank')}",
            notes=[f"Times are forecasts on {cluster_words(topology)}."],
        )
    if options.json:
        answer = {
            "files": {"explorer": str(page), "trace": str(trace)},
            "digests": {direction: plan.digest for direction, plan in plans.items()},
            "scenes": [{"ranks": s.ranks, "method": s.method, "tile": s.tile} for s in scenes],
        }
        typer.echo(json.dumps(answer))
        return
    typer.echo(f"wrote {page} (open it in a browser)\nwrote {trace} (for ui.perfetto.dev)")


# Scenes: a plan, and the main methods on the same problem, each forecast on a cluster


def scene_of(
    plans: Mapping[Direction, Plan],
    topology: Topology,
    *,
    report: Progress,
    measured: Mapping[Direction, Timeline] | None = None,
) -> Scene:
    """The plans with all their steps, simulated on the cluster."""
    plan = next(iter(plans.values()))
    is_mixed = plan.assignment.ulysses_degree > 1 and plan.method != "ulysses"
    spans_of = sampled_ranks(topology.ranks, all_up_to=ALL_SPANS, sample=SOME_SPANS)
    return Scene(
        method=f"ulysses+{plan.method}" if is_mixed else plan.method,
        plans={direction: plan.unrolled() for direction, plan in plans.items()},
        forecasts={d: simulate(plan, topology, spans_of=spans_of, on_progress=report) for d, plan in plans.items()},
        measured=dict(measured or {}),
    )


def with_rivals(subject: Scene, topology: Topology, *, report: Progress) -> list[Scene]:
    """The scene, and the main methods on the same problem, as far as they fit it, mesh with neighbouring tiles."""
    plan = next(iter(subject.plans.values()))
    scenes = {(subject.method, subject.tile): subject}
    choices = list(rivals(plan.problem, Choice(layout=plan.layout)))
    tiles = tiles_of(plan.problem.ranks)
    at = tiles.index(least_volume_tile(plan.problem, plan.layout, "forward", ulysses_degree=1))
    near = [tile for tile in tiles[max(0, at - 1) : at + 2] if min(tile.rows, tile.cols) > 1 and tile != tiles[at]]
    choices += [replace(choices[2], tile=tile) for tile in near]
    for number, choice in enumerate(choices):
        usual = replace(choice, route="ring", partials="ring") if choice.method == "ring" else choice
        plans = {d: single_block_plan(topology, plan.problem, usual, d) for d in subject.directions}
        scene = scene_of(plans, topology, report=part_report(report, number, len(choices), f"{choice.method}: "))
        scenes.setdefault((scene.method, scene.tile), scene)
    return list(scenes.values())
