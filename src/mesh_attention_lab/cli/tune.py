"""`mesh-attention tune`: the plan to use for a problem on a cluster, next to the best of every other method."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mesh_attention.errors import ParseError, UsageError
from mesh_attention.plan.counts import sampled_ranks
from mesh_attention.plan.layout import Turn
from mesh_attention.plan.plan import Plan
from mesh_attention.planning.choice import Choice, default_layout
from mesh_attention.planning.registry import make_plan
from mesh_attention.problem import DIRECTIONS, Direction, Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.timeline import joined
from mesh_attention.topology import Topology
from mesh_attention.tuning.cache import cached_tune
from mesh_attention.tuning.result import FORECAST_ERROR, Trial, Tuning, trial_to_json, tuning_to_json
from mesh_attention.tuning.traffic import costs_on
from mesh_attention.tuning.tune import tune, tuned_plans
from mesh_attention.units import (
    BYTES,
    GIB,
    TIMES,
    Report,
    count,
    format_nbytes,
    format_time,
    format_together,
    parse_nbytes,
    three_digits,
)
from mesh_attention_lab.cli import options as opt
from mesh_attention_lab.cli.files import problem_to_json, progress
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
    plain_console,
    print_fact,
    print_first,
    print_table,
    problem_words,
    token_words,
)
from mesh_attention_lab.comparison import choice_without_costs
from mesh_attention_lab.decoding import forecast_decoding
from mesh_attention_lab.drawing.canvas import save_chart
from mesh_attention_lab.drawing.times import ChartX, time_chart
from mesh_attention_lab.drawing.trace import write_trace
from mesh_attention_lab.rivals import Bound, startrail
from mesh_attention_lab.sweep import AXES, Sweep, SweepAxis, Sweeper, check_axis

CHART_X: dict[SweepAxis, ChartX] = {"ranks": "ranks", "seq": "sequence length", "tile": "tile"}
Tune = Callable[[Problem, Topology, Report], tuple[Tuning, bool]]
"""The tuning, and True if it was read from the cache."""


def _parse_axis(name: str, text: str) -> str:
    if text not in AXES:
        raise ParseError(f"{name} {text!r}: expected {_AXIS_NAMES}")
    return text


_AXIS_NAMES = f"{', '.join(AXES[:-1])} or {AXES[-1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    backward: opt.BothPasses = False
    layout: opt.LayoutOption = None
    memory: Annotated[
        int | None,
        opt.OfPlan(
            "--memory",
            help="Memory that a call may allocate per rank, such as 20GiB; the device's if left out.",
            metavar="SIZE",
            parser=opt.parsed("--memory", parse_nbytes),
        ),
    ] = None
    chart: opt.ChartFile = None
    against: Annotated[
        SweepAxis | None,
        opt.OfOutput(
            "--against",
            help="The x axis of --chart.",
            metavar="|".join(AXES),
            parser=opt.parsed("--against", _parse_axis),
        ),
    ] = None
    trace: opt.TraceFile = None
    no_cache: Annotated[bool, opt.OfOutput("--no-cache", help="Neither read nor keep tunings on disk.")] = False
    layers: opt.Layers = 1
    json: opt.AsJson = False

    def check(self, *, is_turn: bool) -> None:
        """Raise for options that contradict each other."""
        if is_turn and self.against == "seq":
            raise UsageError("--against seq cannot be combined with --new; use --against ranks or tile")
        if self.against is not None and self.chart is None:
            raise UsageError("--against needs --chart FILE")
        if self.chart is not None and self.against is None:
            raise UsageError(f"--chart needs --against {_AXIS_NAMES}")


def tune_command(
    cluster_options: opt.ClusterOptions,
    problem_options: opt.ProblemOptions,
    decode_options: opt.DecodeOptions,
    options: TuneOptions,
) -> None:
    """Choose the plan for a problem on a cluster, and explain why the others were not chosen.

    Exit code 0: done. 2: invalid input, or no plan fits into memory.
    """
    topology = cluster_options.topology
    if decode_options.decode:
        _tune_decoding(problem_options, topology, decode_options, options)
        return
    problem, directions = problem_options.problem(topology.ranks), problem_options.passes(both=options.backward)
    is_turn, layout = problem_options.is_turn, problem_options.layout(options.layout)
    opt.check_layers(options.layers, is_served=is_turn)
    opt.refuse_uneven(problem, layout or default_layout(problem), topology)
    options.check(is_turn=is_turn)
    if options.against is not None:
        check_axis(options.against, problem)

    def tune_at(problem: Problem, topology: Topology, report: Report) -> tuple[Tuning, bool]:
        settings: dict[str, Any] = {"directions": directions, "memory_limit": options.memory, "on_progress": report}
        settings["layout"] = layout
        if options.no_cache:
            return tune(problem, topology, **settings), False
        return cached_tune(problem, topology, **settings)

    with progress("tuning") as report:
        tuning, is_from_cache = tune_at(problem, topology, report)
        rivals = turn_rivals(problem, topology, report=report) if is_turn else ()
        report("checking what to write", 1.0)
        answer = TuneAnswer(
            problem=problem,
            topology=topology,
            # A file has a dot or a slash in its name.
            cluster=cluster_name(topology) if cluster_options.cluster.strip().isalnum() else cluster_options.cluster,
            memory_limit=options.memory,
            tuning=tuning,
            is_from_cache=is_from_cache,
            plans=tuned_plans(problem, topology, tuning.chosen),
            bound=startrail(tuning, problem, topology, memory_limit=options.memory),
            plain=choice_without_costs(problem, topology, tuning.chosen),
            served=Served(layers=options.layers, rivals=rivals) if is_turn else None,
        )
        if options.trace is not None:
            _write_trace(answer, options.trace, report)
        chart: dict[str, Any] | None = None
        if options.chart is not None and options.against is not None:
            chart = _draw(answer, tune_at, options.against, options.chart, report)
    if options.json:
        trace = None if options.trace is None else str(options.trace)
        typer.echo(json.dumps(_as_json(answer) | {"trace": trace, "chart": chart}))
        return
    print_tuning(answer)
    for path in (options.trace, options.chart):
        if path is not None:
            typer.echo(f"\nwrote {path}")
    if chart is not None and chart["left_out"]:
        typer.echo(f"not in the chart, because no plan fits into the memory: {', '.join(chart['left_out'])}")


def _tune_decoding(
    problem_options: opt.ProblemOptions, topology: Topology, decode_options: opt.DecodeOptions, options: TuneOptions
) -> None:
    """A decoded step has a fixed program, so only how queries are held and partial results combined is chosen."""
    unused = {"--backward": options.backward, "--layout": options.layout, "--memory": options.memory}
    opt.refuse_with(
        "--decode", {**unused, "--chart": options.chart, "--against": options.against, "--trace": options.trace}
    )
    problem = problem_options.decoded(topology.ranks)
    forecasts = forecast_decoding(problem, topology, queries=decode_options.queries)
    if options.json:
        typer.echo(json.dumps(decoding_as_json(problem, topology, forecasts, options.layers)))
        return
    print_decoding(problem, topology, forecasts, options.layers)


def _write_trace(answer: TuneAnswer, path: Path, report: Report) -> None:
    topology = answer.topology
    spans_of = sampled_ranks(topology.ranks)
    timelines = [simulate(plan, topology, spans_of=spans_of, on_progress=report) for plan in answer.plans.values()]
    write_trace(path, joined(timelines))


def _draw(answer: TuneAnswer, tune_at: Tune, axis: SweepAxis, path: Path, report: Report) -> dict[str, Any]:
    """Draw the chart; returns what it shows."""
    topology = answer.topology
    sweep: Sweep = Sweeper(
        problem=answer.problem,
        topology=topology,
        tuning=answer.tuning,
        memory_limit=topology.device.memory_gib * GIB if answer.memory_limit is None else answer.memory_limit,
        tune_at=lambda problem, topology, report: tune_at(problem, topology, report)[0],
        report=report,
    ).along(axis)
    report(f"drawing {path.name}", 1.0)
    x, title = CHART_X[axis], _title(answer, axis)
    save_chart(time_chart(sweep.points, x=x, title=title), path)
    points, left_out = list(map(asdict, sweep.points)), list(sweep.left_out)
    return {"path": str(path), "points": points, "x": x, "title": title, "left_out": left_out}


def _title(answer: TuneAnswer, axis: SweepAxis) -> str:
    problem, chosen = answer.problem, answer.tuning.chosen.choices
    words = [head_words(problem), mask_words(problem), " and ".join(chosen)]
    if axis != "seq":
        words.insert(0, token_words(problem) if answer.served is None else new_words(problem))
    words.append(f"on {answer.topology.name if axis == 'ranks' else cluster_name(answer.topology)}")
    degree = next(iter(chosen.values())).assignment.ulysses_degree
    if axis == "tile" and degree > 1:
        words.append(f"Ulysses degree {degree}")
    return ", ".join(words)


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


NAME_WIDTH, REASON_WIDTH = 22, 22
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
    def shown(self) -> tuple[Trial, ...]:
        """The trials and the bound: the chosen one, then the others, fastest first."""
        chosen, *others = self.tuning.trials
        return chosen, *sorted((*others, *filter(None, [self.bound])), key=lambda trial: trial.time_s)

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
    memory = f"{format_nbytes(chosen.peak_nbytes)} per rank, for the buffers of a call"
    print_first(console, write=short_code(answer), time=_time_words(answer), memory=memory)
    if answer.plain is None and answer.served is None:
        texts = dict.fromkeys(map(choice_words, chosen.choices.values()))
        exact = "a call searches quickly, and may choose another; code for exactly this is below"
        print_fact(console, "choice", f"{', backward '.join(texts)}: {exact}")
    _print_equals(console, tuning)
    limit = "" if answer.memory_limit is None else f", within {format_nbytes(answer.memory_limit)} per rank"
    words = f"{problem_words(answer.problem, answer.layout)}{limit}"
    console.print(f"{' and '.join(answer.plans)}; {words}", style="bold")
    console.print(f"on {cluster_words(answer.topology)}")
    console.print()
    if answer.served is not None:
        print_turn(console, answer.problem, answer.topology, *answer.turn, answer.served)
        console.print()
    columns = _columns(answer.shown, tuning, has_nodes=answer.topology.nodes > 1)
    bold = [trial is chosen for trial in answer.shown]
    no_room = print_table(console, columns, bold=bold, gap_after=_equal_rows(answer) % len(answer.shown))
    console.print(_caption(answer, no_room), style="dim")
    if tuning.left_out:
        console.print("\nleft out", style="bold")
        for reason in dict.fromkeys(tuning.left_out.values()):
            families = [family for family, why in tuning.left_out.items() if why == reason]
            console.print(f"{', '.join(families)}: {reason}")
    console.print("\nlower bounds", style="bold")
    console.print(_compute_words(tuning))
    console.print(_nbytes_words(tuning))
    console.print("\nto run exactly this", style="bold")
    console.print(explicit_code(chosen.choices, answer.plans, answer.topology), soft_wrap=True)
    # With a limit, a call searches as thoroughly as this command.
    console.print(f"\n{LET_CALLS_CHOOSE if answer.memory_limit is None else 'or, for any length'}", style="bold")
    console.print(f"attention = {cluster_code(answer)}", soft_wrap=True)
    if len(answer.plans) < len(DIRECTIONS) and answer.served is None:
        console.print("MeshAttention tunes forward and backward together, as --backward does here.", style="dim")


# The first lines


def _time_words(answer: TuneAnswer) -> str:
    tuning, chosen = answer.tuning, answer.tuning.chosen
    share = f"; {tuning.bound_s / chosen.time_s:.0%}".replace("%", " %") + " of one kernel's rate"
    if answer.served is not None:
        return f"{layers_words(chosen.time_s, answer.served.layers)}{share}"
    passes = ", ".join(
        f"{format_time(forecast.time_s)} {direction}" for direction, forecast in chosen.forecasts.items()
    )
    return (passes if len(chosen.forecasts) == 1 else f"{format_time(chosen.time_s)}: {passes}") + share


def _print_equals(console: Console, tuning: Tuning) -> None:
    """Say which methods a forecast cannot tell from the chosen one, and name the simplest."""
    chosen, simplest = tuning.chosen, tuning.simplest
    equal = [trial.family for trial in tuning.equals if trial is not chosen]
    if not equal:
        return
    error = f"{FORECAST_ERROR:.0%}".replace("%", " %")
    print_fact(console, "equal", f"within {error}, the error of forecasts: {', '.join(equal)}")
    longer = f"{abs(simplest.time_s / chosen.time_s - 1):.1%}".replace("%", " %")
    slower = "longer" if simplest.time_s > chosen.time_s else "shorter"
    texts = dict.fromkeys(map(choice_words, simplest.choices.values()))
    other = f"{', backward '.join(texts)}; {longer} {slower} than the first line"
    print_fact(console, "simplest", "of them all, the first line" if simplest is chosen else other)
    console.print()


# The table


def _equal_rows(answer: TuneAnswer) -> int:
    """The rows that a forecast cannot tell from the fastest: the difference is within its error."""
    fastest_s = min(trial.time_s for trial in answer.tuning.trials)
    return sum(trial.time_s <= fastest_s * (1 + FORECAST_ERROR) for trial in answer.shown)


def _columns(trials: Sequence[Trial], tuning: Tuning, *, has_nodes: bool) -> list[Column]:
    chosen = tuning.chosen
    times = [trial.time_s for trial in trials] + [trial.exposed_s for trial in trials]
    time_unit, time_texts = format_together([round(max(0.0, s) * 1e9) for s in times], TIMES, below=1000)
    sent = [trial.between_nbytes for trial in trials] + [trial.sent_nbytes for trial in trials]
    sent_unit, sent_texts = format_together(list(map(round, sent)), BYTES, below=10_000)
    peak_unit, peaks = format_together([trial.peak_nbytes for trial in trials], BYTES, below=1000, digits=3)
    slower = [f"{trial.time_s / chosen.time_s:.2f}" if chosen.time_s else NO_NUMBER for trial in trials]
    columns = [
        Column(header="method\n  choice", cells=list(map(_name, trials)), is_text=True, least_width=NAME_WIDTH),
        Column(header=f"time\n{time_unit}", cells=_at_least(trials, time_texts[: len(trials)])),
        Column(header="×\nfirst", cells=_at_least(trials, slower)),
        Column(header=f"exposed\n{time_unit}", cells=_known(trials, time_texts[len(trials) :])),
        Column(header=f"between\nnodes\n{sent_unit}", cells=_at_least(trials, sent_texts[: len(trials)]), drop=1),
        Column(header=f"sent\nin all\n{sent_unit}", cells=_at_least(trials, sent_texts[len(trials) :]), drop=4),
        Column(header="×\nbound", cells=[_against_bound(trial, tuning) for trial in trials], drop=2),
        Column(header="TFLOP/s", cells=_known(trials, [three_digits(_tflops(trial)) for trial in trials]), drop=5),
        Column(header=f"peak\n{peak_unit}", cells=_known(trials, peaks), drop=3),
        Column(header="why not", cells=[trial.reason for trial in trials], is_text=True, least_width=REASON_WIDTH),
    ]
    return [column for column in columns if has_nodes or not column.header.startswith("between")]


def _name(trial: Trial) -> str:
    """The method, and below it the choice for each pass, or for both; the headline has the layout."""
    texts = {direction: str(replace(choice, layout=None)) for direction, choice in trial.choices.items()}
    if len(set(texts.values())) == 1:
        lines = [next(iter(texts.values()))]
    else:
        lines = [f"{SHORT[direction]} {text}" for direction, text in texts.items()]
    return "\n".join([trial.family, *(f"  {line}" for line in lines)])


def _at_least(trials: Sequence[Trial], texts: Sequence[str]) -> list[str]:
    return [f"≥{text}" if isinstance(trial, Bound) else text for trial, text in zip(trials, texts, strict=True)]


def _known(trials: Sequence[Trial], texts: Sequence[str]) -> list[str]:
    return [NO_NUMBER if isinstance(trial, Bound) else text for trial, text in zip(trials, texts, strict=True)]


def _against_bound(trial: Trial, tuning: Tuning) -> str:
    # Inputs that forward keeps for backward are not sent again: the bound does not hold.
    if not tuning.bound_nbytes or any(choice.keep for choice in trial.choices.values()):
        return NO_NUMBER
    return f"{'≥' if isinstance(trial, Bound) else ''}{trial.sent_nbytes / tuning.bound_nbytes:.2f}"


def _tflops(trial: Trial) -> float:
    """Rate of an average rank, over all passes."""
    operations = sum(forecast.tflops * forecast.time_s for forecast in trial.forecasts.values())
    return operations / trial.time_s if trial.time_s else 0.0


def _caption(answer: TuneAnswer, no_room: str) -> str:
    tuning = answer.tuning
    is_cut = _equal_rows(answer) < len(answer.shown)
    words = [
        f"The first is chosen. {tuning.tie_words}".strip(),
        f"Below the empty line: more than {FORECAST_ERROR:.0%} slower than the fastest.".replace("%", " %")
        if is_cut
        else "",
        "2x4: query shards x KV shards of a rank; inner: the part of that grid in one node; a choice without blocks "
        "per call has cost-based calls. exposed: the time in which the busiest rank does not compute. Bytes are what "
        "an average rank sends; × bound: relative to the lower bound.",
    ]
    if answer.bound is not None:
        words.append("≥: an estimated lower bound; this library has no plan for that method.")
    source = "Read from the cache." if answer.is_from_cache else f"{count(tuning.simulated, 'plan')} simulated."
    return " ".join(filter(None, [*words, no_room, source]))


# Bounds


def _compute_words(tuning: Tuning) -> str:
    bound = f"compute: {format_time(tuning.bound_s)} at the full kernel rate, with work spread evenly"
    if not tuning.bound_s:
        return bound
    return f"{bound}; the choice takes {tuning.chosen.time_s / tuning.bound_s:.2f} times that"


def _nbytes_words(tuning: Tuning) -> str:
    bound = f"communication: {format_nbytes(tuning.bound_nbytes)} received by an average rank"
    against = _against_bound(tuning.chosen, tuning)
    return bound if against == NO_NUMBER else f"{bound}; the choice moves {against} times that"


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
    if answer.layout not in (DEFAULT_LAYOUT, Turn.name):
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
        imports += "from mesh_attention.planning.costs import Costs\n"
    return imports + call


def _settings(choice: Choice, plan: Plan, topology: Topology) -> str:
    """The choice, and the cluster's costs where the default ones would order the steps in another way."""
    stated = f'choice="{choice_words(choice)}"'
    if make_plan(plan.problem, choice, direction=plan.direction) == plan:
        return stated
    return f"{stated}, costs={costs_on(topology, plan.problem, choice, plan.direction)!r}"
