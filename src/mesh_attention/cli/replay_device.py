"""The device of a replay: which one, what runs on it, and whether the plans fit. Torch is imported when asked."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from mesh_attention import __version__
from mesh_attention.errors import MemoryLimitError, UsageError
from mesh_attention.planning.registry import make_plan
from mesh_attention.problem import Problem
from mesh_attention.units import count, format_nbytes

if TYPE_CHECKING:
    import torch

    from mesh_attention.replay.parts import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a replay ran on, and with what."""

    device: str
    kernel: str
    merging: str
    versions: dict[str, str]
    machine: str
    date: str


def device_from(text: str | None) -> torch.device:
    """The one asked for, if it is there; a GPU if there is one and nothing was asked for."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text is None:
        return torch.device("cuda", 0) if gpus else torch.device("cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {text!r}: expected cpu, cuda, or cuda:1 for the second GPU")
    if device.type == "cpu":
        return torch.device("cpu")
    if not gpus:
        raise UsageError(
            f"--device {text}: torch {torch.__version__} sees no CUDA device here; "
            "leave --device out, or give --device cpu and a small problem"
        )
    if (device.index or 0) >= gpus:
        raise UsageError(
            f"--device {text}: there {'is' if gpus == 1 else 'are'} {count(gpus, 'GPU')} here, from cuda:0"
        )
    return torch.device("cuda", device.index or 0)


def surroundings_of(problem: Problem, device: torch.device) -> Surroundings:
    import torch

    from mesh_attention.replay.actor import Actor

    actor = Actor(make_plan(problem, method="ring"), 0, device=device)  # any plan's: the problem and the device decide
    is_cuda = device.type == "cuda"
    return Surroundings(
        device=torch.cuda.get_device_name(device) if is_cuda else f"cpu, {count(torch.get_num_threads(), 'thread')}",
        kernel=actor.kernel.name,
        merging=actor.merging.name,
        versions=versions(),
        machine=f"{platform.system()} {platform.machine()}, {count(os.cpu_count() or 1, 'core')}",
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def versions() -> dict[str, str]:
    """Of what is there: CUDA's and cuDNN's are those that torch brings."""
    import torch

    found = {"mesh-attention": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None  # type: ignore[no-untyped-call]
    if cudnn is not None:
        found["cudnn"] = f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
    with suppress(PackageNotFoundError):
        found["triton"] = version("triton")
    return found


# Memory


@dataclass(frozen=True, slots=True)
class Need:
    """What something takes while it runs, and what of it stays: inputs, and the memory of what is recorded."""

    name: str
    running_nbytes: int
    lasting_nbytes: int


def check_memory(parts: Sequence[Part], *, rank: int, device: torch.device, is_recorded: bool) -> None:
    """Raise before anything runs if the plans say that they take more than is free."""
    needs = [_need(part, rank, device, is_recorded=is_recorded) for part in parts]
    needs.append(_kernel_need(next(iter(parts[0].plans.values())).problem, device))
    free = free_nbytes(device)
    for need in needs:
        if need.running_nbytes > free:
            raise MemoryLimitError(
                f"{need.name} takes {format_nbytes(need.running_nbytes)} with its inputs, and {device} has "
                f"{format_nbytes(free)} free; give more --ranks, a shorter --seq or other --methods"
            )
    together = sum(need.lasting_nbytes for need in needs) + max(need.running_nbytes for need in needs)
    if together > free:
        hint = "give --no-graphs, or fewer --methods" if is_recorded else "give fewer --methods"
        raise MemoryLimitError(
            f"{', '.join(need.name for need in needs)} take {format_nbytes(together)} together, and {device} has "
            f"{format_nbytes(free)} free; {hint}"
        )


def _need(part: Part, rank: int, device: torch.device, *, is_recorded: bool) -> Need:
    """As the plans state it. Each pass has inputs of its own: Q, K, V and, backward, dO."""
    from mesh_attention.replay.actor import Actor

    problem = next(iter(part.plans.values())).problem
    inputs = _token_nbytes(problem) * max(problem.seq_q, problem.seq_kv) // problem.ranks
    passes = [Actor(plan, rank, device=device).device_nbytes for plan in part.plans.values()]
    lasting = inputs * len(passes) + (sum(passes) if is_recorded else 0)
    return Need(part.name, max(passes) + inputs, lasting)


def _kernel_need(problem: Problem, device: torch.device) -> Need:
    """The one kernel's tensors, and about as much again for what it gives and needs besides."""
    from mesh_attention.replay.actor import OneKernel

    tensors = _token_nbytes(problem) * OneKernel(problem, device=device).tokens
    return Need("the one kernel", 2 * tensors, tensors)


def _token_nbytes(problem: Problem) -> int:
    """Of a token's Q, K, V and dO."""
    sizes = problem.head_dim_qk + problem.head_dim_v
    return problem.batch * (problem.heads + problem.kv_heads) * sizes * problem.itemsize


def free_nbytes(device: torch.device) -> int:
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
