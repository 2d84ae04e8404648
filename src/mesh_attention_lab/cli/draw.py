"""`mesh-attention draw`: a plan as a page: who computes what, in which order and when, next to the other methods."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from mesh_attention.errors import UsageError
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import Direction
from mesh_attention.tuning.planner import block_plan_on
from mesh_attention.units import count
from mesh_attention_lab.cli import options as opt
from mesh_attention_lab.cli.command import group
from mesh_attention_lab.cli.files import checked_plan_for, make_folder, progress
from mesh_attention_lab.cli.tables import cluster_name, cluster_words
from mesh_attention_lab.scenes import explorer_scenes, scene_of, write_explorer

MOST_RANKS = 128
PAGE = "explorer.html"


@group
class DrawClusterOptions(opt.ClusterOptions):
    cluster: str = opt.of_problem(
        "--cluster",
        "Cluster for the forecasts: NAMExRANKS, such as h100x16, or a .toml file.",
        "CLUSTER",
        default="h100",
    )


@group
class DrawOptions:
    plan: Path | None = opt.of_plan("--plan", "A plan file, instead of a problem and a choice.", "FILE", default=None)
    out: Path = opt.of_output("--out", "The folder to write into.", "FOLDER", default=Path("pictures"))
    json: bool = opt.json_option()


def draw_command(
    context: typer.Context,
    on: DrawClusterOptions,
    problem: opt.PlannedProblemOptions,
    choice: opt.ChoiceOptions,
    given: DrawOptions,
) -> None:
    """Draw a plan: one page to explore it next to the other methods, and a trace.

    Exit code 0: done. 1: the plan file breaks a rule. 2: invalid input.
    """
    topology = on.topology
    if topology.ranks > MOST_RANKS:
        raise UsageError(
            f"{topology.ranks:,} ranks are more than the page shows; expected at most {MOST_RANKS}: use fewer --ranks, "
            "or see 'mesh-attention simulate' for numbers"
        )
    with progress("planning") as report:
        if given.plan is not None:
            opt.refuse_with_file(context, given.plan, opt.PlannedProblemOptions, opt.ChoiceOptions)
            plan = checked_plan_for(given.plan, topology, report)
            plans: dict[Direction, Plan] = {plan.direction: plan}
        else:
            asked = problem.problem(topology.ranks)
            wanted, directions = problem.choice(choice.choice), problem.passes(both=not problem.is_turn)
            plans = {d: block_plan_on(topology, asked, wanted, d) for d in directions}
        make_folder("--out", given.out)
        subject = scene_of(plans, topology, report=report)
        scenes = explorer_scenes([subject], topology, report=report)
        page = given.out / PAGE
        trace = write_explorer(
            page,
            scenes,
            traced=[scene for scene in scenes if scene.ranks == topology.ranks],
            title=f"{subject.method} {subject.tile} over {count(topology.ranks, 'rank')}",
            notes=[f"Times are forecasts on {cluster_words(topology)}.", "Other numbers of ranks: the same machines."],
        )
    if given.json:
        answer = {
            "files": {"explorer": str(page), "trace": str(trace)},
            "cluster": cluster_name(topology),
            "digests": {direction: plan.digest for direction, plan in plans.items()},
            "scenes": [{"ranks": s.ranks, "method": s.method, "tile": s.tile} for s in scenes],
        }
        typer.echo(json.dumps(answer))
        return
    typer.echo(f"wrote {page} (open it in a browser)\nwrote {trace} (for ui.perfetto.dev)")
