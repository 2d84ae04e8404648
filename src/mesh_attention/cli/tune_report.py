"""What `mesh-attention tune` found, for people: the choice, its rivals and why they lost, bounds, and how to use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from mesh_attention.cli.sizes import BYTES, TIMES, count, format_nbytes, format_together, three_digits
from mesh_attention.cli.tables import Column, fitting, table_of
from mesh_attention.cli.usage import cluster_code, explicit_code
from mesh_attention.cli.words import cluster_words, mask_words, size_words
from mesh_attention.drawing.units import format_time
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import DIRECTIONS, Direction
from mesh_attention.planning.choice import Choice
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.result import Trial, Tuning

NAME_WIDTH, REASON_WIDTH = 22, 22
"""What methods and reasons are wrapped to where there is little room."""
NO_NUMBER = "–"
GAPS = (2,)
SHORT: dict[Direction, str] = {"forward": "fwd", "backward": "bwd"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A tuning, what was asked, and the plans of the choice. `cluster` is what `MeshAttention` takes for it."""

    problem: Problem
    topology: Topology
    cluster: str
    memory_nbytes: int | None
    tuning: Tuning
    is_from_cache: bool
    plans: Mapping[Direction, Plan]


def print_tuning(answer: Answer) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    tuning, chosen = answer.tuning, answer.tuning.chosen
    console.print(_headline(answer), style="bold")
    console.print(f"on {cluster_words(answer.topology)}")
    console.print()
    columns = tuning_columns(tuning, has_nodes=answer.topology.nodes > 1)
    bold = [trial is chosen for trial in tuning.trials]
    console.print(table_of(columns, bold=bold, width=console.width, gaps=GAPS))
    kept, _ = fitting(columns, width=console.width, gaps=GAPS)
    console.print(_caption(answer, [column for column in columns if column not in kept]), style="dim")
    if tuning.left_out:
        console.print("\nleft out", style="bold")
        for reason in dict.fromkeys(tuning.left_out.values()):
            families = [family for family, why in tuning.left_out.items() if why == reason]
            console.print(f"{', '.join(families)}: {reason}")
    console.print("\nlower bounds", style="bold")
    console.print(_compute_words(tuning))
    console.print(_nbytes_words(tuning))
    console.print("\nto use it", style="bold")
    layout = next(iter(answer.plans.values())).layout.name
    limit = answer.memory_nbytes
    console.print(cluster_code(answer.cluster, layout=layout, memory_nbytes=limit, width=console.width))
    if len(answer.plans) < len(DIRECTIONS):
        console.print("which chooses for forward and backward together, as --backward does here", style="dim")
    console.print("\nor, spelled out", style="bold")
    console.print(explicit_code(chosen.choices, answer.plans, answer.topology, width=console.width))


def _headline(answer: Answer) -> str:
    passes, layout = " and ".join(answer.plans), next(iter(answer.plans.values())).layout.name
    limit = "" if answer.memory_nbytes is None else f", within {format_nbytes(answer.memory_nbytes)} a rank"
    return f"{passes}; {size_words(answer.problem)}, {mask_words(answer.problem)}, {layout}{limit}"


# The table


def tuning_columns(tuning: Tuning, *, has_nodes: bool) -> list[Column]:
    trials, chosen = tuning.trials, tuning.chosen
    times = [trial.time_s for trial in trials] + [trial.exposed_s for trial in trials]
    time_unit, time_texts = format_together([round(max(0.0, s) * 1e9) for s in times], TIMES, below=1000)
    sent = [trial.between_nbytes for trial in trials] + [trial.sent_nbytes for trial in trials]
    sent_unit, sent_texts = format_together(list(map(round, sent)), BYTES, below=10_000)
    peak_unit, peaks = format_together([trial.peak_nbytes for trial in trials], BYTES, below=1000, digits=3)
    slower = [f"{trial.time_s / chosen.time_s:.2f}" if chosen.time_s else NO_NUMBER for trial in trials]
    columns = [
        Column(header="method\n  configuration", cells=list(map(_name, trials)), is_text=True, least_width=NAME_WIDTH),
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
    """The method, and below it the configuration of each pass, or of both."""
    by_pass = {direction: configuration(choice) for direction, choice in trial.choices.items()}
    if len(set(by_pass.values())) == 1:
        lines = [next(iter(by_pass.values()))]
    else:
        lines = [f"{SHORT[direction]} {text}" for direction, text in by_pass.items()]
    return "\n".join([trial.family, *(f"  {line}" for line in lines)])


def configuration(choice: Choice) -> str:
    """The choice less its layout, which is that of all."""
    return str(replace(choice, layout=None))


def _at_least(trials: Sequence[Trial], texts: Sequence[str]) -> list[str]:
    return [f"≥{text}" if trial.is_bound else text for trial, text in zip(trials, texts, strict=True)]


def _known(trials: Sequence[Trial], texts: Sequence[str]) -> list[str]:
    return [NO_NUMBER if trial.is_bound else text for trial, text in zip(trials, texts, strict=True)]


def _against_bound(trial: Trial, tuning: Tuning) -> str:
    # What forward keeps for backward need not travel again: the bound does not hold.
    if not tuning.bound_nbytes or any(choice.keep for choice in trial.choices.values()):
        return NO_NUMBER
    return f"{'≥' if trial.is_bound else ''}{trial.sent_nbytes / tuning.bound_nbytes:.2f}"


def _tflops(trial: Trial) -> float:
    """Of an average rank, over all passes."""
    operations = sum(forecast.tflops * forecast.time_s for forecast in trial.forecasts.values())
    return operations / trial.time_s if trial.time_s else 0.0


def _caption(answer: Answer, dropped: Sequence[Column]) -> str:
    tuning = answer.tuning
    source = "kept from an earlier run" if answer.is_from_cache else f"{count(tuning.simulated, 'plan')} simulated"
    words = [
        "The first is chosen. 8·2x4: Ulysses degree · query shards x KV shards of a rank; inner: the part of that grid "
        "in one node; direct or ring: how shards travel (/ how partials do); 4/call: so many blocks make a call, by "
        "price: as many as are worth it. exposed: what communication adds. Bytes are what an average rank sends; "
        "× bound: against the lower bound."
    ]
    if any(trial.is_bound for trial in tuning.trials):
        words.append("≥: has no plan here, and takes at least about that.")
    if dropped:
        names = ", ".join(" ".join(column.header.split()) for column in dropped)
        words.append(f"No room for {names}: a wider terminal and --json have them.")
    return " ".join([*words, f"{source[0].upper()}{source[1:]}."])


# Bounds


def _compute_words(tuning: Tuning) -> str:
    bound = f"compute: {format_time(tuning.bound_s)} at the full kernel rate, with work spread evenly"
    if not tuning.bound_s:
        return bound
    return f"{bound}; the choice takes {tuning.chosen.time_s / tuning.bound_s:.2f} times that"


def _nbytes_words(tuning: Tuning) -> str:
    bound = f"communication: {format_nbytes(round(tuning.bound_nbytes))} received by an average rank"
    against = _against_bound(tuning.chosen, tuning)
    return bound if against == NO_NUMBER else f"{bound}; the choice moves {against} times that"
