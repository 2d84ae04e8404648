"""`mesh-attention calibrate`: measure the machines at hand and write them as a cluster.

By itself it starts processes on this machine. Under torchrun it uses torchrun's ranks: all measure, rank 0 prints and
writes.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from mesh_attention.clusters import cluster_named, cluster_to_toml
from mesh_attention.errors import UsageError
from mesh_attention.machine.files import keep_calibrated, slug
from mesh_attention.machine.fit import Measurement, fit_topology
from mesh_attention.problem import ITEMSIZE, Problem
from mesh_attention.topology import KernelRate, Link, LinkClass, Topology
from mesh_attention.units import Report, count, format_nbytes, format_time, three_digits
from mesh_attention_lab.cli.files import output_file, progress
from mesh_attention_lab.cli.options import HEAD_DIM, parsed, whole_number
from mesh_attention_lab.cli.terminal import Column, plain_console, print_table
from mesh_attention_lab.fit_quality import (
    fitted_time_s,
    kernel_seconds,
    median_error,
    message_seconds,
    unmeasured_links,
)
from mesh_attention_lab.launch import check_gpus, joined_group, note_progress, ranks_here, run_processes

if TYPE_CHECKING:
    import torch

    from mesh_attention.comm.base import Comm


MOST_RANKS = 64


def _parse_name(name: str, text: str) -> str:
    if not (text and text.isprintable()):
        raise UsageError(f"{name} {text!r}: expected a name that can be printed")
    return text


def _parse_cluster(name: str, text: str) -> Topology:
    return cluster_named(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    ranks: Annotated[
        int | None, whole_number("--ranks", "Processes to start here; 2 if left out. Not under torchrun.", Option)
    ] = None
    ranks_per_node: Annotated[
        int | None, whole_number("--ranks-per-node", "Ranks per machine; default: the number on this machine.", Option)
    ] = None
    heads: Annotated[int, whole_number("--heads", "Heads of the attention calls.", Option)] = 32
    head_dim: Annotated[int, whole_number("--head-dim", "Head size.", Option)] = HEAD_DIM
    dtype: Annotated[str, Option("--dtype", help=f"One of {', '.join(ITEMSIZE)}.", metavar="NAME")] = "bfloat16"
    links_of: Annotated[
        Topology | None,
        Option(
            "--links-of",
            help="A cluster (h100x8, FILE.toml) to take missing links from.",
            metavar="CLUSTER",
            parser=parsed("--links-of", _parse_cluster),
        ),
    ] = None
    name: Annotated[
        str | None,
        Option(
            "--name",
            help="Name of the cluster; default: the device's name.",
            metavar="NAME",
            parser=parsed("--name", _parse_name),
        ),
    ] = None
    out: Annotated[Path, Option("--out", help="The file to write.", metavar="FILE")] = Path("cluster.toml")
    keep: Annotated[bool, Option("--keep", help="Also keep it for MeshAttention(group) on such a device.")] = False
    force: Annotated[bool, Option("--force", help="Overwrite an existing file.")] = False
    json: Annotated[bool, Option("--json", help="Print one JSON object; still writes the file.")] = False

    @property
    def setting(self) -> Problem:
        """A problem for its heads, head size and dtype."""
        return Problem.self_attention(seq_len=1, heads=self.heads, head_dim=self.head_dim, ranks=1, dtype=self.dtype)

    def node_size(self, here: int) -> int:
        """Ranks per node: as the option says, or those on a machine, or those of the cluster whose links are used."""
        return self.ranks_per_node or max(here, 1 if self.links_of is None else self.links_of.ranks_per_node)


def calibrate_command(options: CalibrateOptions) -> None:
    """Measure kernels, memory and links of these machines, and write them as a cluster.

    By itself: with processes on this machine. Under torchrun: with its ranks, inside and between nodes.

    Exit code 0: written. 1: a process failed. 2: invalid input, or FILE exists.
    """
    is_under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if is_under_torchrun else options.ranks or 2
    if options.ranks not in (None, ranks):
        raise UsageError(f"--ranks {options.ranks}: torchrun started {ranks} ranks; leave --ranks out")
    setting = options.setting
    if ranks == 1 and options.links_of is None:
        raise UsageError(
            "1 rank has no links to measure; use --ranks 2 or more, or --links-of with a cluster that has such links, "
            "such as h200"
        )
    if is_under_torchrun:
        size = options.node_size(ranks_here())
        measurement = _measure_with_ranks(options, setting, ranks, size)
    else:
        size = options.node_size(ranks)
        measurement = _measure_alone(options, setting, ranks, size)
    if measurement is not None:
        name = options.name or slug(measurement.device)
        topology = fit_topology(measurement, name=name, ranks=ranks, ranks_per_node=size, unmeasured=options.links_of)
        _tell(options, measurement, topology)


# Measuring


def _measure_alone(options: CalibrateOptions, setting: Problem, ranks: int, size: int) -> Measurement:
    if ranks > MOST_RANKS:
        raise UsageError(f"--ranks {ranks}: expected at most {MOST_RANKS}, because all of them run on this machine")
    check_gpus(ranks)
    _check_out(options)
    with progress(f"starting {count(ranks, 'rank')}") as report:
        measurement: Measurement = run_processes(work, setting, size, ranks=ranks, report=report)[0]
    return measurement


def work(setting: Problem, ranks_per_node: int, progress_file: Path) -> Measurement:
    """One of the processes that were started here."""
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here()))  # the ranks share this machine's cores
    with joined_group(is_local=True) as (comm, device):

        def report(doing: str, fraction: float) -> None:
            if comm.rank == 0:
                note_progress(progress_file, doing, fraction)

        return _measured(setting, comm, device, ranks_per_node, report)


def _measure_with_ranks(options: CalibrateOptions, setting: Problem, ranks: int, size: int) -> Measurement | None:
    """The measurement on rank 0, None on the others."""
    from mesh_attention.session.agreement import Statement
    from mesh_attention.session.session import Session

    with joined_group() as (comm, device):
        refusal = _refusal(options) if comm.rank == 0 else ""
        statements = Session(comm).agree(Statement(payload=refusal))  # else the others would wait for rank 0
        if refusal := statements[0].payload:
            if comm.rank == 0:
                raise UsageError(refusal)
            raise typer.Exit(2)
        if comm.rank != 0:
            _measured(setting, comm, device, size, lambda doing, fraction: None)
            return None
        with progress(f"{count(ranks, 'rank')} joined") as report:
            return _measured(setting, comm, device, size, report)


def _measured(setting: Problem, comm: Comm, device: torch.device, size: int, report: Report) -> Measurement:
    from mesh_attention.machine.probe import measure
    from mesh_attention.machine.timing import Clock

    clock = Clock(comm=comm, device=device)
    return measure(setting, clock, ranks_per_node=size, ranks_here=ranks_here(), report=report)


# Writing


def _check_out(options: CalibrateOptions) -> None:
    """Raise before anything is measured for a file that cannot or must not be written."""
    path = output_file("--out", str(options.out), example="cluster.toml")
    if path.suffix.lower() != ".toml":
        raise UsageError(f"--out {path}: expected a name that ends in .toml, which marks a cluster file")
    if os.path.lexists(path) and not options.force:
        raise UsageError(f"--out {path}: exists; choose another name, or use --force to overwrite it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--out {path}: no permission to write there; write elsewhere")


def _refusal(options: CalibrateOptions) -> str:
    try:
        _check_out(options)
    except UsageError as error:
        return str(error)
    return ""


def _tell(options: CalibrateOptions, measurement: Measurement, topology: Topology) -> None:
    if not options.json:
        print_report(measurement, topology, setting=options.setting, links=options.links_of)
    text = cluster_to_toml(topology, note=note(measurement, topology, setting=options.setting, links=options.links_of))
    try:
        with options.out.open("w" if options.force else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"--out {options.out}: {(error.strerror or str(error)).lower()}; write elsewhere") from error
    paths = [options.out, *([keep_calibrated(measurement.device, text)] if options.keep else [])]
    if options.json:
        kept = {"kept": str(paths[1])} if options.keep else {}
        typer.echo(json.dumps(as_json(measurement, topology) | {"path": str(options.out)} | kept))
    else:
        typer.echo(f"wrote {' and '.join(map(str, paths))}")


RATE_FROM_NBYTES = 4096
"""Smaller messages are all latency."""
LARGEST_MEDIAN_ERROR = 0.2
"""Kernels and links are not quite linear; a larger error is noise."""


def print_report(measurement: Measurement, topology: Topology, *, setting: Problem, links: Topology | None) -> None:
    console = plain_console()
    console.print(f"measured: {_headline(measurement, topology, setting)}", style="bold")
    print_table(console, _call_columns(measurement, topology))
    if measurement.messages:
        console.print()
        print_table(console, _message_columns(measurement, topology))
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
