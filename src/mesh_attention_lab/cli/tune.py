"""`mesh-attention tune`: the plan to use for a problem on a cluster, next to the best of every other method."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from mesh_attention.errors import ParseError, UsageError
from mesh_attention.plan.counts import sampled_ranks
from mesh_attention.plan.layout import Layout
from mesh_attention.planning.choice import default_layout
from mesh_attention.problem import Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.timeline import joined
from mesh_attention.topology import Topology
from mesh_attention.tuning.cache import cached_tune
from mesh_attention.tuning.decoding import forecast_decoding
from mesh_attention.tuning.planner import plain_choice
from mesh_attention.tuning.result import FORECAST_ERROR, Tuning, tuning_to_json
from mesh_attention.tuning.tune import tune, tuned_plans
from mesh_attention.units import GIB, parse_nbytes
from mesh_attention_lab.cli import options as opt
from mesh_attention_lab.cli.command import group
from mesh_attention_lab.cli.files import Report, problem_to_json, progress
from mesh_attention_lab.cli.scale import refuse_uneven
from mesh_attention_lab.cli.serving_report import Served, decoding_as_json, print_decoding, turn_as_json
from mesh_attention_lab.cli.tables import cluster_name, head_words, mask_words, new_words, token_words
from mesh_attention_lab.cli.tune_report import Answer, cluster_code, explicit_code, print_tuning, short_code
from mesh_attention_lab.drawing.canvas import save_chart
from mesh_attention_lab.drawing.times import ChartPoint, ChartX, time_chart
from mesh_attention_lab.drawing.trace import write_trace
from mesh_attention_lab.sweep import AXES, Axis, Sweep, Sweeper, check_axis
from mesh_attention_lab.turns import turn_rivals

CODE_WIDTH = 100
CHART_X: dict[Axis, ChartX] = {"ranks": "ranks", "seq": "sequence length", "tile": "tile"}
Tune = Callable[[Problem, Topology, Report], tuple[Tuning, bool]]
"""The tuning, and True if it was read from the cache."""


def _read_axis(name: str, text: str) -> str:
    if text not in AXES:
        raise ParseError(f"{name} {text!r}: expected {_AXIS_NAMES}")
    return text


_AXIS_NAMES = f"{', '.join(AXES[:-1])} or {AXES[-1]}"


@group
class TuneOptions:
    backward: bool = opt.both_passes_option()
    layout: Layout | None = opt.layout_option()
    memory: int | None = opt.of_plan(
        "--memory",
        "Memory that a call may allocate per rank, such as 20GiB; the device's if left out.",
        "SIZE",
        parse_nbytes,
        None,
    )
    chart: Path | None = opt.chart_option()
    against: Axis | None = opt.of_output("--against", "The x axis of --chart.", "|".join(AXES), _read_axis, None)
    trace: Path | None = opt.trace_option()
    no_cache: bool = opt.of_output("--no-cache", "Neither read nor keep tunings on disk.", default=False)
    json: bool = opt.json_option()


def tune_command(
    on: opt.ClusterOptions,
    problem: opt.ProblemOptions,
    step: opt.DecodeOptions,
    model: opt.LayersOption,
    given: TuneOptions,
) -> None:
    """Choose the plan for a problem on a cluster, and explain why the others were not chosen.

    Exit code 0: done. 2: invalid input, or no plan fits into memory.
    """
    topology = on.topology
    if step.check():
        _tune_decoding(problem, topology, step, model.layers, given)
        return
    asked, directions = problem.problem(topology.ranks), problem.passes(both=given.backward)
    layers, layout = model.check(is_served=problem.is_turn), problem.layout(given.layout)
    refuse_uneven(asked, layout or default_layout(asked), topology)
    if problem.is_turn and given.against == "seq":
        raise UsageError("--against seq cannot be combined with --new; use --against ranks or tile")
    if given.against is not None and given.chart is None:
        raise UsageError("--against needs --chart FILE")
    if given.chart is not None and given.against is None:
        raise UsageError(f"--chart needs --against {_AXIS_NAMES}")
    if given.against is not None:
        check_axis(given.against, asked)

    def tune_at(problem: Problem, topology: Topology, report: Report) -> tuple[Tuning, bool]:
        options: dict[str, Any] = {"directions": directions, "memory_limit": given.memory}
        options |= {"layout": None if layout is None else layout.name, "on_progress": report}
        return (
            (tune(problem, topology, **options), False) if given.no_cache else cached_tune(problem, topology, **options)
        )

    with progress("tuning") as report:
        tuning, is_from_cache = tune_at(asked, topology, report)
        rivals = turn_rivals(asked, topology, report=report) if problem.is_turn else ()
        report("checking what to write", 1.0)
        answer = Answer(
            problem=asked,
            topology=topology,
            # A file has a dot or a slash in its name.
            cluster=cluster_name(topology) if on.cluster.strip().isalnum() else on.cluster,
            memory_limit=given.memory,
            tuning=tuning,
            is_from_cache=is_from_cache,
            plans=tuned_plans(asked, topology, tuning.chosen),
            plain=plain_choice(asked, topology, tuning.chosen),
            served=Served(layers=layers, rivals=rivals) if problem.is_turn else None,
        )
        if given.trace is not None:
            _write_trace(answer, given.trace, report)
        chart: dict[str, Any] | None = None
        if given.chart is not None and given.against is not None:
            chart = _draw(answer, tune_at, given.against, given.chart, report)
    if given.json:
        trace = None if given.trace is None else str(given.trace)
        typer.echo(json.dumps(_as_json(answer) | {"trace": trace, "chart": chart}))
        return
    print_tuning(answer)
    for written in (given.trace, given.chart):
        if written is not None:
            typer.echo(f"\nwrote {written}")
    if chart is not None and chart["left_out"]:
        typer.echo(f"not in the chart, because no plan fits into the memory: {', '.join(chart['left_out'])}")


def _tune_decoding(
    problem: opt.ProblemOptions, topology: Topology, step: opt.DecodeOptions, layers: int, given: TuneOptions
) -> None:
    """A decoded step has a fixed program, so only its way and meeting are chosen."""
    unused = {"--backward": given.backward, "--layout": given.layout, "--memory": given.memory}
    opt.refuse_with("--decode", {**unused, "--chart": given.chart, "--against": given.against, "--trace": given.trace})
    asked = problem.decoded(topology.ranks)
    forecasts = forecast_decoding(asked, topology, way=step.way)
    if given.json:
        typer.echo(json.dumps(decoding_as_json(asked, topology, forecasts, layers)))
        return
    print_decoding(asked, topology, forecasts, layers)


def _write_trace(answer: Answer, path: Path, report: Report) -> None:
    topology = answer.topology
    spans_of = sampled_ranks(topology.ranks)
    timelines = [simulate(plan, topology, spans_of=spans_of, on_progress=report) for plan in answer.plans.values()]
    write_trace(path, joined(timelines))


def _draw(answer: Answer, tune_at: Tune, axis: Axis, path: Path, report: Report) -> dict[str, Any]:
    """Draw the chart; returns what it shows."""
    topology = answer.topology
    sweep: Sweep = Sweeper(
        problem=answer.problem,
        topology=topology,
        tuning=answer.tuning,
        limit_nbytes=topology.device.memory_gib * GIB if answer.memory_limit is None else answer.memory_limit,
        tune_at=lambda problem, topology, report: tune_at(problem, topology, report)[0],
        report=report,
    ).along(axis)
    report(f"drawing {path.name}", 1.0)
    points, title = [asdict(point) for point in sweep.points], _title(answer, axis)
    save_chart(time_chart([ChartPoint(**point) for point in points], x=CHART_X[axis], title=title), path)
    return {"path": str(path), "points": points, "x": CHART_X[axis], "title": title, "left_out": list(sweep.left_out)}


def _title(answer: Answer, axis: Axis) -> str:
    problem, chosen = answer.problem, answer.tuning.chosen.choices
    words = [head_words(problem), mask_words(problem), " and ".join(chosen)]
    if axis != "seq":
        words.insert(0, token_words(problem) if answer.served is None else new_words(problem))
    words.append(f"on {answer.topology.name if axis == 'ranks' else cluster_name(answer.topology)}")
    degree = next(iter(chosen.values())).assignment.ulysses
    if axis == "tile" and degree > 1:
        words.append(f"Ulysses degree {degree}")
    return ", ".join(words)


def _as_json(answer: Answer) -> dict[str, Any]:
    choices, plans = answer.tuning.chosen.choices, answer.plans
    first = next(iter(plans.values()))
    layout = first.layout.name
    return {
        "problem": problem_to_json(first.problem),
        "cluster": asdict(answer.topology),
        "directions": list(plans),
        "memory_limit": answer.memory_limit,
        "tuning": tuning_to_json(answer.tuning),
        "is_from_cache": answer.is_from_cache,
        "serving": None if answer.served is None else turn_as_json(answer.problem, *answer.turn, answer.served),
        "digests": {direction: plan.digest for direction, plan in plans.items()},
        "options": {
            direction: {name: value for name, value in choice.options.items() if value is not None}
            for direction, choice in choices.items()
        },
        "simplest": answer.tuning.trials.index(answer.tuning.simplest),
        "equal": [trial.family for trial in answer.tuning.equals],
        "forecast_error": FORECAST_ERROR,
        "code": {
            "short": short_code(answer, width=CODE_WIDTH),
            "cluster": cluster_code(answer.cluster, layout=layout, memory_limit=answer.memory_limit, width=CODE_WIDTH),
            "explicit": explicit_code(choices, plans, answer.topology, width=CODE_WIDTH),
        },
    }
