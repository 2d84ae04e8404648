"""The device of a replay: which one, what runs on it, and whether the plans fit into its memory."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version

import torch

from mesh_attention.errors import MemoryLimitError, UsageError
from mesh_attention.planning.registry import make_plan
from mesh_attention.problem import Problem
from mesh_attention.units import count, format_nbytes
from mesh_attention_lab.replay.actor import Actor, BaselineKernel
from mesh_attention_lab.replay.parts import Part


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
    """The device of this name; without one, a GPU if there is one, or else the CPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text is None:
        return torch.device("cuda", 0) if gpus else torch.device("cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {text!r}: expected cpu, cuda, or cuda:1 for the second GPU")
    if device.type == "cpu":
        return torch.device("cpu")
    if not gpus:
        raise UsageError(
            f"device {text!r}: torch {torch.__version__} sees no CUDA device here; use cpu and a small problem"
        )
    if (device.index or 0) >= gpus:
        raise UsageError(f"device {text!r}: this machine has {count(gpus, 'GPU')}, numbered from cuda:0")
    return torch.device("cuda", device.index or 0)


def environment_of(problem: Problem, device: torch.device) -> Environment:
    actor = Actor(make_plan(problem, method="ring"), 0, device=device)  # kernels depend on the problem, not on the plan
    return environment_with(device, kernel=actor.kernel.name, merging=actor.merging.name)


def environment_with(device: torch.device, *, kernel: str, merging: str) -> Environment:
    is_cuda = device.type == "cuda"
    return Environment(
        device=torch.cuda.get_device_name(device) if is_cuda else f"cpu, {count(torch.get_num_threads(), 'thread')}",
        kernel=kernel,
        merging=merging,
        versions=_versions(),
        machine=f"{platform.system()} {platform.machine()}, {count(os.cpu_count() or 1, 'core')}",
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _versions() -> dict[str, str]:
    """CUDA and cuDNN are those that torch was built with."""
    from mesh_attention import __version__

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
    """Memory of a method while it runs, and the part of it that stays: inputs, and the memory of CUDA graphs."""

    name: str
    running_nbytes: int
    lasting_nbytes: int


def check_memory(parts: Sequence[Part], *, rank: int, device: torch.device, is_captured: bool) -> None:
    """Raise before anything runs if the plans state that they need more memory than is free."""
    needs = [_need(part, rank, device, is_captured=is_captured) for part in parts]
    needs.append(_kernel_need(next(iter(parts[0].plans.values())).problem, device))
    free = free_nbytes(device)
    for need in needs:
        if need.running_nbytes > free:
            raise MemoryLimitError(
                f"{need.name} needs {format_nbytes(need.running_nbytes)} with its inputs, but {device} has "
                f"{format_nbytes(free)} free; use more ranks, a shorter sequence or other methods"
            )
    together = sum(need.lasting_nbytes for need in needs) + max(need.running_nbytes for need in needs)
    if together > free:
        hint = "replay fewer methods" + (", or without CUDA graphs (--no-graphs)" if is_captured else "")
        raise MemoryLimitError(
            f"{', '.join(need.name for need in needs)} need {format_nbytes(together)} together, but {device} has "
            f"{format_nbytes(free)} free; {hint}"
        )


def _need(part: Part, rank: int, device: torch.device, *, is_captured: bool) -> Need:
    """The memory that the plans state. Each pass has its own inputs: Q, K, V and, backward, dO."""
    problem = next(iter(part.plans.values())).problem
    inputs = _token_nbytes(problem) * max(problem.seq_q, problem.seq_kv) // problem.ranks
    passes = [Actor(plan, rank, device=device).device_nbytes for plan in part.plans.values()]
    lasting = inputs * len(passes) + (sum(passes) if is_captured else 0)
    return Need(part.name, max(passes) + inputs, lasting)


def _kernel_need(problem: Problem, device: torch.device) -> Need:
    """The tensors of the one kernel, and about as much again for its results."""
    kernel = BaselineKernel(problem, device=device)
    tensors = _token_nbytes(problem) * max(kernel.tokens, kernel.kv_tokens)
    return Need("the one kernel", 2 * tensors, tensors)


def _token_nbytes(problem: Problem) -> int:
    """Bytes of one token's Q, K, V and dO."""
    sizes = problem.head_dim_qk + problem.head_dim_v
    return problem.batch * (problem.heads + problem.kv_heads) * sizes * problem.itemsize


def free_nbytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
