"""`mesh-attention tune`: the plan to use for a problem on a cluster, beside the best of every other method."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mesh_attention.cli import options as opt
from mesh_attention.cli.comparison import counted_ranks
from mesh_attention.cli.files import check_chart, check_output
from mesh_attention.cli.passes import forecast, joined, passes
from mesh_attention.cli.progress import Report, progress
from mesh_attention.cli.tune_chart import AXES, Axis, Chart, Charter, axis_from, check_axis
from mesh_attention.cli.tune_report import Answer, print_tuning
from mesh_attention.cli.usage import cluster_code, explicit_code
from mesh_attention.cli.words import cluster_name
from mesh_attention.drawing.charts import save_chart, time_chart
from mesh_attention.drawing.trace import write_trace
from mesh_attention.errors import UsageError
from mesh_attention.plan.codec import plan_to_json
from mesh_attention.plan.layout import layout_named
from mesh_attention.plan.steps import Direction
from mesh_attention.planning.choice import Choice
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.cache import cached_tune
from mesh_attention.tuning.result import Tuning, tuning_to_json
from mesh_attention.tuning.tune import tune, tuned_plans

GIB = 2**30
CODE_WIDTH = 100

NoCache = Annotated[bool, typer.Option("--no-cache", help="Tune anew, and keep nothing.", rich_help_panel="Output")]
Against = Annotated[
    str | None,
    typer.Option("--against", help="What --chart has on its x axis.", metavar="|".join(AXES), rich_help_panel="Output"),
]


def tune_command(
    cluster: opt.Cluster,
    seq: opt.Seq,
    heads: opt.Heads,
    ranks: opt.ClusterRanks = None,
    head_dim: opt.HeadDim = "128",
    seq_kv: opt.SeqKv = None,
    kv_heads: opt.KvHeads = None,
    head_dim_v: opt.HeadDimV = None,
    batch: opt.Batch = "1",
    dtype: opt.Dtype = "bfloat16",
    causal: opt.Causal = False,
    window: opt.Window = None,
    documents: opt.Documents = None,
    backward: opt.BothPasses = False,
    layout: opt.LayoutName = None,
    memory: opt.Memory = None,
    chart: opt.Chart = None,
    against: Against = None,
    trace: opt.Trace = None,
    no_cache: NoCache = False,
    json_output: opt.JsonOutput = False,
) -> None:
    """Choose the plan for a problem on a cluster, and say why no other.

    Exit code 0: done. 2: it cannot be done, as when no plan fits into the memory.
    """
    check_output("--trace", trace, example="trace.json")
    check_chart(chart)
    if against is not None and chart is None:
        raise UsageError("--against came without --chart; give --chart FILE to draw")
    topology = opt.cluster_from(cluster, ranks)
    problem = opt.problem_from(
        ranks=str(topology.ranks),
        seq=(seq, seq_kv),
        heads=(heads, kv_heads),
        head_dim=(head_dim, head_dim_v),
        batch=batch,
        dtype=dtype,
        mask=opt.mask_from(is_causal=causal, window_text=window, documents_text=documents),
    )
    tuner = Tuner(
        directions=passes(both=backward),
        layout=None if layout is None else layout_named(layout).name,
        memory_nbytes=opt.memory_from(memory),
        is_cached=not no_cache,
    )
    axis = None if chart is None else axis_from(against)
    if axis is not None:
        check_axis(axis, problem)
    with progress("tuning") as report:
        tuning, is_from_cache = tuner.tune(problem, topology, report)
        answer = Answer(
            problem=problem,
            topology=topology,
            cluster=cluster_name(cluster, topology),
            memory_nbytes=tuner.memory_nbytes,
            tuning=tuning,
            is_from_cache=is_from_cache,
            plans=tuned_plans(problem, topology, tuning.chosen),
        )
        if trace is not None:
            _write_trace(answer, trace, report)
        drawn = None if chart is None or axis is None else _draw(answer, tuner, axis, chart, report)
    if json_output:
        typer.echo(json.dumps(_as_json(answer) | _files_as_json(trace, chart, drawn)))
        return
    print_tuning(answer)
    _tell_files(trace, chart, drawn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuner:
    """How to tune, whatever problem on whatever cluster."""

    directions: tuple[Direction, ...]
    layout: str | None
    memory_nbytes: int | None
    is_cached: bool

    def tune(self, problem: Problem, topology: Topology, report: Report) -> tuple[Tuning, bool]:
        """The second value says whether it was found on disk."""
        asked: dict[str, Any] = {"directions": self.directions, "layout": self.layout, "on_progress": report}
        asked["memory_nbytes"] = self.memory_nbytes
        if self.is_cached:
            return cached_tune(problem, topology, **asked)
        return tune(problem, topology, **asked), False


# Files


def _write_trace(answer: Answer, path: Path, report: Report) -> None:
    ranks = counted_ranks(answer.topology.ranks)
    timelines = forecast(answer.plans, answer.topology, spans_of=ranks, report=report)
    write_trace(path, joined(timelines))


def _draw(answer: Answer, tuner: Tuner, axis: Axis, path: Path, report: Report) -> Chart:
    limit = answer.topology.device.memory_gib * GIB if answer.memory_nbytes is None else answer.memory_nbytes
    chart = Charter(
        problem=answer.problem,
        topology=answer.topology,
        tuning=answer.tuning,
        limit_nbytes=limit,
        tune_at=lambda problem, topology, report: tuner.tune(problem, topology, report)[0],
        report=report,
    ).chart(axis)
    report(f"drawing {path.name}", 1.0)
    save_chart(time_chart(chart.points, x=chart.x, title=chart.title), path)
    return chart


def _tell_files(trace: Path | None, path: Path | None, chart: Chart | None) -> None:
    for written in (trace, path):
        if written is not None:
            typer.echo(f"\nwrote {written}")
    if chart is not None and chart.left_out:
        typer.echo(f"not in the chart, because no plan fits into the memory: {', '.join(chart.left_out)}")


# JSON


def _as_json(answer: Answer) -> dict[str, Any]:
    chosen, plans = answer.tuning.chosen, answer.plans
    first = next(iter(plans.values()))
    return {
        "problem": plan_to_json(first)["problem"],
        "cluster": asdict(answer.topology),
        "directions": list(plans),
        "memory_nbytes": answer.memory_nbytes,
        "tuning": tuning_to_json(answer.tuning),
        "is_from_cache": answer.is_from_cache,
        "digests": {direction: plan.digest for direction, plan in plans.items()},
        "options": {direction: _options_as_json(choice) for direction, choice in chosen.choices.items()},
        "code": {
            "cluster": cluster_code(
                answer.cluster, layout=first.layout.name, memory_nbytes=answer.memory_nbytes, width=CODE_WIDTH
            ),
            "explicit": explicit_code(chosen.choices, plans, answer.topology, width=CODE_WIDTH),
        },
    }


def _options_as_json(choice: Choice) -> dict[str, Any]:
    return {name: value for name, value in choice.options.items() if value is not None}


def _files_as_json(trace: Path | None, path: Path | None, chart: Chart | None) -> dict[str, Any]:
    return {
        "trace": None if trace is None else str(trace),
        "chart": None if chart is None else {"path": str(path), **asdict(chart)},
    }
