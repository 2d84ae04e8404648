"""Tensors as fused kernels load them: 16 bytes at a time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it, in which every head of every token is contiguous and aligned to 16 bytes.

    Fused kernels load 16 bytes at a time; buffers store statistics before dO, and a window may start at any token.
    """
    if not tensor.data_ptr() % 16 and _has_aligned_rows(tensor.shape, tensor.stride(), tensor.itemsize):
        return tensor
    return tokens_first(tensor)


def all_aligned(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if `aligned` would copy none of the three."""
    is_at_16 = not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16
    return is_at_16 and _have_aligned_rows(q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.itemsize)


@lru_cache(maxsize=4096)
def _have_aligned_rows(*forms: Any) -> bool:
    *pairs, itemsize = forms
    return all(_has_aligned_rows(pairs[at], pairs[at + 1], itemsize) for at in range(0, len(pairs), 2))


@lru_cache(maxsize=4096)
def _has_aligned_rows(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    if strides[-1] != 1 or (0 in strides and 1 in strides[:-1]):
        return False  # torch lays out results like Q, K and V; with both, their last axis might not be contiguous
    outer = zip(shape[:-1], strides[:-1], strict=True)
    return all(size == 1 or stride * itemsize % 16 == 0 for size, stride in outer)


def tokens_first(tensor: Tensor) -> Tensor:
    """A copy whose memory order is (batch, tokens, heads, dim)."""
    return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
