"""What serving adds to answers: times and cache of all layers, the usual rivals of a turn, and decoded steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from mesh_attention.plan.serving import cache_nbytes
from mesh_attention.planning.choice import Choice
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.decoding import DecodeForecast, forecast_as_json
from mesh_attention.tuning.decoding import travel_words as decode_travel_words
from mesh_attention.units import GIB, format_nbytes, format_time
from mesh_attention_lab.cli.tables import (
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
from mesh_attention_lab.turns import Rival, rival_as_json, travel_words


def of_layers(text: str, text_of_all: str, layers: int) -> str:
    return text if layers == 1 else f"{text} a layer, {text_of_all} for {layers:,} layers"


def layers_words(time_s: float, layers: int) -> str:
    return of_layers(format_time(time_s), format_time(layers * time_s), layers)


def cache_words(problem: Problem, layers: int) -> str:
    one, every = (format_nbytes(cache_nbytes(problem, layers=n)) for n in (1, layers))
    return f"{of_layers(one, every, layers)}, on each rank"


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
        found = rival.forecast
        is_large = found.peak_nbytes > topology.device.memory_gib * GIB
        needs = f", needs {format_nbytes(found.peak_nbytes)} of memory" if is_large else ""
        slower = f"{found.time_s / time_s:.2f} times as long" if time_s else ""
        text = f"{rival.name:13} {format_time(served.layers * found.time_s)}, {slower}{needs}"
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


def print_decoding(problem: Problem, topology: Topology, forecasts: Sequence[DecodeForecast], layers: int) -> None:
    console, chosen = plain_console(), forecasts[0]
    assert chosen.plan is not None
    print_first(
        console,
        write=f'cache.decode({{chat: {problem.seq_q}}}, way="{chosen.plan.way}", meeting="{chosen.plan.meeting}")',
        time=f"{layers_words(chosen.time_s, layers)}, a {'token' if problem.seq_q == 1 else 'step'}",
        memory=f"cache of {cache_words(problem, layers)}",
    )
    console.print(f"decode; {new_words(problem)}, {head_words(problem)}", style="bold")
    console.print(f"on {cluster_words(topology)}")
    console.print()
    print_fact(console, "way", f"{chosen.name}: {chosen.plan}")
    print_fact(console, "sent", f"{format_nbytes(chosen.sent_nbytes)} a layer, by the busiest rank")
    print_fact(console, "why", decode_travel_words(problem))
    console.print()
    no_room = print_table(console, _columns(forecasts), bold=[one is chosen for one in forecasts])
    console.print(_caption(no_room), style="dim")


def _columns(forecasts: Sequence[DecodeForecast]) -> list[Column]:
    parts = [s for one in forecasts for s in (one.time_s, one.attend_s, one.exchange_s, one.merge_s)]
    texts = [format_time(s) for s in parts]
    fastest = forecasts[0].time_s
    return [
        Column(header="way, meeting", cells=[one.name for one in forecasts], is_text=True),
        Column(header="time", cells=texts[::4]),
        Column(header="×\nfirst", cells=[f"{one.time_s / fastest:.2f}" for one in forecasts]),
        Column(header="attend", cells=texts[1::4]),
        Column(header="exchange", cells=texts[2::4]),
        Column(header="merge", cells=texts[3::4], drop=2),
        Column(header="sent", cells=[format_nbytes(one.sent_nbytes) for one in forecasts], drop=1),
        Column(header="why not", cells=[one.reason for one in forecasts], is_text=True, least_width=18),
    ]


def _caption(no_room: str) -> str:
    words = (
        "The first is chosen. Times are of one layer. attend: read the rank's keys and values; exchange: partial "
        "results, and with spread also new tokens; same: every rank runs the same tokens; spread: sequences are spread "
        "over ranks. pass-KV: all keys and values go to every rank. The cost of many small messages is left out."
    )
    return f"{words} {no_room}".rstrip()


def decoding_as_json(
    problem: Problem, topology: Topology, forecasts: Sequence[DecodeForecast], layers: int
) -> dict[str, Any]:
    return {
        "problem": asdict(problem) | {"mask": str(problem.mask)},
        "cluster": asdict(topology),
        "layers": layers,
        "time_s": layers * forecasts[0].time_s,
        "cache_nbytes": cache_nbytes(problem, layers=layers),
        "reason": decode_travel_words(problem),
        "forecasts": list(map(forecast_as_json, forecasts)),
    }
