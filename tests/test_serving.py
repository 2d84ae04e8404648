"""Prompts in chunks and turns, and decoding, over a cache that is spread over ranks: equal to one process's attention."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mesh_attention import LocalGroup, MeshAttention
from mesh_attention.plan.decoding import MEETINGS
from mesh_attention.serving import CachedLayer, ShardedCache

SIZES = {"kv_heads": 2, "head_dim": 4, "head_dim_v": 3}
HEADS = 4


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
    """Keys and values of all sequences of a cache, whole, beside the cache itself."""

    cache: ShardedCache
    softcap: float
    generator: torch.Generator
    known: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    error: float = 0.0

    def new(self) -> int:
        number = self.cache.new()
        self.known[number] = [
            (torch.zeros(0, layer.kv_heads, layer.head_dim).double(), torch.zeros(0, layer.kv_heads, 3).double())
            for layer in self.cache.layers
        ]
        return number

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def grow(self, layer: int, new: dict[int, int]) -> tuple[dict[int, Tensor], dict[int, Tensor], dict[int, Tensor]]:
        """New queries, keys and values of each sequence; keys and values are noted."""
        found: tuple[dict[int, Tensor], dict[int, Tensor], dict[int, Tensor]] = {}, {}, {}
        for number, tokens in new.items():
            found[0][number] = self.random(tokens, HEADS, 4)
            found[1][number], found[2][number] = self.random(tokens, 2, 4), self.random(tokens, 2, 3)
            k, v = self.known[number][layer]
            self.known[number][layer] = torch.cat([k, found[1][number]]), torch.cat([v, found[2][number]])
        return found

    def due(self, layer: int, q: dict[int, Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
        window = self.cache.layers[layer].window
        return {n: dense(q[n], *self.known[n][layer], window=window, softcap=self.softcap) for n in q}

    def prefill(self, new: dict[int, int]) -> None:
        turn = self.cache.prefill(new)
        for layer in range(len(self.cache.layers)):
            q, k, v = self.grow(layer, new)
            local = [turn.shard(torch.cat(list(whole.values()))[None]) for whole in (q, k, v)]
            outs, lses = turn.attend(layer, *local, softcap=self.softcap, return_lse=True)
            due = self.due(layer, q)
            for rank, out in enumerate(outs):
                own = turn.shard(torch.cat([out for out, _ in due.values()])[None])[rank]
                own_lse = turn.shard(torch.cat([lse for _, lse in due.values()], 1)[None], dim=2)[rank]
                self.compare(out, own)
                self.compare(lses[rank], own_lse)

    def decode(self, sequences: list[int], tokens: int, *, way: str, meeting: str | None) -> None:
        new = dict.fromkeys(sequences, tokens)
        step = self.cache.decode(new, way=way, meeting=meeting)  # type: ignore[arg-type]
        rows = [step.rows(rank) for rank in range(self.cache.ranks)]
        for layer in range(len(self.cache.layers)):
            grown = self.grow(layer, new)
            q, k, v = (torch.stack(list(whole.values())) for whole in grown)
            local = [[whole[at.start : at.stop] for at in rows] for whole in (q, k, v)]
            outs, lses = step.attend(layer, *local, softcap=self.softcap, return_lse=True)
            due = self.due(layer, grown[0])
            for at, out, lse in zip(rows, outs, lses, strict=True):
                for place, number in enumerate(sequences[at.start : at.stop]):
                    self.compare(out[place], due[number][0])
                    self.compare(lse[place], due[number][1])

    def cut(self, number: int, length: int) -> None:
        self.cache.cut(number, length)
        self.known[number] = [(k[:length], v[:length]) for k, v in self.known[number]]

    def fork(self, number: int) -> int:
        copy = self.cache.fork(number)
        self.known[copy] = list(self.known[number])
        return copy

    def compare(self, found: Tensor, due: Tensor) -> None:
        assert found.shape == due.shape
        if due.numel():
            self.error = max(self.error, float((found - due).abs().max()))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_chunks_turns_and_decoding_equal_one_processs_attention(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 12))
    layout = data.draw(st.sampled_from(["zigzag", "striped", "contiguous"]))
    windows = data.draw(st.sampled_from([(None,), (None, 5), (0, None, 9)]))
    model = Model(
        ShardedCache(
            MeshAttention(LocalGroup(ranks), layout=layout),
            [CachedLayer(**SIZES, window=window) for window in windows],
            tokens=400,
            sequences=6,
            dtype=torch.float64,
            device="cpu",
            block_tokens=data.draw(st.sampled_from([1, 3, 8])),
            slack=data.draw(st.sampled_from([0, 4])),
        ),
        data.draw(st.sampled_from([0.0, 2.0])),
        torch.Generator().manual_seed(data.draw(st.integers(0, 100))),
    )
    alive = [model.new()]
    for _ in range(data.draw(st.integers(2, 7))):
        kinds = ["prefill", "decode", "decode"] + ["new", "remove", "cut", "fork"] * (len(alive) < 5)
        kind = data.draw(st.sampled_from(kinds))
        some = data.draw(st.lists(st.sampled_from(alive), min_size=1, unique=True))
        if kind == "prefill":
            model.prefill({number: data.draw(st.integers(1, 23)) for number in some})
        elif kind == "decode":
            way = data.draw(st.sampled_from(["same", "spread"]))
            meeting = data.draw(st.sampled_from(MEETINGS)) if way == "same" else None
            model.decode(some, data.draw(st.integers(1, 3)), way=way, meeting=meeting)
        elif kind == "new":
            alive.append(model.new())
        elif kind == "fork":
            alive.append(model.fork(some[0]))
        elif kind == "remove" and len(alive) > 1:
            model.cache.remove(some[0])
            alive.remove(some[0])
        elif kind == "cut":
            length = model.cache.length(some[0])
            least = model.cache.book.entry(some[0]).most_cut
            model.cut(some[0], data.draw(st.integers(least, length)))
    assert model.error < 1e-12
