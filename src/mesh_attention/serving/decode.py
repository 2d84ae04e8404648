"""A decoded step: one or a few new tokens of some sequences against the cache, as a `DecodePlan` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mesh_attention.arguments import CallOptions
from mesh_attention.errors import ProblemError, UsageError
from mesh_attention.plan.serving import Combine, DecodePlan, Queries, choose_combine
from mesh_attention.serving.book import Window
from mesh_attention.serving.checks import DTYPE_NAMES, by_rank, check_tensors, check_turn, softmax_of
from mesh_attention.serving.prefill import Grown
from mesh_attention.serving.running import LayerSteps, Steps

if TYPE_CHECKING:
    from mesh_attention.serving.cache import ShardedCache


class Step:
    """One or a few new tokens of each of some sequences.

    If queries are replicated, every rank gives the queries, keys and values of all of them and gets all results; if
    they are sharded, those of its own `rows`. Call `attend` once for every layer, in any order. The tokens count as
    cached from the beginning.
    """

    def __init__(
        self, cache: ShardedCache, sequences: Mapping[int, Grown], queries: Queries, combine: Combine | None
    ) -> None:
        self.cache, self.sequences, self.queries, self.combine = cache, sequences, queries, combine
        self.attended: set[int] = set()
        self.new_tokens = next(iter(sequences.values())).tokens
        self._prepared: list[Steps] = []
        self._shape = len(sequences), self.new_tokens, queries, combine
        self.fingerprint: int | Tensor = 0

    @property
    def position_ids(self) -> Tensor:
        """The positions of all new tokens in their sequences, (sequences, new tokens)."""
        starts = torch.tensor([[grown.before.shares.length] for grown in self.sequences.values()])
        return (starts + torch.arange(self.new_tokens)).to(self.cache.device)

    def rows(self, rank: int) -> range:
        """The sequences, by their place in this step, that a rank runs."""
        return self.plan(0, heads=self.cache.layers[0].kv_heads).own[rank]

    def plan(self, layer: int, *, heads: int) -> DecodePlan:
        """The plan of a layer with `heads` query heads."""
        cache, known = self.cache, self.cache.layers[layer]
        if heads % known.kv_heads:
            raise ProblemError(f"{heads} heads cannot share {known.kv_heads} KV heads evenly")
        plan = DecodePlan(
            ranks=cache.ranks,
            sequences=len(self.sequences),
            new_tokens=self.new_tokens,
            heads=heads,
            kv_heads=known.kv_heads,
            head_dim_qk=known.head_dim,
            head_dim_v=known.value_dim,
            dtype=DTYPE_NAMES[cache.dtype],
            queries=self.queries,
        )
        return replace(plan, combine=self.combine or choose_combine(plan))

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

        Tensors are (sequences, new tokens, heads, dim); in a local group, lists of them. With `return_lse`, also the
        LSE (sequences, heads, new tokens).
        """
        cache = self.cache
        key = None if cache.attention.is_local else self._key(layer, q, k, v, softmax_scale, softcap)
        is_due = self.attended is cache.last and layer not in self.attended
        running = cache.steps.ready.get(key) if is_due else None
        if running is not None:  # a decoded token waits for every line of this, in every layer
            return self._run(layer, running, [(q, k, v)], return_lse=return_lse)
        with cache.attention.session.telling():
            check_turn(cache, self, layer)
            ranks = by_rank(cache, q, k, v)
            running = self._running(layer, ranks, softmax_scale, softcap)
        if key is not None:
            cache.steps.ready[key] = running
        return self._run(layer, running, ranks, return_lse=return_lse)

    def _run(self, layer: int, running: LayerSteps, ranks: Sequence[Sequence[Tensor]], *, return_lse: bool) -> Any:
        steps, attention = running.steps, self.cache.attention
        with attention.session.call():
            if steps not in self._prepared:
                steps.prepare(self)
                self._prepared.append(steps)
            # On NCCL, comparing ids takes a collective: one layer of a step does it for all.
            is_compared = not (self.attended and steps.comms[0].is_capturable)
            results = running.run(ranks, self._begin_pass(running) if is_compared else None)
            self.attended.add(layer)
            outs = [out.clone() for out, _ in results]  # the next layer uses the same buffers
            if not return_lse:
                return outs if attention.is_local else outs[0]
            lses = [lse.transpose(1, 2).clone() for _, lse in results]
        return (outs, lses) if attention.is_local else (outs[0], lses[0])

    def _key(self, layer: int, q: Any, k: Any, v: Any, scale: Any, softcap: Any) -> tuple[Any, ...] | None:
        """Key of a call: equal for calls that need no further check; None if this one has to be checked."""
        if type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor:
            return None
        if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
            return None
        if type(softcap) is not float or not (scale is None or type(scale) is float):
            return None
        tensors = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
        return layer, *self._shape, scale, softcap, *tensors

    def _running(self, layer: int, ranks: Sequence[Sequence[Any]], scale: float | None, softcap: float) -> LayerSteps:
        """The runner of this layer."""
        cache, plan = self.cache, self.plan(layer, heads=_heads(ranks))
        for rank, comm in zip(ranks, cache.attention.comms, strict=True):
            check_tensors(cache, layer, rank, (len(plan.own[comm.rank]), self.new_tokens))
        softmax = softmax_of(cache.layers[layer], CallOptions(softmax_scale=scale, softcap=softcap))
        return cache.steps.layer(plan, layer, softmax)

    def _begin_pass(self, running: LayerSteps) -> Tensor | None:
        """The id of this layer's pass: which layer, attended and merged how, in which cache, after which history."""
        number = hash((running.call_id, self.cache.history)) & 0xFFFFFFFFFFFF  # of numbers: as on other ranks
        session, device = self.cache.attention.session, self.cache.device
        return session.begin_pass(number, device, forward_pass=self.fingerprint)

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
            for position in range(length, length + self.new_tokens):
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


def _heads(ranks: Sequence[Sequence[Any]]) -> int:
    q = ranks[0][0]
    if not isinstance(q, Tensor) or q.dim() != 4:
        raise UsageError(f"q is a {type(q).__name__}: expected a tensor (sequences, new tokens, heads, dim)")
    return int(q.shape[2])
