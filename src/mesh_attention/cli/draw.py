"""`mesh-attention draw`: a plan as a page: who computes what, in which order, when, and against the other methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mesh_attention.cli import options as opt
from mesh_attention.cli.passes import passes
from mesh_attention.cli.pictures import make_folder, write_pictures
from mesh_attention.cli.planned import checked_plan, plan_errors, plan_on, refuse_more, required
from mesh_attention.cli.progress import progress
from mesh_attention.cli.scenes import explorer_scenes, scene_of
from mesh_attention.cli.words import cluster_words, name_with_ranks
from mesh_attention.drawing.page import Scene
from mesh_attention.errors import UsageError
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import Direction
from mesh_attention.topology import Topology
from mesh_attention.units import count

BESIDE_A_FILE = ("plan_file", "cluster", "ranks", "out", "json_output")
"""The options that go with a plan file; it says all else."""
MOST_RANKS = 128
PAGE = "explorer.html"

Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="What times are forecast on: NAMExRANKS, such as h100x16, or a .toml file; h100 if left out.",
        metavar="CLUSTER",
        rich_help_panel="Problem",
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", help="A plan file, instead of a problem.", metavar="FILE", rich_help_panel="Plan"),
]
Out = Annotated[
    Path, typer.Option("--out", help="The folder to write into.", metavar="FOLDER", rich_help_panel="Output")
]


def draw_command(
    context: typer.Context,
    cluster: Cluster = None,
    ranks: opt.ClusterRanks = None,
    seq: opt.PlannedSeq = None,
    heads: opt.PlannedHeads = None,
    head_dim: opt.HeadDim = "128",
    seq_kv: opt.SeqKv = None,
    kv_heads: opt.KvHeads = None,
    head_dim_v: opt.HeadDimV = None,
    batch: opt.Batch = "1",
    dtype: opt.Dtype = "bfloat16",
    causal: opt.Causal = False,
    window: opt.Window = None,
    documents: opt.Documents = None,
    method: opt.MethodName = "mesh",
    tile: opt.TileText = "auto",
    ulysses_degree: opt.UlyssesDegree = None,
    inner: opt.InnerText = None,
    layout: opt.LayoutName = None,
    route: opt.RouteName = None,
    partials: opt.PartialsName = None,
    blocks_per_call: opt.BlocksPerCall = None,
    keep: opt.KeepText = None,
    plan_file: PlanFile = None,
    out: Out = Path("pictures"),
    json_output: opt.JsonOutput = False,
) -> None:
    """Draw a plan: one page to explore it beside the other methods, and a trace.

    Exit code 0: done. 1: the plan file breaks a rule. 2: it cannot be done.
    """
    topology = opt.cluster_from(cluster or "h100", ranks)
    _check_ranks(topology)
    with plan_errors(), progress("planning") as report:
        if plan_file is not None:
            refuse_more(context, plan_file, allowed=BESIDE_A_FILE)
            plan = checked_plan(plan_file, topology, report)
            plans: dict[Direction, Plan] = {plan.direction: plan}
        else:
            problem = opt.problem_from(
                ranks=str(topology.ranks),
                seq=(required("--seq", seq), seq_kv),
                heads=(required("--heads", heads), kv_heads),
                head_dim=(head_dim, head_dim_v),
                batch=batch,
                dtype=dtype,
                mask=opt.mask_from(is_causal=causal, window_text=window, documents_text=documents),
            )
            options = {
                "method": method,
                "tile": opt.tile_from(tile),
                "ulysses_degree": opt.whole_from("--ulysses-degree", ulysses_degree),
                "inner": opt.inner_from(inner),
                "layout": opt.layout_from(layout),
                "route": opt.route_from("--route", route),
                "partials": opt.route_from("--partials", partials),
                "blocks_per_call": opt.whole_from("--blocks-per-call", blocks_per_call),
                "keep": opt.keep_from(keep),
            }
            plans = {d: plan_on(problem, topology, d, options) for d in passes(both=True)}
        make_folder("--out", out)
        subject = scene_of(plans, topology, report=report)
        scenes = explorer_scenes([subject], topology, report=report)
        page = out / PAGE
        title = f"{subject.method} {subject.tile} over {count(topology.ranks, 'rank')}"
        notes = [f"Times are forecasts on {cluster_words(topology)}.", "Other numbers of ranks: the same machines."]
        beside = [scene for scene in scenes if scene.ranks == topology.ranks]
        trace = write_pictures(page, scenes, traced=beside, title=title, notes=notes)
    if json_output:
        typer.echo(json.dumps(_as_json({"explorer": page, "trace": trace}, plans, topology, scenes)))
        return
    typer.echo(f"wrote {page} (open it in a browser)\nwrote {trace} (for ui.perfetto.dev)")


def _check_ranks(topology: Topology) -> None:
    if topology.ranks > MOST_RANKS:
        raise UsageError(
            f"{topology.ranks:,} ranks are more than a picture holds; expected at most {MOST_RANKS}: draw fewer with "
            "--ranks, or see 'mesh-attention simulate' for numbers"
        )


def _as_json(
    files: dict[str, Path], plans: dict[Direction, Plan], topology: Topology, scenes: list[Scene]
) -> dict[str, Any]:
    return {
        "files": {name: str(path) for name, path in files.items()},
        "cluster": name_with_ranks(topology),
        "digests": {direction: plan.digest for direction, plan in plans.items()},
        "scenes": [{"ranks": s.ranks, "method": s.method, "tile": s.tile} for s in scenes],
    }
