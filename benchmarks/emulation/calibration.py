"""Figures for a simulator, from the machine and network a run is on: links, kernels, merging.

Every rank calls these at the same time. Cores are shared by all ranks, so a kernel's time is that of all ranks
computing at once; where some of them wait for the network, the others compute faster than this says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from emulation.check_rate import patterns, seconds_of
from emulation.contenders import Job
from mesh_attention import causal, full
from mesh_attention.kernels.base import CallMask, Demand, Kernel, RowGradient, Scores
from mesh_attention.kernels.merging import TorchMerging
from mesh_attention.kernels.select import choose_kernel
from mesh_attention.plan.steps import DIRECTIONS, Direction

RECTANGLES = (
    (256, 256),
    (256, 1024),
    (256, 4096),
    (512, 512),
    (512, 2048),
    (1024, 1024),
    (1024, 4096),
    (2048, 2048),
    (2048, 4096),
)
FORMS = ("full", "causal")
REPEATS = 3
TINY_NBYTES = 8
TINY_MESSAGES = 50
UNLIMITED_NBYTES = 2**27


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    direction: Direction
    form: str
    queries: int
    keys: int
    flops: int
    """Counted as plans do: a causal call does about half of a full one's."""
    seconds: float


def calibrate(job: Job, note: Callable[[str], None]) -> dict[str, Any]:
    """All figures, for the JSON line. Rates are of payload bytes; times are seconds."""
    note("calibrating links")
    links = calibrate_links(job.calibration_s)
    times = []
    for direction in DIRECTIONS:
        for form in FORMS:
            note(f"calibrating kernels: {direction}, {form}")
            times += calibrate_kernel(job, direction, form)
    note("calibrating merges")
    fits = {
        f"{direction} {form}": fit([t for t in times if (t.direction, t.form) == (direction, form)])
        for direction in DIRECTIONS
        for form in FORMS
    }
    return {
        "links": links,
        "kernel": fits,
        "kernel_times": [asdict(t) for t in times],
        "merge": calibrate_merge(job, ranks=dist.get_world_size()),
    }


# Links


def calibrate_links(seconds: float) -> list[dict[str, Any]]:
    """Payload rate of each pattern, and the time of a tiny message where two ranks take part.

    Transfers last twice `seconds` at the limit, so that what the limiter's bucket lets through weighs little.
    """
    limit, a_node = int(os.environ["NETNS_RATE_BITS"]), int(os.environ["LOCAL_WORLD_SIZE"])
    figures: list[dict[str, Any]] = []
    for pattern in patterns(int(limit / 8 * 2 * seconds) or UNLIMITED_NBYTES):
        slowest = median(seconds_of(pattern.post, repeats=REPEATS))
        figures.append({"pattern": pattern.name, "nbytes_per_s": round(pattern.nbytes / slowest)})
    for name, peer, exists in (
        ("tiny between nodes", a_node, dist.get_world_size() > a_node),
        ("tiny in a node", 1, a_node > 1),
    ):
        if exists:
            figures.append({"pattern": name, "seconds": _tiny_message(peer)})
    return figures


def _tiny_message(peer: int) -> float:
    """Half of a round trip between rank 0 and another, while the rest do nothing."""
    rank, message = dist.get_rank(), torch.zeros(TINY_NBYTES, dtype=torch.uint8)
    seconds = []
    dist.barrier()
    for _ in range(TINY_MESSAGES if rank in (0, peer) else 0):
        start = time.perf_counter()
        if rank == 0:
            dist.send(message, peer)
            dist.recv(message, peer)
        else:
            dist.recv(message, 0)
            dist.send(message, 0)
        seconds.append((time.perf_counter() - start) / 2)
    dist.barrier()
    return _over_ranks(median(seconds) if seconds else 0.0)[0]


# Kernels


def calibrate_kernel(job: Job, direction: Direction, form: str) -> list[KernelTime]:
    demand = Demand(
        device="cpu",
        dtype=torch.float32,
        head_dim_qk=job.head_dim,
        head_dim_v=job.head_dim,
        softcap=0.0,
        lse_gradient=False,
    )
    kernel = choose_kernel(demand)
    shapes = [(queries, keys) for queries, keys in RECTANGLES if form == "full" or queries == keys]
    times = []
    for queries, keys in shapes:
        seconds = median(_over_ranks(_seconds_a_call(_kernel_call(kernel, job, direction, form, queries, keys), job)))
        pairs = queries * keys if form == "full" else queries * (queries + 1) // 2
        flops = 2 * pairs * job.heads * job.head_dim * (2 if direction == "forward" else 5)
        what = {"direction": direction, "form": form, "queries": queries, "keys": keys}
        times.append(KernelTime(**what, flops=flops, seconds=seconds))  # type: ignore[arg-type]
    return times


def _kernel_call(
    kernel: Kernel, job: Job, direction: Direction, form: str, queries: int, keys: int
) -> Callable[[], object]:
    q, do = (torch.randn(1, job.heads, queries, job.head_dim) for _ in range(2))
    k, v = (torch.randn(1, job.kv_heads, keys, job.head_dim) for _ in range(2))
    spans = ((range(keys - queries, keys),), (range(keys),))
    mask = CallMask(form, causal() if form == "causal" else full(), *spans, keys, keys)  # type: ignore[arg-type]
    scores = Scores(mask, job.head_dim**-0.5)
    if direction == "forward":
        return lambda: kernel.forward(q, k, v, scores)
    out, lse = kernel.forward(q, k, v, scores)
    row = RowGradient(do, lse, (out * do).sum(-1))
    return lambda: kernel.backward(q, k, v, row, scores)


def fit(times: Sequence[KernelTime]) -> dict[str, float]:
    """time = call_s + flops / flops_per_s, by least squares of the relative errors; call_s is not below 0.

    `worst` is the largest ratio, either way, between a fitted and a measured time.
    """
    weights = [t.seconds**-2 for t in times]
    total = sum(weights)
    mean_flops = sum(w * t.flops for w, t in zip(weights, times, strict=True)) / total
    mean_s = sum(w * t.seconds for w, t in zip(weights, times, strict=True)) / total
    spread = sum(w * (t.flops - mean_flops) ** 2 for w, t in zip(weights, times, strict=True))
    slope = sum(w * (t.flops - mean_flops) * (t.seconds - mean_s) for w, t in zip(weights, times, strict=True)) / spread
    call_s = mean_s - slope * mean_flops
    if call_s < 0:
        squares = sum(w * t.flops**2 for w, t in zip(weights, times, strict=True))
        call_s, slope = 0.0, sum(w * t.flops * t.seconds for w, t in zip(weights, times, strict=True)) / squares
    ratios = [(call_s + slope * t.flops) / t.seconds for t in times]
    return {"call_s": call_s, "flops_per_s": 1 / slope, "worst": max(max(ratio, 1 / ratio) for ratio in ratios)}


# Merging


def calibrate_merge(job: Job, *, ranks: int) -> dict[str, float]:
    """Bytes of a partial (O and LSE of one shard) that are folded into a running sum in a second."""
    shape = (1, job.heads, -(-job.seq // ranks), job.head_dim)
    (total, partial), (total_lse, lse) = ([torch.randn(s) for _ in range(2)] for s in (shape, shape[:-1]))
    seconds = median(
        _over_ranks(_seconds_a_call(lambda: TorchMerging().merge_output(total, total_lse, partial, lse), job))
    )
    return {"tokens": shape[2], "nbytes_per_s": round((partial.nbytes + lse.nbytes) / seconds)}


# All ranks at once


def _seconds_a_call(call: Callable[[], object], job: Job) -> float:
    """Mean seconds of a call, over a while in which every rank makes it: one call may or may not be interrupted."""
    dist.barrier()
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < job.calibration_s:
        call()
        calls += 1
    return (time.perf_counter() - start) / calls


def _over_ranks(value: float) -> list[float]:
    values = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor([value], dtype=torch.float64))
    return [v.item() for v in values]
