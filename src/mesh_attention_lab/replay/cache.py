"""A decoded step in a replay: the cache of one rank with real K and V, and the rank's steps over it.

The layers of a small model take turns, so that the device reads its memory and not its cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch

from mesh_attention.arguments import Softmax
from mesh_attention.comm.base import Comm, drive
from mesh_attention.errors import MemoryLimitError
from mesh_attention.execution.buffers import Buffer, Fields
from mesh_attention.execution.executor import Executor
from mesh_attention.kernels.base import DTYPES, Demand
from mesh_attention.kernels.decode import TorchDecode, choose_decode
from mesh_attention.machine.timing import within
from mesh_attention.plan.buffer_sizes import BLOCK_TOKENS
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import Item
from mesh_attention.problem import Direction, Problem
from mesh_attention.serving.book import WindowSize
from mesh_attention.serving.memory import CachedLayer, CacheMemory, cache_nbytes
from mesh_attention.serving.step_runner import LayerCache, StepState
from mesh_attention.units import format_nbytes
from mesh_attention_lab.replay.actor import Actor
from mesh_attention_lab.replay.device import free_nbytes

IN_TURN_NBYTES = {"cuda": 2**30, "cpu": 0}
"""K and V of all layers that take turns: many times the cache of a device."""
MOST_LAYERS = 64
STEPS_IN_A_ROW = {"cuda": 20, "cpu": 1}
"""For each time that is taken."""


class FilledCache:
    """K and V of the layers that take turns, on the rank with the most tokens.

    As the kernel that steps are compared with, it attends all queries to them and exchanges nothing.
    """

    def __init__(self, problem: Problem, *, device: torch.device) -> None:
        self.problem, self.device, self.calls = problem, device, STEPS_IN_A_ROW[device.type]
        self.tokens, self.kv_tokens = problem.seq_q, -(-problem.seq_kv // problem.ranks)
        blocks, dtype = -(-self.kv_tokens // BLOCK_TOKENS), DTYPES[problem.dtype]
        qk, v = problem.head_dim_qk, problem.head_dim_v
        layer = CachedLayer(kv_heads=problem.kv_heads, head_dim=qk, head_dim_v=v)
        blocks_by_window: dict[WindowSize, int] = {None: problem.batch * blocks}
        layer_nbytes = cache_nbytes([layer], blocks_by_window, BLOCK_TOKENS, problem.itemsize)
        self.passes = within(-(-IN_TURN_NBYTES[device.type] // layer_nbytes), 2, MOST_LAYERS)
        free = free_nbytes(device)
        if self.passes * layer_nbytes > free:
            raise MemoryLimitError(
                f"K and V of {self.passes} layers need {format_nbytes(self.passes * layer_nbytes)}, but {device} has "
                f"{format_nbytes(free)} free; use more ranks, fewer sequences or fewer cached tokens"
            )
        self.memory = CacheMemory([layer] * self.passes, blocks_by_window, BLOCK_TOKENS, dtype, device)
        for stored in self.memory.stored:
            for tensor in stored:
                tensor.normal_()
        shape = problem.batch, problem.seq_q
        self.state = StepState.empty(shape, blocks, device)
        self.state.update(
            [list(range(at * blocks, (at + 1) * blocks)) for at in range(problem.batch)],
            [[0] * problem.seq_q] * problem.batch,
            [[self.kv_tokens] * problem.seq_q] * problem.batch,
            # Where the last token is; other ranks' new tokens, which a rank leaves out, cost as much.
            [
                at * blocks * BLOCK_TOKENS + self.kv_tokens - 1
                for at in range(problem.batch)
                for _ in range(problem.seq_q)
            ],
        )
        self.kernel = choose_decode(Demand(device=device.type, dtype=dtype, head_dim_qk=qk, head_dim_v=v))
        self.is_capturable = self.kernel.name != TorchDecode.name  # which reads on the host
        softmax = Softmax(scale=qk**-0.5)
        self.layers = [LayerCache(stored, self.state, self.kernel, softmax, shape) for stored in self.memory.stored]
        rows = problem.batch * problem.seq_q
        self.queries = torch.randn((rows, problem.heads, qk), device=device, dtype=dtype)
        self.partials = {
            "o": torch.empty((rows, problem.heads, v), device=device, dtype=dtype),
            "lse": torch.empty((rows, problem.heads), device=device),
        }

    def flops(self, direction: Direction) -> int:
        return self.problem.flops(direction, pairs=self.tokens * self.kv_tokens)

    def run(self, direction: Direction) -> None:
        for layer in self.layers:
            layer.attend(self.queries, self.partials)


class StepActor(Actor):
    """One rank's steps of all layers of a cache, one after the other."""

    def __init__(self, plan: Plan, rank: int, cache: FilledCache) -> None:
        super().__init__(plan, rank, device=cache.device)
        self.cache, self.passes, self.calls = cache, cache.passes, cache.calls
        self.pool: dict[tuple[Item, ...], Buffer] = {}

    @cached_property
    def flops(self) -> int:
        return self.cache.flops("forward")

    @cached_property
    def inputs(self) -> dict[str, Fields]:
        """q, k and v of the tokens that this rank runs."""
        problem, matrix = self.cache.problem, self.plan.matrix
        every = problem.batch * problem.seq_q
        own = every if matrix.is_replicated else sum(map(len, matrix.home_segments("row", self.rank)))
        sizes = (problem.heads, problem.head_dim_qk), (problem.kv_heads, problem.head_dim_qk)
        q, k, v = (
            torch.randn((1, own, *size), device=self.device, dtype=DTYPES[problem.dtype]).transpose(1, 2)
            for size in (*sizes, (problem.kv_heads, problem.head_dim_v))
        )
        return {"q": {"q": q, "k": k, "v": v}}

    def run(self, comm: Comm) -> Mapping[str, Fields]:
        for layer in self.cache.layers:
            executor = Executor(
                compiled=self.compiled, comm=comm, inputs=self.inputs, device=self.device, cache=layer, pool=self.pool
            )
            drive(executor.run())
        return {}
