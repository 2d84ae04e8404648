"""What turns and steps have in common: new tokens of some sequences, with which each layer attends once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mesh_attention.arguments import CallOptions, Softmax, check_plain, describe, flag
from mesh_attention.errors import ProblemError, UsageError
from mesh_attention.masks import Segment
from mesh_attention.serving.book import Entry, WindowSize

if TYPE_CHECKING:
    from mesh_attention.serving.cache import ShardedCache


@dataclass(frozen=True, slots=True)
class Growth:
    """A sequence before and after its new tokens."""

    before: Entry
    after: Entry

    @property
    def tokens(self) -> int:
        return self.after.shares.length - self.before.shares.length

    def new_segments(self, rank: int) -> tuple[Segment, ...]:
        """A rank's new positions in a turn, counted from the first new one."""
        run, ranks = self.after.shares.runs[-1], self.after.shares.ranks
        return run.layout.segments((rank - run.first) % ranks, seq_len=run.tokens, ranks=ranks)

    def first_seen(self, window: WindowSize) -> int:
        """The first position that a new query sees."""
        return 0 if window is None else max(0, self.before.shares.length - window)


class Appended(ABC):
    """New tokens of some sequences, in every layer. They count as cached from the beginning."""

    def __init__(self, cache: ShardedCache, sequences: Mapping[int, Growth]) -> None:
        self.cache, self.sequences = cache, sequences
        self.attended: set[int] = set()

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

        Tensors are (1, tokens, heads, dim) in a turn, and (sequences, new tokens, heads, dim) in a step; in a local
        group, lists of them. With `return_lse`, also the LSE, with heads before tokens.
        """
        options = CallOptions(softmax_scale=softmax_scale, softcap=softcap)
        outs, lses = self._attend(layer, (q, k, v), options, return_lse)
        self.attended.add(layer)
        self.cache.note("attended", layer)
        if self.cache.attention.is_local:
            return (outs, lses) if return_lse else outs
        return (outs[0], lses[0]) if return_lse else outs[0]

    @abstractmethod
    def _attend(
        self, layer: int, tensors: tuple[Any, Any, Any], options: CallOptions, return_lse: bool
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Outputs and, if wanted, LSEs of the local ranks."""

    def _by_rank(self, layer: int, tensors: tuple[Any, Any, Any], return_lse: bool) -> list[tuple[Any, Any, Any]]:
        """The tensors of each local rank. Refuses a layer that cannot attend now."""
        flag("return_lse", return_lse)
        if self.attended is not self.cache.last:
            raise UsageError(
                "this turn is over: the cache has a later one, or a sequence of this one was truncated or removed; "
                "use the last turn or step"
            )
        self._check_layer(layer)
        if layer in self.attended:
            raise UsageError(f"layer {layer} has attended in this turn already; each layer attends once")
        if not self.cache.attention.is_local:
            return [tensors]
        ranks = self.cache.ranks
        if not all(isinstance(x, list | tuple) and len(x) == ranks for x in tensors):
            raise UsageError(f"q, k and v must each be a list of {ranks} tensors, one per rank of the local group")
        return list(zip(*tensors, strict=True))

    def _check_layer(self, layer: object) -> None:
        if type(layer) is not int or not 0 <= layer < len(self.cache.layers):
            raise UsageError(f"layer {layer!r}: expected 0 to {len(self.cache.layers) - 1}")

    def _check_tensors(self, layer: int, tensors: Sequence[Tensor], tokens: tuple[int, int]) -> None:
        """Refuse tensors that are not of these (sequences, tokens) and of this layer's heads and sizes."""
        cache, known = self.cache, self.cache.layers[layer]
        sizes = ("heads", known.head_dim), (known.kv_heads, known.head_dim), (known.kv_heads, known.value_dim)
        for name, tensor, size in zip("qkv", tensors, sizes, strict=True):
            shape = (*tokens, *size)
            if (
                not isinstance(tensor, Tensor)
                or tensor.dim() != 4
                or any(a != b for a, b in zip(tensor.shape, shape, strict=True) if b != "heads")
            ):
                expected = ", ".join(map(str, shape))
                raise ProblemError(f"{name} of layer {layer} is {describe(tensor)}: expected ({expected})")
            if tensor.dtype != cache.dtype or tensor.device != cache.device:
                raise ProblemError(
                    f"{name} is {tensor.dtype} on {tensor.device}: the cache is {cache.dtype} on {cache.device}"
                )
            if torch.is_grad_enabled() and tensor.requires_grad:
                raise UsageError(f"{name} requires a gradient, and a cache keeps none; use torch.no_grad()")
        check_plain(tensors)

    def _softmax(self, layer: int, options: CallOptions) -> Softmax:
        """Scale and softcap of a layer's scores, checked."""
        return options.checked().softmax(self.cache.layers[layer].head_dim)


def checked_new_tokens(new: Mapping[int, int]) -> Sequence[tuple[int, int]]:
    """The sequences of a turn or a step with their numbers of new tokens, checked."""
    if not isinstance(new, Mapping) or not new:
        raise UsageError(f"a turn got {new!r}: expected a number of new tokens for each of its sequences")
    for sequence, tokens in new.items():
        if type(tokens) is not int or tokens < 1:
            raise UsageError(f"sequence {sequence} got {tokens!r} new tokens: expected a whole number of at least 1")
    return list(new.items())
