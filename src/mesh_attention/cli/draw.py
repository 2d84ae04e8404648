"""`mesh-attention draw`: a plan as pictures: who computes what, in which order, when, and against ring."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mesh_attention.cli import options as opt
from mesh_attention.cli.passes import passes
from mesh_attention.cli.pictures import (
    CHART_FORMATS,
    CHARTS,
    PICTURES,
    Album,
    Picture,
    make_folder,
    pictures_from,
    write_album,
)
from mesh_attention.cli.planned import checked_plan, plan_errors, plan_on, refuse_more, required
from mesh_attention.cli.progress import Report, progress
from mesh_attention.cli.scenes import explorer_scenes, rival_scenes, scene_of
from mesh_attention.cli.words import cluster_words, name_with_ranks
from mesh_attention.drawing.canvas import new_figure
from mesh_attention.drawing.page import Scene
from mesh_attention.errors import ParseError, UsageError
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import Direction
from mesh_attention.topology import Topology
from mesh_attention.units import count, parse_whole

BESIDE_A_FILE = ("plan_file", "cluster", "ranks", "out", "only", "chart_format", "rank", "json_output")
"""The options that go with a plan file; it says all else."""
ALL = ",".join(PICTURES)
MOST_RANKS = 128
LOOK_AT = {"explorer": "open it in a browser", "trace": "for ui.perfetto.dev"}

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
Only = Annotated[
    str,
    typer.Option("--only", help=f"Some of {ALL}.", metavar="LIST", rich_help_panel="Output", show_default="all"),
]
Format = Annotated[
    str,
    typer.Option("--format", help="Of the charts.", metavar="|".join(CHART_FORMATS), rich_help_panel="Output"),
]
Rank = Annotated[
    str,
    typer.Option("--rank", help="The rank that is marked and shown.", metavar="N", rich_help_panel="Output"),
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
    only: Only = ALL,
    chart_format: Format = "png",
    rank: Rank = "0",
    json_output: opt.JsonOutput = False,
) -> None:
    """Draw a plan: matrix, steps, timeline, methods against ring, a trace, and a page to explore it all.

    Exit code 0: done. 1: the plan file breaks a rule. 2: it cannot be done.
    """
    wanted = _wanted(only, chart_format)
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
        marked = _marked(rank, topology)
        make_folder("--out", out)
        album = _album(plans, topology, wanted, marked, report)
        written = write_album(album, out, wanted=wanted, chart_format=chart_format, report=report)
    if json_output:
        typer.echo(json.dumps(_as_json(album, plans, topology, written)))
        return
    for picture, path in written.items():
        typer.echo(f"wrote {path}" + (f" ({LOOK_AT[picture]})" if picture in LOOK_AT else ""))


def _wanted(only: str, chart_format: str) -> tuple[Picture, ...]:
    wanted = pictures_from(only)
    if chart_format not in CHART_FORMATS:
        raise ParseError(f"--format {chart_format!r}: expected one of {', '.join(CHART_FORMATS)}")
    if any(picture in CHARTS for picture in wanted):
        new_figure(height_in=1.0)  # refuses where there is no matplotlib
    return wanted


def _check_ranks(topology: Topology) -> None:
    if topology.ranks > MOST_RANKS:
        raise UsageError(
            f"{topology.ranks:,} ranks are more than a picture holds; expected at most {MOST_RANKS}: draw fewer with "
            "--ranks, or see 'mesh-attention simulate' for numbers"
        )


def _marked(text: str, topology: Topology) -> int:
    rank = parse_whole("--rank", text, least=0)
    if rank >= topology.ranks:
        raise UsageError(f"--rank {rank}: there are ranks 0 to {topology.ranks - 1}")
    return rank


def _album(
    plans: dict[Direction, Plan], topology: Topology, wanted: tuple[Picture, ...], rank: int, report: Report
) -> Album:
    """Only what is wanted is planned and simulated."""
    subject = scene_of(plans, topology, report=report)
    plan = next(iter(plans.values()))
    scenes: list[Scene] = [subject]
    if "explorer" in wanted:
        scenes = explorer_scenes([subject], topology, report=report)
    elif "against_ring" in wanted or "trace" in wanted:
        directions = subject.directions
        scenes += rival_scenes(plan.problem, topology, layout=plan.layout, directions=directions, report=report)
    here = [scene for scene in scenes if scene.ranks == topology.ranks]
    rivals = sorted(here, key=lambda scene: scene.method != "ring")
    return Album(
        subject=subject,
        rivals=_without_doubles(rivals),
        scenes=scenes,
        title=f"{subject.method} {subject.tile} over {count(topology.ranks, 'rank')}",
        where=f"forecast on {name_with_ranks(topology)}",
        notes=[f"Times are forecasts on {cluster_words(topology)}.", "Other numbers of ranks: the same machines."],
        rank=rank,
    )


def _without_doubles(scenes: list[Scene]) -> list[Scene]:
    return list({(scene.method, scene.tile): scene for scene in reversed(scenes)}.values())[::-1]


def _as_json(
    album: Album, plans: dict[Direction, Plan], topology: Topology, written: dict[Picture, Path]
) -> dict[str, Any]:
    return {
        "files": {picture: str(path) for picture, path in written.items()},
        "rank": album.rank,
        "cluster": name_with_ranks(topology),
        "digests": {direction: plan.digest for direction, plan in plans.items()},
        "scenes": [{"ranks": s.ranks, "method": s.method, "tile": s.tile} for s in album.scenes],
    }
