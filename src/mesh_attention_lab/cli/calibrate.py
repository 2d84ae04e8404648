"""`mesh-attention calibrate`: measure the machines at hand and write them as a cluster.

By itself it starts processes on this machine. Under torchrun it uses torchrun's ranks: all measure, rank 0 prints and
writes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mesh_attention.clusters import cluster_to_toml, find_cluster
from mesh_attention.errors import UsageError
from mesh_attention.machine.files import keep_calibrated, slug
from mesh_attention.machine.fit import Measurement, fit_topology
from mesh_attention.problem import ITEMSIZE, Problem
from mesh_attention.topology import Topology
from mesh_attention.units import count, parse_whole
from mesh_attention_lab.cli.calibrate_report import as_json, note, print_report
from mesh_attention_lab.cli.command import group, option
from mesh_attention_lab.cli.files import Report, output_file, progress
from mesh_attention_lab.cli.options import HEAD_DIM
from mesh_attention_lab.launch import check_gpus, joined_group, note_progress, ranks_here, run_processes

if TYPE_CHECKING:
    import torch

    from mesh_attention.comm.base import Comm

MOST_RANKS = 64


def _read_name(name: str, text: str) -> str:
    if not (text and text.isprintable()):
        raise UsageError(f"{name} {text!r}: expected a name that can be printed")
    return text


def _read_cluster(name: str, text: str) -> Topology:
    return find_cluster(text)


@group
class CalibrateOptions:
    ranks: int | None = option(
        "--ranks", "Processes to start here; 2 if left out. Not under torchrun.", "N", parse_whole, None
    )
    ranks_per_node: int | None = option(
        "--ranks-per-node", "Ranks per machine; default: the number on this machine.", "N", parse_whole, None
    )
    heads: int = option("--heads", "Heads of the attention calls.", "N", parse_whole, 32)
    head_dim: int = option("--head-dim", "Head size.", "N", parse_whole, HEAD_DIM)
    dtype: str = option("--dtype", f"One of {', '.join(ITEMSIZE)}.", "NAME", default="bfloat16")
    links_of: Topology | None = option(
        "--links-of",
        "A cluster (h100x8, FILE.toml) to take missing links from.",
        "CLUSTER",
        _read_cluster,
        None,
    )
    name: str | None = option("--name", "Name of the cluster; default: the device's name.", "NAME", _read_name, None)
    out: Path = option("--out", "The file to write.", "FILE", default=Path("cluster.toml"))
    keep: bool = option("--keep", "Also keep it for MeshAttention(group) on such a device.", default=False)
    force: bool = option("--force", "Overwrite an existing file.", default=False)
    json: bool = option("--json", "Print one JSON object; still writes the file.", default=False)

    @property
    def setting(self) -> Problem:
        """A problem for its heads, head size and dtype."""
        return Problem.self_attention(seq=1, heads=self.heads, head_dim=self.head_dim, ranks=1, dtype=self.dtype)

    def node_size(self, here: int) -> int:
        """Ranks per node: as asked for, or those on a machine, or those of the cluster whose links are used."""
        return self.ranks_per_node or max(here, 1 if self.links_of is None else self.links_of.ranks_per_node)


def calibrate_command(given: CalibrateOptions) -> None:
    """Measure kernels, memory and links of these machines, and write them as a cluster.

    By itself: with processes on this machine. Under torchrun: with its ranks, inside and between nodes.

    Exit code 0: written. 1: a process failed. 2: invalid input, or FILE exists.
    """
    is_under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if is_under_torchrun else given.ranks or 2
    if given.ranks not in (None, ranks):
        raise UsageError(f"--ranks {given.ranks}: torchrun started {ranks} ranks; leave --ranks out")
    setting = given.setting
    if ranks == 1 and given.links_of is None:
        raise UsageError(
            "1 rank has no links to measure; use --ranks 2 or more, or --links-of with a cluster that has such links, "
            "such as h200"
        )
    if is_under_torchrun:
        size = given.node_size(ranks_here())
        measurement = _measure_with_ranks(given, setting, ranks, size)
    else:
        size = given.node_size(ranks)
        measurement = _measure_alone(given, setting, ranks, size)
    if measurement is not None:
        name = given.name or slug(measurement.device)
        topology = fit_topology(measurement, name=name, ranks=ranks, ranks_per_node=size, unmeasured=given.links_of)
        _tell(given, measurement, topology)


# Measuring


def _measure_alone(given: CalibrateOptions, setting: Problem, ranks: int, size: int) -> Measurement:
    if ranks > MOST_RANKS:
        raise UsageError(f"--ranks {ranks}: expected at most {MOST_RANKS}, because all of them run on this machine")
    check_gpus(ranks)
    _check_out(given)
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


def _measure_with_ranks(given: CalibrateOptions, setting: Problem, ranks: int, size: int) -> Measurement | None:
    """The measurement on rank 0, None on the others."""
    with joined_group() as (comm, device):
        refusal = _refusal(given) if comm.rank == 0 else ""
        if refusal := comm.share(refusal).result()[0]:  # else the others would wait for rank 0
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

    return measure(setting, comm=comm, device=device, ranks_per_node=size, ranks_here=ranks_here(), report=report)


# Writing


def _check_out(given: CalibrateOptions) -> None:
    """Raise before anything is measured for a file that cannot or must not be written."""
    path = output_file("cluster.toml")("--out", str(given.out))
    if path.suffix.lower() != ".toml":
        raise UsageError(f"--out {path}: expected a name that ends in .toml, which marks a cluster file")
    if os.path.lexists(path) and not given.force:
        raise UsageError(f"--out {path}: exists; choose another name, or use --force to overwrite it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--out {path}: no permission to write there; write elsewhere")


def _refusal(given: CalibrateOptions) -> str:
    try:
        _check_out(given)
    except UsageError as error:
        return str(error)
    return ""


def _tell(given: CalibrateOptions, measurement: Measurement, topology: Topology) -> None:
    if not given.json:
        print_report(measurement, topology, setting=given.setting, links=given.links_of)
    text = cluster_to_toml(topology, note=note(measurement, topology, setting=given.setting, links=given.links_of))
    try:
        with given.out.open("w" if given.force else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"--out {given.out}: {(error.strerror or str(error)).lower()}; write elsewhere") from error
    paths = [given.out, *([keep_calibrated(measurement.device, text)] if given.keep else [])]
    if given.json:
        kept = {"kept": str(paths[1])} if given.keep else {}
        typer.echo(json.dumps(as_json(measurement, topology) | {"path": str(given.out)} | kept))
    else:
        typer.echo(f"wrote {' and '.join(map(str, paths))}")
