"""One rank: it does what the first process asks for, one contender at a time, and answers with figures or a failure."""

from __future__ import annotations

import logging
import os
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from one_gpu import device_name, join_group, meet, synchronize
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from side_by_side.contenders import DEFAULT, MEASURED, Contender, make_contender

PARTS = 8
"""Parts of a rank's tokens whose errors are compared one by one: late tokens have small results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The attention that all contenders compute: causal, bfloat16."""

    seq: int
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.seq} tokens, {self.heads} heads ({self.kv_heads} KV) of {self.head_dim}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What every rank is told when it starts."""

    ranks: int
    kind: str
    address: str
    timeout_s: float
    folders: dict[str, Path]
    """Where the packages of the other libraries are."""
    folder: str
    """For files that the ranks share."""


def work(connection: Connection, rank: int, setup: Setup) -> None:
    warnings.simplefilter("ignore")
    os.environ["LOCAL_RANK"] = "0"
    device = join_group(rank, setup.ranks, setup.address, setup.kind, timeout_s=setup.timeout_s)
    meet(device)
    station = Station(rank, device, setup)
    commands: dict[str, Callable[..., Any]] = {
        "meet": lambda: meet(device),
        "pose": station.pose,
        "check": station.check,
        "time": station.time,
    }
    connection.send(("done", device_name(device)))
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            os._exit(1)
        if message is None:
            break
        command, *arguments = message
        try:
            answer = ("done", commands[command](*arguments))
        except Exception as error:
            answer = ("failed", (f"{type(error).__name__}: {error}", traceback.format_exc()))
        connection.send(answer)
    dist.barrier()
    dist.destroy_process_group()


@dataclass
class Station:
    """What a rank keeps between commands."""

    rank: int
    device: torch.device
    setup: Setup
    contenders: dict[str, Contender] = field(default_factory=dict)
    wholes: list[Tensor] = field(default_factory=list)
    """Q, K, V and dO of the whole sequence, the same on every rank."""
    shards: dict[bytes, tuple[list[Tensor], list[Tensor]]] = field(default_factory=dict)
    """By positions: this rank's tokens of Q, K, V and dO, and of the right O, dQ, dK and dV."""
    path: Path = Path()
    warm: set[str] = field(default_factory=set)
    """Contenders that have run on these inputs: the first time they plan, connect and allocate."""

    def pose(self, task: Task) -> None:
        """Make the inputs; rank 0 computes alone what is right."""
        self.shards.clear()
        self.warm.clear()
        generator = torch.Generator(device=self.device).manual_seed(1)
        self.wholes = [
            torch.randn(
                1, task.seq, heads, task.head_dim, device=self.device, generator=generator, dtype=torch.float32
            ).bfloat16()
            for heads in (task.heads, task.kv_heads, task.kv_heads, task.heads)
        ]
        self.path = Path(self.setup.folder, "right.pt")
        if self.rank == 0:
            torch.save([tensor.cpu() for tensor in attend_alone(self.wholes)], self.path)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        meet(self.device)

    def check(self, name: str) -> dict[str, Any]:
        """Run both passes once: relative errors of O, dQ, dK and dV, and what the call logged and planned."""
        contender = self._contender(name)
        inputs, right = self._shards(contender)
        with _Listening() if name in (DEFAULT, MEASURED) else _Listening(logging.CRITICAL) as heard:
            results, _ = self._run(contender, inputs)
        self.warm.add(name)
        errors = [_error(found.float(), due) for found, due in zip(results, right, strict=True)]
        return {"errors": errors, "plan": contender.plan(), "log": heard.lines}

    def time(self, name: str) -> tuple[float, float]:
        """Seconds of forward, and of both passes."""
        contender = self._contender(name)
        inputs, _ = self._shards(contender)
        if name not in self.warm:
            self._run(contender, inputs)
            self.warm.add(name)
        return self._run(contender, inputs)[1]

    def _contender(self, name: str) -> Contender:
        if name not in self.contenders:
            self.contenders[name] = make_contender(name, self.device, self.setup.folders)
        return self.contenders[name]

    def _shards(self, contender: Contender) -> tuple[list[Tensor], list[Tensor]]:
        positions = contender.positions(self.wholes[0].shape[1])
        key = positions.cpu().numpy().tobytes()
        if key not in self.shards:
            rights: list[Tensor] = torch.load(self.path, mmap=True)
            inputs = [whole[:, positions.to(self.device)].contiguous() for whole in self.wholes]
            self.shards[key] = inputs, [right[:, positions.cpu()].to(self.device) for right in rights]
        return self.shards[key]

    def _run(self, contender: Contender, inputs: Sequence[Tensor]) -> tuple[list[Tensor], tuple[float, float]]:
        q, k, v = (tensor.detach().requires_grad_() for tensor in inputs[:3])
        with contender.around():
            meet(self.device)
            start = time.perf_counter()
            out = contender.attend(q, k, v)
            synchronize(self.device)
            forward_s = time.perf_counter() - start
            gradients = torch.autograd.grad(out, (q, k, v), inputs[3])
            synchronize(self.device)
            both_s = time.perf_counter() - start
        return [out.detach(), *gradients], (forward_s, both_s)


def attend_alone(wholes: Sequence[Tensor]) -> list[Tensor]:
    """O, dQ, dK and dV by torch's own attention in float32."""
    q, k, v, d_out = (tensor.float().transpose(1, 2) for tensor in wholes)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    keys, values = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    # Never the formula with all scores at once, which fills the memory of a GPU.
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if q.is_cuda else nullcontext():
        out = scaled_dot_product_attention(q, keys, values, is_causal=True)
    gradients = torch.autograd.grad(out, leaves, d_out)
    return [tensor.detach().transpose(1, 2).contiguous() for tensor in (out, *gradients)]


def _error(found: Tensor, due: Tensor) -> float:
    """The largest relative error, by norm, of any part of a rank's tokens."""
    pairs = zip(found.chunk(PARTS, dim=1), due.chunk(PARTS, dim=1), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


class _Listening(logging.Handler):
    """Keeps what this library logs about its plans."""

    def __init__(self, level: int = logging.INFO) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if ".kernels" not in record.name:
            self.lines.append(record.getMessage())

    def __enter__(self) -> _Listening:
        logger = logging.getLogger("mesh_attention")
        self.before = logger.level
        logger.setLevel(min(self.level, logging.WARNING))
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("mesh_attention")
        logger.removeHandler(self)
        logger.setLevel(self.before)
