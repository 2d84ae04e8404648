"""The protocols of kernels (attention over one rectangle) and of merging partials, and the strides of their tensors.

Tensors are (batch, heads, tokens, dim), with any strides.

Below it, what kernels share about strides: tensors as fused kernels load them, 16 bytes at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from mesh_attention.masks import Mask, Segment, causal, full

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class _Weak:
    """Lets something be kept for as long as an instance exists."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, eq=False)
class CallMask(_Weak):
    """The mask of one call. Compared by identity: it is made once, and looked up in every call.

    ``full``: no mask. ``causal``: query i sees keys up to i, with as many queries as keys. ``positions``: `mask`, for
    tokens at these positions of the whole sequence.
    """

    form: Literal["full", "causal", "positions"]
    mask: Mask
    q: tuple[Segment, ...]
    kv: tuple[Segment, ...]
    seq_q: int
    seq_kv: int

    @classmethod
    def full(cls, queries: int, keys: int) -> CallMask:
        """No mask."""
        return cls("full", full(), (range(queries),), (range(keys),), queries, keys)

    @classmethod
    def causal(cls, tokens: int) -> CallMask:
        """Causal, with as many queries as keys."""
        return cls("causal", causal(), (range(tokens),), (range(tokens),), tokens, tokens)

    def load(self, device: torch.device) -> None:
        """Copy to the device what `dense` needs there."""
        if self.mask.documents is not None:
            _cuts(self.mask.documents.q, device)
            _cuts(self.mask.documents.kv, device)

    def dense(self, device: torch.device) -> Tensor:
        """(queries, keys), True where the query sees the key."""
        q, kv = positions(self.q, device)[:, None], positions(self.kv, device)[None, :]
        shift: Tensor | int = self.seq_kv - self.seq_q
        seen = torch.ones(1, dtype=torch.bool, device=device)
        if self.mask.documents is not None:
            q_cuts, kv_cuts = (_cuts(cuts, device) for cuts in (self.mask.documents.q, self.mask.documents.kv))
            q_doc, kv_doc = torch.searchsorted(q_cuts, q, right=True), torch.searchsorted(kv_cuts, kv, right=True)
            seen = q_doc == kv_doc
            shift = kv_cuts[q_doc] - q_cuts[q_doc]
        distance = kv - q - shift
        if self.mask.left is not None:
            seen = seen & (distance >= -self.mask.left)
        if self.mask.right is not None:
            seen = seen & (distance <= self.mask.right)
        return seen.expand(q.shape[0], kv.shape[1])


def positions(segments: tuple[Segment, ...], device: torch.device) -> Tensor:
    """Positions made on the device: a copy from the host cannot be part of a CUDA graph."""
    return torch.cat([torch.arange(s.start, s.stop, s.step, device=device) for s in segments])


@lru_cache(maxsize=256)
def _cuts(cuts: tuple[int, ...], device: torch.device) -> Tensor:
    """Boundaries copied to the device once, at first use, which is before a CUDA graph is captured."""
    return torch.tensor(cuts, device=device)


class Scores(NamedTuple):
    """The mask, scale and softcap of a call's scores; softcap 0 means none."""

    mask: CallMask
    scale: float
    softcap: float = 0.0


class RowGradient(NamedTuple):
    """The inputs of backward for its queries, besides Q. `lse` is over *all* keys.

    `delta` is rowsum(O∘dO) - dLSE; `out` may replace it where O is available and there is no dLSE.
    """

    do: Tensor
    lse: Tensor
    delta: Tensor | None = None
    out: Tensor | None = None


class Gradients(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The requirements of one attention call; `deterministic`: the same bits in every run."""

    device: str
    dtype: torch.dtype
    head_dim_qk: int
    head_dim_v: int
    softcap: float = 0.0
    lse_gradient: bool = False
    deterministic: bool = False


class Kernel(Protocol):
    """Attention over a rectangle. Rows that see nothing have output 0 and LSE -inf."""

    name: str

    def unsupported_reason(self, demand: Demand) -> str | None:
        """None if the kernel can do that; otherwise the reason, as in "needs …"."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """The output, and the LSE of the rectangle's scores."""

    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: RowGradient, scores: Scores) -> Gradients:
        """The rectangle's share of the gradients."""


class Merging(Protocol):
    """An implementation of merging. It may be faster than plain torch, but not less exact."""

    name: str

    def unsupported_reason(self, device: torch.device) -> str | None:
        """None if it works on the device; otherwise the reason."""

    def start_output(self, total: Tensor, total_lse: Tensor, partial: Tensor, lse: Tensor) -> None:
        """Start a sum with its first partial; the old contents of the sum are not read."""

    def merge_output(self, total: Tensor, total_lse: Tensor, partial: Tensor, lse: Tensor) -> None:
        """Merge an output and its LSE into the running ones. Rows that saw nothing have LSE -inf and weight 0.

        The weights of the other rows add up to 1, however large the LSEs are. NaN outputs stay NaN.
        """

    def copy(self, dest: Tensor, source: Tensor) -> None:
        """Copy between any two dtypes: the first partial of a gradient, packing, rounding a sum."""

    def add(self, total: Tensor, partial: Tensor) -> None:
        """Add another partial of a gradient."""


# Strides


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it, in which every head of every token is contiguous and aligned to 16 bytes.

    Fused kernels load 16 bytes at a time; buffers store statistics before dO, and a window may start at any token.
    """
    if not tensor.data_ptr() % 16 and _has_aligned_rows(tensor.shape, tensor.stride(), tensor.itemsize):
        return tensor
    return tokens_first(tensor)


@lru_cache(maxsize=4096)
def _has_aligned_rows(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    if strides[-1] != 1 or (0 in strides and 1 in strides[:-1]):
        return False  # torch lays out results like Q, K and V; with both, their last axis might not be contiguous
    outer = zip(shape[:-1], strides[:-1], strict=True)
    return all(size == 1 or stride * itemsize % 16 == 0 for size, stride in outer)


def tokens_first(tensor: Tensor) -> Tensor:
    """A copy whose memory order is (batch, tokens, heads, dim)."""
    return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


@lru_cache(maxsize=4096)
def dense_strides(like: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor without gaps whose dims have the same order in memory as in a tensor with strides `like`."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=like.__getitem__):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)
