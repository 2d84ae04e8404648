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
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh_attention.clusters import cluster_named, cluster_to_toml
from mesh_attention.errors import UsageError
from mesh_attention.machine.detected_cluster import calibrated_file, slug
from mesh_attention.machine.fit import CallTime, Measurement, MessageTime, fit_topology
from mesh_attention.problem import ITEMSIZE, Problem
from mesh_attention.topology import Device, LinkClass, Topology
from mesh_attention.tuning.stored import write_at_once
from mesh_attention.units import Progress, count
from mesh_attention_lab.cli.options import HEAD_DIM, file, flag, option, whole_number
from mesh_attention_lab.cli.terminal import percent, plain_console, progress
from mesh_attention_lab.drawing import writing
from mesh_attention_lab.launch import check_gpus, joined_group, ranks_here, run_processes

if TYPE_CHECKING:
    import torch

    from mesh_attention.comm.base import Comm


MOST_RANKS = 64


def _parse_name(text: str) -> str:
    if not (text and text.isprintable()):
        raise UsageError(f" {text!r}: expected a name that can be printed")
    return text


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    ranks: Annotated[int | None, whole_number("Processes to start here; 2 if left out. Not under torchrun.")] = None
    ranks_per_node: Annotated[int | None, whole_number("Ranks per machine; default: the number on this machine.")] = (
        None
    )
    heads: Annotated[int, whole_number("Heads of the attention calls.")] = 32
    head_dim: Annotated[int, whole_number("Head size.")] = HEAD_DIM
    dtype: Annotated[str, option(f"One of {', '.join(ITEMSIZE)}.", "NAME")] = "bfloat16"
    links_of: Annotated[
        Topology | None, option("A cluster (h100x8, FILE.toml) to take missing links from.", "CLUSTER", cluster_named)
    ] = None
    name: Annotated[str | None, option("Name of the cluster; default: the device's name.", "NAME", _parse_name)] = None
    out: Annotated[Path, file("The file to write.", "cluster.toml")] = Path("cluster.toml")
    keep: Annotated[bool, flag("--keep", "Also keep it for MeshAttention(group) on such a device.")] = False
    force: Annotated[bool, flag("--force", "Overwrite an existing file.")] = False
    json: Annotated[bool, flag("--json", "Print one JSON object; still writes the file.")] = False

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
    setting = options.setting  # refuses here what the processes would refuse
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
    with progress(f"measuring with {count(ranks, 'rank')}"):
        measurement: Measurement = run_processes(work, setting, size, ranks=ranks)[0]
    return measurement


def work(setting: Problem, ranks_per_node: int) -> Measurement:
    """One of the processes that were started here."""
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here()))  # the ranks share this machine's cores
    with joined_group(is_local=True) as (comm, device):
        return measured(setting, comm, device, ranks_per_node, lambda activity, fraction: None)


def _measure_with_ranks(options: CalibrateOptions, setting: Problem, ranks: int, size: int) -> Measurement | None:
    """The measurement on rank 0, None on the others."""
    from mesh_attention.session.agreement import Statement
    from mesh_attention.session.session import Session

    with joined_group() as (comm, device):
        refusal = ""
        try:
            if comm.rank == 0:
                _check_out(options)
        except UsageError as error:
            refusal = str(error)
        statements = Session(comm).agree(Statement(payload=refusal))  # else the others would wait for rank 0
        if refusal:
            raise UsageError(refusal)
        if statements[0].payload:
            raise typer.Exit(2)
        with progress(f"{count(ranks, 'rank')} joined", is_shown=comm.rank == 0) as report:
            measurement = measured(setting, comm, device, size, report)
        return measurement if comm.rank == 0 else None


def measured(setting: Problem, comm: Comm, device: torch.device, size: int, report: Progress) -> Measurement:
    """The measured times, with `size` ranks per node; `report` hears of rank 0."""
    from mesh_attention.machine.timing import Clock, measure

    heard = report if comm.rank == 0 else lambda activity, fraction: None
    clock = Clock(comm=comm, device=device)
    return measure(setting, clock, ranks_per_node=size, ranks_here=ranks_here(), report=heard)


# Writing


def _check_out(options: CalibrateOptions) -> None:
    """Raise before anything is measured for a file that cannot or must not be written."""
    path = options.out
    if path.suffix.lower() != ".toml":
        raise UsageError(f"--out {path}: expected a name that ends in .toml, which marks a cluster file")
    if os.path.lexists(path) and not options.force:
        raise UsageError(f"--out {path}: exists; choose another name, or use --force to overwrite it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--out {path}: no permission to write there; write elsewhere")


def _tell(options: CalibrateOptions, measurement: Measurement, topology: Topology) -> None:
    headline = _headline(measurement, topology, options.setting)
    text = cluster_to_toml(topology, note=_note(headline, measurement, options.links_of))
    if not options.json:
        _print_report(headline, median_error(measurement, topology), text)
    with writing(options.out), options.out.open("w" if options.force else "x", encoding="utf-8") as stream:
        stream.write(text)
    kept = keep_calibrated(measurement.device, text) if options.keep else None
    if options.json:
        files = {"path": str(options.out)} | ({} if kept is None else {"kept": str(kept)})
        typer.echo(json.dumps(_as_json(measurement, topology) | files))
    else:
        typer.echo(f"wrote {' and '.join(map(str, filter(None, (options.out, kept))))}")


def keep_calibrated(device: str, text: str) -> Path:
    """Write a calibrated cluster where groups on this device look for it."""
    path = calibrated_file(device)
    if path is None:
        raise UsageError("--keep: this user has no home directory; set XDG_CONFIG_HOME")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_at_once(path, text)
    except OSError as error:
        raise UsageError(f"--keep: {path}: {(error.strerror or str(error)).lower()}; set XDG_CONFIG_HOME") from error
    return path


LARGEST_MEDIAN_ERROR = 0.2
"""Kernels and links are not quite linear; a larger error is noise."""


def _print_report(headline: str, error: float, text: str) -> None:
    console = plain_console()
    console.print(f"measured: {headline}", style="bold")
    console.print(
        f"The median error of the figures below is {percent(error, digits=1)}; --json has every time.\n\n{text}"
    )
    if error > LARGEST_MEDIAN_ERROR:
        console.print(
            "The measured times are far from the fit: is the machine busy with something else? Measure again when it "
            "is idle.",
            style="bold red",
        )


def _note(headline: str, measurement: Measurement, links: Topology | None) -> str:
    """The lines above the file: how it was measured, and which figures were not."""
    lines = [f"Measured: {headline}; torch {version('torch')}."]
    for link_class in unmeasured_links(measurement):
        other = "between" if link_class == "inside" else "inside"
        source = f"assumed equal to {other}" if links is None else f"taken from {links.name}"
        lines.append(f"{link_class}: not measured, {source}.")
    return "\n".join(lines)


def _as_json(measurement: Measurement, topology: Topology) -> dict[str, Any]:
    calls = [asdict(call) | {"fitted_s": kernel_seconds(topology.device, call)} for call in measurement.calls]
    messages = [asdict(m) | {"fitted_s": message_seconds(topology, m)} for m in measurement.messages]
    return {
        "topology": asdict(topology),
        "unmeasured": unmeasured_links(measurement),
        "measurement": asdict(measurement) | {"calls": calls, "messages": messages},
    }


def _headline(measurement: Measurement, topology: Topology, setting: Problem) -> str:
    threads = f" with {count(measurement.threads, 'thread')} each" if measurement.device == "cpu" else ""
    return (
        f"{count(topology.ranks, 'rank')} on {measurement.device}{threads}, kernel {measurement.kernel}, "
        f"{count(setting.heads, 'head')} of {setting.head_dim_qk}, {setting.dtype}"
    )


# How good the fit is: the times that its figures give, next to those that were measured


def kernel_seconds(device: Device, call: CallTime) -> float:
    """The fitted time of a call."""
    return device.call_seconds(
        call.direction,
        heads=call.heads,
        q_tokens=call.q_tokens,
        kv_tokens=call.kv_tokens,
        flops=call.flops,
        is_masked=call.is_causal,
    )


def message_seconds(topology: Topology, message: MessageTime) -> float:
    """The fitted time of a message, both ways if links are duplex."""
    waiting = max(1.0, message.pairs / topology.nics_per_node) if message.link_class == "between" else 1.0
    return topology.link(message.link_class).seconds(message.nbytes * waiting)


def unmeasured_links(measurement: Measurement) -> list[LinkClass]:
    """The kinds of link that the ranks do not have."""
    both: tuple[LinkClass, ...] = ("inside", "between")
    return [kind for kind in both if all(message.link_class != kind for message in measurement.messages)]


def fitted_time_s(message: MessageTime, topology: Topology) -> float:
    """The one of its times that was fitted."""
    return message.both_ways_s if topology.full_duplex else message.one_way_s


def median_error(measurement: Measurement, topology: Topology) -> float:
    """Relative error of the fitted times: that of calls or that of messages, the larger of the two."""
    calls = [abs(kernel_seconds(topology.device, call) / call.time_s - 1) for call in measurement.calls]
    messages = [abs(message_seconds(topology, m) / fitted_time_s(m, topology) - 1) for m in measurement.messages]
    return max(median(calls), median(messages or [0.0]))
