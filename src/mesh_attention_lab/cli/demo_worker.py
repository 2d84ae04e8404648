"""One rank of `mesh-attention demo`: it attends with each method and measures. Prints nothing, draws nothing.

Torch is imported inside the functions, because importing the command line must not import it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from mesh_attention.machine.fit import Measurement
from mesh_attention.plan.plan import Plan, rank_costs
from mesh_attention.planners.choice import Choice
from mesh_attention.problem import DIRECTIONS, Problem
from mesh_attention.timeline import Timeline
from mesh_attention_lab.cli.calibrate import measured
from mesh_attention_lab.launch import joined_group

if TYPE_CHECKING:
    from torch import Tensor

    from mesh_attention.api import MeshAttention
    from mesh_attention.execution.engine import Engine
    from mesh_attention_lab.testing.wrappers import Counting

TIMED_RUNS = 3
LARGEST_ERROR = 1e-4
"""Relative, float32 against float64; a right result stays below 1e-5, a lost or doubled block is above 1e-2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodResult:
    """One method, forward and backward together, on one rank or the worst.

    Errors are the largest difference from the reference, relative to the largest value of the whole reference; `passes`
    are of all ranks, on rank 0.
    """

    method: str
    tile: str
    forward_error: float
    gradient_error: float
    sent_nbytes: int
    received_nbytes: int
    messages: int
    peak_nbytes: int
    is_as_planned: bool
    time_s: float
    passes: tuple[tuple[Plan, Timeline], ...] = ()

    @property
    def is_right(self) -> bool:
        return self.is_as_planned and max(self.forward_error, self.gradient_error) <= LARGEST_ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResults:
    """Results of one rank; a calibration only if passes were recorded."""

    methods: list[MethodResult]
    calibration: Measurement | None = None


def work(problem: Problem, methods: Mapping[str, Choice], is_recorded: bool) -> RankResults:
    """Measure each method on this rank. The launcher has set rank, size and address in the environment."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # the ranks share this machine's cores
    with joined_group(use_gpus=False, is_local=True) as (comm, device):
        inputs, truth = make_inputs(problem), [torch.empty(shape) for shape in _shapes(problem)]
        if comm.rank == 0:
            truth = single_process_attention(problem, inputs)
        for tensor in truth:
            dist.broadcast(tensor, src=0)
        demo = Demo(problem, inputs, truth, is_recorded)
        results = [demo.measure(name, choice) for name, choice in methods.items()]
        calibration = measured(problem, comm, device, comm.size, lambda *progress: None) if is_recorded else None
        return RankResults(methods=results, calibration=calibration)


@dataclass(frozen=True, slots=True)
class Demo:
    problem: Problem
    inputs: Sequence[Tensor]
    truth: Sequence[Tensor]
    is_recorded: bool

    def measure(self, name: str, choice: Choice) -> MethodResult:
        """A first run for errors and counts, which is also the warm-up; then timed runs; then one that is recorded."""
        import torch

        from mesh_attention.api import MeshAttention
        from mesh_attention.arguments import CallOptions
        from mesh_attention.comm.torch_dist import TorchComm
        from mesh_attention_lab.testing.wrappers import Counting

        seq, counting = self.problem.seq_q, Counting(TorchComm())
        attention = MeshAttention(counting, choice=choice)
        *shards, d_out = (attention.shard(tensor) for tensor in self.inputs)
        q, k, v = (tensor.requires_grad_() for tensor in shards)
        engine = attention.calls.engine([[q, k, v]], CallOptions(causal=True, seq_len=seq))
        forward = partial(attention, q, k, v, causal=True, seq_len=seq)
        backward = partial(torch.autograd.grad, inputs=(q, k, v), grad_outputs=d_out)
        out = forward()
        forward_peak = engine.meters[0].peak
        results = [out.detach(), *backward(out)]
        peaks = [forward_peak, engine.meters[0].peak]
        errors = [_relative_error(attention, ours, whole) for ours, whole in zip(results, self.truth, strict=True)]
        result = MethodResult(
            method=name,
            tile=str(choice.assignment),
            forward_error=errors[0],
            gradient_error=max(errors[1:]),
            sent_nbytes=counting.sent_nbytes.total(),
            received_nbytes=counting.received_nbytes.total(),
            messages=counting.messages,
            peak_nbytes=max(peaks),
            is_as_planned=_is_as_planned(engine, counting, peaks),
            time_s=median(_time_s(forward, backward) for _ in range(TIMED_RUNS)),
        )
        return replace(result, passes=_recorded(attention, forward, backward)) if self.is_recorded else result


def _time_s(forward: Callable[[], Tensor], backward: Callable[[Tensor], object]) -> float:
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    backward(forward())
    return time.perf_counter() - start


def _recorded(
    attention: MeshAttention, forward: Callable[[], Tensor], backward: Callable[[Tensor], object]
) -> tuple[tuple[Plan, Timeline], ...]:
    """Both passes once, recorded; ranks start each together. Rank 0 returns the passes of all ranks."""
    import torch.distributed as dist

    from mesh_attention_lab.recording import record

    with record(attention) as recording:
        dist.barrier()
        out = forward()
        dist.barrier()
        backward(out)
    passes = recording.passes()
    return tuple((recorded.plan, recorded.timeline) for recorded in passes) if dist.get_rank() == 0 else ()


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
    seen = torch.ones(problem.seq_q, problem.seq_kv, dtype=torch.bool).tril(problem.seq_kv - problem.seq_q)
    mask: dict[str, Any] = {"is_causal": True} if problem.seq_q == problem.seq_kv else {"attn_mask": seen}
    q, k, v = (tensor.transpose(1, 2) for tensor in leaves)
    out = scaled_dot_product_attention(q, k, v, enable_gqa=True, **mask).transpose(1, 2)
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
