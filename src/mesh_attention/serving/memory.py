"""The memory of a cache on one rank: for every layer, K and V in blocks. A *slot* is the place of one token in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mesh_attention.errors import ProblemError
from mesh_attention.kernels.decode import Blocks
from mesh_attention.plan.buffer_sizes import layer_nbytes
from mesh_attention.problem import check_whole
from mesh_attention.serving.book import WindowSize
from mesh_attention.units import brief


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedLayer:
    """The KV heads and head sizes of a layer.

    With a `window`, a query sees that many tokens before its own, and older ones are dropped.
    """

    kv_heads: int
    head_dim: int
    head_dim_v: int | None = None
    window: WindowSize = None

    def __post_init__(self) -> None:
        check_whole(ProblemError, kv_heads=self.kv_heads, head_dim=self.head_dim, head_dim_v=self.value_dim)
        if self.window is not None and (type(self.window) is not int or self.window < 0):
            raise ProblemError(f"window={brief(self.window)}: expected a number of tokens, or None for all")

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def elements(self) -> int:
        """Elements of one token."""
        return self.kv_heads * (self.head_dim + self.value_dim)


def cache_nbytes(layers: Iterable[CachedLayer], blocks: dict[WindowSize, int], block_tokens: int, itemsize: int) -> int:
    """Bytes of a cache on one rank."""
    return sum(
        layer_nbytes(blocks[layer.window], token_nbytes=layer.elements * itemsize, block_tokens=block_tokens)
        for layer in layers
    )


class CacheMemory:
    """K and V of all layers on one rank. `slots` count tokens over all blocks of a layer."""

    def __init__(
        self,
        layers: Sequence[CachedLayer],
        blocks: dict[WindowSize, int],
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers, self.block_tokens, self.dtype, self.device = layers, block_tokens, dtype, device
        with torch.inference_mode(False):  # later turns need not be in inference mode
            self.stored = [self._empty(layer, blocks[layer.window]) for layer in layers]

    def _empty(self, layer: CachedLayer, blocks: int) -> Blocks:
        shape = (blocks + 1, self.block_tokens, layer.kv_heads)
        k, v = (
            torch.empty((*shape, dim), dtype=self.dtype, device=self.device)
            for dim in (layer.head_dim, layer.value_dim)
        )
        return Blocks(k, v)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for stored in self.stored for tensor in stored)

    def grow(self, blocks: dict[WindowSize, int]) -> None:
        """Move every layer into more blocks; one layer at a time, so that little more memory is needed."""
        with torch.inference_mode(False), torch.no_grad():
            for index, layer in enumerate(self.layers):
                old = self.stored[index]
                if old.k.shape[0] > blocks[layer.window]:
                    continue
                new = self._empty(layer, blocks[layer.window])
                for before, after in zip(old, new, strict=True):
                    after[: before.shape[0] - 1] = before[:-1]
                self.stored[index] = new

    def copy(self, copies: Sequence[tuple[WindowSize, int, int]]) -> None:
        """Copy blocks: for each a window, from which block, to which."""
        for layer, stored in zip(self.layers, self.stored, strict=True):
            for window, source, dest in copies:
                if window == layer.window:
                    for tensor in stored:
                        tensor[dest].copy_(tensor[source])

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store tokens, (tokens, heads, dim)."""
        stored = self.stored[layer]
        stored.k.flatten(0, 1).index_copy_(0, slots, k)
        stored.v.flatten(0, 1).index_copy_(0, slots, v)

    def read(self, layer: int, slots: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Tokens, (tokens, heads, dim): a copy, or a view where slots are a slice."""
        flat = [tensor.flatten(0, 1) for tensor in self.stored[layer]]
        if isinstance(slots, slice):
            return flat[0][slots], flat[1][slots]
        return flat[0].index_select(0, slots), flat[1].index_select(0, slots)


def slots_of(blocks: Sequence[int], first: int, stop: int, block_tokens: int) -> slice | list[int]:
    """The slots of tokens `first` to `stop` of a table: a slice if they are consecutive."""
    if first >= stop:
        return slice(0, 0)
    used = blocks[first // block_tokens : -(-stop // block_tokens)]
    if all(b == a + 1 for a, b in pairwise(used)):
        start = used[0] * block_tokens + first % block_tokens
        return slice(start, start + stop - first)
    return [blocks[i // block_tokens] * block_tokens + i % block_tokens for i in range(first, stop)]
