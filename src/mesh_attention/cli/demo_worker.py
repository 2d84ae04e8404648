"""One rank of `mesh-attention demo`: it attends with each method and measures. Prints nothing, draws nothing.

Torch is imported inside the functions, because importing the command line must not import it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh_attention.calibration.fit import Measurement
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.queries import rank_costs
from mesh_attention.plan.steps import DIRECTIONS
from mesh_attention.problem import Problem
from mesh_attention.timeline import Timeline

if TYPE_CHECKING:
    from torch import Tensor

    from mesh_attention.api import MeshAttention
    from mesh_attention.comm.wrappers import Counting
    from mesh_attention.execution.engine import Engine

TIMED_RUNS = 3
CALIBRATION_STEPS = 6
"""Of the progress bar: it takes about as long as so many runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A method under the name it is shown by, and the arguments of `MeshAttention` that make it."""

    name: str
    tile: str
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one rank saw of one method, forward and backward together.

    Errors are the largest difference from the reference, relative to the largest value of the whole reference.
    """

    forward_error: float
    gradient_error: float
    sent_nbytes: int
    received_nbytes: int
    messages: int
    peak_nbytes: int
    is_as_planned: bool
    times_s: tuple[float, ...]
    passes: tuple[Pass, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A pass as it was recorded: of all ranks, on rank 0."""

    plan: Plan
    timeline: Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one rank has to tell; without a recording there is no calibration either."""

    methods: list[Measured]
    calibration: Measurement | None = None


def work(problem: Problem, contenders: Sequence[Contender], is_recorded: bool, progress_file: Path) -> Seen:
    """What this rank measures of each method. The launcher has set rank, size and address in the environment."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # the ranks share this machine's cores
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    dist.init_process_group("gloo")
    try:
        steps = 1 + len(contenders) * (1 + TIMED_RUNS + is_recorded) + CALIBRATION_STEPS * is_recorded
        notes = Notes(progress_file if dist.get_rank() == 0 else None, steps=steps)
        notes.tell("attention in one process")
        inputs, truth = make_inputs(problem), [torch.empty(shape) for shape in _shapes(problem)]
        if dist.get_rank() == 0:
            truth = single_process_attention(problem, inputs)
        for tensor in truth:
            dist.broadcast(tensor, src=0)
        attend = partial(measure, problem, inputs=inputs, truth=truth, notes=notes, is_recorded=is_recorded)
        methods = [attend(contender) for contender in contenders]
        return Seen(methods=methods, calibration=calibrate(problem, notes) if is_recorded else None)
    finally:
        dist.destroy_process_group()


class Notes:
    """Tells the launcher, through a file, what is being done and which fraction of all steps is behind."""

    def __init__(self, path: Path | None, *, steps: int) -> None:
        self.path, self.steps, self.done = path, steps, 0

    def tell(self, doing: str) -> None:
        self._write(self.done, doing)
        self.done += 1

    def tell_part(self, doing: str, fraction: float) -> None:
        """Of the last steps, calibration."""
        self._write(self.done + fraction * (self.steps - self.done), doing)

    def _write(self, done: float, doing: str) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{done / self.steps} {doing}\n")


def measure(
    problem: Problem,
    contender: Contender,
    *,
    inputs: Sequence[Tensor],
    truth: Sequence[Tensor],
    notes: Notes,
    is_recorded: bool,
) -> Measured:
    """A first run for errors and counts, which is also the warm-up; then the timed runs; then one that is recorded."""
    import torch
    import torch.distributed as dist

    from mesh_attention.api import MeshAttention
    from mesh_attention.arguments import CallOptions
    from mesh_attention.comm.torch_dist import TorchComm
    from mesh_attention.comm.wrappers import Counting

    notes.tell(f"{contender.name} {contender.tile}: compare and count")
    counting = Counting(TorchComm())
    attention = MeshAttention(counting, **contender.options)
    *given, d_out = (attention.shard(tensor) for tensor in inputs)
    q, k, v = (tensor.requires_grad_() for tensor in given)
    engine = attention.engines.find([[q, k, v]], CallOptions(causal=True, seq_len=problem.seq_q))
    out = attention(q, k, v, causal=True, seq_len=problem.seq_q)
    forward_peak = engine.meters[0].peak
    results = [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)]
    peaks = [forward_peak, engine.meters[0].peak]
    errors = [_relative_error(attention, ours, whole) for ours, whole in zip(results, truth, strict=True)]
    sent_nbytes, received_nbytes = counting.sent_nbytes.total(), counting.received_nbytes.total()
    messages, is_as_planned = counting.messages, _is_as_planned(engine, counting, peaks)
    times_s = []
    for number in range(TIMED_RUNS):
        notes.tell(f"{contender.name} {contender.tile}: timed run {number + 1} of {TIMED_RUNS}")
        dist.barrier()
        start = time.perf_counter()
        torch.autograd.grad(attention(q, k, v, causal=True, seq_len=problem.seq_q), (q, k, v), d_out)
        times_s.append(time.perf_counter() - start)
    passes: tuple[Pass, ...] = ()
    if is_recorded:
        notes.tell(f"{contender.name} {contender.tile}: recorded run")
        passes = recorded(attention, (q, k, v), d_out, seq=problem.seq_q)
    return Measured(
        forward_error=errors[0],
        gradient_error=max(errors[1:]),
        sent_nbytes=sent_nbytes,
        received_nbytes=received_nbytes,
        messages=messages,
        peak_nbytes=max(peaks),
        is_as_planned=is_as_planned,
        times_s=tuple(times_s),
        passes=passes,
    )


def recorded(
    attention: MeshAttention, inputs: tuple[Tensor, Tensor, Tensor], d_out: Tensor, *, seq: int
) -> tuple[Pass, ...]:
    """Forward and backward once, noted; ranks begin each together. Rank 0 tells of all ranks, the others nothing."""
    import torch
    import torch.distributed as dist

    from mesh_attention.execution.recorder import record

    with record(attention) as recording:
        dist.barrier()
        out = attention(*inputs, causal=True, seq_len=seq)
        dist.barrier()
        torch.autograd.grad(out, inputs, d_out)
    passes = recording.passes()
    return tuple(Pass(plan=one.plan, timeline=one.timeline) for one in passes) if dist.get_rank() == 0 else ()


def calibrate(problem: Problem, notes: Notes) -> Measurement:
    """What a forecast for this machine needs, as `mesh-attention calibrate` measures it."""
    import torch
    import torch.distributed as dist

    from mesh_attention.calibration.measurement import measure as measure_machine
    from mesh_attention.comm.torch_dist import TorchComm

    ranks = dist.get_world_size()
    return measure_machine(
        problem,
        comm=TorchComm(),
        device=torch.device("cpu"),
        ranks_per_node=ranks,
        ranks_here=ranks,
        report=lambda doing, fraction: notes.tell_part(f"calibrating: {doing}", fraction),
    )


def make_inputs(problem: Problem) -> list[Tensor]:
    """Q, K, V and dO of the whole sequence; the same on every rank."""
    import torch

    generator = torch.Generator().manual_seed(0)
    _, q_shape, k_shape, v_shape = _shapes(problem)
    return [torch.randn(shape, generator=generator) for shape in (q_shape, k_shape, v_shape, q_shape)]


def single_process_attention(problem: Problem, inputs: Sequence[Tensor]) -> list[Tensor]:
    """O, dQ, dK and dV by torch's own attention in float64, rounded to float32."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v, d_out = (tensor.double() for tensor in inputs)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    group_size = problem.heads // problem.kv_heads
    keys, values = (tensor.repeat_interleave(group_size, dim=2).transpose(1, 2) for tensor in (k, v))
    out = scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=True).transpose(1, 2)
    gradients = torch.autograd.grad(out, leaves, d_out)
    return [tensor.detach().float().contiguous() for tensor in (out, *gradients)]


def _shapes(problem: Problem) -> list[tuple[int, ...]]:
    """Of O, Q (and dQ), K and V."""
    q = (problem.batch, problem.seq_q, problem.heads, problem.head_dim_qk)
    kv = (problem.batch, problem.seq_kv, problem.kv_heads, problem.head_dim_qk)
    return [q, q, kv, kv]


def _relative_error(attention: MeshAttention, ours: Tensor, whole: Tensor) -> float:
    difference = (ours - attention.shard(whole)).abs()
    return float(difference.max() / whole.abs().max()) if difference.numel() else 0.0


def _is_as_planned(engine: Engine, counting: Counting, peaks: Sequence[int]) -> bool:
    """Whether bytes of each kind, messages and the peak of each pass are those that the two plans state."""
    costs = [rank_costs(engine.programs(direction)[0].plan, counting.rank) for direction in DIRECTIONS]
    sent: dict[str, int] = {}
    received: dict[str, int] = {}
    for cost in costs:
        for totals, by_kind in ((sent, cost.sent), (received, cost.received)):
            for kind, nbytes in by_kind.items():
                totals[kind] = totals.get(kind, 0) + nbytes.total
    counted = (dict(counting.sent_nbytes), dict(counting.received_nbytes), counting.messages, list(peaks))
    return counted == (sent, received, sum(c.messages for c in costs), [c.peak_nbytes for c in costs])


def loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next(name for name in ("lo", "lo0") if name in names)
