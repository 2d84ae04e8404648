"""`Step`, a decoded step: one or a few new tokens of some sequences against the cache. `planners` has its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mesh_attention.arguments import CallOptions
from mesh_attention.execution.autograd import without_autocast
from mesh_attention.kernels.base import DTYPES
from mesh_attention.plan.plan import Plan
from mesh_attention.planners.over_cache import Combining, Queries, StepShape, even, plan_decode
from mesh_attention.serving.book import WindowSize
from mesh_attention.serving.new_tokens import Appended, Growth
from mesh_attention.serving.step_runner import LayerStep, StepBuffers
from mesh_attention.session.agreement import Statement

if TYPE_CHECKING:
    from mesh_attention.serving.cache import ShardedCache

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Step(Appended):
    """One or a few new tokens of each of some sequences.

    If queries are replicated, every rank gives the queries, keys and values of all of them and gets all results; if
    they are sharded, those of its own `rows`. Call `attend` once for every layer, in any order. The tokens count as
    cached from the beginning.
    """

    def __init__(
        self, cache: ShardedCache, sequences: Mapping[int, Growth], queries: Queries, combine: Combining | None
    ) -> None:
        super().__init__(cache, sequences)
        self.queries, self.combine = queries, combine
        self.new_tokens = tuple(grown.tokens for grown in sequences.values())
        self._prepared: list[StepBuffers] = []
        self._shape = self.new_tokens, queries, combine
        self.fingerprint: int | Tensor = 0

    @property
    def position_ids(self) -> Tensor:
        """The positions of all new tokens in their sequences, (sequences, new tokens); of a ragged step (1, tokens)."""
        rows = [[*range(grown.before.shares.length, grown.after.shares.length)] for grown in self.sequences.values()]
        return torch.tensor([[at for row in rows for at in row]] if self.is_ragged else rows, device=self.cache.device)

    @property
    def is_ragged(self) -> bool:
        """True if sequences have different numbers of new tokens: then all are packed into one row."""
        return len(set(self.new_tokens)) > 1

    @property
    def by_row(self) -> list[Growth]:
        """The sequence of each row of the kernel: of every token in a ragged step."""
        repeats = self.new_tokens if self.is_ragged else [1] * len(self.new_tokens)
        return [grown for grown, times in zip(self.sequences.values(), repeats, strict=True) for _ in range(times)]

    def rows(self, rank: int) -> range:
        """The sequences, by their place in this step, that a rank runs."""
        sequences = len(self.new_tokens)
        return range(sequences) if self.queries == "replicated" else even(sequences, self.cache.ranks)[rank]

    def shape(self, layer: int, *, heads: int) -> StepShape:
        """What the plan of a layer with `heads` query heads depends on."""
        cache, known = self.cache, self.cache.layers[layer]
        return StepShape(
            new_tokens=self.new_tokens,
            ranks=cache.ranks,
            heads=heads,
            kv_heads=known.kv_heads,
            head_dim_qk=known.head_dim,
            head_dim_v=known.value_dim,
            dtype=DTYPE_NAMES[cache.dtype],
        )

    def plan(self, layer: int, *, heads: int) -> Plan:
        """The plan of a layer with `heads` query heads."""
        return plan_decode(self.shape(layer, heads=heads), queries=self.queries, combining=self.combine)

    def _tensor_rows(self, rank: int) -> tuple[int, int]:
        """Sequences and new tokens of the tensors that a rank gives and gets."""
        own = self.new_tokens[self.rows(rank).start : self.rows(rank).stop]
        return (1, sum(own)) if self.is_ragged else (len(own), self.new_tokens[0])

    def _attend(
        self, layer: int, tensors: tuple[Any, Any, Any], options: CallOptions, return_lse: bool
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        cache = self.cache
        session, ranks = cache.attention.session, [tensors]
        is_checked = cache.attention.is_local or type(return_lse) is not bool
        key = None if is_checked else self._key(layer, tensors, options)
        is_due = self.attended is cache.last and layer not in self.attended
        # A decoded token waits for every line of this, in every layer, so a call like an earlier one is not checked.
        layer_step = cache.steps.ready.get(key) if is_due else None
        if layer_step is None:
            with session.telling():
                ranks = self._by_rank(layer, tensors, return_lse)
                layer_step = self._layer_step(layer, ranks, options)
            if key is not None:
                cache.steps.ready[key] = layer_step
        buffers = layer_step.buffers
        with session.call(), without_autocast(cache.device):
            if buffers not in self._prepared:
                buffers.prepare(self)
                self._prepared.append(buffers)
            # On NCCL, comparing ids takes a collective: one layer of a step does it for all.
            is_compared = not (self.attended and buffers.comms[0].is_capturable)
            results = cache.steps.run(layer_step, ranks, self._begin_pass(layer_step) if is_compared else None)
            dim = cache.layers[layer].value_dim
            own = [(result, q.shape[:3]) for result, (q, _, _) in zip(results, ranks, strict=True)]
            # Copies, because the next layer uses the same buffers.
            outs = [result["o"].view(*shape, dim).clone() for result, shape in own]
            if not return_lse:
                return outs, []
            return outs, [result["lse"].view(shape).transpose(1, 2).clone() for result, shape in own]

    def _key(self, layer: int, tensors: tuple[Any, Any, Any], options: CallOptions) -> tuple[Any, ...] | None:
        """Key of a call: equal for calls that need no further check; None if this one has to be checked."""
        q, k, v = tensors
        if type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor:
            return None
        if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
            return None
        scale, softcap = options.softmax_scale, options.softcap
        if type(softcap) is not float or not (scale is None or type(scale) is float):
            return None
        kinds = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
        return layer, *self._shape, scale, softcap, *kinds

    def _layer_step(self, layer: int, ranks: Sequence[Sequence[Any]], options: CallOptions) -> LayerStep:
        cache = self.cache
        for tensors, comm in zip(ranks, cache.attention.comms, strict=True):
            self._check_tensors(layer, tensors, self._tensor_rows(comm.rank))
        shape = self.shape(layer, heads=ranks[0][0].shape[2])
        return cache.steps.layer_step(shape, self.queries, self.combine, layer, self._softmax(layer, options))

    def _begin_pass(self, layer_step: LayerStep) -> Tensor | None:
        """The id of this layer's pass: which layer, attended and merged how, in which cache, after which history."""
        number = hash((layer_step.stated.call_id, self.cache.history)) & 0xFFFFFFFFFFFF  # of numbers: as on other ranks
        session, device = self.cache.attention.session, self.cache.device
        describe = None if layer_step.buffers.comms[0].is_capturable else layer_step.describe
        stated, tokens = layer_step.stated, self.fingerprint
        if isinstance(tokens, int) and tokens:
            stated = Statement(must_match={**stated.must_match, "tokens": f"#{tokens:010x}"})
        return session.begin_pass(number, device, forward_pass=tokens, describe=describe, call=stated)

    def reach(self, rank: int, window: WindowSize) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """For each row and query, the first token of this rank that it sees, and one past the last; then the slot of
        each new token, where those of other ranks go to a slot that nobody reads."""
        size = self.cache.block_tokens
        first, stop, slots = [], [], []
        nowhere = self.cache.book.pools[window].size * size
        for grown in self.sequences.values():
            before, after = grown.before, grown.after
            table, run = after.tables[window], after.shares.runs[-1]
            base, length, held = table.dropped * size, before.shares.length, before.counts[rank]
            firsts, stops = [], []
            for position in range(length, length + grown.tokens):
                if (run.first + position - run.start) % self.cache.ranks == rank:
                    at = held - base
                    slots.append(table.blocks[at // size] * size + at % size)
                    held += 1
                else:
                    slots.append(nowhere)
                stops.append(held - base)
                seen = 0 if window is None else after.shares.before(rank, max(0, position - window))
                firsts.append(max(0, seen - base))
            first += [[each] for each in firsts] if self.is_ragged else [firsts]
            stop += [[each] for each in stops] if self.is_ragged else [stops]
        return first, stop, slots
