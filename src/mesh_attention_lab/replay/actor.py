"""One rank of one plan with made-up inputs, ready to run repeatedly; and the kernel it is compared with.

Inputs are normal numbers: zeros would run faster than anything real.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import isqrt, log

import torch
from torch import Tensor

from mesh_attention.arguments import Softmax
from mesh_attention.comm.base import Comm, drive
from mesh_attention.execution.buffers import STATISTICS, Buffer, Fields, fields_of, token_format
from mesh_attention.execution.compiled import Compiled, compile_program
from mesh_attention.execution.engine import Outputs
from mesh_attention.execution.executor import Executor
from mesh_attention.kernels.base import DTYPES, CallMask, Kernel, RowGradient, Scores
from mesh_attention.kernels.select import choose_merging, kernel_for
from mesh_attention.plan.assignment import Axis
from mesh_attention.plan.plan import Plan, rank_costs
from mesh_attention.plan.steps import AXIS_OF, INPUTS, Item, Kind
from mesh_attention.problem import Direction, Problem


class Actor:
    """One rank's part in one pass. A run has `passes` of it, and a time is taken of `calls` runs in a row."""

    passes = calls = 1

    def __init__(self, plan: Plan, rank: int, *, device: torch.device) -> None:
        self.plan, self.rank, self.device = plan, rank, device
        self.problem, self.matrix, self.merging = plan.problem, plan.matrix, choose_merging(device)

    @cached_property
    def kernel(self) -> Kernel:
        return kernel_for(self.problem, self.device)

    @cached_property
    def tokens(self) -> dict[str, int]:
        axes: dict[str, Axis] = {"q": "row", "kv": "col"}
        return {side: sum(map(len, self.matrix.home_segments(axis, self.rank))) for side, axis in axes.items()}

    @cached_property
    def compiled(self) -> Compiled:
        return compile_program(self.plan, self.rank)

    @cached_property
    def inputs(self) -> dict[str, Fields]:
        return {kind: self._input(kind) for kind in INPUTS[self.plan.direction]}

    @cached_property
    def flops(self) -> int:
        """FLOPs of this rank."""
        return rank_costs(self.plan, self.rank).flops

    @property
    def device_nbytes(self) -> int:
        """Bytes that the plan states for a pass, without its inputs and without the items that forward kept."""
        kept = {
            id(self.compiled.allocations[item]): self.compiled.allocations[item].nbytes for item in self.compiled.kept
        }
        return self.compiled.device_nbytes - (sum(kept.values()) if self.plan.direction == "backward" else 0)

    @property
    def largest_message_nbytes(self) -> int:
        return max((self.matrix.nbytes(item).total for item in self.compiled.allocations), default=0)

    def run(self, comm: Comm) -> Mapping[str, Fields]:
        """One pass. On a GPU it is only queued when this returns."""
        executor = Executor(
            compiled=self.compiled,
            comm=comm,
            kernel=self.kernel,
            softmax=Softmax(scale=self.problem.head_dim_qk**-0.5),
            inputs=self.inputs,
            device=self.device,
            new_output=Outputs(self.problem, self.tokens, self.device),
            merging=self.merging,
            kept=self._kept if self.plan.direction == "backward" else {},
        )
        return drive(executor.run())

    @cached_property
    def _kept(self) -> dict[Item, Buffer]:
        """Items that forward would have kept; those that are adjacent in memory share a buffer."""
        made: dict[tuple[Item, ...], Buffer] = {}
        for item in self.compiled.kept:
            allocation = self.compiled.allocations[item]
            if allocation.items not in made:
                fmt = token_format(item.kind, self.problem, self.plan.assignment.head_shares, False)
                made[allocation.items] = Buffer.empty(
                    fmt, tokens=allocation.tokens, batch=self.problem.batch, device=self.device
                )
                for tensor in made[allocation.items].fields.values():
                    tensor.normal_()
        return {item: made[self.compiled.allocations[item].items] for item in self.compiled.kept}

    def _input(self, kind: Kind) -> Fields:
        tokens, batch = self.tokens["q" if AXIS_OF[kind] == "row" else "kv"], self.problem.batch
        made: dict[str, Tensor] = {}
        for name, heads, dim in fields_of(kind, self.problem):
            if name in STATISTICS:
                size = (batch, heads, tokens)
                wide = torch.float64 if self.problem.dtype == "float64" else torch.float32
                shift = log(self.problem.seq_kv) if name == "lse" else 0.0
                made[name] = torch.randn(size, device=self.device, dtype=wide) + shift
            else:
                dtype = DTYPES[self.problem.dtype]
                made[name] = torch.randn((batch, tokens, heads, dim), device=self.device, dtype=dtype).transpose(1, 2)
        return made


class BaselineKernel:
    """One kernel call with as much work as a rank has: the rate of the device without communication.

    It is square, and causal if the mask is. If there are more keys than queries, as in a turn against a cache, it has
    no mask, and at most as many queries as the problem; few queries have many keys.
    """

    passes = calls = 1

    def __init__(self, problem: Problem, *, device: torch.device) -> None:
        self.problem, self.kernel = problem, kernel_for(problem, device)
        pairs = problem.pairs // problem.ranks
        is_causal = problem.mask.right is not None and problem.seq_q == problem.seq_kv
        self.tokens = max(1, isqrt(2 * pairs if is_causal else pairs))
        self.kv_tokens = self.tokens
        if problem.seq_q < problem.seq_kv:
            self.tokens = min(self.tokens, problem.seq_q)
            self.kv_tokens = max(1, pairs // self.tokens)
        self.pairs = self.tokens * (self.tokens + 1) // 2 if is_causal else self.tokens * self.kv_tokens
        mask = CallMask.causal(self.tokens) if is_causal else CallMask.full(self.tokens, self.kv_tokens)
        self.scores = Scores(mask, problem.head_dim_qk**-0.5)
        self.device = device

    def flops(self, direction: Direction) -> int:
        return self.problem.flops(direction, pairs=self.pairs)

    @cached_property
    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        problem = self.problem
        sizes = (
            (self.tokens, problem.heads, problem.head_dim_qk),
            (self.kv_tokens, problem.kv_heads, problem.head_dim_qk),
            (self.kv_tokens, problem.kv_heads, problem.head_dim_v),
            (self.tokens, problem.heads, problem.head_dim_v),
        )
        dtype = DTYPES[problem.dtype]
        q, k, v, do = (
            torch.randn((problem.batch, *size), device=self.device, dtype=dtype).transpose(1, 2) for size in sizes
        )
        return q, k, v, do

    @cached_property
    def _row(self) -> RowGradient:
        q, k, v, do = self._tensors
        out, lse = self.kernel.forward(q, k, v, self.scores)
        return RowGradient(do, lse, out=out.to(do.dtype))

    def run(self, direction: Direction) -> object:
        q, k, v, _ = self._tensors
        if direction == "forward":
            return self.kernel.forward(q, k, v, self.scores)
        return self.kernel.backward(q, k, v, self._row, self.scores)
