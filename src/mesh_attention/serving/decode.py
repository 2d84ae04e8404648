"""A decoded step: one or a few new tokens of some sequences against the cache, by the fixed program of a `DecodePlan`.

What a step needs lives as long as its shapes recur: buffers, the tables of blocks on the device, and with CUDA graphs
one graph for each layer. So a step plans nothing and allocates little.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mesh_attention.arguments import CallOptions, Softmax
from mesh_attention.comm.base import Comm, Parcel, Work
from mesh_attention.comm.marked import Marked
from mesh_attention.errors import UsageError
from mesh_attention.execution.buffers import DTYPES
from mesh_attention.execution.graphs import CapturedGraph
from mesh_attention.kernels.base import Demand
from mesh_attention.kernels.decode import DecodeKernel, Reach, TorchDecode, choose_decode
from mesh_attention.plan.decoding import DecodePlan, Meeting, Way
from mesh_attention.serving.book import Window
from mesh_attention.serving.memory import Memory
from mesh_attention.serving.prefill import Grown

if TYPE_CHECKING:
    from mesh_attention.serving.cache import ShardedCache


class Rows:
    """Partial results of all rows as they travel: each an output and its LSE, in one buffer of bytes."""

    def __init__(self, plan: DecodePlan, count: tuple[int, ...], device: torch.device) -> None:
        dtype = DTYPES[plan.dtype]
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        self.raw = torch.empty((*count, plan.row_nbytes), dtype=torch.uint8, device=device)
        self.typed = self.raw.view(dtype)
        self.out = self.typed[..., : plan.head_dim_v]
        self.lse = self.raw.view(wide)[..., -1]

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
        self.partials = Rows(plan, (plan.rows,), device)
        own = plan.slices[rank] if plan.meeting == "slices" else range(plan.rows)
        self.own = own
        self.arrived = Rows(plan, (ranks, len(own)), device)
        self.merged = Rows(plan, (plan.rows,), device)
        self.tokens = torch.empty(
            (plan.sequences if plan.way == "spread" else 0, plan.queries * plan.token_nbytes),
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
        spread. The next step overwrites them."""
        plan = self.plan
        q, k, v = tensors
        if plan.way == "spread":
            q, k, v = yield from self._gather_tokens(q, k, v)
        memory.write(layer, state.slots, k.flatten(0, 1), v.flatten(0, 1))
        shape = (plan.sequences, plan.queries, plan.heads)
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
        found = self.results
        if plan.way == "spread":
            mine = self.own if plan.ranks > 1 else range(plan.rows)
            shape = (len(plan.own[self.comm.rank]), *shape[1:])
            rows = slice(mine.start, mine.stop)
            return found.out[rows].view(*shape, plan.head_dim_v), found.lse[rows].view(shape)
        return found.out.view(*shape, plan.head_dim_v), found.lse.view(shape)

    def _meet(self, kernel: DecodeKernel) -> Generator[Work, None, None]:
        """Partials of all ranks, merged: the own rows, and in the way `same` then those of the others."""
        plan, rank, own = self.plan, self.comm.rank, self.own
        others = [other for other in range(plan.ranks) if other != rank]
        to = {other: plan.slices[other] if plan.meeting == "slices" else range(plan.rows) for other in others}
        self.arrived.raw[rank].copy_(self.partials.raw[own.start : own.stop])
        yield self.comm.post(
            [Parcel([self.partials.part(to[other])], other, "o") for other in others if to[other]],
            [Parcel([self.arrived.raw[other].view(-1)], other, "o") for other in others if own],
        )
        if own:
            at = slice(own.start, own.stop)
            kernel.merge(self.arrived.out, self.arrived.lse, self.merged.out[at], self.merged.lse[at])
        if plan.meeting == "slices" and plan.way == "same":
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
            width = plan.queries * heads * dim
            found.append(typed[:, first : first + width].view(plan.sequences, plan.queries, heads, dim))
            first += width
        return found


class Steps:
    """Runs steps of one shape for the ranks played here: their engines, states and graphs."""

    def __init__(self, cache: ShardedCache, plan: DecodePlan) -> None:
        self.cache, self.plan = cache, plan
        played = cache.attention.engines.played
        self.comms = played.comms_on(cache.device)
        self.engines = [StepEngine(plan, comm, cache.device) for comm in self.comms]
        self.states: dict[Window, list[StepState]] = {}
        self.tables: dict[Window, list[tuple[int, ...]]] = {}
        self.marked = self.comms[0] if isinstance(self.comms[0], Marked) else None
        self.is_new = True
        self._inputs: list[list[Tensor]] = []
        """What graphs read, and the mark among them."""
        self._own_mark: Tensor
        self._seen: set[object] = set()
        self._graphs: dict[object, CapturedGraph[list[tuple[Tensor, Tensor]]]] = {}

    def prepare(self, step: Step) -> None:
        """Bring the lengths and tables of a step to the device."""
        shape = (self.plan.sequences, self.plan.queries)
        for window, pool in self.cache.book.pools.items():
            if window not in self.states:
                device = self.cache.device
                self.states[window] = [StepState.empty(shape, pool.size, device) for _ in self.comms]
            tables = [grown.after.tables[window].blocks for grown in step.sequences.values()]
            is_same = tables == self.tables.get(window)
            self.tables[window] = tables
            for comm, state in zip(self.comms, self.states[window], strict=True):
                state.update([] if is_same else [list(blocks) for blocks in tables], *step.reach(comm.rank, window))

    def run(
        self,
        layer: int,
        tensors: Sequence[Sequence[Tensor]],
        softmax: Softmax,
        mark: Tensor | None,
    ) -> list[tuple[Tensor, Tensor]]:
        if self.is_new and self.marked is not None:
            self.is_new = False
            others = [rank for rank in range(self.plan.ranks) if rank != self.marked.rank]
            self.marked.reach(others, others)
        if not self._may_capture(softmax):
            return self._run(layer, tensors, softmax, mark)
        key = layer, softmax, mark is not None
        if key not in self._seen:  # the first time sets up what a graph cannot capture
            self._seen.add(key)
            return self._run(layer, tensors, softmax, mark)
        return self._launch(key, layer, tensors, softmax, mark)

    def _may_capture(self, softmax: Softmax) -> bool:
        kernel = self.engines[0].kernel_for(softmax.softcap)
        return self.cache.attention.engines.cuda_graphs and kernel.name != TorchDecode.name  # it reads on the host

    def _launch(
        self,
        key: object,
        layer: int,
        tensors: Sequence[Sequence[Tensor]],
        softmax: Softmax,
        mark: Tensor | None,
    ) -> list[tuple[Tensor, Tensor]]:
        """Run a layer's graph, which reads copies of the inputs."""
        if not self._inputs:
            with torch.inference_mode(False), torch.no_grad():  # later steps need not be in inference mode
                self._inputs = [[tensor.contiguous().clone() for tensor in rank] for rank in tensors]
                self._own_mark = torch.zeros((1, 1, 2), dtype=torch.int64, device=self.cache.device)
        own, own_mark = self._inputs, None if mark is None else self._own_mark
        if key not in self._graphs:
            pool = self.cache.graph_memory().pool
            self._graphs[key] = CapturedGraph(
                lambda: self._run(layer, own, softmax, own_mark), self.cache.device, pool=pool
            )
        torch._foreach_copy_([t for rank in own for t in rank], [t for rank in tensors for t in rank])
        if mark is not None:
            self._own_mark.copy_(mark)
        return self._graphs[key].launch()

    def _run(
        self,
        layer: int,
        tensors: Sequence[Sequence[Tensor]],
        softmax: Softmax,
        mark: Tensor | None,
    ) -> list[tuple[Tensor, Tensor]]:
        cache = self.cache
        states = self.states[cache.layers[layer].window]
        played = cache.attention.engines.played
        if mark is not None and self.marked is not None:
            self.marked.open(mark, played.ledger.history)
        results = played.drive(
            [
                engine.run(memory, layer, state, rank, softmax)
                for engine, memory, state, rank in zip(self.engines, cache.memories, states, tensors, strict=True)
            ]
        )
        if mark is not None and self.marked is not None:
            self.marked.close([self.engines[0].results.typed])
        return results


class Step:
    """One or a few new tokens of each of some sequences.

    In the way ``same``, every rank gives the queries, keys and values of all of them and gets all results; in the way
    ``spread``, those of its own `rows`. Call `attend` once for every layer, in any order. The tokens count as cached
    from the beginning.
    """

    def __init__(self, cache: ShardedCache, sequences: Mapping[int, Grown], way: Way, meeting: Meeting | None) -> None:
        self.cache, self.sequences, self.way, self.meeting = cache, sequences, way, meeting
        self.attended: set[int] = set()
        self.queries = next(iter(sequences.values())).tokens
        self._prepared: list[Steps] = []
        self.fingerprint: int | Tensor = 0

    @property
    def position_ids(self) -> Tensor:
        """The positions of all new tokens in their sequences, (sequences, queries)."""
        starts = torch.tensor([[grown.before.shares.length] for grown in self.sequences.values()])
        return (starts + torch.arange(self.queries)).to(self.cache.device)

    def rows(self, rank: int) -> range:
        """The sequences, by their place in this step, that a rank runs."""
        return self.cache.decode_plan(self, 0, heads=self.cache.layers[0].kv_heads).own[rank]

    def attend(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        *,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        return_lse: bool = False,
    ) -> Any:
        """Store the new keys and values of a layer, and attend the new queries to all that they see.

        Tensors are (sequences, queries, heads, dim); in a local group, lists of them. With `return_lse`, also the LSE
        (sequences, heads, queries).
        """
        cache, played = self.cache, self.cache.attention.engines.played
        with played.telling:
            cache.check_turn(self, layer)
            ranks = cache.by_rank(q, k, v)
            steps, softmax = self._found(layer, ranks, softmax_scale, softcap)
        with played.ledger.talking(), torch.no_grad():
            if steps not in self._prepared:
                steps.prepare(self)
                self._prepared.append(steps)
            # On NCCL, comparing marks takes a collective: one layer of a step does it for all.
            is_marked = steps.marked is not None and not (self.attended and steps.marked.is_capturable)
            mark = self._mark(steps) if is_marked else None
            results = steps.run(layer, ranks, softmax, mark)
            self.attended.add(layer)
            outs = [out.clone() for out, _ in results]  # the next layer uses the same buffers
            if not return_lse:
                return outs if cache.attention.is_local else outs[0]
            lses = [lse.transpose(1, 2).clone() for _, lse in results]
        return (outs, lses) if cache.attention.is_local else (outs[0], lses[0])

    def _found(
        self, layer: int, ranks: Sequence[Sequence[Any]], scale: float | None, softcap: float
    ) -> tuple[Steps, Softmax]:
        """What runs this layer, and its scores. Kept, because a decoded token waits for every line of the host's."""
        kinds = tuple(_kind(tensor) for rank in ranks for tensor in rank)
        key = layer, len(self.sequences), self.queries, self.way, self.meeting, type(scale), scale, softcap, kinds
        found = self.cache.ready.get(key)
        if found is None:
            cache = self.cache
            plan = cache.decode_plan(self, layer, heads=_heads(ranks))
            for rank, comm in zip(ranks, cache.attention.comms, strict=True):
                cache.check_tensors(layer, rank, (len(plan.own[comm.rank]), self.queries))
            softmax = cache.softmax(layer, CallOptions(softmax_scale=scale, softcap=softcap))
            found = cache.ready[key] = cache.steps(plan), softmax
        return found

    def _mark(self, steps: Steps) -> Tensor:
        plan, ledger = steps.plan, self.cache.attention.engines.played.ledger
        lengths = tuple((number, grown.after.shares.length) for number, grown in self.sequences.items())
        number = hash((plan.sequences, plan.queries, plan.heads, self.way == "same", *lengths)) & 0xFFFFFFFFFFFF
        device = self.cache.device if steps.comms[0].is_capturable else None
        return ledger.mark(number, device, self.fingerprint)

    def reach(self, rank: int, window: Window) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """For each sequence and query, the first token of this rank that it sees, and the one behind the last; then the
        slot of each new token, where those of other ranks go to a slot that nobody reads."""
        size = self.cache.block_tokens
        first, stop, slots = [], [], []
        nowhere = self.cache.book.pools[window].size * size
        for grown in self.sequences.values():
            before, after = grown.before, grown.after
            table, run = after.tables[window], after.shares.runs[-1]
            base, length, held = table.dropped * size, before.shares.length, before.counts[rank]
            firsts, stops = [], []
            for position in range(length, length + self.queries):
                if (run.first + position - run.start) % self.cache.ranks == rank:
                    at = held - base
                    slots.append(table.blocks[at // size] * size + at % size)
                    held += 1
                else:
                    slots.append(nowhere)
                stops.append(held - base)
                seen = 0 if window is None else after.shares.before(rank, max(0, position - window))
                firsts.append(max(0, seen - base))
            first.append(firsts)
            stop.append(stops)
        return first, stop, slots


def _kind(tensor: Any) -> Any:
    """What decides whether a tensor fits; a tensor that may not is never equal to another."""
    if type(tensor) is not Tensor or (tensor.requires_grad and torch.is_grad_enabled()):
        return object()
    return tensor.shape, tensor.dtype, tensor.device


def _heads(ranks: Sequence[Sequence[Any]]) -> int:
    q = ranks[0][0]
    if not isinstance(q, Tensor) or q.dim() != 4:
        raise UsageError(f"q is a {type(q).__name__}: expected a tensor (sequences, queries, heads, dim)")
    return int(q.shape[2])
