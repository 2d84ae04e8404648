"""`mesh-attention draw`: a plan as a page: who computes what, in which order and when, next to the other methods."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mesh_attention.errors import UsageError
from mesh_attention.plan.plan import Plan
from mesh_attention.problem import Direction
from mesh_attention.units import count
from mesh_attention_lab.cli import options as opt
from mesh_attention_lab.cli.terminal import cluster_name, cluster_words, progress
from mesh_attention_lab.comparison import single_block_plan
from mesh_attention_lab.drawing.page import write_page
from mesh_attention_lab.scenes import scene_of, with_rivals

MOST_RANKS = 128


@dataclass(frozen=True, kw_only=True)
class DrawOptions(opt.PlannedOptions):
    cluster: opt.Cluster = "h100"
    plan: Annotated[
        Path | None, opt.option("A plan file, instead of a problem and a choice.", "FILE", panel=opt.PLAN)
    ] = None
    out: Annotated[Path, opt.file("The page to write.", "explorer.html")] = Path("explorer.html")
    json: opt.AsJson = False


def draw_command(options: DrawOptions) -> None:
    """Draw a plan: one page to explore it next to the other methods.

    Exit code 0: done. 1: the plan file breaks a rule. 2: invalid input.
    """
    topology = options.topology
    if topology.ranks > MOST_RANKS:
        raise UsageError(
            f"{topology.ranks:,} ranks are more than the page shows; expected at most {MOST_RANKS}: use fewer --ranks, "
            "or see 'mesh-attention simulate' for numbers"
        )
    with progress("planners") as report:
        if options.plan is not None:
            plan = options.plan_in(options.plan, report)
            plans: dict[Direction, Plan] = {plan.direction: plan}
        else:
            problem = options.problem(topology.ranks)
            directions = options.passes(both=not options.is_turn)
            plans = {d: single_block_plan(topology, problem, options.choice, d) for d in directions}
        subject = scene_of(plans, topology, report=report)
        scenes = with_rivals(subject, topology, report=report)
        write_page(
            options.out,
            scenes,
            title=f"{subject.method} {subject.tile} over {count(topology.ranks, 'rank')}",
            notes=[f"Times are forecasts on {cluster_words(topology)}."],
        )
    if options.json:
        answer = {
            "page": str(options.out),
            "cluster": cluster_name(topology),
            "digests": {direction: plan.digest for direction, plan in plans.items()},
            "scenes": [{"ranks": s.ranks, "method": s.method, "tile": s.tile} for s in scenes],
        }
        typer.echo(json.dumps(answer))
        return
    typer.echo(f"wrote {options.out} (open it in a browser)")
