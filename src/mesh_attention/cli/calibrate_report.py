"""What `mesh-attention calibrate` found, as tables for people, as JSON, and as the note above the file."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mesh_attention.calibration.fit import Measurement, MessageTime, kernel_seconds, message_seconds
from mesh_attention.problem import Problem
from mesh_attention.topology import KernelRate, Link, LinkClass, Topology
from mesh_attention.units import count, format_nbytes, format_time, three_digits

RATE_FROM_NBYTES = 4096
"""Smaller messages are all latency."""
LARGEST_MEDIAN_ERROR = 0.2
"""Kernels and links are not quite linear; what is further off than this is noise."""


def print_report(measurement: Measurement, topology: Topology, *, setting: Problem, links: Topology | None) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(f"measured: {_headline(measurement, topology, setting)}", style="bold")
    console.print(_call_table(measurement, topology))
    if measurement.messages:
        console.print()
        console.print(_message_table(measurement, topology))
    console.print()
    for name, figures in _figures(measurement, topology, links).items():
        console.print(f"{name:<9}{figures}")
    if median_error(measurement, topology) > LARGEST_MEDIAN_ERROR:
        console.print(
            "The times are far from what the figures say: is the machine busy with something else? Measure again when "
            "it is idle.",
            style="bold red",
        )


def note(measurement: Measurement, topology: Topology, *, setting: Problem, links: Topology | None) -> str:
    """The lines above the file: how it was measured, and what in it was not."""
    lines = [f"Measured: {_headline(measurement, topology, setting)}; torch {version('torch')}."]
    lines += [f"{link_class}: {_stand_in(link_class, links)}." for link_class in unmeasured(measurement)]
    return "\n".join(lines)


def as_json(measurement: Measurement, topology: Topology) -> dict[str, Any]:
    calls = [asdict(call) | {"fitted_s": kernel_seconds(topology.device, call)} for call in measurement.calls]
    messages = [asdict(m) | {"fitted_s": message_seconds(topology, m)} for m in measurement.messages]
    return {
        "topology": asdict(topology),
        "unmeasured": unmeasured(measurement),
        "measurement": asdict(measurement) | {"calls": calls, "messages": messages},
    }


def median_error(measurement: Measurement, topology: Topology) -> float:
    """Of the fitted times, relative to the measured ones; of calls or of messages, whichever is larger."""
    calls = [abs(kernel_seconds(topology.device, call) / call.time_s - 1) for call in measurement.calls]
    messages = [abs(message_seconds(topology, m) / _time_s(m, topology) - 1) for m in measurement.messages]
    return max(median(calls), median(messages or [0.0]))


def _time_s(message: MessageTime, topology: Topology) -> float:
    """The time that was fitted."""
    return message.both_ways_s if topology.full_duplex else message.one_way_s


def unmeasured(measurement: Measurement) -> list[LinkClass]:
    """The kinds of link that were not there to be measured."""
    seen = {message.link_class for message in measurement.messages}
    both: tuple[LinkClass, ...] = ("inside", "between")
    return [link_class for link_class in both if link_class not in seen]


def _stand_in(link_class: LinkClass, links: Topology | None) -> str:
    other = "between" if link_class == "inside" else "inside"
    return f"not measured, as {links.name}'s" if links is not None else f"not measured, taken to be as {other}"


def _headline(measurement: Measurement, topology: Topology, setting: Problem) -> str:
    threads = f" with {count(measurement.threads, 'thread')} each" if measurement.device == "cpu" else ""
    return (
        f"{count(topology.ranks, 'rank')} on {measurement.device}{threads}, kernel {measurement.kernel}, "
        f"{count(setting.heads, 'head')} of {setting.head_dim_qk}, {setting.dtype}"
    )


# Tables


def _call_table(measurement: Measurement, topology: Topology) -> Table:
    table = _table("call", "queries × keys", "mask", "time", "TFLOP/s", "fit", "error")
    for call in sorted(measurement.calls, key=lambda call: call.direction, reverse=True):
        fitted_s = kernel_seconds(topology.device, call)
        table.add_row(
            call.direction,
            f"{call.q_tokens} × {call.kv_tokens}",
            "causal" if call.is_causal else "full",
            format_time(call.time_s),
            three_digits(call.flops / call.time_s / 1e12),
            format_time(fitted_s),
            _error(fitted_s, call.time_s),
        )
    return table


def _message_table(measurement: Measurement, topology: Topology) -> Table:
    table = _table("messages", "at once", "size", "one way", "both ways", "GB/s", "fit", "error")
    for message in measurement.messages:
        time_s = _time_s(message, topology)
        fitted_s = message_seconds(topology, message)
        table.add_row(
            message.link_class,
            count(message.pairs, "pair"),
            format_nbytes(message.nbytes),
            format_time(message.one_way_s),
            format_time(message.both_ways_s),
            three_digits(message.nbytes / time_s / 1e9) if message.nbytes >= RATE_FROM_NBYTES else "",
            format_time(fitted_s),
            _error(fitted_s, time_s),
        )
    return table


def _figures(measurement: Measurement, topology: Topology, links: Topology | None) -> dict[str, str]:
    device, memory = topology.device, measurement.memory
    merged = f"merging {format_nbytes(memory.nbytes)} took {format_time(memory.large_s)}"
    missing = {of: f" ({_stand_in(of, links)})" for of in unmeasured(measurement)}
    nics = f"{count(topology.nics_per_node, 'NIC')} a node of {count(topology.ranks_per_node, 'rank')}"
    return {
        "forward": _rate(device.forward),
        "backward": _rate(device.backward),
        "memory": f"{device.memory_gb_per_s:g} GB/s ({merged}), {device.memory_gib:g} GiB a rank",
        "launch": f"{device.launch_us:g} µs",
        "inside": _link(topology.inside, topology) + missing.get("inside", ""),
        "between": f"{_link(topology.between, topology)}, {nics}{missing.get('between', '')}",
    }


def _rate(rate: KernelRate) -> str:
    return f"{rate.tflops:g} TFLOP/s, {rate.call_us:g} µs a call; masked calls reach {rate.masked:.0%} of it"


def _link(link: Link, topology: Topology) -> str:
    ways = "each way at once" if topology.full_duplex else "one way at a time"
    return f"{link.gb_per_s:g} GB/s {ways}, {link.latency_us:g} µs"


def _table(*headers: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number == 0 or header == "mask" else "right", no_wrap=True)
    return table


def _error(fitted: float, seen: float) -> str:
    return f"{fitted / seen - 1:+.0%}"
