"""`mesh-attention tune`: the plan to use for a problem on a cluster, next to the best of every other method."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mesh_attention.errors import UsageError
from mesh_attention.plan.layout import TypicalTurn
from mesh_attention.plan.plan import Plan
from mesh_attention.planners.choice import Choice, default_layout
from mesh_attention.problem import DIRECTIONS, Direction, Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.topology import Topology
from mesh_attention.tuning.bounds import costs_on
from mesh_attention.tuning.result import FORECAST_ERROR, Trial, Tuning, trial_to_json, tuning_to_json, within
from mesh_attention.tuning.stored import cached_tune
from mesh_attention.tuning.tune import tune, tuned_plans
from mesh_attention.units import (
    GIB,
    Progress,
    count,
    format_nbytes,
    format_time,
)
from mesh_attention_lab.bounds import lower_bounds
from mesh_attention_lab.cli import options as opt
from mesh_attention_lab.cli.files import problem_to_json
from mesh_attention_lab.cli.serving_tables import cache_nbytes, cache_words, decode_words, layers_words, travel_words
from mesh_attention_lab.cli.terminal import (
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
    print_trials,
    problem_words,
    progress,
    time_words,
    token_words,
)
from mesh_attention_lab.comparison import PlanTrial, choice_without_costs, sampled_ranks, startrail
from mesh_attention_lab.decode_forecasts import WAYS, decode_trial_as_json, decode_trials
from mesh_attention_lab.decode_simulator import decode_seconds
from mesh_attention_lab.drawing.charts import ChartX, save_chart, time_chart
from mesh_attention_lab.drawing.trace import joined, write_trace
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
            layers=options.layers if options.is_turn else None,
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
    problem, layers = options.decoded(topology.ranks), options.layers
    spans_of = sampled_ranks(topology.ranks) if options.trace else ()
    trials = decode_trials(problem, topology, queries=options.queries, spans_of=spans_of)
    if options.trace is not None:
        write_trace(options.trace, trials[0].timelines["forward"])
    if options.json:
        answer = {
            "problem": problem_to_json(problem),
            "cluster": asdict(topology),
            "layers": layers,
            "time_s": layers * trials[0].time_s,
            "cache_nbytes": cache_nbytes(problem, layers=layers),
            "reason": decode_words(problem),
            "forecasts": list(map(decode_trial_as_json, trials)),
            "trace": options.trace and str(options.trace),
        }
        typer.echo(json.dumps(answer))
        return
    _print_decoding(problem, topology, trials, layers)
    if options.trace is not None:
        typer.echo(f"\nwrote {options.trace}")


DECODE_CAPTION = (
    "The first is chosen. replicated: every rank runs the same tokens; sharded: some of the sequences. all_gather: "
    "every rank merges all partial results; reduce_scatter: some of them. Times and bytes are of one layer. "
    "The cost of many small messages is left out."
)


def _print_decoding(problem: Problem, topology: Topology, trials: Sequence[PlanTrial], layers: int) -> None:
    console, chosen = plain_console(), trials[0]
    queries, combine = WAYS[chosen.family]
    print_first(
        console,
        write=f'cache.decode({{chat: {problem.seq_q}}}, queries="{queries}", combine="{combine}")',
        time=f"{layers_words(chosen.time_s, layers)}, a {'token' if problem.seq_q == 1 else 'step'}",
        memory=f"cache of {cache_words(problem, layers)}",
    )
    console.print(f"decode; {new_words(problem)}, {head_words(problem)}", style="bold")
    console.print(f"on {cluster_words(topology)}")
    console.print()
    print_fact(console, "attend", f"{format_time(decode_seconds(topology.device, problem))} to read keys and values")
    print_fact(console, "why", decode_words(problem))
    console.print()
    print_trials(console, trials, topology)
    console.print(DECODE_CAPTION, style="dim")


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
    lengths = token_words(problem) if answer.layers is None else new_words(problem)
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
        "bound_s": answer.bounds[0],
        "bound_nbytes": answer.bounds[1],
        "bound": None if answer.bound is None else trial_to_json(answer.bound),
        "is_from_cache": answer.is_from_cache,
        "serving": None if answer.layers is None else _turn_as_json(answer, answer.layers),
        "digests": {direction: plan.digest for direction, plan in plans.items()},
        "options": {
            direction: {name: value for name, value in choice.options.items() if value is not None}
            for direction, choice in choices.items()
        },
        "simplest": answer.tuning.trials.index(simplest_of(equals_of(answer.tuning))),
        "equal": [trial.family for trial in equals_of(answer.tuning)],
        "forecast_error": FORECAST_ERROR,
        "code": {
            "short": short_code(answer),
            "cluster": f"attention = {cluster_code(answer)}",
            "explicit": explicit_code(choices, answer.problem, answer.topology),
        },
    }


def _turn_as_json(answer: TuneAnswer, layers: int) -> dict[str, Any]:
    problem, chosen = answer.problem, answer.tuning.chosen
    return {
        "new": problem.seq_q,
        "cached": problem.seq_kv - problem.seq_q,
        "layers": layers,
        "time_s": layers * chosen.time_s,
        "cache_nbytes": cache_nbytes(problem, layers=layers),
        "reason": travel_words(problem, chosen.choices["forward"]),
    }


LET_CALLS_CHOOSE = "or let calls choose, by a quick search"


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
    bound: Trial | None
    """Of a method that this library has no plan for."""
    plain: Choice | None
    """A choice for both passes that is as fast without costs; None if there is none."""
    layers: int | None = None
    """Of a turn."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower bounds: seconds of compute, and bytes that an average rank receives."""
        return lower_bounds(dict.fromkeys(self.plans, self.problem), self.topology.device)

    @property
    def layout(self) -> str:
        return next(iter(self.plans.values())).layout.name


def print_tuning(answer: TuneAnswer) -> None:
    console, tuning, chosen = plain_console(), answer.tuning, answer.tuning.chosen
    print_first(
        console,
        write=short_code(answer),
        time=time_words(
            {direction: forecast.time_s for direction, forecast in chosen.forecasts.items()},
            answer.bounds[0],
            "" if answer.layers is None else layers_words(chosen.time_s, answer.layers),
        ),
        memory=f"{format_nbytes(chosen.peak_nbytes)} per rank, for the buffers of a call",
    )
    if answer.plain is None and answer.layers is None:
        exact = "a call searches quickly, and may choose another; code for exactly this is below"
        print_fact(console, "choice", f"{_choices_words(chosen)}: {exact}")
    _print_equals(console, tuning)
    limit = "" if answer.memory_limit is None else f", within {format_nbytes(answer.memory_limit)} per rank"
    words = f"{problem_words(answer.problem, answer.layout)}{limit}"
    console.print(f"{' and '.join(answer.plans)}; {words}", style="bold")
    console.print(f"on {cluster_words(answer.topology)}")
    console.print()
    if answer.layers is not None:
        choice = chosen.choices["forward"]
        print_fact(console, "cache", cache_words(answer.problem, answer.layers))
        print_fact(console, "tile", choice_words(choice))
        print_fact(console, "why", travel_words(answer.problem, choice))
        console.print()
    print_trials(console, tuning.trials, answer.topology)
    console.print(_caption(answer), style="dim")
    if tuning.left_out:
        console.print("\nleft out", style="bold")
        for reason in dict.fromkeys(tuning.left_out.values()):
            families = [family for family, why in tuning.left_out.items() if why == reason]
            console.print(f"{', '.join(families)}: {reason}")
    console.print("\nto run exactly this", style="bold")
    console.print(explicit_code(chosen.choices, answer.problem, answer.topology), soft_wrap=True)
    # With a limit, a call searches as thoroughly as this command.
    console.print(f"\n{LET_CALLS_CHOOSE if answer.memory_limit is None else 'or, for any length'}", style="bold")
    console.print(f"attention = {cluster_code(answer)}", soft_wrap=True)
    if len(answer.plans) < len(DIRECTIONS) and answer.layers is None:
        console.print("MeshAttention tunes forward and backward together, as --backward does here.", style="dim")


def _choices_words(trial: Trial) -> str:
    return ", backward ".join(dict.fromkeys(map(choice_words, trial.choices.values())))


def equals_of(tuning: Tuning) -> tuple[Trial, ...]:
    """Trials that a forecast cannot tell from the fastest: the difference is within its error."""
    return within(FORECAST_ERROR, tuning.trials)


def simplest_of(trials: Sequence[Trial]) -> Trial:
    return min(trials, key=lambda trial: trial.complexity)


def _print_equals(console: Console, tuning: Tuning) -> None:
    """Say which methods a forecast cannot tell from the chosen one, and name the simplest."""
    chosen, simplest = tuning.chosen, simplest_of(equals_of(tuning))
    equal = [trial.family for trial in equals_of(tuning) if trial is not chosen]
    if not equal:
        return
    print_fact(console, "equal", f"within {percent(FORECAST_ERROR)}, the error of forecasts: {', '.join(equal)}")
    longer = percent(abs(simplest.time_s / chosen.time_s - 1), digits=1)
    slower = "longer" if simplest.time_s > chosen.time_s else "shorter"
    other = f"{_choices_words(simplest)}; {longer} {slower} than the first line"
    print_fact(console, "simplest", "of them all, the first line" if simplest is chosen else other)
    console.print()


def _caption(answer: TuneAnswer) -> str:
    tuning, bound = answer.tuning, answer.bound
    words = [
        "The first is chosen.",
        tuning.tie_words,
        "2x4: query shards x KV shards of a rank; inner: the part of that grid in one node. exposed: the time in which "
        "the busiest rank does not compute. Bytes are what an average rank sends; it must receive at least "
        f"{format_nbytes(answer.bounds[1])}.",
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


EXPLICIT_CODE = """\
from dataclasses import replace
from mesh_attention import MeshAttention, make_plan
from mesh_attention.planners.choice import Choice
from mesh_attention.planners.costs import Costs
choices = {{
{choices}
}}
def planner(problem, direction, layout):
    text, costs = choices[direction]
    return make_plan(problem, replace(Choice.parse(text), layout=layout), direction=direction, costs=costs)
attention = MeshAttention(group, {layout}planner=planner)"""


def explicit_code(choices: Mapping[Direction, Choice], problem: Problem, topology: Topology) -> str:
    """Code that makes exactly the plans of these choices, without a tuner or a cluster."""
    lines = []
    for direction in DIRECTIONS:
        choice = choices.get(direction, choices["forward"])
        costs = None if choice.is_collective else costs_on(topology, problem, choice, direction)
        lines.append(f'    "{direction}": ("{replace(choice, layout=None)}", {costs!r}),')
    layout = choices["forward"].layout
    own = "" if layout in (None, TypicalTurn()) else f'layout="{layout.name}", '
    return EXPLICIT_CODE.format(choices="\n".join(lines), layout=own)
