"""Runs decoded steps: buffers, tables of blocks on the device, and with CUDA graphs one graph for each layer.

All of it lives as long as the shapes of steps recur, so a step plans nothing and allocates little. The steps
themselves are in `serving.decoded_step`, their plans in `planners.over_cache`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mesh_attention.arguments import Softmax
from mesh_attention.comm.base import Comm, posts_apart
from mesh_attention.execution.buffers import Buffer, Fields
from mesh_attention.execution.compiled import compile_program, describe_post, peers_of
from mesh_attention.execution.executor import Executor
from mesh_attention.execution.graphs import CapturedGraph
from mesh_attention.kernels.base import DTYPES, Demand
from mesh_attention.kernels.decode import Blocks, DecodeKernel, Reach, TorchDecode, choose_decode
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import Item
from mesh_attention.planners.over_cache import Combining, Queries, StepShape, plan_decode
from mesh_attention.serving.book import WindowSize
from mesh_attention.serving.memory import CachedLayer, CacheMemory
from mesh_attention.session.agreement import Statement
from mesh_attention.session.session import Session

if TYPE_CHECKING:
    from mesh_attention.serving.decoded_step import Step

MOST_STEPS = 16
"""Shapes of steps whose buffers are kept."""
StepKind = tuple[StepShape, Queries, Combining | None]


@dataclass
class StepState:
    """The part of a step that depends on lengths, on the device of one rank, for layers of one window."""

    reach: Reach
    slots: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, int], most_blocks: int, device: torch.device) -> StepState:
        def zeros(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        reach = Reach(zeros(shape[0], most_blocks), zeros(*shape), zeros(*shape))
        return cls(reach, zeros(shape[0] * shape[1], dtype=torch.int64))

    def update(self, table: list[list[int]], first: list[list[int]], stop: list[list[int]], slots: list[int]) -> None:
        """Copy in place: graphs read these tensors."""
        width = max(map(len, table), default=0)
        padded = [blocks + [0] * (width - len(blocks)) for blocks in table]
        for dest, values in (
            (self.reach.table[:, :width], padded),
            (self.reach.first, first),
            (self.reach.stop, stop),
            (self.slots, slots),
        ):
            dest.copy_(torch.tensor(values, dtype=dest.dtype, device="cpu").view(dest.shape), non_blocking=True)


@dataclass(frozen=True)
class LayerCache:
    """One layer's cache of one rank, as a step with given softmax and lengths sees it (`executor.CacheKernel`)."""

    stored: Blocks
    state: StepState
    kernel: DecodeKernel
    softmax: Softmax
    shape: tuple[int, int]
    """Sequences, and queries of each."""

    def decode(self, tokens: Fields, partials: Fields) -> None:
        self.stored.k.flatten(0, 1).index_copy_(0, self.state.slots, tokens["k"])
        self.stored.v.flatten(0, 1).index_copy_(0, self.state.slots, tokens["v"])
        self.attend(tokens["q"], partials)

    def attend(self, q: Tensor, partials: Fields) -> None:
        by_query = *self.shape, q.shape[1]
        out, lse = partials["o"].view(*by_query, -1), partials["lse"].view(by_query)
        q, reach, softmax = q.view(*by_query, -1), self.state.reach, self.softmax
        self.kernel.attend(q, self.stored, reach, scale=softmax.scale, softcap=softmax.softcap, out=out, lse=lse)

    def combine(self, partials: Fields, total: Fields) -> None:
        self.kernel.merge(partials["o"], partials["lse"], total["o"], total["lse"])


class StepBuffers:
    """For steps of one plan: programs, buffers and lengths of the local ranks, and what their graphs read."""

    def __init__(self, plan: Plan, shape: tuple[int, int], comms: Sequence[Comm], device: torch.device) -> None:
        self.plan, self.shape, self.comms, self.device = plan, shape, comms, device
        self.programs = [compile_program(plan, comm.rank) for comm in comms]
        self.pools: list[dict[tuple[Item, ...], Buffer]] = [{} for _ in comms]
        self.states: dict[WindowSize, list[StepState]] = {}
        self.tables: dict[WindowSize, list[tuple[int, ...]]] = {}
        self.kernels: dict[float, DecodeKernel] = {}
        self.is_connected = False
        with torch.inference_mode(False):  # later steps need not be in inference mode
            problem, dtype = plan.problem, DTYPES[plan.problem.dtype]
            self.nothing = {  # of a rank that runs none of the sequences
                "o": torch.empty((0, problem.heads, problem.head_dim_v), dtype=dtype, device=device),
                "lse": torch.empty((0, problem.heads), dtype=torch.promote_types(dtype, torch.float32), device=device),
            }
            self.pass_id = torch.zeros((1, 1, 2), dtype=torch.int64, device=device)
        self.inputs: list[list[Tensor]] = []

    def kernel_for(self, softcap: float) -> DecodeKernel:
        if softcap not in self.kernels:
            problem = self.plan.problem
            demand = Demand(
                device=self.device.type,
                dtype=DTYPES[problem.dtype],
                head_dim_qk=problem.head_dim_qk,
                head_dim_v=problem.head_dim_v,
                softcap=softcap,
                lse_gradient=False,
            )
            self.kernels[softcap] = choose_decode(demand)
        return self.kernels[softcap]

    def prepare(self, step: Step) -> None:
        """Bring the lengths and tables of a step to the device."""
        for window, pool in step.cache.book.pools.items():
            if window not in self.states:
                with torch.inference_mode(False):
                    self.states[window] = [StepState.empty(self.shape, pool.size, self.device) for _ in self.comms]
            tables = [growth.after.tables[window].blocks for growth in step.by_row]
            is_same = tables == self.tables.get(window)
            self.tables[window] = tables
            for comm, state in zip(self.comms, self.states[window], strict=True):
                state.update([] if is_same else [list(blocks) for blocks in tables], *step.reach(comm.rank, window))

    def executor(self, number: int, cache: LayerCache, tensors: Sequence[Tensor]) -> Executor:
        """A layer's pass of one of the local ranks, with its q, k and v."""
        return Executor(
            compiled=self.programs[number],
            comm=self.comms[number],
            # Of all tokens of a step, (sequences, tokens, heads, dim), as fields of a batch of one.
            inputs={"q": {n: x.flatten(0, 1).transpose(0, 1)[None] for n, x in zip("qkv", tensors, strict=True)}},
            device=self.device,
            cache=cache,
            pool=self.pools[number],
        )

    def copy_in(self, tensors: Sequence[Sequence[Tensor]], pass_id: Tensor | None) -> None:
        """Copy what graphs read."""
        if not self.inputs:
            with torch.inference_mode(False), torch.no_grad():
                self.inputs = [[tensor.contiguous().clone() for tensor in rank] for rank in tensors]
        torch._foreach_copy_([t for rank in self.inputs for t in rank], [t for rank in tensors for t in rank])
        if pass_id is not None:
            self.pass_id.copy_(pass_id)


class LayerStep:
    """One layer in steps of one shape, and its graphs."""

    def __init__(
        self, buffers: StepBuffers, layer: int, cached: CachedLayer, softmax: Softmax, made_with: Mapping[str, str]
    ) -> None:
        self.buffers, self.layer, self.window, self.softmax = buffers, layer, cached.window, softmax
        must_match = {"operation": "a decoded step", **made_with, "layer": str(layer)}
        must_match |= {"plan": buffers.plan.digest}
        must_match |= {"shape": str(buffers.shape), "cached layer": str(cached), "softmax": str(softmax)}
        self.stated = Statement(must_match=must_match)
        self.describe = partial(describe_post, buffers.programs[0], posts_apart(buffers.comms[0]))
        self.seen: set[bool] = set()
        self.graphs: dict[bool, CapturedGraph[list[Fields]]] = {}
        """With a pass id, and without one."""


class StepRunner:
    """Runs the steps of a cache, and with CUDA graphs captures each layer the second time and launches it from then on.

    It and what it keeps do not refer to the cache or back to each other, so that a cache and its graphs are released
    with the last reference to it: left to the garbage collector, they may go while another graph is captured, which
    spoils that one.
    """

    def __init__(
        self,
        session: Session,
        cuda_graphs: bool,
        layers: Sequence[CachedLayer],
        memories: Sequence[CacheMemory],
        device: torch.device,
        made_with: Mapping[str, str],
    ) -> None:
        self.session, self.cuda_graphs, self.device, self.made_with = session, cuda_graphs, device, made_with
        self.cached_layers, self.memories = layers, memories
        self.by_shape: dict[StepKind, StepBuffers] = {}
        self.layers: dict[tuple[StepKind, int, Softmax], LayerStep] = {}
        self.ready: dict[object, LayerStep] = {}
        """By call, so that a call like an earlier one is not checked again."""

    @cached_property
    def graph_pool(self) -> object:
        """The memory that all graphs share."""
        return torch.cuda.graph_pool_handle()

    def layer_step(
        self, shape: StepShape, queries: Queries, combine: Combining | None, layer: int, softmax: Softmax
    ) -> LayerStep:
        key = shape, queries, combine
        if key not in self.by_shape:
            if len(self.by_shape) >= MOST_STEPS:
                oldest = next(iter(self.by_shape))
                del self.by_shape[oldest]
                self.layers = {known: kept for known, kept in self.layers.items() if known[0] != oldest}
                self.ready.clear()  # those that are left are found again by their shape
            plan = plan_decode(shape, queries=queries, combining=combine)
            self.by_shape[key] = StepBuffers(plan, shape.grid, self.session.comms_on(self.device), self.device)
        of_layer = key, layer, softmax
        if of_layer not in self.layers:
            self.layers[of_layer] = LayerStep(
                self.by_shape[key], layer, self.cached_layers[layer], softmax, self.made_with
            )
        return self.layers[of_layer]

    def run(self, step: LayerStep, tensors: Sequence[Sequence[Tensor]], pass_id: Tensor | None) -> list[Fields]:
        """Output and LSE of each local rank, by token. The next layer overwrites them."""
        has_id, buffers = pass_id is not None, step.buffers
        kernel = buffers.kernel_for(step.softmax.softcap)
        is_captured = self.cuda_graphs and kernel.name != TorchDecode.name  # which reads on the host
        if not is_captured or has_id not in step.seen:
            step.seen.add(has_id)
            if not buffers.is_connected:
                buffers.is_connected = True
                self.session.connect(self.device, *peers_of(buffers.programs[0]))
            return self._run(step, tensors, pass_id)
        buffers.copy_in(tensors, pass_id)
        if has_id not in step.graphs:
            own_id = buffers.pass_id if has_id else None
            step.graphs[has_id] = CapturedGraph(
                lambda: self._run(step, buffers.inputs, own_id), self.device, pool=self.graph_pool
            )
        return step.graphs[has_id].launch()

    def _run(self, step: LayerStep, tensors: Sequence[Sequence[Tensor]], pass_id: Tensor | None) -> list[Fields]:
        buffers = step.buffers
        kernel, executors = buffers.kernel_for(step.softmax.softcap), []
        for number, (memory, state) in enumerate(zip(self.memories, buffers.states[step.window], strict=True)):
            cache = LayerCache(memory.stored[step.layer], state, kernel, step.softmax, buffers.shape)
            executors.append(buffers.executor(number, cache, tensors[number]))
        ranks = [executor.run() for executor in executors]
        self.session.run_pass(ranks, pass_id, self.device, lambda _: executors[0].result_bytes)
        return [executor.result.by_token(None) if executor.result else buffers.nothing for executor in executors]

    def drop(self) -> None:
        """Forget all buffers and graphs, which refer to memory that is about to move."""
        for kept in (self.by_shape, self.layers, self.ready):
            kept.clear()
