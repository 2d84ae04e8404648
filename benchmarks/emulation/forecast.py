"""What the simulator makes of a run: the emulated network as a cluster, from the run's own calibration. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from emulation.contenders import Job, plans_of
from mesh_attention.simulation.simulate import simulate
from mesh_attention.topology import Device, KernelRate, Link, Topology

MERGED_BYTES = 3
"""A merge reads a float32 partial once, and reads and writes the sum; the calibration counts the partial."""


def cluster_of(calibration: Mapping[str, Any], *, ranks: int, ranks_per_node: int, shard: int) -> Topology:
    """The network and the processor that all ranks share, as measured with all of them at work at once."""
    links = {link["pattern"]: link for link in calibration["links"]}
    between = Link(
        gb_per_s=links["ring of nodes"]["nbytes_per_s"] / 1e9,
        latency_us=links["tiny between nodes"]["seconds"] * 1e6,
    )
    inside = between
    if "duplex in a node" in links:
        rate, tiny = links["duplex in a node"]["nbytes_per_s"], links["tiny in a node"]["seconds"]
        inside = Link(gb_per_s=rate / 1e9, latency_us=tiny * 1e6)
    return Topology(
        name="emulated",
        ranks=ranks,
        ranks_per_node=ranks_per_node,
        device=Device(
            forward=_rate(calibration, "forward", shard),
            backward=_rate(calibration, "backward", shard),
            memory_gb_per_s=MERGED_BYTES * calibration["merge"]["nbytes_per_s"] / 1e9,
            memory_gib=1.0,
        ),
        inside=inside,
        between=between,
    )


def _rate(calibration: Mapping[str, Any], direction: str, shard: int) -> KernelRate:
    """Masked calls are those of a rank's own shard, so their rate is taken at its size."""
    fitted = calibration["kernel"][f"{direction} full"]
    causal = [t for t in calibration["kernel_times"] if (t["direction"], t["form"]) == (direction, "causal")]
    own = min(causal, key=lambda time: abs(time["queries"] - shard))
    seconds = own["seconds"] - fitted["call_s"]
    return KernelRate(
        tflops=fitted["flops_per_s"] / 1e12,
        call_us=fitted["call_s"] * 1e6,
        masked=own["flops"] / seconds / fitted["flops_per_s"],
    )


def forecasts(job: Job, cluster: Topology) -> dict[str, float]:
    """Seconds of each method, all passes together."""
    problem = job.problem(cluster.ranks)
    plans = {name: plans_of(problem, options, job.directions) for name, options in job.methods.items()}
    return {name: sum(simulate(plan, cluster).time_s for plan in passes) for name, passes in plans.items()}
