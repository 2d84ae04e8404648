"""Measures this device and its link to the host, as a cluster of many such devices."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from mesh_attention.comm.base import Parcel
from mesh_attention.execution.graphs import CapturedGraph
from mesh_attention.machine.fit import fit_device, fit_line
from mesh_attention.machine.probe import measured_on
from mesh_attention.machine.timing import sample_s, time_kernel, time_memory
from mesh_attention.problem import Problem
from mesh_attention.topology import Link, Topology
from mesh_attention_lab.replay.transport import ReplayComm

Report = Callable[[str, float], None]
MESSAGE_NBYTES = (2**20, 2**22, 2**24, 2**26)
MESSAGES_IN_A_ROW, SAMPLES = 8, 5


def measure_cluster(problem: Problem, *, device: torch.device, report: Report) -> Topology:
    """A cluster with the ranks of the problem, each on a device like this one, with the host's memory as its peer."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events and graphs use the current device
    comm = ReplayComm(0, 1, device=device)
    calls = time_kernel(problem, comm=comm, device=device, report=lambda doing, fraction: report(doing, 0.8 * fraction))
    report("merging partials", 0.8)
    memory = time_memory(problem, comm=comm, device=device, ranks_here=1)
    report("copies to the host and back", 0.9)
    link = measure_link(device)
    measurement = measured_on(device, problem, calls=calls, memory=memory)
    return Topology(
        name=measurement.device,
        ranks=problem.ranks,
        ranks_per_node=1,
        device=fit_device(measurement),
        inside=link,
        between=link,
    )


def measure_link(device: torch.device) -> Link:
    """The link, measured by copies in and out at once, as in a replay; the rate is that of one direction."""
    comm = ReplayComm(0, 2, device=device)
    comm.reserve(max(MESSAGE_NBYTES))
    points = []
    for nbytes in MESSAGE_NBYTES:
        out, back = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
        # In two chunks, as the shards of a zigzag layout.
        parcels = [Parcel(out.chunk(2), 1, "")], [Parcel(back.chunk(2), 1, "")]

        def in_a_row(parcels: tuple[list[Parcel], list[Parcel]] = parcels) -> None:
            for work in [comm.post(*parcels) for _ in range(MESSAGES_IN_A_ROW)]:
                work.wait()

        sample_s(in_a_row, device, calls=1)
        # From a graph: the host is slower at posting small copies than the device at making them.
        play = CapturedGraph(in_a_row, device).launch if device.type == "cuda" else in_a_row
        times = [sample_s(play, device, calls=1) / MESSAGES_IN_A_ROW for _ in range(SAMPLES)]
        points.append((float(nbytes), median(times)))
    line = fit_line(points)
    return Link(gb_per_s=float(f"{1e-9 / line.slope:.4g}"), latency_us=float(f"{line.base * 1e6:.4g}"))
