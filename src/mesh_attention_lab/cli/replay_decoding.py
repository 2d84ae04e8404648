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
    console, problem, decoding = plain_console(), played.problem, played.decoding
    console.print(
        f"replay of rank {decoding.rank} of {problem.ranks:,} on {played.environment.device}: decode; "
        f"{new_words(problem)}, {head_words(problem)}",
        style="bold",
    )
    console.print(_setting_words(played))
    console.print(WHAT_IT_IS)
    console.print()
    read, took = f"{decoding.read_gb_per_s / 1e3:.3g} TB/s", format_time(decoding.read_s)
    words = f"{format_nbytes(decoding.nbytes)} of keys and values at {read}, this device's rate: {took}"
    print_fact(console, "read", words)
    print_fact(
        console,
        "attend",
        f"{format_time(decoding.attend_s)}, {decoding.attend_gb_per_s / 1e3:.3g} TB/s, "
        f"{decoding.attend_gb_per_s / decoding.read_gb_per_s:.1%} of that rate",
    )
    console.print()
    print_table(console, _columns(decoding))
    words = (
        f"Times are of one layer: medians of {count(len(decoding.attend_times_s), 'round')}. time: with exchanges and "
        "merging. × read: relative to the time to read keys and values. alone: without exchanges. sent: by this rank. "
        "error: error of the forecast."
    )
    if not played.is_measured:
        words += " Forecasts are for the cluster's links; the replay uses this machine's."
    console.print(words, style="dim")


def _setting_words(played: DecodingPlayed) -> str:
    on, decoding = played.environment, played.decoding
    versions = ", ".join(f"{name} {number}" for name, number in on.versions.items())
    queued = "from CUDA graphs" if decoding.is_captured else "step by step"
    words = f"kernel {on.kernel}, {count(decoding.layers, 'layer')} in turn, {queued}; {versions}"
    if not played.is_measured:
        return f"{words}; forecasts for {cluster_words(decoding.topology)}"
    link, device = decoding.topology.between, decoding.topology.device
    return (
        f"{words}; link {link.gb_per_s:g} GB/s each way at once, {link.latency_us:g} µs; fixed times of a call "
        f"{device.forward.call_us:g} µs, of a merge {device.launch_us:g} µs"
    )


def _columns(decoding: PlayedDecoding) -> list[Column]:
    steps = decoding.steps
    return [
        Column(header="queries, combine", cells=[step.plan.name for step in steps], is_text=True),
        Column(header="time", cells=[format_time(step.time_s) for step in steps]),
        Column(header="×\nread", cells=[f"{step.time_s / decoding.read_s:.2f}" for step in steps]),
        Column(header="alone", cells=[format_time(step.silent_s) for step in steps]),
        Column(header="sent", cells=[format_nbytes(step.plan.sent_nbytes(decoding.rank)) for step in steps]),
        Column(header="forecast", cells=[format_time(step.forecast_s) for step in steps]),
        Column(header="error\n%", cells=[f"{100 * _error(step):+.1f}" for step in steps]),
    ]


def _error(step: PlayedStep) -> float:
    return step.forecast_s / step.time_s - 1


def decoding_as_json(played: DecodingPlayed) -> dict[str, Any]:
    decoding = played.decoding
    return {
        "command": played.command,
        **asdict(played.environment),
        "problem": asdict(played.problem) | {"mask": str(played.problem.mask)},
        "cluster": asdict(decoding.topology),
        "is_measured": played.is_measured,
        "is_recorded": decoding.is_captured,
        "rank": decoding.rank,
        "layers": decoding.layers,
        "kv_nbytes": decoding.nbytes,
        "read_gb_per_s": decoding.read_gb_per_s,
        "read_s": decoding.read_s,
        "attend_s": decoding.attend_s,
        "attend_times_s": decoding.attend_times_s,
        "attend_gb_per_s": decoding.attend_gb_per_s,
        "steps": [
            asdict(step)
            | {"name": step.plan.name, "time_s": step.time_s, "silent_s": step.silent_s}
            | {"sent_nbytes": step.plan.sent_nbytes(decoding.rank), "against_read": step.time_s / decoding.read_s}
            | {"forecast_error": _error(step)}
            for step in decoding.steps
        ],
    }
