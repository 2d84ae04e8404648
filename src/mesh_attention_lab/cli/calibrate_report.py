"""The measurement of `mesh-attention calibrate`: tables for people, JSON, and the note above the cluster file."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from mesh_attention.machine.fit import (
    Measurement,
    fitted_time_s,
    kernel_seconds,
    median_error,
    message_seconds,
    unmeasured_links,
)
from mesh_attention.problem import Problem
from mesh_attention.topology import KernelRate, Link, LinkClass, Topology
from mesh_attention.units import count, format_nbytes, format_time, three_digits
from mesh_attention_lab.cli.tables import Column, plain_console, print_table

RATE_FROM_NBYTES = 4096
"""Smaller messages are all latency."""
LARGEST_MEDIAN_ERROR = 0.2
"""Kernels and links are not quite linear; a larger error is noise."""


def print_report(measurement: Measurement, topology: Topology, *, setting: Problem, links: Topology | None) -> None:
    console = plain_console()
    console.print(f"measured: {_headline(measurement, topology, setting)}", style="bold")
    print_table(console, _call_columns(measurement, topology), gaps=(3, 2, 1))
    if measurement.messages:
        console.print()
        print_table(console, _message_columns(measurement, topology), gaps=(3, 2, 1))
    console.print()
    for name, figures in _figures(measurement, topology, links).items():
        console.print(f"{name:<9}{figures}")
    if median_error(measurement, topology) > LARGEST_MEDIAN_ERROR:
        console.print(
            "The measured times are far from the fit: is the machine busy with something else? Measure again when it "
            "is idle.",
            style="bold red",
        )


def note(measurement: Measurement, topology: Topology, *, setting: Problem, links: Topology | None) -> str:
    """The lines above the file: how it was measured, and which figures were not."""
    lines = [f"Measured: {_headline(measurement, topology, setting)}; torch {version('torch')}."]
    lines += [f"{link_class}: {_stand_in(link_class, links)}." for link_class in unmeasured_links(measurement)]
    return "\n".join(lines)


def as_json(measurement: Measurement, topology: Topology) -> dict[str, Any]:
    calls = [asdict(call) | {"fitted_s": kernel_seconds(topology.device, call)} for call in measurement.calls]
    messages = [asdict(m) | {"fitted_s": message_seconds(topology, m)} for m in measurement.messages]
    return {
        "topology": asdict(topology),
        "unmeasured": unmeasured_links(measurement),
        "measurement": asdict(measurement) | {"calls": calls, "messages": messages},
    }


def _stand_in(link_class: LinkClass, links: Topology | None) -> str:
    other = "between" if link_class == "inside" else "inside"
    return f"not measured, taken from {links.name}" if links is not None else f"not measured, assumed equal to {other}"


def _headline(measurement: Measurement, topology: Topology, setting: Problem) -> str:
    threads = f" with {count(measurement.threads, 'thread')} each" if measurement.device == "cpu" else ""
    return (
        f"{count(topology.ranks, 'rank')} on {measurement.device}{threads}, kernel {measurement.kernel}, "
        f"{count(setting.heads, 'head')} of {setting.head_dim_qk}, {setting.dtype}"
    )


def _call_columns(measurement: Measurement, topology: Topology) -> list[Column]:
    calls = sorted(measurement.calls, key=lambda call: call.direction, reverse=True)
    fitted = [kernel_seconds(topology.device, call) for call in calls]
    return [
        Column(header="call", cells=[call.direction for call in calls], is_text=True),
        Column(header="queries × keys", cells=[f"{call.q_tokens} × {call.kv_tokens}" for call in calls]),
        Column(header="mask", cells=["causal" if call.is_causal else "full" for call in calls], is_text=True),
        Column(header="time", cells=[format_time(call.time_s) for call in calls]),
        Column(header="TFLOP/s", cells=[three_digits(call.flops / call.time_s / 1e12) for call in calls]),
        Column(header="fit", cells=list(map(format_time, fitted))),
        Column(header="error", cells=[_error(s, call.time_s) for s, call in zip(fitted, calls, strict=True)]),
    ]


def _message_columns(measurement: Measurement, topology: Topology) -> list[Column]:
    messages = measurement.messages
    seconds = [fitted_time_s(m, topology) for m in messages]
    fitted = [message_seconds(topology, m) for m in messages]
    rates = [
        three_digits(m.nbytes / s / 1e9) if m.nbytes >= RATE_FROM_NBYTES else ""
        for m, s in zip(messages, seconds, strict=True)
    ]
    return [
        Column(header="messages", cells=[m.link_class for m in messages], is_text=True),
        Column(header="at once", cells=[count(m.pairs, "pair") for m in messages]),
        Column(header="size", cells=[format_nbytes(m.nbytes) for m in messages]),
        Column(header="one way", cells=[format_time(m.one_way_s) for m in messages]),
        Column(header="both ways", cells=[format_time(m.both_ways_s) for m in messages]),
        Column(header="GB/s", cells=rates),
        Column(header="fit", cells=list(map(format_time, fitted))),
        Column(header="error", cells=[_error(a, b) for a, b in zip(fitted, seconds, strict=True)]),
    ]


def _figures(measurement: Measurement, topology: Topology, links: Topology | None) -> dict[str, str]:
    device, memory = topology.device, measurement.memory
    merged = f"merging {format_nbytes(memory.nbytes)} took {format_time(memory.large_s)}"
    missing = {of: f" ({_stand_in(of, links)})" for of in unmeasured_links(measurement)}
    nics = f"{count(topology.nics_per_node, 'NIC')} per node of {count(topology.ranks_per_node, 'rank')}"
    return {
        "forward": _rate(device.forward),
        "backward": _rate(device.backward),
        "memory": f"{device.memory_gb_per_s:g} GB/s ({merged}), {device.memory_gib:g} GiB per rank",
        "launch": f"{device.launch_us:g} µs",
        "inside": _link(topology.inside, topology) + missing.get("inside", ""),
        "between": f"{_link(topology.between, topology)}, {nics}{missing.get('between', '')}",
    }


def _rate(rate: KernelRate) -> str:
    return f"{rate.tflops:g} TFLOP/s, {rate.call_us:g} µs per call; masked calls reach {rate.masked:.0%} of it"


def _link(link: Link, topology: Topology) -> str:
    ways = "each way at once" if topology.full_duplex else "one way at a time"
    return f"{link.gb_per_s:g} GB/s {ways}, {link.latency_us:g} µs"


def _error(fitted: float, seen: float) -> str:
    return f"{fitted / seen - 1:+.0%}"
