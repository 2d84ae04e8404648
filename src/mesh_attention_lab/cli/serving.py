"""Serving in the answers of commands: times and cache of all layers, the usual rivals of a turn, and decoded steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mesh_attention.plan.assignment import Tile
from mesh_attention.plan.counts import MANY_RANKS, rank_costs
from mesh_attention.plan.footprint import cache_nbytes, kv_token_nbytes
from mesh_attention.plan.layout import TypicalTurn
from mesh_attention.planners.choice import Choice
from mesh_attention.problem import Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.topology import Topology
from mesh_attention.tuning.result import Forecast
from mesh_attention.tuning.search import MOST_TRANSFERS
from mesh_attention.tuning.traffic import plan_on
from mesh_attention.units import GIB, Progress, format_nbytes, format_time
from mesh_attention_lab.cli.files import problem_to_json
from mesh_attention_lab.cli.terminal import (
    LABEL_WIDTH,
    Column,
    cluster_words,
    head_words,
    new_words,
    plain_console,
    print_fact,
    print_first,
    print_table,
)
from mesh_attention_lab.decoding import DecodeForecast, forecast_as_json
from mesh_attention_lab.decoding import travel_words as decode_travel_words

if TYPE_CHECKING:
    from mesh_attention_lab.replay.decoding import PlayedDecoding, PlayedStep

GROUPINGS = (1, 4, 16, None)
"""Blocks per call that are tried for a rival; None is cost-based."""
PRICED_RANKS = 8
GROUPINGS_OF_MANY, PRICED_OF_MANY = (16,), 1
"""The same on many ranks, where every forecast takes a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A method of other systems for serving, with the grouping that suits it best."""

    name: str
    choice: Choice
    forecast: Forecast


def turn_rivals(problem: Problem, topology: Topology, *, report: Progress) -> tuple[Rival, ...]:
    """Pass-KV ring, pass-Q ring and all-gather, each forecast whether it fits into memory or not; none on so many ranks
    that their programs take too long to build."""
    if problem.ranks > MOST_TRANSFERS:
        return ()
    rivals = []
    for number, (name, choices) in enumerate(_rivals(problem)):
        report(f"simulating {name}", number / 3)
        forecasts = {choice: _forecast(choice, problem, topology) for choice in choices}
        best = min(forecasts, key=lambda choice: forecasts[choice].time_s)
        rivals.append(Rival(name=name, choice=best, forecast=forecasts[best]))
    return tuple(rivals)


def _rivals(problem: Problem) -> Iterator[tuple[str, list[Choice]]]:
    for name, choice in (
        ("pass-KV ring", Choice(method="ring", layout=TypicalTurn(), route="ring")),
        ("pass-Q ring", Choice(method="pass-q", layout=TypicalTurn(), route="ring")),
    ):
        resolved = choice.resolved(problem, "forward")
        groupings = GROUPINGS if problem.ranks < MANY_RANKS else GROUPINGS_OF_MANY
        yield name, [replace(resolved, blocks_per_call=blocks) for blocks in groupings]
    yield (
        "all-gather",
        [Choice(method="attention2d", tile=Tile(1, problem.ranks), ulysses_degree=1, layout=TypicalTurn())],
    )


def _forecast(choice: Choice, problem: Problem, topology: Topology) -> Forecast:
    priced_ranks = PRICED_RANKS if problem.ranks < MANY_RANKS else PRICED_OF_MANY
    return Forecast.of(simulate(plan_on(topology, problem, choice, "forward"), topology, priced_ranks=priced_ranks))


def rival_as_json(rival: Rival) -> dict[str, Any]:
    return {"name": rival.name, "choice": rival.choice.options, **asdict(rival.forecast)}


def travel_words(problem: Problem, choice: Choice) -> str:
    """The sizes of queries and of keys and values, and which of them travel under a choice."""
    tile, ulysses = choice.assignment.tile, choice.assignment.ulysses_degree
    queries = problem.batch * problem.seq_q * problem.heads * problem.head_dim_qk * problem.itemsize
    kv = problem.batch * problem.seq_kv * kv_token_nbytes(problem)
    sizes = (
        f"{problem.seq_q:,} new queries are {format_nbytes(queries)}, keys and values {format_nbytes(kv)}, "
        f"{format_nbytes(kv / problem.ranks)} a rank"
    )
    travels = {
        (False, False): "nothing else travels" if ulysses > 1 else "nothing travels",
        (True, False): "queries travel",
        (False, True): "keys and values travel",
        (True, True): f"both travel, {tile.rows} shards of queries and {tile.cols} of keys and values to a rank",
    }[tile.rows > 1, tile.cols > 1]
    traded = f"{ulysses} ranks trade heads for tokens, then " if ulysses > 1 else ""
    return f"{sizes}: {traded}{travels}."


def of_layers(text: str, text_of_all: str, layers: int) -> str:
    return text if layers == 1 else f"{text} a layer, {text_of_all} for {layers:,} layers"


def layers_words(time_s: float, layers: int) -> str:
    return of_layers(format_time(time_s), format_time(layers * time_s), layers)


def cache_words(problem: Problem, layers: int) -> str:
    a_layer, in_all = (format_nbytes(cache_nbytes(problem, layers=n)) for n in (1, layers))
    return f"{of_layers(a_layer, in_all, layers)}, on each rank"


# Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a tuning of a turn has besides its trials."""

    layers: int
    rivals: tuple[Rival, ...]


def print_turn(
    console: Console, problem: Problem, topology: Topology, choice: Choice, time_s: float, served: Served
) -> None:
    print_fact(console, "cache", cache_words(problem, served.layers))
    print_fact(console, "tile", str(replace(choice, layout=None)))
    print_fact(console, "why", travel_words(problem, choice))
    for number, rival in enumerate(served.rivals):
        forecast = rival.forecast
        is_large = forecast.peak_nbytes > topology.device.memory_gib * GIB
        needs = f", needs {format_nbytes(forecast.peak_nbytes)} of memory" if is_large else ""
        slower = f"{forecast.time_s / time_s:.2f} times as long" if time_s else ""
        text = f"{rival.name:13} {format_time(served.layers * forecast.time_s)}, {slower}{needs}"
        console.print(f"{'' if number else 'against':{LABEL_WIDTH}}{text}")


def turn_as_json(problem: Problem, choice: Choice, time_s: float, served: Served) -> dict[str, Any]:
    return {
        "new": problem.seq_q,
        "cached": problem.seq_kv - problem.seq_q,
        "layers": served.layers,
        "time_s": served.layers * time_s,
        "cache_nbytes": cache_nbytes(problem, layers=served.layers),
        "reason": travel_words(problem, choice),
        "rivals": list(map(rival_as_json, served.rivals)),
    }


# Decoding

CAPTION = (
    "The first is chosen. Times are of one layer. attend: read the rank's keys and values; exchange: partial results, "
    "and of sharded queries the new tokens. replicated: every rank runs the same tokens; sharded: some of the "
    "sequences. The cost of many small messages is left out."
)


def print_decoding(problem: Problem, topology: Topology, forecasts: Sequence[DecodeForecast], layers: int) -> None:
    console, chosen = plain_console(), forecasts[0]
    print_first(
        console,
        write=f'cache.decode({{chat: {problem.seq_q}}}, queries="{chosen.queries}", combine="{chosen.combine}")',
        time=f"{layers_words(chosen.time_s, layers)}, a {'token' if problem.seq_q == 1 else 'step'}",
        memory=f"cache of {cache_words(problem, layers)}",
    )
    console.print(f"decode; {new_words(problem)}, {head_words(problem)}", style="bold")
    console.print(f"on {cluster_words(topology)}")
    console.print()
    print_fact(console, "step", f"{chosen.name}: {chosen.steps}")
    print_fact(console, "sent", f"{format_nbytes(chosen.sent_nbytes)} a layer, by the busiest rank")
    print_fact(console, "why", decode_travel_words(problem))
    console.print()
    print_table(console, _columns(forecasts), bold=[forecast is chosen for forecast in forecasts])
    console.print(CAPTION, style="dim")


def _columns(forecasts: Sequence[DecodeForecast]) -> list[Column]:
    fastest = forecasts[0].time_s
    return [
        Column(header="queries, combine", cells=[forecast.name for forecast in forecasts], is_text=True),
        Column(header="time", cells=[format_time(forecast.time_s) for forecast in forecasts]),
        Column(header="×\nfirst", cells=[f"{forecast.time_s / fastest:.2f}" for forecast in forecasts]),
        Column(header="attend", cells=[format_time(forecast.attend_s) for forecast in forecasts]),
        Column(header="exchange", cells=[format_time(forecast.exchange_s) for forecast in forecasts]),
        Column(header="why not", cells=[forecast.reason for forecast in forecasts], is_text=True, least_width=16),
    ]


def decoding_as_json(
    problem: Problem, topology: Topology, forecasts: Sequence[DecodeForecast], layers: int
) -> dict[str, Any]:
    return {
        "problem": problem_to_json(problem),
        "cluster": asdict(topology),
        "layers": layers,
        "time_s": layers * forecasts[0].time_s,
        "cache_nbytes": cache_nbytes(problem, layers=layers),
        "reason": decode_travel_words(problem),
        "forecasts": list(map(forecast_as_json, forecasts)),
    }


def print_played_decoding(problem: Problem, played: PlayedDecoding, *, device: str, setting: str) -> None:
    console = plain_console()
    console.print(
        f"replay of rank {played.rank} of {problem.ranks:,} on {device}: decode; "
        f"{new_words(problem)}, {head_words(problem)}",
        style="bold",
    )
    console.print(setting)
    console.print()
    read = f"{format_nbytes(played.kv_nbytes)} of keys and values at {played.read_gb_per_s / 1e3:.3g} TB/s"
    print_fact(console, "read", f"{read}, this device's rate: {format_time(played.read_s)}")
    attended = f"{format_time(played.attend_s)}, {played.attend_gb_per_s / 1e3:.3g} TB/s"
    print_fact(console, "attend", f"{attended}, {played.attend_gb_per_s / played.read_gb_per_s:.1%} of that rate")
    console.print()
    print_table(console, _played_columns(played))
    words = (
        "Times are of one layer, with real kernels, keys and values; an exchange is one copy each way between device "
        "and host, without other ranks being late or the latency of many peers. × read: relative to reading keys and "
        "values. sent: by this rank. error: of the forecast."
    )
    console.print(words, style="dim")


def _played_columns(played: PlayedDecoding) -> list[Column]:
    steps = played.steps
    return [
        Column(header="queries, combine", cells=[step.forecast.name for step in steps], is_text=True),
        Column(header="time", cells=[format_time(step.time_s) for step in steps]),
        Column(header="×\nread", cells=[f"{step.time_s / played.read_s:.2f}" for step in steps]),
        Column(header="sent", cells=[format_nbytes(_sent_nbytes(step, played.rank)) for step in steps]),
        Column(header="forecast", cells=[format_time(step.forecast.time_s) for step in steps]),
        Column(header="error\n%", cells=[f"{100 * step.forecast_error:+.1f}" for step in steps]),
    ]


def played_as_json(played: PlayedDecoding) -> dict[str, Any]:
    steps = [
        forecast_as_json(step.forecast)
        | {"forecast_s": step.forecast.time_s, "forecast_error": step.forecast_error}
        | {"times_s": step.times_s, "time_s": step.time_s, "against_read": step.time_s / played.read_s}
        | {"sent_nbytes": _sent_nbytes(step, played.rank)}
        for step in played.steps
    ]
    figures = {field.name: getattr(played, field.name) for field in fields(played)}
    derived = {name: getattr(played, name) for name in ("read_s", "attend_s", "attend_gb_per_s")}
    return figures | derived | {"steps": steps}


def _sent_nbytes(step: PlayedStep, rank: int) -> int:
    return rank_costs(step.forecast.plan, rank).sent_nbytes
