"""Decoding: attention of a few queries over K and V that are kept in blocks. The protocol, plain torch, and the choice.

A *block* here is a fixed number of token slots, which any sequence may use. A sequence has a list of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mesh_attention.kernels.base import Demand
from mesh_attention.kernels.decode_triton import TritonDecode
from mesh_attention.kernels.select import first_that_supports


class Blocks(NamedTuple):
    """One layer's K and V on this rank: (blocks, block_tokens, kv_heads, head_dim), dim contiguous, in any order."""

    k: Tensor
    v: Tensor


class Reach(NamedTuple):
    """The tokens of this rank that each query sees; all tensors are int32.

    `table` (sequences, most_blocks): the blocks of each sequence; its token i is in block ``table[s, i //
    block_tokens]``, at ``i % block_tokens``. `first` and `stop` (sequences, queries): the query sees the tokens
    first:stop, or none. Slots before a sequence's lowest `first` and from its highest `stop` on are not read.
    """

    table: Tensor
    first: Tensor
    stop: Tensor


class DecodeKernel(Protocol):
    """Attention over blocks. One instance has one scratch, so its calls must not run at the same time."""

    name: str

    def supports(self, demand: Demand) -> str | None:
        """None if the kernel can do that; otherwise the reason, as in "needs …"."""

    def attend(
        self, q: Tensor, blocks: Blocks, reach: Reach, *, scale: float, softcap: float, out: Tensor, lse: Tensor
    ) -> None:
        """Write the output (sequences, queries, heads, head_dim_v) and LSE (sequences, queries, heads) of `q`.

        Both may have any strides. A query that sees nothing has output 0 and LSE -inf. Softcap 0 means none.
        """

    def merge(self, parts: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
        """Merge parts (n, rows, head_dim_v) with their LSEs (n, rows) into `out` (rows, head_dim_v) and `lse` (rows).

        All may have any strides. An LSE of -inf has weight 0; other weights add up to 1, however large the LSEs are.
        """


class TorchDecode:
    """Torch's own operations, one sequence at a time. Reads `first` and `stop` on the host."""

    name = "torch"

    def supports(self, demand: Demand) -> str | None:
        return None

    def attend(
        self, q: Tensor, blocks: Blocks, reach: Reach, *, scale: float, softcap: float, out: Tensor, lse: Tensor
    ) -> None:
        for at, (first, stop) in enumerate(zip(reach.first.tolist(), reach.stop.tolist(), strict=True)):
            seen = [(low, high) for low, high in zip(first, stop, strict=True) if low < high]
            if not seen:
                out[at].zero_()
                lse[at].fill_(-torch.inf)
                continue
            span = range(min(low for low, _ in seen), max(high for _, high in seen))
            k, v = (_gather(x, reach.table[at], span) for x in blocks)
            tokens = torch.arange(span.start, span.stop, device=q.device)
            mask = (tokens >= reach.first[at, :, None]) & (tokens < reach.stop[at, :, None])
            found, sums = _attend(q[at], k, v, mask, scale, softcap)
            out[at].copy_(found)
            lse[at].copy_(sums)

    def merge(self, parts: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
        if not parts.shape[0]:
            out.zero_()
            lse.fill_(-torch.inf)
            return
        top = lses.amax(0)
        top = top.masked_fill(top == -torch.inf, 0.0)
        weights = (lses - top).exp()
        total = weights.sum(0)
        # Divided by their own sum, and not by exp of the joint LSE, which is rounded.
        weights = weights / total.masked_fill(total == 0, 1.0)
        out.copy_((weights[..., None] * _widen(parts)).sum(0))
        lse.copy_(top + total.log())


DECODES: tuple[Callable[[], DecodeKernel], ...] = (TritonDecode, TorchDecode)
"""Kernels in the order they are asked; torch's, which works anywhere, comes last."""


def choose_decode(demand: Demand) -> DecodeKernel:
    """The first kernel that supports the demand, with a scratch of its own."""
    return first_that_supports("decoding", [make() for make in DECODES], demand)


def _gather(x: Tensor, table: Tensor, span: range) -> Tensor:
    """(kv_heads, tokens, dim) of the tokens in `span`, in float32 or float64."""
    size = x.shape[1]
    first = span.start // size
    found = x[table[first : -(-span.stop // size)].long()].flatten(0, 1)
    return _widen(found[span.start - first * size : span.stop - first * size].transpose(0, 1))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    """Output (queries, heads, head_dim_v) and LSE (queries, heads) under a mask (queries, tokens)."""
    queries, heads, _ = q.shape
    kv_heads = k.shape[0]
    grouped = _widen(q).view(queries, kv_heads, heads // kv_heads, -1).transpose(0, 1)
    scores = torch.einsum("hqgd,hnd->hqgn", grouped, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask[None, :, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1).masked_fill((lse == -torch.inf)[..., None], 0.0)
    out = torch.einsum("hqgn,hnd->hqgd", weights, v)
    return out.transpose(0, 1).flatten(1, 2), lse.transpose(0, 1).flatten(1, 2)


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
