"""The device of a replay: which one, what runs on it, its free memory, and the device as a cluster of many like it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version

import torch

from mesh_attention.comm.base import Parcel
from mesh_attention.comm.local import LocalGroup
from mesh_attention.errors import MemoryLimitError, UsageError
from mesh_attention.kernels.select import choose_merging, kernel_for
from mesh_attention.machine.fit import MessageTime, fit_topology
from mesh_attention.machine.timing import Clock, measured_on, time_kernel, time_memory
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.units import Progress, count, format_nbytes
from mesh_attention_lab.replay.actor import Actor, BaselineKernel
from mesh_attention_lab.replay.result import Part
from mesh_attention_lab.replay.transport import ReplayComm


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The device, kernels and versions of a replay."""

    device: str
    kernel: str
    merging: str
    versions: dict[str, str]
    machine: str
    date: str


def find_device(text: str | None) -> torch.device:
    """The device of this name, or a GPU if there is one. It becomes the current device, which events and graphs use."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = [*(f"cuda:{index}" for index in range(gpus)), "cpu"]
    name = known[0] if text is None else "cuda:0" if text == "cuda" else text
    if name not in known:
        raise UsageError(f"device {text!r}: torch {torch.__version__} sees {', '.join(known)} here; use one of these")
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def environment_of(problem: Problem, device: torch.device) -> Environment:
    is_cuda = device.type == "cuda"
    return Environment(
        device=torch.cuda.get_device_name(device) if is_cuda else f"cpu, {count(torch.get_num_threads(), 'thread')}",
        kernel=kernel_for(problem, device).name,
        merging=choose_merging(device).name,
        versions=_versions(),
        machine=f"{platform.system()} {platform.machine()}, {count(os.cpu_count() or 1, 'core')}",
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _versions() -> dict[str, str]:
    """CUDA and cuDNN are those that torch was built with."""
    from mesh_attention import __version__

    versions = {"mesh-attention": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None  # type: ignore[no-untyped-call]
    if cudnn is not None:
        versions["cudnn"] = f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
    with suppress(PackageNotFoundError):
        versions["triton"] = version("triton")
    return versions


# Memory


def check_memory(parts: Sequence[Part], *, rank: int, device: torch.device, is_captured: bool) -> None:
    """Raise before anything runs if it needs more memory than is free.

    Each pass has its own inputs. CUDA graphs keep the buffers of all passes; otherwise one pass runs at a time. The one
    kernel has its tensors, and about as much again for its results.
    """
    plans = [plan for part in parts for plan in part.plans.values()]
    problem = plans[0].problem
    buffers = [Actor(plan, rank, device=device).device_nbytes for plan in plans]
    kernel = BaselineKernel(problem, device=device)
    tokens = len(plans) * max(problem.seq_q, problem.seq_kv) // problem.ranks + 2 * max(kernel.tokens, kernel.kv_tokens)
    needed = _token_nbytes(problem) * tokens + (sum(buffers) if is_captured else max(buffers))
    free = free_nbytes(device)
    if needed > free:
        hint = ", or no CUDA graphs (--no-graphs)" if is_captured else ""
        raise MemoryLimitError(
            f"{', '.join(part.name for part in parts)} and the one kernel need {format_nbytes(needed)}, but {device} "
            f"has {format_nbytes(free)} free; use more ranks, a shorter sequence, fewer methods{hint}"
        )


def _token_nbytes(problem: Problem) -> int:
    """Bytes of one token's Q, K, V and dO."""
    sizes = problem.head_dim_qk + problem.head_dim_v
    return problem.batch * (problem.heads + problem.kv_heads) * sizes * problem.itemsize


def free_nbytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps after measuring is free
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


READ_NBYTES = {"cuda": 4 * 2**30, "cpu": 2**24}


def measure_read(device: torch.device) -> float:
    """GB/s of a large read: the best of two reductions."""
    data = torch.ones(READ_NBYTES[device.type] // 4, device=device).view(-1, 4096)
    clock = Clock(comm=LocalGroup(1).comm(0), device=device)
    return data.nbytes / min(clock.call_s(lambda: data.sum(1)), clock.call_s(lambda: data.amax(1))) / 1e9


# As a cluster

MESSAGE_NBYTES = (2**20, 2**22, 2**24, 2**26)
MESSAGES_IN_A_ROW = 8


def measure_cluster(problem: Problem, *, device: torch.device, report: Progress) -> Topology:
    """A cluster with the ranks of the problem, each on a device like this one, with the host's memory as its peer."""
    clock = Clock(comm=LocalGroup(1).comm(0), device=device)
    calls = time_kernel(problem, clock, lambda activity, fraction: report(activity, 0.8 * fraction))
    report("merging partials", 0.8)
    memory = time_memory(problem, clock, ranks_here=1)
    report("copies to the host and back", 0.9)
    measurement = measured_on(device, problem, calls=calls, memory=memory, messages=time_copies(clock))
    return fit_topology(measurement, name=measurement.device, ranks=problem.ranks, ranks_per_node=1, unmeasured=None)


def time_copies(clock: Clock) -> list[MessageTime]:
    """Copies in and out at once, as in a replay: the time of both ways is that of each."""
    comm, device, times = ReplayComm(0, 2, device=clock.device), clock.device, list[MessageTime]()
    comm.reserve(max(MESSAGE_NBYTES))
    for nbytes in MESSAGE_NBYTES:
        out, back = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
        # In two chunks, as the shards of a zigzag layout.
        parcels = [Parcel(out.chunk(2), 1, "")], [Parcel(back.chunk(2), 1, "")]

        def in_a_row(parcels: tuple[list[Parcel], list[Parcel]] = parcels) -> None:
            for work in [comm.post(*parcels) for _ in range(MESSAGES_IN_A_ROW)]:
                work.wait()

        time_s = clock.call_s(in_a_row) / MESSAGES_IN_A_ROW
        times.append(MessageTime(link_class="between", pairs=1, nbytes=nbytes, one_way_s=time_s, both_ways_s=time_s))
    return times
