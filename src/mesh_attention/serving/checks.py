"""Checks of turns and steps: refuses layers that cannot attend now, and tensors that do not fit the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mesh_attention.arguments import CallOptions, Softmax, check_plain, describe
from mesh_attention.errors import ProblemError, UsageError
from mesh_attention.execution.buffers import DTYPES
from mesh_attention.problem import Problem
from mesh_attention.serving.memory import CachedLayer

if TYPE_CHECKING:
    from mesh_attention.serving.cache import ShardedCache
    from mesh_attention.serving.decode import Step
    from mesh_attention.serving.prefill import Turn

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def check_turn(cache: ShardedCache, turn: Turn | Step, layer: object) -> None:
    """Refuse a layer that cannot attend now."""
    if turn.attended is not cache.last:
        raise UsageError(
            "this turn is over: the cache has a later one, or a sequence of this one was truncated or removed; "
            "use the last turn or step"
        )
    check_layer(cache, layer)
    if layer in turn.attended:
        raise UsageError(f"layer {layer} has attended in this turn already; each layer attends once")


def check_layer(cache: ShardedCache, layer: object) -> None:
    if type(layer) is not int or not 0 <= layer < len(cache.layers):
        raise UsageError(f"layer {layer!r}: expected 0 to {len(cache.layers) - 1}")


def by_rank(cache: ShardedCache, q: Any, k: Any, v: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tensors of each local rank."""
    if not cache.attention.is_local:
        return [(q, k, v)]
    if not all(isinstance(x, list | tuple) and len(x) == cache.ranks for x in (q, k, v)):
        raise UsageError(f"q, k and v must each be a list of {cache.ranks} tensors, one per rank of the local group")
    return list(zip(q, k, v, strict=True))


def check_tensors(cache: ShardedCache, layer: int, tensors: Sequence[Tensor], tokens: tuple[int, int]) -> None:
    """Refuse tensors that are not of these (sequences, tokens) and of this layer's heads and sizes."""
    known = cache.layers[layer]
    sizes = (None, known.head_dim), (known.kv_heads, known.head_dim), (known.kv_heads, known.value_dim)
    for name, tensor, (heads, dim) in zip("qkv", tensors, sizes, strict=True):
        shape = (*tokens, "heads" if heads is None else heads, dim)
        fits = isinstance(tensor, Tensor) and tensor.dim() == 4
        fits = fits and all(a == b for a, b in zip(tensor.shape, shape, strict=True) if b != "heads")
        if not fits:
            raise ProblemError(f"{name} of layer {layer} is {describe(tensor)}: expected {_shape(shape)}")
        if tensor.dtype != cache.dtype or tensor.device != cache.device:
            raise ProblemError(
                f"{name} is {tensor.dtype} on {tensor.device}: the cache is {cache.dtype} on {cache.device}"
            )
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise UsageError(f"{name} requires a gradient, and a cache keeps none; use torch.no_grad()")
    check_plain(tensors)


def softmax_of(layer: CachedLayer, options: CallOptions) -> Softmax:
    """Scale and softcap of a layer's scores, checked."""
    dims = layer.head_dim, layer.value_dim
    problem = Problem(seq_q=1, seq_kv=1, heads=1, kv_heads=1, head_dim_qk=dims[0], head_dim_v=dims[1], ranks=1)
    return options.checked().softmax(problem)


def _shape(sizes: Sequence[object]) -> str:
    return f"({', '.join(map(str, sizes))})"
