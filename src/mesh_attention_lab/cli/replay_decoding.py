"""The result of `mesh-attention replay --decode`: lines and a table for people, JSON for machines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mesh_attention.problem import Problem
from mesh_attention.units import count, format_nbytes, format_time
from mesh_attention_lab.cli.terminal import (
    Column,
    cluster_words,
    head_words,
    new_words,
    plain_console,
    print_fact,
    print_table,
)

if TYPE_CHECKING:
    from mesh_attention_lab.replay.decoding import PlayedDecoding, PlayedStep
    from mesh_attention_lab.replay.device import Environment

WHAT_IT_IS = (
    "A replay of one layer's step: keys, values and kernels are real, and every exchange is one copy of its size in "
    "each direction between the device and its host. Left out: other ranks being late, and the latency of many peers."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingPlayed:
    """A replay of decoding, and its settings. Forecasts are for this device, unless a cluster was given."""

    command: str
    problem: Problem
    is_measured: bool
    environment: Environment
    decoding: PlayedDecoding


def print_decoding(played: DecodingPlayed) -> None:
    console, problem, found = plain_console(), played.problem, played.decoding
    console.print(
        f"replay of rank {found.rank} of {problem.ranks:,} on {played.environment.device}: decode; "
        f"{new_words(problem)}, {head_words(problem)}",
        style="bold",
    )
    console.print(_setting_words(played))
    console.print(WHAT_IT_IS)
    console.print()
    read = f"{found.read_gb_per_s / 1e3:.3g} TB/s"
    print_fact(
        console,
        "read",
        f"{format_nbytes(found.nbytes)} of keys and values at {read}, this device's rate: {format_time(found.read_s)}",
    )
    print_fact(
        console,
        "attend",
        f"{format_time(found.attend_s)}, {found.attend_gb_per_s / 1e3:.3g} TB/s, "
        f"{found.attend_gb_per_s / found.read_gb_per_s:.1%} of that rate",
    )
    console.print()
    no_room = print_table(console, _columns(found))
    words = (
        f"Times are of one layer: medians of {count(len(found.attend_times_s), 'round')}. time: with exchanges and "
        "merging. × read: relative to the time to read keys and values. alone: without exchanges. sent: by this rank. "
        "error: error of the forecast."
    )
    if not played.is_measured:
        words += " Forecasts are for the cluster's links; the replay uses this machine's."
    console.print(f"{words} {no_room}".rstrip(), style="dim")


def _setting_words(played: DecodingPlayed) -> str:
    on, found = played.environment, played.decoding
    versions = ", ".join(f"{name} {number}" for name, number in on.versions.items())
    queued = "from CUDA graphs" if found.is_captured else "step by step"
    words = f"kernel {on.kernel}, {count(found.layers, 'layer')} in turn, {queued}; {versions}"
    if not played.is_measured:
        return f"{words}; forecasts for {cluster_words(found.topology)}"
    link, device = found.topology.between, found.topology.device
    return (
        f"{words}; link {link.gb_per_s:g} GB/s each way at once, {link.latency_us:g} µs; fixed times of a call "
        f"{device.forward.call_us:g} µs, of a merge {device.launch_us:g} µs"
    )


def _columns(found: PlayedDecoding) -> list[Column]:
    steps = found.steps
    return [
        Column(header="way, meeting", cells=[step.plan.name for step in steps], is_text=True),
        Column(header="time", cells=[format_time(step.time_s) for step in steps]),
        Column(header="×\nread", cells=[f"{step.time_s / found.read_s:.2f}" for step in steps]),
        Column(header="alone", cells=[format_time(step.silent_s) for step in steps]),
        Column(header="exchanges", cells=[str(step.plan.exchanges) for step in steps], drop=2),
        Column(header="sent", cells=[format_nbytes(step.plan.sent_nbytes(found.rank)) for step in steps], drop=1),
        Column(header="forecast", cells=[format_time(step.forecast_s) for step in steps]),
        Column(header="error\n%", cells=[f"{100 * _error(step):+.1f}" for step in steps]),
    ]


def _error(step: PlayedStep) -> float:
    return step.forecast_s / step.time_s - 1


def decoding_as_json(played: DecodingPlayed) -> dict[str, Any]:
    found = played.decoding
    return {
        "command": played.command,
        **asdict(played.environment),
        "problem": asdict(played.problem) | {"mask": str(played.problem.mask)},
        "cluster": asdict(found.topology),
        "is_measured": played.is_measured,
        "is_recorded": found.is_captured,
        "rank": found.rank,
        "layers": found.layers,
        "kv_nbytes": found.nbytes,
        "read_gb_per_s": found.read_gb_per_s,
        "read_s": found.read_s,
        "attend_s": found.attend_s,
        "attend_times_s": found.attend_times_s,
        "attend_gb_per_s": found.attend_gb_per_s,
        "steps": [
            asdict(step)
            | {"name": step.plan.name, "time_s": step.time_s, "silent_s": step.silent_s}
            | {"sent_nbytes": step.plan.sent_nbytes(found.rank), "against_read": step.time_s / found.read_s}
            | {"forecast_error": _error(step)}
            for step in found.steps
        ],
    }
