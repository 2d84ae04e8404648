"""`mesh-attention calibrate`: measure the machines at hand and write the cluster that they are.

Alone it starts processes on this machine. Under torchrun it uses the ranks that are there: all measure, rank 0 prints
and writes. What each rank does is in `calibrate_worker`; torch is imported when the command runs.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from os.path import isdir
from pathlib import Path
from typing import Annotated

import typer

from mesh_attention.calibration.fit import Measurement, fit_topology
from mesh_attention.cli.calibrate_report import as_json, note, print_report
from mesh_attention.cli.calibrate_worker import check_gpus, joined, measured, work
from mesh_attention.cli.demo import WorkerError, run_processes
from mesh_attention.cli.progress import progress
from mesh_attention.clusters import cluster_to_toml, find_cluster
from mesh_attention.errors import UsageError
from mesh_attention.problem import ITEMSIZE, Problem
from mesh_attention.topology import Topology
from mesh_attention.units import count, parse_whole

MOST_RANKS = 64

Ranks = Annotated[
    str | None,
    typer.Option("--ranks", help="Processes to start here; 2 if left out. Not under torchrun.", metavar="N"),
]
RanksPerNode = Annotated[
    str | None, typer.Option("--ranks-per-node", help="As many as there are on a machine if left out.", metavar="N")
]
Heads = Annotated[str, typer.Option("--heads", help="Heads of the attention calls.", metavar="N")]
HeadDim = Annotated[str, typer.Option("--head-dim", help="Their size.", metavar="N")]
Dtype = Annotated[str, typer.Option("--dtype", help=f"One of {', '.join(ITEMSIZE)}.", metavar="NAME")]
LinksOf = Annotated[
    str | None,
    typer.Option("--links-of", help="A cluster (h100x8, FILE.toml) for links that are not here.", metavar="CLUSTER"),
]
Name = Annotated[str | None, typer.Option("--name", help="The cluster's; its device's if left out.", metavar="NAME")]
Out = Annotated[Path, typer.Option("--out", help="The file to write.", metavar="FILE")]
Force = Annotated[bool, typer.Option("--force", help="Write over a file that is there.")]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print one JSON object; still writes the file.")]


def calibrate_command(
    ranks: Ranks = None,
    ranks_per_node: RanksPerNode = None,
    heads: Heads = "32",
    head_dim: HeadDim = "128",
    dtype: Dtype = "bfloat16",
    links_of: LinksOf = None,
    name: Name = None,
    out: Out = Path("cluster.toml"),
    force: Force = False,
    json_output: JsonOutput = False,
) -> None:
    """Measure kernels, memory and links where this runs, and write them as a cluster.

    Alone: with processes on this machine. Under torchrun: with its ranks, inside and between nodes.

    Exit code 0: written. 1: a process failed. 2: it cannot be done, or FILE is there already.
    """
    if name is not None and not (name and name.isprintable()):
        raise UsageError(f"--name {name!r}: expected a name that can be printed")
    job = Job(
        setting=Problem.self_attention(
            seq=1,
            heads=parse_whole("--heads", heads),
            head_dim=parse_whole("--head-dim", head_dim),
            ranks=1,
            dtype=dtype,
        ),
        ranks=None if ranks is None else parse_whole("--ranks", ranks),
        ranks_per_node=None if ranks_per_node is None else parse_whole("--ranks-per-node", ranks_per_node),
        links=None if links_of is None else find_cluster(links_of),
        name=name,
        out=out,
        force=force,
    )
    try:
        found = measure_with_ranks(job) if is_under_torchrun() else measure_alone(job)
    except WorkerError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    if found is not None:
        _tell(job, found, json_output=json_output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What was asked. The setting is a problem for its heads, head size and dtype."""

    setting: Problem
    ranks: int | None
    ranks_per_node: int | None
    links: Topology | None
    name: str | None
    out: Path
    force: bool

    def node_size(self, here: int) -> int:
        """Ranks a node: as asked, or those on a machine, or the whole node whose links stand for those not here."""
        return self.ranks_per_node or max(here, self.links.ranks_per_node if self.links is not None else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What rank 0 has in the end."""

    measurement: Measurement
    topology: Topology


# Measuring


def is_under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def measure_alone(job: Job) -> Found:
    ranks = 2 if job.ranks is None else job.ranks
    if ranks > MOST_RANKS:
        raise UsageError(f"--ranks {ranks}: expected at most {MOST_RANKS}, because all of them run on this machine")
    check_gpus(ranks)
    _check_links(job, ranks)
    check_out(job.out, force=job.force)
    ranks_per_node = job.node_size(ranks)
    with progress(f"starting {count(ranks, 'rank')}") as report:
        by_rank = run_processes(work, job.setting, ranks_per_node, ranks=ranks, report=report)
    return _fitted(job, by_rank[0], ranks=ranks, ranks_per_node=ranks_per_node)


def measure_with_ranks(job: Job) -> Found | None:
    """On rank 0 what was found, on the others nothing."""
    ranks, here = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if job.ranks not in (None, ranks):
        raise UsageError(f"--ranks {job.ranks}: under torchrun there are {ranks} ranks; leave --ranks out")
    _check_links(job, ranks)
    ranks_per_node = job.node_size(here)
    with joined() as (comm, device):
        refusal = _refusal(job) if comm.rank == 0 else ""
        if refusal := comm.share(refusal).result()[0]:  # else the others would wait for rank 0
            if comm.rank == 0:
                raise UsageError(refusal)
            raise typer.Exit(2)
        if comm.rank != 0:
            measured(job.setting, comm, device, ranks_per_node=ranks_per_node, report=lambda doing, fraction: None)
            return None
        with progress(f"{count(ranks, 'rank')} are here") as report:
            measurement = measured(job.setting, comm, device, ranks_per_node=ranks_per_node, report=report)
    return _fitted(job, measurement, ranks=ranks, ranks_per_node=ranks_per_node)


def _fitted(job: Job, measurement: Measurement, *, ranks: int, ranks_per_node: int) -> Found:
    name = job.name or re.sub(r"[^a-z0-9]+", "-", measurement.device.lower()).strip("-")
    topology = fit_topology(measurement, name=name, ranks=ranks, ranks_per_node=ranks_per_node, unmeasured=job.links)
    return Found(measurement=measurement, topology=topology)


def _check_links(job: Job, ranks: int) -> None:
    if ranks == 1 and job.links is None:
        raise UsageError(
            "1 rank has no links to measure; give --ranks 2 or more, or --links-of with a cluster that has such links, "
            "such as h200"
        )


# Writing


def check_out(path: Path, *, force: bool) -> None:
    """Raise before anything is measured for a file that cannot or must not be written."""
    if not isdir(path.parent):
        raise UsageError(f"--out {path}: there is no directory {path.parent}; make it first or write elsewhere")
    if isdir(path):
        raise UsageError(f"--out {path}: is a directory; give a file name, such as {path / 'cluster.toml'}")
    if path.suffix.lower() != ".toml":
        raise UsageError(f"--out {path}: expected a name that ends in .toml, by which it is known as a cluster")
    if os.path.lexists(path) and not force:
        raise UsageError(f"--out {path}: is there already; give another name, or --force to write over it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--out {path}: may not be written here; write elsewhere")


def _refusal(job: Job) -> str:
    try:
        check_out(job.out, force=job.force)
    except UsageError as error:
        return str(error)
    return ""


def _tell(job: Job, found: Found, *, json_output: bool) -> None:
    if not json_output:
        print_report(found.measurement, found.topology, setting=job.setting, links=job.links)
    text = cluster_to_toml(
        found.topology, note=note(found.measurement, found.topology, setting=job.setting, links=job.links)
    )
    try:
        with job.out.open("w" if job.force else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"--out {job.out}: {(error.strerror or str(error)).lower()}; write elsewhere") from error
    if json_output:
        typer.echo(json.dumps(as_json(found.measurement, found.topology) | {"path": str(job.out)}))
    else:
        typer.echo(f"wrote {job.out}")
