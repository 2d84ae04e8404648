"""Runs decoded steps: buffers, tables of blocks on the device, and with CUDA graphs one graph for each layer.

All of it lives as long as the shapes of steps recur, so a step plans nothing and allocates little. `serving.decode` has
the steps themselves, `plan.serving` what a rank does in one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mesh_attention.arguments import Softmax
from mesh_attention.comm.base import Comm, Parcel, Work
from mesh_attention.execution.buffers import DTYPES
from mesh_attention.execution.graphs import CapturedGraph
from mesh_attention.kernels.base import Demand
from mesh_attention.kernels.decode import Blocks, DecodeKernel, Reach, TorchDecode, choose_decode
from mesh_attention.plan.serving import DecodePlan
from mesh_attention.serving.book import WindowSize
from mesh_attention.serving.memory import CachedLayer, CacheMemory
from mesh_attention.session.agreement import Statement
from mesh_attention.session.session import Session

if TYPE_CHECKING:
    from mesh_attention.serving.decode import Step

MOST_STEPS = 16
"""Shapes of steps whose buffers are kept."""


class Rows:
    """Partial results of all rows as they travel: each an output and its LSE, in one buffer of bytes."""

    def __init__(self, plan: DecodePlan, raw: Tensor) -> None:
        dtype = DTYPES[plan.dtype]
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        self.raw = raw
        self.typed = self.raw.view(dtype)
        self.out = self.typed[..., : plan.head_dim_v]
        self.lse = self.raw.view(wide)[..., -1]

    @classmethod
    def empty(cls, plan: DecodePlan, *count: int, device: torch.device) -> Rows:
        return cls(plan, torch.empty((*count, plan.row_nbytes), dtype=torch.uint8, device=device))

    def part(self, at: range) -> Tensor:
        return self.raw[at.start : at.stop]


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
            dest.copy_(torch.tensor(values, dtype=dest.dtype).view(dest.shape), non_blocking=True)


class StepEngine:
    """Runs steps of one shape for one rank."""

    def __init__(self, plan: DecodePlan, comm: Comm, device: torch.device) -> None:
        self.plan, self.comm, self.device = plan, comm, device
        self.kernel: dict[float, DecodeKernel] = {}
        rank, ranks = comm.rank, plan.ranks
        is_gathered = plan.combine == "all_gather"
        self.own = range(plan.rows) if is_gathered else plan.slices[rank]
        self.arrived = Rows.empty(plan, ranks, len(self.own), device=device)
        # What is gathered by all need not be copied to its own place there.
        self.partials = (
            Rows(plan, self.arrived.raw[rank]) if is_gathered else Rows.empty(plan, plan.rows, device=device)
        )
        self.merged = Rows.empty(plan, plan.rows, device=device)
        self.tokens = torch.empty(
            (plan.sequences if plan.queries == "sharded" else 0, plan.new_tokens * plan.token_nbytes),
            dtype=torch.uint8,
            device=device,
        )

    @property
    def results(self) -> Rows:
        return self.merged if self.plan.ranks > 1 else self.partials

    def kernel_for(self, softcap: float) -> DecodeKernel:
        if softcap not in self.kernel:
            plan = self.plan
            demand = Demand(
                device=self.device.type,
                dtype=DTYPES[plan.dtype],
                head_dim_qk=plan.head_dim_qk,
                head_dim_v=plan.head_dim_v,
                softcap=softcap,
                lse_gradient=False,
            )
            self.kernel[softcap] = choose_decode(demand)
        return self.kernel[softcap]

    def run(
        self,
        memory: CacheMemory,
        layer: int,
        state: StepState,
        tensors: Sequence[Tensor],
        softmax: Softmax,
    ) -> Generator[Work, None, tuple[Tensor, Tensor]]:
        """Output (sequences, queries, heads, dim) and LSE (sequences, queries, heads), of this rank's own
        sequences if they are sharded. The next step overwrites them."""
        plan = self.plan
        q, k, v = tensors
        if plan.queries == "sharded":
            q, k, v = yield from self._gather_tokens(q, k, v)
        memory.write(layer, state.slots, k.flatten(0, 1), v.flatten(0, 1))
        self.attend(q, memory.stored[layer], state.reach, softmax)
        if plan.ranks > 1:
            yield from self._combine(self.kernel_for(softmax.softcap))
        out, lse = self.results.out, self.results.lse
        if plan.queries == "sharded":
            mine = slice(self.own.start, self.own.stop)
            out, lse = out[mine], lse[mine]
        return self._by_query(out, lse)

    def attend(self, q: Tensor, blocks: Blocks, reach: Reach, softmax: Softmax) -> None:
        """Attend to this rank's own tokens; `partials` hold the results."""
        out, lse = self._by_query(self.partials.out, self.partials.lse)
        kernel = self.kernel_for(softmax.softcap)
        kernel.attend(q, blocks, reach, scale=softmax.scale, softcap=softmax.softcap, out=out, lse=lse)

    def _by_query(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Rows by sequence, query and head."""
        shape = (-1, self.plan.new_tokens, self.plan.heads)
        return out.view(*shape, self.plan.head_dim_v), lse.view(shape)

    def _combine(self, kernel: DecodeKernel) -> Generator[Work, None, None]:
        """Merge the partials of all ranks: its own rows, and with replicated queries then gather the others'."""
        plan, own = self.plan, self.own
        slices = plan.slices if plan.combine == "reduce_scatter" else (own,) * plan.ranks
        if plan.combine == "reduce_scatter":
            self.arrived.raw[self.comm.rank].copy_(self.partials.raw[own.start : own.stop])
        yield self._exchange(
            "o", lambda other: self.partials.part(slices[other]), lambda other: self.arrived.raw[other]
        )
        if own:
            at = slice(own.start, own.stop)
            kernel.merge(self.arrived.out, self.arrived.lse, self.merged.out[at], self.merged.lse[at])
        if plan.combine == "reduce_scatter" and plan.queries == "replicated":
            yield self._exchange(
                "o", lambda other: self.merged.part(own), lambda other: self.merged.part(slices[other])
            )

    def _exchange(self, kind: str, sent: Callable[[int], Tensor], received: Callable[[int], Tensor]) -> Work:
        """Exchange bytes with every other rank, as far as there are any."""
        others = [rank for rank in range(self.plan.ranks) if rank != self.comm.rank]
        sends, recvs = (
            [Parcel([data.view(-1)], other, kind) for other in others if (data := part(other)).numel()]
            for part in (sent, received)
        )
        return self.comm.post(sends, recvs)

    def _gather_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> Generator[Work, None, list[Tensor]]:
        """q, k and v of all sequences, from the ranks that run them."""
        plan, own = self.plan, self.plan.own[self.comm.rank]
        packed = torch.cat([tensor.flatten(1) for tensor in (q, k, v)], 1)
        self.tokens[own.start : own.stop].copy_(packed.view(torch.uint8))
        parts = [self.tokens[at.start : at.stop] for at in plan.own]
        if plan.ranks > 1:
            yield self._exchange("q", lambda other: parts[self.comm.rank], lambda other: parts[other])
        sizes = (plan.heads, plan.head_dim_qk), (plan.kv_heads, plan.head_dim_qk), (plan.kv_heads, plan.head_dim_v)
        typed, gathered, first = self.tokens.view(q.dtype), [], 0
        for heads, dim in sizes:
            width = plan.new_tokens * heads * dim
            gathered.append(typed[:, first : first + width].view(plan.sequences, plan.new_tokens, heads, dim))
            first += width
        return gathered


class StepBuffers:
    """For steps of one shape: engines and states of the local ranks, and what their graphs read."""

    def __init__(self, plan: DecodePlan, comms: Sequence[Comm], device: torch.device) -> None:
        self.plan, self.comms, self.device = plan, comms, device
        self.states: dict[WindowSize, list[StepState]] = {}
        self.tables: dict[WindowSize, list[tuple[int, ...]]] = {}
        self.is_connected = False
        with torch.inference_mode(False):  # later steps need not be in inference mode
            self.engines = [StepEngine(plan, comm, device) for comm in comms]
            self.pass_id = torch.zeros((1, 1, 2), dtype=torch.int64, device=device)
        self.inputs: list[list[Tensor]] = []

    def prepare(self, step: Step) -> None:
        """Bring the lengths and tables of a step to the device."""
        shape = (self.plan.sequences, self.plan.new_tokens)
        for window, pool in step.cache.book.pools.items():
            if window not in self.states:
                with torch.inference_mode(False):
                    self.states[window] = [StepState.empty(shape, pool.size, self.device) for _ in self.comms]
            tables = [growth.after.tables[window].blocks for growth in step.sequences.values()]
            is_same = tables == self.tables.get(window)
            self.tables[window] = tables
            for comm, state in zip(self.comms, self.states[window], strict=True):
                state.update([] if is_same else [list(blocks) for blocks in tables], *step.reach(comm.rank, window))

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

    def __init__(self, buffers: StepBuffers, layer: int, cached: CachedLayer, softmax: Softmax) -> None:
        self.buffers, self.layer, self.window, self.softmax = buffers, layer, cached.window, softmax
        must_match = {"operation": "a decoded step", "layer": str(layer), "plan": repr(buffers.plan)}
        self.call_id = Statement(must_match=must_match | {"cached layer": str(cached), "softmax": str(softmax)}).call_id
        self.seen: set[bool] = set()
        self.graphs: dict[bool, CapturedGraph[list[tuple[Tensor, Tensor]]]] = {}
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
    ) -> None:
        self.session, self.cuda_graphs, self.device = session, cuda_graphs, device
        self.cached_layers, self.memories = layers, memories
        self.by_plan: dict[DecodePlan, StepBuffers] = {}
        self.layers: dict[tuple[DecodePlan, int, Softmax], LayerStep] = {}
        self.ready: dict[object, LayerStep] = {}
        """By call, so that a call like an earlier one is not checked again."""

    @cached_property
    def graph_pool(self) -> object:
        """The memory that all graphs share."""
        return torch.cuda.graph_pool_handle()

    def layer_step(self, plan: DecodePlan, layer: int, softmax: Softmax) -> LayerStep:
        if plan not in self.by_plan:
            if len(self.by_plan) >= MOST_STEPS:
                oldest = next(iter(self.by_plan))
                del self.by_plan[oldest]
                self.layers = {key: kept for key, kept in self.layers.items() if key[0] != oldest}
                self.ready.clear()  # those that are left are found again by their plan
            self.by_plan[plan] = StepBuffers(plan, self.session.comms_on(self.device), self.device)
        key = plan, layer, softmax
        if key not in self.layers:
            self.layers[key] = LayerStep(self.by_plan[plan], layer, self.cached_layers[layer], softmax)
        return self.layers[key]

    def run(
        self, step: LayerStep, tensors: Sequence[Sequence[Tensor]], pass_id: Tensor | None
    ) -> list[tuple[Tensor, Tensor]]:
        """Output and LSE of each local rank. The next layer overwrites them."""
        has_id, buffers = pass_id is not None, step.buffers
        kernel = buffers.engines[0].kernel_for(step.softmax.softcap)
        is_captured = self.cuda_graphs and kernel.name != TorchDecode.name  # which reads on the host
        if not is_captured or has_id not in step.seen:
            step.seen.add(has_id)
            if not buffers.is_connected:
                buffers.is_connected = True
                others = [rank for rank in range(buffers.plan.ranks) if rank != buffers.comms[0].rank]
                self.session.connect(self.device, others, others)
            return self._run(step, tensors, pass_id)
        buffers.copy_in(tensors, pass_id)
        if has_id not in step.graphs:
            own_id = buffers.pass_id if has_id else None
            step.graphs[has_id] = CapturedGraph(
                lambda: self._run(step, buffers.inputs, own_id), self.device, pool=self.graph_pool
            )
        return step.graphs[has_id].launch()

    def _run(
        self, step: LayerStep, tensors: Sequence[Sequence[Tensor]], pass_id: Tensor | None
    ) -> list[tuple[Tensor, Tensor]]:
        engines, states = step.buffers.engines, step.buffers.states[step.window]
        ranks = [
            engine.run(memory, step.layer, state, rank, step.softmax)
            for engine, memory, state, rank in zip(engines, self.memories, states, tensors, strict=True)
        ]
        return self.session.run_pass(ranks, pass_id, self.device, lambda _: [engines[0].results.typed])

    def drop(self) -> None:
        """Forget all buffers and graphs, which refer to memory that is about to move."""
        for kept in (self.by_plan, self.layers, self.ready):
            kept.clear()
