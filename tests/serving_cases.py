"""A cache beside the whole keys and values of its sequences: whatever is appended is compared with dense attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mesh_attention import LocalGroup, MeshAttention
from mesh_attention.serving import CachedLayer, ShardedCache, Step, Turn

KV_HEADS, HEAD_DIM, VALUE_DIM, HEADS = 2, 4, 3, 4


def layers_of(windows: Sequence[int | None], scale: int = 1) -> list[CachedLayer]:
    """Small layers, one for each window; with `scale`, head sizes are that many times larger."""
    return [
        CachedLayer(kv_heads=KV_HEADS, head_dim=scale * HEAD_DIM, head_dim_v=scale * VALUE_DIM, window=window)
        for window in windows
    ]


def cache_of(
    on: MeshAttention | int,
    windows: Sequence[int | None] = (None,),
    *,
    tokens: int = 256,
    sequences: int = 4,
    scale: int = 1,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    **options: Any,
) -> ShardedCache:
    """An empty cache on an attention, or on a number of local ranks."""
    attention = MeshAttention(LocalGroup(on)) if isinstance(on, int) else on
    sizes = {"tokens": tokens, "sequences": sequences, "dtype": dtype, "device": device}
    return ShardedCache(attention, layers_of(windows, scale), **sizes, **options)


def dense(q: Tensor, k: Tensor, v: Tensor, *, window: int | None, softcap: float) -> tuple[Tensor, Tensor]:
    """Attention of the last queries of one sequence, (tokens, heads, dim), and the LSE (heads, tokens)."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(k.shape[0])[None] - (torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0])
    seen = distance <= 0 if window is None else (distance <= 0) & (distance >= -window)
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


@dataclass
class Model:
    """The cache, and all that was appended to it. `error` is the largest so far, relative to the largest number."""

    cache: ShardedCache
    softcap: float = 0.0
    seed: int = 0
    known: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    error: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    """Given to `attend` besides."""
    order: Sequence[int] = ()
    """Of the layers; as they are numbered if empty."""

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.ranks = [comm.rank for comm in self.cache.attention.comms]

    def new(self) -> int:
        number = self.cache.new()
        self.known[number] = [
            (torch.zeros(0, layer.kv_heads, layer.head_dim), torch.zeros(0, layer.kv_heads, layer.value_dim))
            for layer in self.cache.layers
        ]
        return number

    def prefill(self, new: dict[int, int]) -> None:
        turn = self.cache.prefill(new)
        for layer in self.order or range(len(self.cache.layers)):
            q, k, v = self._grow(layer, new)
            local = [turn.shard(self._given(torch.cat(list(whole.values()))[None])) for whole in (q, k, v)]
            outs, lses = self._attend(turn, layer, local)
            due = self._due(layer, q)
            due_out = self._by_rank(turn.shard(torch.cat([out for out, _ in due.values()])[None]))
            due_lse = self._by_rank(turn.shard(torch.cat([lse for _, lse in due.values()], 1)[None], dim=2))
            for found, expected in zip((*outs, *lses), (*due_out, *due_lse), strict=True):
                self._compare(found, expected)

    def decode(
        self, new: dict[int, int] | list[int], tokens: int = 1, *, queries: Any = "replicated", combine: Any = None
    ) -> None:
        """A step of as many tokens for each sequence, or of `tokens` for all."""
        new = new if isinstance(new, dict) else dict.fromkeys(new, tokens)
        step = self.cache.decode(new, queries=queries, combine=combine)
        runs = [list(new)[rows.start : rows.stop] for rows in map(step.rows, self.ranks)]
        for layer in self.order or range(len(self.cache.layers)):
            grown = self._grow(layer, new)
            parts: list[Any] = [[self._given(_by_row(step, whole, run)) for run in runs] for whole in grown]
            local = parts if self.cache.attention.is_local else [part[0] for part in parts]
            outs, lses = self._attend(step, layer, local)
            due = self._due(layer, grown[0])
            due_outs = {number: out for number, (out, _) in due.items()}
            due_lses = {number: lse.T for number, (_, lse) in due.items()}
            for run, out, lse in zip(runs, outs, lses, strict=True):
                self._compare(out, _by_row(step, due_outs, run))
                self._compare(lse.transpose(1, 2), _by_row(step, due_lses, run))

    def truncate(self, number: int, length: int) -> None:
        self.cache.truncate(number, length)
        self.known[number] = [(k[:length], v[:length]) for k, v in self.known[number]]

    def fork(self, number: int) -> int:
        copy = self.cache.fork(number)
        self.known[copy] = list(self.known[number])
        return copy

    # Numbers

    def _grow(self, layer: int, new: dict[int, int]) -> tuple[dict[int, Tensor], dict[int, Tensor], dict[int, Tensor]]:
        """New queries, keys and values of each sequence, in float64; keys and values are noted."""
        known = self.cache.layers[layer]
        found: tuple[dict[int, Tensor], dict[int, Tensor], dict[int, Tensor]] = {}, {}, {}
        sizes = ((HEADS, known.head_dim), (known.kv_heads, known.head_dim), (known.kv_heads, known.value_dim))
        for number, tokens in new.items():
            for side, (heads, dim) in zip(found, sizes, strict=True):
                random = torch.randn((tokens, heads, dim), generator=self.generator, dtype=torch.float64)
                side[number] = random.to(self.cache.dtype).double()
            k, v = self.known[number][layer]
            self.known[number][layer] = torch.cat([k, found[1][number]]), torch.cat([v, found[2][number]])
        return found

    def _given(self, whole: Tensor) -> Tensor:
        return whole.to(self.cache.device, self.cache.dtype)

    def _due(self, layer: int, q: dict[int, Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
        window = self.cache.layers[layer].window
        return {n: dense(q[n], *self.known[n][layer], window=window, softcap=self.softcap) for n in q}

    def _attend(self, turn: Turn | Step, layer: int, local: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
        outs, lses = turn.attend(layer, *local, **({"softcap": self.softcap, "return_lse": True} | self.options))
        return self._by_rank(outs), self._by_rank(lses)

    def _by_rank(self, found: Any) -> list[Tensor]:
        return list(found) if self.cache.attention.is_local else [found]

    def _compare(self, found: Tensor, due: Tensor) -> None:
        assert found.shape == due.shape
        assert found.isfinite().all()  # every query sees itself
        if due.numel():
            self.error = max(self.error, float((found.double().cpu() - due).abs().max() / due.abs().max().clamp(min=1)))


def _by_row(step: Step, tokens: dict[int, Tensor], run: list[int]) -> Tensor:
    """The tokens of some sequences, as a step takes them."""
    some = next(iter(tokens.values()))
    if step.is_ragged:
        return torch.cat([some[:0], *(tokens[number] for number in run)])[None]
    return torch.stack([tokens[number] for number in run]) if run else some[None][:0]
