"""Clusters on disk: what `mesh-attention calibrate --keep` wrote, by device, and what groups measured."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from mesh_attention.clusters import cluster_to_toml, read_cluster
from mesh_attention.errors import UsageError
from mesh_attention.machine.facts import Facts
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.stored import cache_folder, own_folder, user_folder, write_at_once

log = logging.getLogger(__name__)


def slug(device: str) -> str:
    """A device's name as part of a file's name: ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


# Calibrated


def calibrated_file(device: str) -> Path | None:
    """``$XDG_CONFIG_HOME/mesh-attention/DEVICE.toml``, by default in ``~/.config``; None for a user without a home."""
    folder = user_folder("XDG_CONFIG_HOME", ".config")
    return None if folder is None else folder / f"{slug(device)}.toml"


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


# Measured


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


# Both


def read_kept(path: Path | None) -> Topology | None:
    """The cluster in a file, or None if there is none, or none that can be read."""
    try:
        return None if path is None or not path.exists() else read_cluster(path)
    except OSError as error:
        log.warning("%s: %s; it is not used", path, (error.strerror or str(error)).lower())
        return None
    except UsageError as error:
        log.warning("%s; it is not used", error)
        return None
