"""`mesh-attention tune`: the plan to use for a problem on a cluster, next to the best of every other method."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args

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
from mesh_attention.tuning.result import FORECAST_ERROR, Trial, Tuning, tuning_to_json, within
from mesh_attention.tuning.stored import cached_tune
from mesh_attention.tuning.tune import tune, tuned_plans
from mesh_attention.units import Progress, count, format_nbytes, format_time
from mesh_attention_lab.bounds import lower_bounds
from mesh_attention_lab.cli import options as opt
from mesh_attention_lab.cli import terminal as term
from mesh_attention_lab.cli.files import problem_to_json
from mesh_attention_lab.comparison import WAYS, PlanTrial, choice_without_costs, decode_trials, sampled_ranks
from mesh_attention_lab.decode_simulator import decode_seconds
from mesh_attention_lab.drawing.charts import ChartAxis, save_chart, time_chart
from mesh_attention_lab.drawing.trace import joined, write_trace
from mesh_attention_lab.sweep import TuneAt, sweep_sizes, sweep_tiles

AXES: tuple[ChartAxis, ...] = get_args(ChartAxis)


@dataclass(frozen=True, kw_only=True)
class TuneOptions(opt.DecodeOptions, opt.ClusterOptions):
    backward: opt.BothPasses = False
    memory: Annotated[
        int | None,
        opt.option(
            "Memory of a call per rank, as 20GiB; the device's if left out.", "SIZE", opt.parse_nbytes, opt.PLAN
        ),
    ] = None
    chart: opt.ChartFile = None
    against: Annotated[ChartAxis | None, opt.one_of("The x axis of --chart.", AXES, opt.OUTPUT)] = None
    trace: opt.TraceFile = None
    no_cache: Annotated[bool, opt.flag("--no-cache", "Neither read nor keep tunings on disk.", opt.OUTPUT)] = False
    layers: opt.Layers = 1
    json: opt.AsJson = False

    def check(self) -> None:
        """Raise for options that contradict each other."""
        opt.check_layers(self.layers, is_served=self.is_turn)
        if (self.chart is None) != (self.against is None):
            raise UsageError(f"--chart FILE and --against {'|'.join(AXES)} need each other; give both or none")
        if self.against == "seq":
            self.refuse_with("--against seq", "new", "documents")


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

    def tune_at(problem: Problem, topology: Topology, report: Progress) -> tuple[Tuning, bool]:
        settings: dict[str, Any] = {"directions": directions, "memory_limit": options.memory, "on_progress": report}
        if options.no_cache:
            return tune(problem, topology, layout=layout, **settings), False
        return cached_tune(problem, topology, layout=layout, **settings)

    with term.progress("tuning") as report:
        tuning, is_from_cache = tune_at(problem, topology, report)
        report("checking what to write", 1.0)
        answer = TuneAnswer(
            problem=problem,
            topology=topology,
            cluster=options.cluster,
            memory_limit=options.memory,
            tuning=tuning,
            is_from_cache=is_from_cache,
            plans=tuned_plans(problem, topology, tuning.chosen),
            plain=choice_without_costs(problem, topology, tuning.chosen),
            layers=options.layers if options.is_turn else None,
        )
        if options.trace is not None:
            spans_of = sampled_ranks(topology.ranks)
            passes = [simulate(p, topology, spans_of=spans_of, on_progress=report) for p in answer.plans.values()]
            write_trace(options.trace, joined(passes))
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
            "cache_nbytes": term.cache_nbytes(problem, layers=layers),
            "trials": [trial.to_json() | {"plan": str(trial.plans["forward"])} for trial in trials],
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
    console, chosen = term.plain_console(), trials[0]
    queries, combine = WAYS[chosen.family]
    term.print_first(
        console,
        write=f'cache.decode({{chat: {problem.seq_q}}}, queries="{queries}", combine="{combine}")',
        time=f"{term.layers_words(chosen.time_s, layers)}, a {'token' if problem.seq_q == 1 else 'step'}",
        memory=f"cache of {term.cache_words(problem, layers)}",
    )
    console.print(f"decode; {term.new_words(problem)}, {term.head_words(problem)}", style="bold")
    console.print(f"on {term.cluster_words(topology)}")
    console.print()
    attend = format_time(decode_seconds(topology.device, problem))
    term.print_fact(console, "attend", f"{attend} to read keys and values")
    console.print()
    term.print_trials(console, trials, topology)
    console.print(DECODE_CAPTION, style="dim")


def _draw(
    answer: TuneAnswer, tune_at: TuneAt, axis: ChartAxis | None, path: Path | None, report: Progress
) -> dict[str, Any] | None:
    """Draw the chart; returns what it shows."""
    if axis is None or path is None:
        return None
    problem, topology, chosen = answer.problem, answer.topology, answer.tuning.chosen
    if axis == "tile":
        points, left_out = sweep_tiles(problem, topology, chosen=chosen, limit=answer.memory_limit, report=report)
    else:
        points, left_out = sweep_sizes(axis, problem, topology, chosen=chosen, tune_at=tune_at, report=report)
    report(f"drawing {path.name}", 1.0)
    tokens, ranks = ("up to " if axis == varied else "" for varied in ("seq", "ranks"))
    title = f"{tokens}{term.problem_words(problem, answer.layout)}, {' and '.join(answer.plans)}"
    title += f", on {ranks}{count(topology.ranks, 'rank')} of {topology.name}"
    save_chart(time_chart(points, x=axis, title=title), path)
    drawn = [asdict(point) for point in points]
    return {"path": str(path), "x": axis, "title": title, "points": drawn, "left_out": left_out}


def _as_json(answer: TuneAnswer) -> dict[str, Any]:
    choices, plans, equals = answer.tuning.chosen.choices, answer.plans, equals_of(answer.tuning)
    return {
        "problem": problem_to_json(answer.problem),
        "cluster": asdict(answer.topology),
        "memory_limit": answer.memory_limit,
        "tuning": tuning_to_json(answer.tuning),
        "bound_s": answer.bounds[0],
        "bound_nbytes": answer.bounds[1],
        "is_from_cache": answer.is_from_cache,
        "layers": answer.layers,
        "cache_nbytes": None if answer.layers is None else term.cache_nbytes(answer.problem, layers=answer.layers),
        "digests": {direction: plan.digest for direction, plan in plans.items()},
        "simplest": answer.tuning.trials.index(min(equals, key=lambda trial: trial.complexity)),
        "equal": [trial.family for trial in equals],
        "forecast_error": FORECAST_ERROR,
        "code": {
            "short": short_code(answer),
            "cluster": f"attention = {cluster_code(answer)}",
            "explicit": explicit_code(choices, answer.problem, answer.topology),
        },
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
    plain: Choice | None
    """A choice for both passes that is as fast without costs; None if there is none."""
    layers: int | None = None
    """Of a turn."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower bounds: seconds of compute, and bytes that an average rank receives."""
        return lower_bounds(self.problem, self.plans, self.topology.device)

    @property
    def layout(self) -> str:
        return next(iter(self.plans.values())).layout.name


def print_tuning(answer: TuneAnswer) -> None:
    console, tuning, chosen = term.plain_console(), answer.tuning, answer.tuning.chosen
    term.print_first(
        console,
        write=short_code(answer),
        time=term.time_words(
            {direction: forecast.time_s for direction, forecast in chosen.forecasts.items()},
            answer.bounds[0],
            "" if answer.layers is None else term.layers_words(chosen.time_s, answer.layers),
        ),
        memory=f"{format_nbytes(chosen.peak_nbytes)} per rank, for the buffers of a call",
    )
    if answer.plain is None and answer.layers is None:
        exact = "a call searches quickly, and may choose another; code for exactly this is below"
        term.print_fact(console, "choice", f"{_choices_words(chosen)}: {exact}")
    _print_equals(console, tuning)
    limit = "" if answer.memory_limit is None else f", within {format_nbytes(answer.memory_limit)} per rank"
    words = f"{term.problem_words(answer.problem, answer.layout)}{limit}"
    console.print(f"{' and '.join(answer.plans)}; {words}", style="bold")
    console.print(f"on {term.cluster_words(answer.topology)}")
    console.print()
    if answer.layers is not None:
        choice = chosen.choices["forward"]
        term.print_fact(console, "cache", term.cache_words(answer.problem, answer.layers))
        term.print_fact(console, "tile", term.choice_words(choice))
        term.print_fact(console, "why", term.travel_words(answer.problem, choice))
        console.print()
    term.print_trials(console, tuning.trials, answer.topology)
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
    return ", backward ".join(dict.fromkeys(map(term.choice_words, trial.choices.values())))


def equals_of(tuning: Tuning) -> tuple[Trial, ...]:
    """Trials that a forecast cannot tell from the fastest: the difference is within its error."""
    return within(FORECAST_ERROR, tuning.trials)


def _print_equals(console: Console, tuning: Tuning) -> None:
    """Say which methods a forecast cannot tell from the chosen one, and name the simplest."""
    chosen, equals = tuning.chosen, equals_of(tuning)
    simplest = min(equals, key=lambda trial: trial.complexity)
    equal = [trial.family for trial in equals if trial is not chosen]
    if not equal:
        return
    error = f"within {term.percent(FORECAST_ERROR)}, the error of forecasts"
    term.print_fact(console, "equal", f"{error}: {', '.join(equal)}")
    longer = term.percent(abs(simplest.time_s / chosen.time_s - 1), digits=1)
    slower = "longer" if simplest.time_s > chosen.time_s else "shorter"
    other = f"{_choices_words(simplest)}; {longer} {slower} than the first line"
    term.print_fact(console, "simplest", "of them all, the first line" if simplest is chosen else other)
    console.print()


def _caption(answer: TuneAnswer) -> str:
    tuning = answer.tuning
    words = [
        "The first is chosen.",
        tuning.tie_words,
        "2x4: query shards x KV shards of a rank; inner: the part of that grid in one node. exposed: the time in which "
        "the busiest rank does not compute. Bytes are what an average rank sends; it must receive at least "
        f"{format_nbytes(answer.bounds[1])}.",
        "Read from the cache." if answer.is_from_cache else f"{count(tuning.simulated, 'plan')} simulated.",
    ]
    return " ".join(filter(None, words))


# Code that uses the choice: it runs, and makes the plans that were forecast


DEFAULT_LAYOUT = "zigzag"
"""The default of `MeshAttention`."""


def short_code(answer: TuneAnswer) -> str:
    """A call that is as fast as the choice, if stating a choice alone is; or one that lets the tuner choose."""
    plain = answer.plain
    return cluster_code(answer) if plain is None else f'MeshAttention(group, choice="{term.choice_words(plain)}")'


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
