"""The answer of `mesh-attention tune`: the choice, its rivals and why they lost, bounds, and how to use it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from mesh_attention.plan.layout import Turn
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import DIRECTIONS, INPUTS, OUTPUTS, Direction
from mesh_attention.planning.choice import Choice
from mesh_attention.planning.costs import CALL_PRICES, Costs
from mesh_attention.planning.registry import make_plan
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.result import FORECAST_ERROR, Trial, Tuning
from mesh_attention.tuning.traffic import costs_on
from mesh_attention.units import BYTES, TIMES, count, format_nbytes, format_time, format_together, three_digits
from mesh_attention_lab.cli.serving_report import Served, layers_words, print_turn
from mesh_attention_lab.cli.tables import (
    LABEL_WIDTH,
    NO_NUMBER,
    Column,
    cluster_words,
    plain_console,
    print_fact,
    print_first,
    print_table,
    problem_words,
)

NAME_WIDTH, REASON_WIDTH = 22, 22
"""Methods and reasons are wrapped to these widths where there is little room."""
LET_CALLS_CHOOSE = "or let calls choose, by a quick search"
SHORT: dict[Direction, str] = {"forward": "fwd", "backward": "bwd"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
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
    served: Served | None = None

    @property
    def layout(self) -> str:
        return next(iter(self.plans.values())).layout.name

    @property
    def turn(self) -> tuple[Choice, float]:
        """The choice of a turn, and its time."""
        chosen = self.tuning.chosen
        return chosen.choices["forward"], chosen.time_s


def print_tuning(answer: Answer) -> None:
    console, tuning, chosen = plain_console(), answer.tuning, answer.tuning.chosen
    write = short_code(answer, width=console.width - LABEL_WIDTH)
    memory = f"{format_nbytes(chosen.peak_nbytes)} per rank, for the buffers of a call"
    print_first(console, write=write, time=_time_words(answer), memory=memory)
    if answer.plain is None and answer.served is None:
        texts = dict.fromkeys(map(_stated, chosen.choices.values()))
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
    columns = _columns(tuning, has_nodes=answer.topology.nodes > 1)
    bold = [trial is chosen for trial in tuning.trials]
    no_room = print_table(console, columns, bold=bold, gap_after=len(tuning.equals) % len(tuning.trials))
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
    console.print(explicit_code(chosen.choices, answer.plans, answer.topology, width=console.width), soft_wrap=True)
    limit_nbytes = answer.memory_limit
    # With a limit, a call searches as thoroughly as this command.
    console.print(f"\n{LET_CALLS_CHOOSE if limit_nbytes is None else 'or, for any length'}", style="bold")
    console.print(
        cluster_code(answer.cluster, layout=answer.layout, memory_limit=limit_nbytes, width=console.width),
        soft_wrap=True,
    )
    if len(answer.plans) < len(DIRECTIONS) and answer.served is None:
        console.print("MeshAttention tunes forward and backward together, as --backward does here.", style="dim")


# The first lines


def short_code(answer: Answer, *, width: int) -> str:
    """A call that is as fast as the choice, if stating a choice alone is; or one that lets the tuner choose."""
    if answer.plain is None:
        return _cluster_call(answer.cluster, layout=answer.layout, memory_limit=answer.memory_limit, width=width)
    return filled(f'MeshAttention(group, choice="{_stated(answer.plain)}")', width=width)


def _time_words(answer: Answer) -> str:
    tuning, chosen = answer.tuning, answer.tuning.chosen
    share = f"; {tuning.bound_s / chosen.time_s:.0%}".replace("%", " %") + " of one kernel's rate"
    if answer.served is not None:
        return f"{layers_words(chosen.time_s, answer.served.layers)}{share}"
    passes = ", ".join(f"{format_time(one.time_s)} {direction}" for direction, one in chosen.forecasts.items())
    return (passes if len(chosen.forecasts) == 1 else f"{format_time(chosen.time_s)}: {passes}") + share


def _print_equals(console: Console, tuning: Tuning) -> None:
    """Say which methods a forecast cannot tell from the chosen one, and name the simplest."""
    chosen, simplest = tuning.chosen, tuning.simplest
    equal = [trial.family for trial in tuning.equals if trial is not chosen and not trial.is_bound]
    if not equal:
        return
    error = f"{FORECAST_ERROR:.0%}".replace("%", " %")
    print_fact(console, "equal", f"within {error}, the error of forecasts: {', '.join(equal)}")
    longer = f"{abs(simplest.time_s / chosen.time_s - 1):.1%}".replace("%", " %")
    slower = "longer" if simplest.time_s > chosen.time_s else "shorter"
    texts = dict.fromkeys(map(_stated, simplest.choices.values()))
    other = f"{', backward '.join(texts)}; {longer} {slower} than the first line"
    print_fact(console, "simplest", "of them all, the first line" if simplest is chosen else other)
    console.print()


def _stated(choice: Choice) -> str:
    """The text of a choice. A cache states where its tokens are, so the layout of a turn is not a part of it."""
    return str(replace(choice, layout=None) if choice.layout == Turn() else choice)


# The table


def _columns(tuning: Tuning, *, has_nodes: bool) -> list[Column]:
    trials, chosen = tuning.trials, tuning.chosen
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
    return [f"≥{text}" if trial.is_bound else text for trial, text in zip(trials, texts, strict=True)]


def _known(trials: Sequence[Trial], texts: Sequence[str]) -> list[str]:
    return [NO_NUMBER if trial.is_bound else text for trial, text in zip(trials, texts, strict=True)]


def _against_bound(trial: Trial, tuning: Tuning) -> str:
    # Inputs that forward keeps for backward are not sent again: the bound does not hold.
    if not tuning.bound_nbytes or any(choice.keep for choice in trial.choices.values()):
        return NO_NUMBER
    return f"{'≥' if trial.is_bound else ''}{trial.sent_nbytes / tuning.bound_nbytes:.2f}"


def _tflops(trial: Trial) -> float:
    """Rate of an average rank, over all passes."""
    operations = sum(forecast.tflops * forecast.time_s for forecast in trial.forecasts.values())
    return operations / trial.time_s if trial.time_s else 0.0


def _caption(answer: Answer, no_room: str) -> str:
    tuning = answer.tuning
    is_cut = len(tuning.equals) < len(tuning.trials)
    words = [
        f"The first is chosen. {tuning.tie_words}".strip(),
        f"Below the empty line: more than {FORECAST_ERROR:.0%} slower than the fastest.".replace("%", " %")
        if is_cut
        else "",
        "2x4: query shards x KV shards of a rank; inner: the part of that grid in one node; a choice without blocks "
        "per call has cost-based calls. exposed: the time in which the busiest rank does not compute. Bytes are what "
        "an average rank sends; × bound: relative to the lower bound.",
    ]
    if any(trial.is_bound for trial in tuning.trials):
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


DIGITS = (1, 2, 3, 4, 6, 9, 17)
"""Significant digits of a cost; the fewest that make the same plan are written."""
DEFAULT_LAYOUT = "zigzag"
"""The default of `MeshAttention`."""


def cluster_code(cluster: str, *, layout: str, memory_limit: int | None, width: int) -> str:
    """Code that lets every rank tune."""
    return _cluster_call(cluster, layout=layout, memory_limit=memory_limit, width=width, name="attention = ")


def _cluster_call(cluster: str, *, layout: str, memory_limit: int | None, width: int, name: str = "") -> str:
    arguments = [f"cluster={json.dumps(cluster)}"]
    if layout not in (DEFAULT_LAYOUT, Turn.name):
        arguments.append(f'layout="{layout}"')
    if memory_limit is not None:
        power = next(power for power in (30, 20, 10, 0) if memory_limit % 2**power == 0)
        arguments.append(f"memory_limit={memory_limit >> power}" + (f" * 2**{power}" if power else ""))
    return filled(f"{name}MeshAttention(group, {', '.join(arguments)})", width=width)


def explicit_code(
    choices: Mapping[Direction, Choice], plans: Mapping[Direction, Plan], topology: Topology, *, width: int
) -> str:
    """Code that states the choice, without a tuner or a cluster."""
    written = {d: _arguments(choice, plans[d], topology) for d, choice in choices.items()}
    first, *others = written.values()
    if all(other == first for other in others):
        names = ["Costs", "MeshAttention"] if "costs=" in first else ["MeshAttention"]
        statements = [f"attention = MeshAttention(group, {first})"]
    else:
        has_costs = any("costs=" in arguments for arguments in written.values())
        names = ["Costs"] * has_costs + ["MeshAttention", "make_plan"]
        by_pass = ", ".join(f'"{direction}": dict({arguments})' for direction, arguments in written.items())
        layout = f'layout="{next(iter(plans.values())).layout.name}"'
        statements = [
            f"options = {{{by_pass}}}",
            f"attention = MeshAttention(group, {layout}, planner=lambda problem, direction, layout: "
            "make_plan(problem, direction=direction, **options[direction]))",
        ]
    lines = [f"from mesh_attention import {', '.join(names)}", *statements]
    return "\n".join(filled(line, width=width) for line in lines)


def filled(statement: str, *, width: int) -> str:
    """The statement wrapped at spaces outside strings and tiles, which are all in brackets, where lines may end."""
    lines = [""]
    for word in re.findall(r'(?:"(?:\\.|[^"\\])*"|\(\d+, \d+\)|[^\s"])+', statement):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines += _pieces(word, width=width)
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def _pieces(word: str, *, width: int) -> list[str]:
    """A word on lines of its own. If it is too long for one, its text is cut into two, which Python joins again."""
    cut = word.rfind(", ", 0, width - 8) + 2
    if len(word) + 4 <= width or word.count('"') != 2 or cut < 2:
        return [f"    {word}"]
    return [f'    {word[:cut]}"', *_pieces(f'"{word[cut:]}', width=width)]


def _arguments(choice: Choice, plan: Plan, topology: Topology) -> str:
    costs = _least_costs(choice, plan, topology)
    written = ", ".join(f"{kind}={cost!r}" for kind, cost in costs.items())
    return f'choice="{_stated(choice)}"' + (f", costs=Costs({written})" if costs else "")


def _least_costs(choice: Choice, plan: Plan, topology: Topology) -> dict[str, float]:
    """Costs that make this plan, with as few digits as do; empty if the plan is the same without."""
    for costs in _rounded(choice, plan, topology):
        given: dict[str, Any] = {"costs": Costs(**costs)} if costs else {}
        if make_plan(plan.problem, choice, direction=plan.direction, **given) == plan:
            return costs
    raise AssertionError("the exact costs do not make the same plan again")


def _rounded(choice: Choice, plan: Plan, topology: Topology) -> Iterator[dict[str, float]]:
    yield {}
    costs = asdict(costs_on(topology, plan.problem, choice, plan.direction))
    kinds = (*INPUTS[plan.direction], *OUTPUTS[plan.direction])
    names = [*kinds, *(price for price in CALL_PRICES if costs[price])]
    for digits in DIGITS:
        yield {name: float(f"{costs[name]:.{digits}g}") for name in names}
