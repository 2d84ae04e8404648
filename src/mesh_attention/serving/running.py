"""Runs decoded steps: buffers, tables of blocks on the device, and with CUDA graphs one graph for each layer.

All of it lives as long as the shapes of steps recur, so a step plans nothing and allocates little. `serving.decode` has
the steps themselves, `plan.serving` what a rank does in one.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mesh_attention.arguments import Softmax
from mesh_attention.comm.base import Comm, Parcel, Work
from mesh_attention.execution.buffers import DTYPES
from mesh_attention.execution.graphs import CapturedGraph, GraphMemory
from mesh_attention.kernels.base import Demand
from mesh_attention.kernels.decode import DecodeKernel, Reach, TorchDecode, choose_decode
from mesh_attention.plan.serving import DecodePlan
from mesh_attention.serving.book import Window
from mesh_attention.serving.memory import CachedLayer, Memory
from mesh_attention.session.agreement import Question
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
        return self.raw[at.start : at.stop].view(-1)


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
        memory: Memory,
        layer: int,
        state: StepState,
        tensors: Sequence[Tensor],
        softmax: Softmax,
    ) -> Generator[Work, None, tuple[Tensor, Tensor]]:
        """Output (sequences, queries, heads, dim) and LSE (sequences, queries, heads), of the own sequences if they are
        sharded. The next step overwrites them."""
        plan = self.plan
        q, k, v = tensors
        if plan.queries == "sharded":
            q, k, v = yield from self._gather_tokens(q, k, v)
        memory.write(layer, state.slots, k.flatten(0, 1), v.flatten(0, 1))
        shape = (plan.sequences, plan.new_tokens, plan.heads)
        kernel, partials = self.kernel_for(softmax.softcap), self.partials
        kernel.attend(
            q,
            memory.stored[layer],
            state.reach,
            scale=softmax.scale,
            softcap=softmax.softcap,
            out=partials.out.view(*shape, plan.head_dim_v),
            lse=partials.lse.view(shape),
        )
        if plan.ranks > 1:
            yield from self._meet(kernel)
        results = self.results
        if plan.queries == "sharded":
            mine = self.own if plan.ranks > 1 else range(plan.rows)
            shape = (len(plan.own[self.comm.rank]), *shape[1:])
            rows = slice(mine.start, mine.stop)
            return results.out[rows].view(*shape, plan.head_dim_v), results.lse[rows].view(shape)
        return results.out.view(*shape, plan.head_dim_v), results.lse.view(shape)

    def _meet(self, kernel: DecodeKernel) -> Generator[Work, None, None]:
        """Partials of all ranks, merged: the own rows, and if queries are replicated then those of the others."""
        plan, rank, own = self.plan, self.comm.rank, self.own
        others = [other for other in range(plan.ranks) if other != rank]
        to = {other: plan.slices[other] if plan.combine == "reduce_scatter" else range(plan.rows) for other in others}
        if plan.combine == "reduce_scatter":
            self.arrived.raw[rank].copy_(self.partials.raw[own.start : own.stop])
        yield self.comm.post(
            [Parcel([self.partials.part(to[other])], other, "o") for other in others if to[other]],
            [Parcel([self.arrived.raw[other].view(-1)], other, "o") for other in others if own],
        )
        if own:
            at = slice(own.start, own.stop)
            kernel.merge(self.arrived.out, self.arrived.lse, self.merged.out[at], self.merged.lse[at])
        if plan.combine == "reduce_scatter" and plan.queries == "replicated":
            yield self.comm.post(
                [Parcel([self.merged.part(own)], other, "o") for other in others if own],
                [Parcel([self.merged.part(to[other])], other, "o") for other in others if to[other]],
            )

    def _gather_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> Generator[Work, None, list[Tensor]]:
        """q, k and v of all sequences, from the ranks that run them."""
        plan, rank = self.plan, self.comm.rank
        own = plan.own[rank]
        packed = torch.cat([tensor.flatten(1) for tensor in (q, k, v)], 1)
        self.tokens[own.start : own.stop].copy_(packed.view(torch.uint8))
        others = [other for other in range(plan.ranks) if other != rank]
        if others:
            mine = self.tokens[own.start : own.stop].view(-1)
            yield self.comm.post(
                [Parcel([mine], other, "q") for other in others if own],
                [
                    Parcel([self.tokens[at.start : at.stop].view(-1)], other, "q")
                    for other in others
                    if (at := plan.own[other])
                ],
            )
        sizes = [
            (plan.heads, plan.head_dim_qk),
            (plan.kv_heads, plan.head_dim_qk),
            (plan.kv_heads, plan.head_dim_v),
        ]
        typed, found, first = self.tokens.view(q.dtype), [], 0
        for heads, dim in sizes:
            width = plan.new_tokens * heads * dim
            found.append(typed[:, first : first + width].view(plan.sequences, plan.new_tokens, heads, dim))
            first += width
        return found


@dataclass(frozen=True)
class StepContext:
    """The session, layers, memories and device that the steps of a cache share.

    It does not refer to the cache, so that a cache and its graphs are released with the last reference to it: left to
    the garbage collector, they may go while another graph is captured, which spoils that one.
    """

    session: Session
    cuda_graphs: bool
    layers: Sequence[CachedLayer]
    memories: Sequence[Memory]
    device: torch.device

    @cached_property
    def graph_pool(self) -> object:
        """The memory that all graphs share."""
        return GraphMemory(self.device).pool


class Steps:
    """Steps of one shape, for the local ranks: their engines and states, and what their graphs read."""

    def __init__(self, context: StepContext, plan: DecodePlan) -> None:
        self.context, self.plan = context, plan
        self.comms = context.session.comms_on(context.device)
        self.states: dict[Window, list[StepState]] = {}
        self.tables: dict[Window, list[tuple[int, ...]]] = {}
        self.is_new = True
        with torch.inference_mode(False):  # later steps need not be in inference mode
            self.engines = [StepEngine(plan, comm, context.device) for comm in self.comms]
            self.pass_id = torch.zeros((1, 1, 2), dtype=torch.int64, device=context.device)
        self.inputs: list[list[Tensor]] = []

    def prepare(self, step: Step) -> None:
        """Bring the lengths and tables of a step to the device."""
        shape = (self.plan.sequences, self.plan.new_tokens)
        for window, pool in step.cache.book.pools.items():
            if window not in self.states:
                with torch.inference_mode(False):
                    self.states[window] = [StepState.empty(shape, pool.size, self.context.device) for _ in self.comms]
            tables = [grown.after.tables[window].blocks for grown in step.sequences.values()]
            is_same = tables == self.tables.get(window)
            self.tables[window] = tables
            for comm, state in zip(self.comms, self.states[window], strict=True):
                state.update([] if is_same else [list(blocks) for blocks in tables], *step.reach(comm.rank, window))

    def connect(self) -> None:
        """Connect with all ranks before the first step, where a transport has to."""
        if self.is_new:
            self.is_new = False
            others = [rank for rank in range(self.plan.ranks) if rank != self.comms[0].rank]
            self.context.session.connect(self.context.device, others, others)

    def copy_in(self, tensors: Sequence[Sequence[Tensor]], pass_id: Tensor | None) -> None:
        """Copy what graphs read."""
        if not self.inputs:
            with torch.inference_mode(False), torch.no_grad():
                self.inputs = [[tensor.contiguous().clone() for tensor in rank] for rank in tensors]
        torch._foreach_copy_([t for rank in self.inputs for t in rank], [t for rank in tensors for t in rank])
        if pass_id is not None:
            self.pass_id.copy_(pass_id)


class LayerSteps:
    """One layer in steps of one shape: run the first time, captured the second, and launched from then on."""

    def __init__(self, steps: Steps, layer: int, softmax: Softmax) -> None:
        self.steps, self.layer, self.softmax = steps, layer, softmax
        kernel, context = steps.engines[0].kernel_for(softmax.softcap), steps.context
        self.window = context.layers[layer].window
        self.is_captured = context.cuda_graphs and kernel.name != TorchDecode.name  # which reads on the host
        self.call_id = Question(
            asked={
                "operation": "a decoded step",
                "layer": str(layer),
                "plan": repr(steps.plan),
                "cached layer": str(context.layers[layer]),
                "softmax": str(softmax),
            }
        ).call_id
        self.seen: set[bool] = set()
        self.graphs: dict[bool, CapturedGraph[list[tuple[Tensor, Tensor]]]] = {}
        """With a pass id, and without one."""

    def run(self, tensors: Sequence[Sequence[Tensor]], pass_id: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """Output and LSE of each local rank. The next layer overwrites them."""
        has_id = pass_id is not None
        if not self.is_captured or has_id not in self.seen:
            self.seen.add(has_id)
            self.steps.connect()
            return self._run(tensors, pass_id)
        steps = self.steps
        steps.copy_in(tensors, pass_id)
        if has_id not in self.graphs:
            context, own_id = steps.context, steps.pass_id if has_id else None
            self.graphs[has_id] = CapturedGraph(
                lambda: self._run(steps.inputs, own_id), context.device, pool=context.graph_pool
            )
        return self.graphs[has_id].launch()

    def _run(self, tensors: Sequence[Sequence[Tensor]], pass_id: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        steps, context = self.steps, self.steps.context
        ranks = [
            engine.run(memory, self.layer, state, rank, self.softmax)
            for engine, memory, state, rank in zip(
                steps.engines, context.memories, steps.states[self.window], tensors, strict=True
            )
        ]
        return context.session.run_pass(ranks, pass_id, context.device, lambda _: [steps.engines[0].results.typed])


class StepCache:
    """Buffers and graphs that a cache keeps between its steps. Dropped when its memory moves."""

    def __init__(self, context: StepContext) -> None:
        self.context = context
        self.by_plan: dict[DecodePlan, Steps] = {}
        self.layers: dict[tuple[DecodePlan, int, Softmax], LayerSteps] = {}
        self.ready: dict[object, LayerSteps] = {}
        """Runners of layers by call, so that a call like an earlier one is not checked again."""

    def layer(self, plan: DecodePlan, layer: int, softmax: Softmax) -> LayerSteps:
        """The runner of a layer in steps of this plan."""
        if plan not in self.by_plan:
            if len(self.by_plan) >= MOST_STEPS:
                self._drop_oldest()
            self.by_plan[plan] = Steps(self.context, plan)
        key = plan, layer, softmax
        if key not in self.layers:
            self.layers[key] = LayerSteps(self.by_plan[plan], layer, softmax)
        return self.layers[key]

    def _drop_oldest(self) -> None:
        oldest = next(iter(self.by_plan))
        del self.by_plan[oldest]
        self.layers = {key: layer for key, layer in self.layers.items() if key[0] != oldest}
        self.ready.clear()  # those that are left are found again by their plan

    def drop(self) -> None:
        for kept in (self.by_plan, self.layers, self.ready):
            kept.clear()
