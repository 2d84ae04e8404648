"""`mesh-attention simulate`: forecast a plan on a cluster, beside Ring-Attention."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mesh_attention.cli import options as opt
from mesh_attention.cli.comparison import counted_ranks
from mesh_attention.cli.files import check_chart, check_output
from mesh_attention.cli.passes import forecast, passes
from mesh_attention.cli.planned import checked_plan, plan_errors, plan_on, refuse_more, required, ring_like
from mesh_attention.cli.progress import Report, progress
from mesh_attention.cli.simulate_report import Contender, as_json, bounds_of, print_forecasts
from mesh_attention.drawing.canvas import save_chart
from mesh_attention.drawing.gantt import gantt
from mesh_attention.drawing.trace import write_trace
from mesh_attention.plan.codec import plan_to_json
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import Direction
from mesh_attention.problem import Problem
from mesh_attention.timeline import Timeline
from mesh_attention.topology import Topology

BESIDE_A_FILE = ("file", "cluster", "ranks", "trace", "chart", "json_output")
"""The options that go with a plan file; it says all else."""

File = Annotated[
    Path | None,
    typer.Argument(metavar="PLAN", help="A plan file, instead of a problem and options.", show_default=False),
]


def simulate_command(
    context: typer.Context,
    cluster: opt.Cluster,
    file: File = None,
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
    backward: opt.BothPasses = False,
    route: opt.RouteName = None,
    partials: opt.PartialsName = None,
    blocks_per_call: opt.BlocksPerCall = None,
    keep: opt.KeepText = None,
    trace: opt.Trace = None,
    chart: opt.Chart = None,
    json_output: opt.JsonOutput = False,
) -> None:
    """Forecast a plan on a cluster: time, what communication adds, bytes and memory, beside ring.

    Exit code 0: done. 1: the plan file breaks a rule. 2: it cannot be done.
    """
    check_output("--trace", trace, example="trace.json")
    check_chart(chart)
    topology = opt.cluster_from(cluster, ranks)
    with plan_errors(), progress("planning") as report:
        if file is not None:
            refuse_more(context, file, allowed=BESIDE_A_FILE)
            asked = _from_file(file, topology, report)
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
                "tile": opt.tile_from(tile),
                "ulysses_degree": opt.whole_from("--ulysses-degree", ulysses_degree),
                "inner": opt.inner_from(inner),
                "layout": opt.layout_from(layout),
                "route": opt.route_from("--route", route),
                "partials": opt.route_from("--partials", partials),
                "blocks_per_call": opt.whole_from("--blocks-per-call", blocks_per_call),
                "keep": opt.keep_from(keep),
            }
            asked = _from_options(problem, topology, options | {"method": method}, passes(both=backward))
        contenders = _forecast(asked, is_traced=trace is not None, report=report)
        _write(contenders[0].whole, asked.shown_ranks, trace=trace, chart=chart, report=report)
    if json_output:
        typer.echo(json.dumps(_as_json(asked, contenders, trace=trace, chart=chart)))
        return
    print_forecasts(contenders, topology, shown_ranks=asked.shown_ranks)
    for path in (trace, chart):
        if path is not None:
            typer.echo(f"wrote {path}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A plan for each pass, and ring's to set beside them."""

    topology: Topology
    plans: dict[Direction, Plan]
    ring: dict[Direction, Plan]

    @property
    def shown_ranks(self) -> tuple[int, ...]:
        """The first, a middle one and the last."""
        return tuple(sorted({0, self.topology.ranks // 2, self.topology.ranks - 1}))


# From options


def _from_options(
    problem: Problem, topology: Topology, options: dict[str, Any], directions: tuple[Direction, ...]
) -> Asked:
    plans = {direction: plan_on(problem, topology, direction, options) for direction in directions}
    ring = {direction: ring_like(plan, topology) for direction, plan in plans.items()}
    return Asked(topology=topology, plans=plans, ring=ring)


# From a file


def _from_file(file: Path, topology: Topology, report: Report) -> Asked:
    plan = checked_plan(file, topology, report)
    return Asked(topology=topology, plans={plan.direction: plan}, ring={plan.direction: ring_like(plan, topology)})


# Forecasts


def _forecast(asked: Asked, *, is_traced: bool, report: Report) -> list[Contender]:
    """The plan's, with what some ranks do when; and ring's, unless the plan is ring."""
    topology = asked.topology
    ranks = {*asked.shown_ranks, *(counted_ranks(topology.ranks) if is_traced else ())}
    found = [Contender(plans=asked.plans, timelines=forecast(asked.plans, topology, spans_of=ranks, report=report))]
    if asked.ring != asked.plans:
        found.append(Contender(plans=asked.ring, timelines=forecast(asked.ring, topology, spans_of=(), report=report)))
    return found


def _write(
    timeline: Timeline, shown_ranks: tuple[int, ...], *, trace: Path | None, chart: Path | None, report: Report
) -> None:
    if trace is not None:
        report(f"writing {trace.name}", 1.0)
        write_trace(trace, timeline)
    if chart is not None:
        report(f"drawing {chart.name}", 1.0)
        save_chart(gantt(timeline, ranks=shown_ranks), chart)


def _as_json(asked: Asked, contenders: list[Contender], *, trace: Path | None, chart: Path | None) -> dict[str, Any]:
    plans = list(asked.plans.values())
    bound_s, bound_nbytes = bounds_of(plans, asked.topology)
    return {
        "problem": plan_to_json(plans[0])["problem"],
        "cluster": asdict(asked.topology),
        "layout": plans[0].layout.name,
        "is_exact": all(contender.whole.is_exact for contender in contenders),
        "bound_s": bound_s,
        "bound_nbytes": bound_nbytes,
        "forecasts": [as_json(contender, asked.topology) for contender in contenders],
        "trace": None if trace is None else str(trace),
        "chart": None if chart is None else str(chart),
    }
