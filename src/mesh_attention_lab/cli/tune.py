"""`mesh-attention tune`: the plan to use for a problem on a cluster, next to the best of every other method."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mesh_attention.errors import UsageError
from mesh_attention.plan.layout import TypicalTurn
from mesh_attention.plan.plan import Plan
from mesh_attention.planners.choice import Choice, default_layout
from mesh_attention.planners.make import make_plan
from mesh_attention.problem import DIRECTIONS, Direction, Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.timeline import joined
from mesh_attention.topology import Topology
from mesh_attention.tuning.result import FORECAST_ERROR, Trial, Tuning, trial_to_json, tuning_to_json
from mesh_attention.tuning.stored import cached_tune
from mesh_attention.tuning.traffic import costs_on
from mesh_attention.tuning.tune import tune, tuned_plans
from mesh_attention.units import (
    BYTES,
    GIB,
    TIMES,
    Progress,
    count,
    format_nbytes,
    format_time,
)
from mesh_attention_lab.cli import options as opt
from mesh_attention_lab.cli.files import problem_to_json
from mesh_attention_lab.cli.serving import (
    Served,
    decoding_as_json,
    layers_words,
    print_decoding,
    print_turn,
    turn_as_json,
    turn_rivals,
)
from mesh_attention_lab.cli.terminal import (
    NO_NUMBER,
    Column,
    choice_words,
    cluster_name,
    cluster_words,
    head_words,
    mask_words,
    new_words,
    percent,
    plain_console,
    print_fact,
    print_first,
    print_table,
    problem_words,
    progress,
    time_words,
    token_words,
)
from mesh_attention_lab.comparison import Bound, choice_without_costs, sampled_ranks, startrail
from mesh_attention_lab.decoding import by_time, decode_forecasts
from mesh_attention_lab.drawing.charts import ChartX, save_chart, time_chart
from mesh_attention_lab.drawing.trace import write_trace
from mesh_attention_lab.sweep import AXES, SweepAxis, TuneAt, check_axis, sweep, sweep_tiles

CHART_X: dict[SweepAxis, ChartX] = {"ranks": "ranks", "seq": "sequence length", "tile": "tile"}


@dataclass(frozen=True, kw_only=True)
class TuneOptions(opt.DecodeOptions, opt.ClusterOptions):
    backward: opt.BothPasses = False
    memory: Annotated[
        int | None,
        opt.option(
            "Memory that a call may allocate per rank, such as 20GiB; the device's if left out.",
            "SIZE",
            opt.parse_nbytes,
            opt.PLAN,
        ),
    ] = None
    chart: opt.ChartFile = None
    against: Annotated[SweepAxis | None, opt.one_of("The x axis of --chart.", AXES, opt.OUTPUT)] = None
    trace: opt.TraceFile = None
    no_cache: Annotated[bool, opt.flag("--no-cache", "Neither read nor keep tunings on disk.", opt.OUTPUT)] = False
    layers: opt.Layers = 1
    json: opt.AsJson = False

    def check(self) -> None:
        """Raise for options that contradict each other."""
        opt.check_layers(self.layers, is_served=self.is_turn)
        if self.is_turn and self.against == "seq":
            raise UsageError("--against seq cannot be combined with --new; use --against ranks or tile")
        if self.against is not None and self.chart is None:
            raise UsageError("--against needs --chart FILE")
        if self.chart is not None and self.against is None:
            raise UsageError(f"--chart needs --against {' '.join(AXES)}")


def tune_command(options: TuneOptions) -> None:
    """Choose the plan for a problem on a cluster, and explain why the others were not chosen.

    Exit code 0: done. 2: invalid input, or no plan fits into memory.
    """
    topology = options.topology
    if options.decode:
        _tune_decoding(options, topology)
        return
    problem, directions = options.problem(topology.ranks), options.passes(both=options.backward)
    layout = options.planned_layout
    options.check()
    opt.refuse_uneven(problem, layout or default_layout(problem), topology)
    if options.against is not None:
        check_axis(options.against, problem)

    def tune_at(problem: Problem, topology: Topology, report: Progress) -> tuple[Tuning, bool]:
        settings: dict[str, Any] = {"directions": directions, "memory_limit": options.memory, "on_progress": report}
        if options.no_cache:
            return tune(problem, topology, layout=layout, **settings), False
        return cached_tune(problem, topology, layout=layout, **settings)

    with progress("tuning") as report:
        tuning, is_from_cache = tune_at(problem, topology, report)
        rivals = turn_rivals(problem, topology, report=report) if options.is_turn else ()
        report("checking what to write", 1.0)
        answer = TuneAnswer(
            problem=problem,
            topology=topology,
            # A file has a dot or a slash in its name.
            cluster=cluster_name(topology) if options.cluster.strip().isalnum() else options.cluster,
            memory_limit=options.memory,
            tuning=tuning,
            is_from_cache=is_from_cache,
            plans=tuned_plans(problem, topology, tuning.chosen),
            bound=startrail(tuning, problem, topology, memory_limit=options.memory),
            plain=choice_without_costs(problem, topology, tuning.chosen),
            served=Served(layers=options.layers, rivals=rivals) if options.is_turn else None,
        )
        if options.trace is not None:
            spans_of = sampled_ranks(topology.ranks)
            passes = [simulate(p, topology, spans_of=spans_of, on_progress=report) for p in answer.plans.values()]
            write_trace(options.trace, joined(passes))
        chart: dict[str, Any] | None = None
        if options.chart is not None and options.against is not None:
            chart = _draw(answer, tune_at, options.against, options.chart, report)
    if options.json:
        typer.echo(json.dumps(_as_json(answer) | {"trace": options.trace and str(options.trace), "chart": chart}))
        return
    print_tuning(answer)
    for path in filter(None, (options.trace, options.chart)):
        typer.echo(f"\nwrote {path}")
    if chart is not None and chart["left_out"]:
        typer.echo(f"not in the chart, because no plan fits into the memory: {', '.join(chart['left_out'])}")


def _tune_decoding(options: TuneOptions, topology: Topology) -> None:
    """A decoded step has a fixed program, so only how queries are held and partial results combined is chosen."""
    options.refuse_with("--decode", "backward", "layout", "memory", "chart", "against")
    problem = options.decoded(topology.ranks)
    spans_of = sampled_ranks(topology.ranks) if options.trace else ()
    forecasts = by_time(decode_forecasts(problem, topology, queries=options.queries, spans_of=spans_of))
    if options.trace is not None:
        write_trace(options.trace, forecasts[0].timeline)
    if options.json:
        answer = decoding_as_json(problem, topology, forecasts, options.layers)
        typer.echo(json.dumps(answer | {"trace": options.trace and str(options.trace)}))
        return
    print_decoding(problem, topology, forecasts, options.layers)
    if options.trace is not None:
        typer.echo(f"\nwrote {options.trace}")


def _draw(answer: TuneAnswer, tune_at: TuneAt, axis: SweepAxis, path: Path, report: Progress) -> dict[str, Any]:
    """Draw the chart; returns what it shows."""
    problem, topology, chosen = answer.problem, answer.topology, answer.tuning.chosen
    if axis == "tile":
        limit = topology.device.memory_gib * GIB if answer.memory_limit is None else answer.memory_limit
        drawn = sweep_tiles(problem, topology, chosen=chosen, memory_limit=limit, report=report)
    else:
        drawn = sweep(axis, problem, topology, chosen=chosen.family, tune_at=tune_at, report=report)
    report(f"drawing {path.name}", 1.0)
    x, title = CHART_X[axis], _title(answer, axis)
    save_chart(time_chart(drawn.points, x=x, title=title), path)
    return asdict(drawn) | {"path": str(path), "x": x, "title": title}


def _title(answer: TuneAnswer, axis: SweepAxis) -> str:
    """What the points of a chart have in common."""
    problem = answer.problem
    lengths = token_words(problem) if answer.served is None else new_words(problem)
    words = [head_words(problem), mask_words(problem), " and ".join(answer.plans)]
    if axis == "ranks":
        return ", ".join([lengths, *words, f"on {answer.topology.name}"])
    words.append(f"on {cluster_name(answer.topology)}")
    if axis == "seq":
        return ", ".join(words)
    degree = next(iter(answer.tuning.chosen.choices.values())).assignment.ulysses_degree
    return ", ".join([lengths, *words, *([f"Ulysses degree {degree}"] if degree > 1 else [])])


def _as_json(answer: TuneAnswer) -> dict[str, Any]:
    choices, plans = answer.tuning.chosen.choices, answer.plans
    return {
        "problem": problem_to_json(answer.problem),
        "cluster": asdict(answer.topology),
        "directions": list(plans),
        "memory_limit": answer.memory_limit,
        "tuning": tuning_to_json(answer.tuning),
        "bound": None if answer.bound is None else trial_to_json(answer.bound),
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
            "short": short_code(answer),
            "cluster": f"attention = {cluster_code(answer)}",
            "explicit": explicit_code(choices, plans, answer.topology),
        },
    }


NAME_WIDTH, REASON_WIDTH = 19, 20
"""Methods and reasons are wrapped to these widths where there is little room."""
LET_CALLS_CHOOSE = "or let calls choose, by a quick search"
SHORT: dict[Direction, str] = {"forward": "fwd", "backward": "bwd"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneAnswer:
    """A tuning, its problem, and the plans of the choice. `cluster` is the argument that `MeshAttention` takes."""

    problem: Problem
    topology: Topology
    cluster: str
    memory_limit: int | None
    tuning: Tuning
    is_from_cache: bool
    plans: Mapping[Direction, Plan]
    bound: Bound | None
    """Of a method that this library has no plan for."""
    plain: Choice | None
    """A choice for both passes that is as fast without costs; None if there is none."""
    served: Served | None = None

    @property
    def layout(self) -> str:
        return next(iter(self.plans.values())).layout.name

    @property
    def turn(self) -> tuple[Choice, float]:
        """The choice of a turn, and its time."""
        chosen = self.tuning.chosen
        return chosen.choices["forward"], chosen.time_s


def print_tuning(answer: TuneAnswer) -> None:
    console, tuning, chosen = plain_console(), answer.tuning, answer.tuning.chosen
    print_first(
        console,
        write=short_code(answer),
        time=time_words(
            {direction: forecast.time_s for direction, forecast in chosen.forecasts.items()},
            tuning.bound_s,
            "" if answer.served is None else layers_words(chosen.time_s, answer.served.layers),
        ),
        memory=f"{format_nbytes(chosen.peak_nbytes)} per rank, for the buffers of a call",
    )
    if answer.plain is None and answer.served is None:
        exact = "a call searches quickly, and may choose another; code for exactly this is below"
        print_fact(console, "choice", f"{_choices_words(chosen)}: {exact}")
    _print_equals(console, tuning)
    limit = "" if answer.memory_limit is None else f", within {format_nbytes(answer.memory_limit)} per rank"
    words = f"{problem_words(answer.problem, answer.layout)}{limit}"
    console.print(f"{' and '.join(answer.plans)}; {words}", style="bold")
    console.print(f"on {cluster_words(answer.topology)}")
    console.print()
    if answer.served is not None:
        print_turn(console, answer.problem, answer.topology, *answer.turn, answer.served)
        console.print()
    columns = _columns(tuning, has_nodes=answer.topology.nodes > 1)
    print_table(console, columns, bold=[trial is chosen for trial in tuning.trials])
    console.print(_caption(answer), style="dim")
    if tuning.left_out:
        console.print("\nleft out", style="bold")
        for reason in dict.fromkeys(tuning.left_out.values()):
            families = [family for family, why in tuning.left_out.items() if why == reason]
            console.print(f"{', '.join(families)}: {reason}")
    console.print("\nto run exactly this", style="bold")
    console.print(explicit_code(chosen.choices, answer.plans, answer.topology), soft_wrap=True)
    # With a limit, a call searches as thoroughly as this command.
    console.print(f"\n{LET_CALLS_CHOOSE if answer.memory_limit is None else 'or, for any length'}", style="bold")
    console.print(f"attention = {cluster_code(answer)}", soft_wrap=True)
    if len(answer.plans) < len(DIRECTIONS) and answer.served is None:
        console.print("MeshAttention tunes forward and backward together, as --backward does here.", style="dim")


def _choices_words(trial: Trial) -> str:
    return ", backward ".join(dict.fromkeys(map(choice_words, trial.choices.values())))


def _print_equals(console: Console, tuning: Tuning) -> None:
    """Say which methods a forecast cannot tell from the chosen one, and name the simplest."""
    chosen, simplest = tuning.chosen, tuning.simplest
    equal = [trial.family for trial in tuning.equals if trial is not chosen]
    if not equal:
        return
    print_fact(console, "equal", f"within {percent(FORECAST_ERROR)}, the error of forecasts: {', '.join(equal)}")
    longer = percent(abs(simplest.time_s / chosen.time_s - 1), digits=1)
    slower = "longer" if simplest.time_s > chosen.time_s else "shorter"
    other = f"{_choices_words(simplest)}; {longer} {slower} than the first line"
    print_fact(console, "simplest", "of them all, the first line" if simplest is chosen else other)
    console.print()


# The table


def _columns(tuning: Tuning, *, has_nodes: bool) -> list[Column]:
    trials, chosen = tuning.trials, tuning.chosen
    slower = [f"{trial.time_s / chosen.time_s:.2f}" if chosen.time_s else NO_NUMBER for trial in trials]
    sent = ("between\nnodes", "between_nbytes") if has_nodes else ("sent", "sent_nbytes")
    return [
        Column(header="method\n  choice", cells=list(map(_name, trials)), is_text=True, least_width=NAME_WIDTH),
        Column.of_amounts("time", [1e9 * trial.time_s for trial in trials], TIMES, below=1000),
        Column(header="×\nfirst", cells=slower),
        Column.of_amounts("exposed", [max(0.0, 1e9 * trial.exposed_s) for trial in trials], TIMES, below=1000),
        Column.of_amounts(sent[0], [getattr(trial, sent[1]) for trial in trials], BYTES),
        Column.of_amounts("peak", [trial.peak_nbytes for trial in trials], BYTES, below=1000, digits=3),
        Column(header="why not", cells=[trial.reason for trial in trials], is_text=True, least_width=REASON_WIDTH),
    ]


def _name(trial: Trial) -> str:
    """The method, and below it the choice for each pass, or for both; the headline has the layout."""
    texts = {direction: str(replace(choice, layout=None)) for direction, choice in trial.choices.items()}
    if len(set(texts.values())) == 1:
        lines = [next(iter(texts.values()))]
    else:
        lines = [f"{SHORT[direction]} {text}" for direction, text in texts.items()]
    return "\n".join([trial.family, *(f"  {line}" for line in lines)])


def _caption(answer: TuneAnswer) -> str:
    tuning, bound = answer.tuning, answer.bound
    words = [
        "The first is chosen.",
        tuning.tie_words,
        "2x4: query shards x KV shards of a rank; inner: the part of that grid in one node. exposed: the time in which "
        "the busiest rank does not compute. Bytes are what an average rank sends; it must receive at least "
        f"{format_nbytes(tuning.bound_nbytes)}.",
        ""
        if bound is None
        else f"{bound.family}, which has no planner here, takes {format_time(bound.time_s)} or more.",
        "Read from the cache." if answer.is_from_cache else f"{count(tuning.simulated, 'plan')} simulated.",
    ]
    return " ".join(filter(None, words))


# Code that uses the choice: it runs, and makes the plans that were forecast


DEFAULT_LAYOUT = "zigzag"
"""The default of `MeshAttention`."""


def short_code(answer: TuneAnswer) -> str:
    """A call that is as fast as the choice, if stating a choice alone is; or one that lets the tuner choose."""
    return (
        cluster_code(answer) if answer.plain is None else f'MeshAttention(group, choice="{choice_words(answer.plain)}")'
    )


def cluster_code(answer: TuneAnswer) -> str:
    """A call that lets every rank tune."""
    arguments = ["group", f"cluster={json.dumps(answer.cluster)}"]
    if answer.layout not in (DEFAULT_LAYOUT, TypicalTurn.name):
        arguments.append(f'layout="{answer.layout}"')
    if answer.memory_limit is not None:
        arguments.append(f"memory_limit={answer.memory_limit}")
    return f"MeshAttention({', '.join(arguments)})"


def explicit_code(choices: Mapping[Direction, Choice], plans: Mapping[Direction, Plan], topology: Topology) -> str:
    """Code that makes exactly these plans, without a tuner or a cluster."""
    settings = {direction: _settings(choice, plans[direction], topology) for direction, choice in choices.items()}
    if len(set(settings.values())) == 1:
        call = f"attention = MeshAttention(group, {next(iter(settings.values()))})"
    else:
        by_pass = "".join(f'    "{direction}": dict({setting}),\n' for direction, setting in settings.items())
        layout = next(iter(plans.values())).layout.name
        call = (
            f"options = {{\n{by_pass}}}\n"
            f'attention = MeshAttention(group, layout="{layout}", planner=lambda problem, direction, layout:\n'
            "    make_plan(problem, direction=direction, **options[direction]))"
        )
    imports = "from mesh_attention import MeshAttention, make_plan\n"
    if "Costs(" in call:
        imports += "from mesh_attention.planners.costs import Costs\n"
    return imports + call


def _settings(choice: Choice, plan: Plan, topology: Topology) -> str:
    """The choice, and the cluster's costs where the default ones would order the steps in another way."""
    stated = f'choice="{choice_words(choice)}"'
    if make_plan(plan.problem, choice, direction=plan.direction) == plan:
        return stated
    return f"{stated}, costs={costs_on(topology, plan.problem, choice, plan.direction)!r}"
