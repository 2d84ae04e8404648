"""One rank of `mesh-attention demo`: it attends with each method and measures. Prints nothing, draws nothing.

Torch is imported inside the functions, because importing the command line must not import it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh_attention.machine.fit import Measurement
from mesh_attention.plan.counts import rank_costs
from mesh_attention.plan.plan import Plan
from mesh_attention.planning.choice import Choice
from mesh_attention.problem import DIRECTIONS, Problem
from mesh_attention.timeline import Timeline
from mesh_attention_lab.launch import joined_group, note_progress

if TYPE_CHECKING:
    from torch import Tensor

    from mesh_attention.api import MeshAttention
    from mesh_attention.execution.engine import Engine
    from mesh_attention.testing.wrappers import Counting

TIMED_RUNS = 3
CALIBRATION_STEPS = 6
"""Calibration takes about as long as this many runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodCounts:
    """One method, forward and backward together, on one rank or the worst.

    Errors are the largest difference from the reference, relative to the largest value of the whole reference.
    """

    forward_error: float
    gradient_error: float
    sent_nbytes: int
    received_nbytes: int
    messages: int
    peak_nbytes: int
    is_as_planned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(MethodCounts):
    """One rank; `passes` are of all ranks, on rank 0."""

    times_s: tuple[float, ...]
    passes: tuple[tuple[Plan, Timeline], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResults:
    """Results of one rank; a calibration only if passes were recorded."""

    methods: list[Measured]
    calibration: Measurement | None = None


def work(problem: Problem, methods: Mapping[str, Choice], is_recorded: bool, progress_file: Path) -> RankResults:
    """Measure each method on this rank. The launcher has set rank, size and address in the environment."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # the ranks share this machine's cores
    with joined_group(use_gpus=False, is_local=True) as (comm, _):
        steps = 1 + len(methods) * (1 + TIMED_RUNS + is_recorded) + CALIBRATION_STEPS * is_recorded
        notes = ProgressNotes(progress_file if comm.rank == 0 else None, steps=steps)
        notes.tell("attention in one process")
        inputs, truth = make_inputs(problem), [torch.empty(shape) for shape in _shapes(problem)]
        if comm.rank == 0:
            truth = single_process_attention(problem, inputs)
        for tensor in truth:
            dist.broadcast(tensor, src=0)
        demo = Demo(problem, inputs, truth, notes, is_recorded)
        results = [demo.measure(name, choice) for name, choice in methods.items()]
        return RankResults(methods=results, calibration=calibrate(problem, notes) if is_recorded else None)


class ProgressNotes:
    """Reports to the launcher, through a file, the current activity and the fraction of all steps that are done."""

    def __init__(self, path: Path | None, *, steps: int) -> None:
        self.path, self.steps, self.done = path, steps, 0

    def tell(self, doing: str, fraction: float | None = None) -> None:
        """One more step; with a fraction, that part of all remaining steps."""
        done = self.done if fraction is None else self.done + fraction * (self.steps - self.done)
        self.done += fraction is None
        if self.path is not None:
            note_progress(self.path, doing, done / self.steps)


@dataclass(frozen=True, slots=True)
class Demo:
    problem: Problem
    inputs: Sequence[Tensor]
    truth: Sequence[Tensor]
    notes: ProgressNotes
    is_recorded: bool

    def measure(self, name: str, choice: Choice) -> Measured:
        """A first run for errors and counts, which is also the warm-up; then timed runs; then one that is recorded."""
        import torch

        from mesh_attention.api import MeshAttention
        from mesh_attention.arguments import CallOptions
        from mesh_attention.comm.torch_dist import TorchComm
        from mesh_attention.testing.wrappers import Counting

        self.notes.tell(f"{name}: compare and count")
        seq, counting = self.problem.seq_q, Counting(TorchComm())
        attention = MeshAttention(counting, choice=choice)
        *shards, d_out = (attention.shard(tensor) for tensor in self.inputs)
        q, k, v = (tensor.requires_grad_() for tensor in shards)
        engine = attention.calls.engine([[q, k, v]], CallOptions(causal=True, seq_len=seq))
        out = attention(q, k, v, causal=True, seq_len=seq)
        forward_peak = engine.meters[0].peak
        results = [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)]
        peaks = [forward_peak, engine.meters[0].peak]
        errors = [_relative_error(attention, ours, whole) for ours, whole in zip(results, self.truth, strict=True)]
        counted: dict[str, Any] = {
            "sent_nbytes": counting.sent_nbytes.total(),
            "received_nbytes": counting.received_nbytes.total(),
            "messages": counting.messages,
            "is_as_planned": _is_as_planned(engine, counting, peaks),
        }
        return Measured(
            forward_error=errors[0],
            gradient_error=max(errors[1:]),
            peak_nbytes=max(peaks),
            **counted,
            times_s=tuple(self._timed(name, attention, (q, k, v), d_out)),
            passes=self._recorded(name, attention, (q, k, v), d_out) if self.is_recorded else (),
        )

    def _timed(self, name: str, attention: MeshAttention, qkv: tuple[Tensor, ...], d_out: Tensor) -> list[float]:
        import torch
        import torch.distributed as dist

        times_s = []
        for number in range(TIMED_RUNS):
            self.notes.tell(f"{name}: timed run {number + 1} of {TIMED_RUNS}")
            dist.barrier()
            start = time.perf_counter()
            torch.autograd.grad(attention(*qkv, causal=True, seq_len=self.problem.seq_q), qkv, d_out)
            times_s.append(time.perf_counter() - start)
        return times_s

    def _recorded(
        self, name: str, attention: MeshAttention, qkv: tuple[Tensor, ...], d_out: Tensor
    ) -> tuple[tuple[Plan, Timeline], ...]:
        """Forward and backward once, recorded; ranks start each together. Rank 0 returns the passes of all ranks."""
        import torch
        import torch.distributed as dist

        from mesh_attention_lab.recording import record

        self.notes.tell(f"{name}: recorded run")
        with record(attention) as recording:
            dist.barrier()
            out = attention(*qkv, causal=True, seq_len=self.problem.seq_q)
            dist.barrier()
            torch.autograd.grad(out, qkv, d_out)
        passes = recording.passes()
        return tuple((recorded.plan, recorded.timeline) for recorded in passes) if dist.get_rank() == 0 else ()


def calibrate(problem: Problem, notes: ProgressNotes) -> Measurement:
    """Measure this machine for forecasts, as `mesh-attention calibrate` does."""
    import torch

    from mesh_attention.comm.torch_dist import TorchComm
    from mesh_attention.machine.probe import measure
    from mesh_attention.machine.timing import Clock

    comm = TorchComm()
    return measure(
        problem,
        Clock(comm=comm, device=torch.device("cpu")),
        ranks_per_node=comm.size,
        ranks_here=comm.size,
        report=lambda doing, fraction: notes.tell(f"calibrating: {doing}", fraction),
    )


# The problem in one process


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
    seen = torch.ones(problem.seq_q, problem.seq_kv, dtype=torch.bool).tril(problem.seq_kv - problem.seq_q)
    mask = {"is_causal": True} if problem.seq_q == problem.seq_kv else {"attn_mask": seen}
    out = scaled_dot_product_attention(q.transpose(1, 2), keys, values, **mask).transpose(1, 2)
    gradients = torch.autograd.grad(out, leaves, d_out)
    return [tensor.detach().float().contiguous() for tensor in (out, *gradients)]


def _shapes(problem: Problem) -> list[tuple[int, ...]]:
    """Shapes of O, Q (and dQ), K and V."""
    q = (problem.batch, problem.seq_q, problem.heads, problem.head_dim_qk)
    kv = (problem.batch, problem.seq_kv, problem.kv_heads, problem.head_dim_qk)
    return [q, q, kv, kv]


def _relative_error(attention: MeshAttention, ours: Tensor, whole: Tensor) -> float:
    difference = (ours - attention.shard(whole)).abs()
    return float(difference.max() / whole.abs().max()) if difference.numel() else 0.0


def _is_as_planned(engine: Engine, counting: Counting, peaks: Sequence[int]) -> bool:
    """True if bytes of each kind, messages and the peak of each pass are those that the two plans state."""
    costs = [rank_costs(engine.programs(direction)[0].plan, counting.rank) for direction in DIRECTIONS]
    sent: Counter[str] = Counter()
    received: Counter[str] = Counter()
    for cost in costs:
        sent.update({kind: nbytes.total for kind, nbytes in cost.sent.items()})
        received.update({kind: nbytes.total for kind, nbytes in cost.received.items()})
    counted = (counting.sent_nbytes, counting.received_nbytes, counting.messages, list(peaks))
    return counted == (sent, received, sum(c.messages for c in costs), [c.peak_nbytes for c in costs])
