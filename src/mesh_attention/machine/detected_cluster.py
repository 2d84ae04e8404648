"""The cluster that the ranks at hand make: what each says of its host and device, and where the figures come from.

They come from a preset that is like the device, or from a file: what `mesh-attention calibrate --keep` wrote for the
device, or what a group measured.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mesh_attention.clusters import PRESETS, cluster_to_toml, read_cluster
from mesh_attention.errors import UsageError
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.stored import cache_folder, own_folder, user_folder, write_at_once
from mesh_attention.units import GIB, count

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One rank's host and device. `generation` is the major number of an NVIDIA GPU's compute capability, else 0."""

    host: str
    device: str
    uuid: str = ""
    generation: int = 0
    memory_gib: float = 0.0


def facts_of(device: torch.device) -> Facts:
    """This rank's facts."""
    import torch

    host = f"{socket.gethostname()} {_boot_id()}".strip()
    if device.type != "cuda":
        return Facts(host=host, device=device.type)
    properties = torch.cuda.get_device_properties(device)
    is_amd = torch.version.hip is not None
    return Facts(
        host=host,
        device=torch.cuda.get_device_name(device),
        uuid=str(getattr(properties, "uuid", "")),
        generation=0 if is_amd else properties.major,
        memory_gib=properties.total_memory / GIB,
    )


def _boot_id() -> str:
    """A number that the system draws when it starts: hosts may share a name."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A cluster, and where its figures come from, in words. Without a cluster, choices are volume-based."""

    topology: Topology | None
    source: str

    def __str__(self) -> str:
        if self.topology is None:
            return self.source
        nodes = self.topology.nodes
        spread = "1 node" if nodes == 1 else f"{nodes} nodes of {self.topology.ranks_per_node}"
        return f"{self.topology.name}, {spread}, {self.source}"


# Hosts


def ranks_per_node(hosts: Sequence[str]) -> int:
    """The largest number such that ranks ``k · number`` up to ``(k + 1) · number`` are always on one host."""
    starts = [rank for rank, (before, host) in enumerate(pairwise(hosts), start=1) if before != host]
    return gcd(*starts) or len(hosts)


def sharers(facts: Sequence[Facts]) -> int:
    """The number of ranks on the device that most ranks share."""
    return max(Counter(rank.uuid for rank in facts if rank.uuid).values(), default=1)


# Devices


class Likeness(NamedTuple):
    """The preset for a device. `is_own` is False if the device is another one of the same kind."""

    preset: str
    is_own: bool


_NAMES = (
    (r"\bH200\b", "h200", True),
    (r"\bH100\b", "h100", True),
    (r"\b(H800|GH200)\b", "h100", False),
    (r"\bA100\b", "a100", True),
    (r"\bA800\b", "a100", False),
    (r"\bB200\b", "b200", True),
    (r"\b(GB200|B100|B300|GB300)\b", "b200", False),
    (r"\bMI300X\b", "mi300x", True),
    (r"\bMI\d+\w*\b", "mi300x", False),
)
_GENERATIONS = {8: "a100", 9: "h100", 10: "b200"}


def likeness_of(facts: Facts) -> Likeness:
    """The preset by the device's name, or else by its kind."""
    for pattern, preset, is_own in _NAMES:
        if re.search(pattern, facts.device, re.IGNORECASE):
            return Likeness(preset, is_own)
    if facts.generation:
        return Likeness(_GENERATIONS.get(facts.generation, "a100" if facts.generation < 8 else "b200"), False)
    return Likeness("mi300x", False)


# Clusters


def preset_machine(facts: Sequence[Facts]) -> Machine:
    """The cluster of these ranks, with the figures of the preset for rank 0's device."""
    own, like = facts[0], likeness_of(facts[0])
    preset = PRESETS[like.preset]
    topology = placed(preset, facts)
    source = "preset" if like.is_own else f"preset nearest to {own.device!r}"
    if len({rank.device for rank in facts}) > 1:
        source += "; ranks have different devices"
    shared = sharers(facts)
    return Machine(topology=topology, source=source if shared == 1 else f"{source}, {count(shared, 'rank')} on a GPU")


def known_machine(facts: Sequence[Facts]) -> Machine:
    """The machine of these ranks: calibrated, or else the preset for the device.

    Presets assume one rank per GPU: NCCL sends between ranks that share one through the host, however slow that is.
    """
    path = calibrated_file(facts[0].device)
    cluster = read_kept(path)
    if cluster is None and (shared := sharers(facts)) > 1:
        return Machine(topology=None, source=f"volume-based, {count(shared, 'rank')} on a GPU")
    if cluster is None:
        return preset_machine(facts)
    if cluster.nodes == 1 and cluster.between == cluster.inside:  # it was measured within one node
        cluster = replace(cluster, between=PRESETS[likeness_of(facts[0]).preset].between)
    return Machine(topology=placed(cluster, facts), source=f"calibrated, {path}")


def placed(figures: Topology, facts: Sequence[Facts]) -> Topology:
    """A cluster with the nodes of these ranks. Ranks that share a device share its rates, its memory and its NIC."""
    here, shared = ranks_per_node([rank.host for rank in facts]), sharers(facts)
    nics = round(figures.nics_per_node / figures.ranks_per_node * here / shared)
    whole = figures.device
    memory_gib = min((rank.memory_gib for rank in facts if rank.memory_gib), default=whole.memory_gib)
    device = replace(
        whole,
        forward=replace(whole.forward, tflops=whole.forward.tflops / shared),
        backward=replace(whole.backward, tflops=whole.backward.tflops / shared),
        memory_gb_per_s=whole.memory_gb_per_s / shared,
        memory_gib=memory_gib / shared,
    )
    return replace(
        figures,
        ranks=len(facts),
        ranks_per_node=here,
        nics_per_node=max(1, min(here, nics)),
        device=device,
        inside=replace(figures.inside, gb_per_s=figures.inside.gb_per_s / shared),
    )


def slug(device: str) -> str:
    """A device's name as part of a file's name: ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


# Clusters on disk


def calibrated_file(device: str) -> Path | None:
    """``$XDG_CONFIG_HOME/mesh-attention/DEVICE.toml``, by default in ``~/.config``; None for a user without a home."""
    folder = user_folder("XDG_CONFIG_HOME", ".config")
    return None if folder is None else folder / f"{slug(device)}.toml"


def measured_file(problem: Problem, facts: Sequence[Facts], transport: str) -> Path | None:
    """Where the measurement of such a group is kept: by hosts, devices, transport and NCCL's settings, dtype and head
    sizes."""
    folder = own_folder(cache_folder())
    if folder is None:
        return None
    names = [(rank.host.split()[0], rank.device, rank.uuid) for rank in facts]
    # Every rank of a test may claim a host of its own; rank 0 alone asks.
    settings = sorted(item for item in os.environ.items() if item[0].startswith("NCCL_") and item[0] != "NCCL_HOSTID")
    key = (names, transport, settings, problem.dtype, problem.head_dim_qk, problem.head_dim_v)
    return folder / f"measured-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.toml"


def keep_measured(path: Path | None, topology: Topology, note: str) -> None:
    if path is None:
        return
    try:
        write_at_once(path, cluster_to_toml(topology, note=note))
    except OSError as error:
        log.warning("could not keep the measured cluster: %s", error)


def read_kept(path: Path | None) -> Topology | None:
    """The cluster in a file, or None if there is none, or none that can be read."""
    try:
        return None if path is None or not path.exists() else read_cluster(path)
    except (OSError, UsageError) as error:
        log.warning("%s; it is not used", error)
        return None
