"""Timing calls on all ranks at the same time, since ranks that share a processor also compute at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from mesh_attention.calibration.effort import THOROUGH, Effort
from mesh_attention.comm.base import Comm
from mesh_attention.execution.graphs import CapturedGraph

LEAST_SAMPLES, MOST_SAMPLES = 3, 15
MOST_CALLS = 1000

Report = Callable[[str, float], None]
"""Gets the current task and the fraction done."""


def gather_values(comm: Comm, value: float) -> list[float]:
    """Each rank's number, as the same list on all ranks; also a barrier."""
    return [float(text) for text in comm.share(repr(value)).result()]


def time_call(call: Callable[[], object], *, comm: Comm, device: torch.device, effort: Effort = THOROUGH) -> float:
    """Seconds of a call after warm-up: the median of the ranks' medians; the same on every rank.

    Samples are of several calls: ranks that share a core alternate every few milliseconds, and a call that fits into
    such a slice would look as if it had the core to itself.
    """
    sample_s(call, device, calls=1)
    own_s = sample_s(call, device, calls=1)
    first_s = gather_values(comm, own_s) if effort.is_thorough else [own_s]
    calls = within(int(effort.sample_s / min(first_s)), 1, MOST_CALLS)  # other ranks may have waited for the core
    samples = within(int(effort.sampled_s / (median(first_s) * calls)), LEAST_SAMPLES, MOST_SAMPLES)
    in_a_row = _repeated(call, calls, device)
    rest(device, effort.rest_s)
    return median(gather_values(comm, median(sample_s(in_a_row, device, calls=1) / calls for _ in range(samples))))


def rest(device: torch.device, seconds: float) -> None:
    """Let a GPU finish and cool down; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        time.sleep(seconds)


def _repeated(call: Callable[[], object], calls: int, device: torch.device) -> Callable[[], object]:
    """Several calls in a row. On a GPU they run as a CUDA graph, since the host may be slower than a small call."""

    def repeat() -> None:
        for _ in range(calls):
            call()

    return CapturedGraph(repeat, device).launch if device.type == "cuda" else repeat


def sample_s(call: Callable[[], object], device: torch.device, *, calls: int) -> float:
    """Seconds per call of several calls in a row."""
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3 / calls
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def within(number: int, least: int, most: int) -> int:
    return max(least, min(most, number))
