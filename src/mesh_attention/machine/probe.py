"""A short measurement by all ranks of a group at once: links, kernels and merging, in about two seconds.

It measures what `calibration` does, with fewer sizes and samples, and in little memory: a model may be there already.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mesh_attention.calibration.effort import BRIEF
from mesh_attention.calibration.fit import Measurement, fit_topology
from mesh_attention.calibration.measurement import measure
from mesh_attention.comm.base import Comm
from mesh_attention.machine.files import slug
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology


def probe(problem: Problem, *, comm: Comm, device: torch.device, ranks_per_node: int) -> Measurement:
    """The measured times, the same on every rank."""
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        measured = measure(
            problem,
            comm=comm,
            device=device,
            ranks_per_node=ranks_per_node,
            ranks_here=min(comm.size, ranks_per_node),
            report=lambda doing, fraction: None,
            effort=BRIEF,
        )
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the model may need the memory
    return measured


def fitted(measurement: Measurement, *, ranks: int, ranks_per_node: int, known: Topology | None) -> Topology:
    """The measured cluster; links that these ranks do not have are those of the known one."""
    name = slug(measurement.device)
    return fit_topology(measurement, name=name, ranks=ranks, ranks_per_node=ranks_per_node, unmeasured=known)
