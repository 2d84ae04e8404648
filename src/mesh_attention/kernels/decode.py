"""Decoding: attention of a few queries over a paged KV cache. The protocol, plain torch, Triton, and the choice.

A *block* here is a fixed number of token slots, which any sequence may use. A sequence has a list of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mesh_attention.kernels.base import Demand
from mesh_attention.kernels.intervals import LARGEST_HEAD, padded_dim, score_factors
from mesh_attention.kernels.launching import (
    Launch,
    launch,
    shared_nbytes,
    stride_unit,
    triton_unsupported_reason,
    with_strides,
)
from mesh_attention.kernels.reference import widen
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

    def unsupported_reason(self, demand: Demand) -> str | None:
        """None if the kernel can do that; otherwise the reason, as in "needs …"."""

    def attend(
        self, q: Tensor, blocks: Blocks, reach: Reach, *, scale: float, softcap: float, out: Tensor, lse: Tensor
    ) -> None:
        """Write the output (sequences, queries, heads, head_dim_v) and LSE (sequences, queries, heads) of `q`.

        Both may have any strides. A query that sees nothing has output 0 and LSE -inf. Softcap 0 means none.
        """

    def merge(self, parts: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
        """Merge parts (n, tokens, heads, head_dim_v) with their LSEs (n, tokens, heads) into `out` and `lse`.

        All may have any strides. An LSE of -inf has weight 0; other weights add up to 1, however large the LSEs are.
        """


class TorchDecode:
    """Torch's own operations, one sequence at a time. Reads `first` and `stop` on the host."""

    name = "torch"

    def unsupported_reason(self, demand: Demand) -> str | None:
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
            result, sums = _attend(q[at], k, v, mask, scale, softcap)
            out[at].copy_(result)
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
        out.copy_((weights[..., None] * widen(parts)).sum(0))
        lse.copy_(top + total.log())


def _gather(x: Tensor, table: Tensor, span: range) -> Tensor:
    """(kv_heads, tokens, dim) of the tokens in `span`, in float32 or float64."""
    size = x.shape[1]
    first = span.start // size
    tokens = x[table[first : -(-span.stop // size)].long()].flatten(0, 1)
    return widen(tokens[span.start - first * size : span.stop - first * size].transpose(0, 1))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    """Output (queries, heads, head_dim_v) and LSE (queries, heads) under a mask (queries, tokens)."""
    queries, heads, _ = q.shape
    kv_heads = k.shape[0]
    grouped = widen(q).view(queries, kv_heads, heads // kv_heads, -1).transpose(0, 1)
    scores = torch.einsum("hqgd,hnd->hqgn", grouped, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask[None, :, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1).masked_fill((lse == -torch.inf)[..., None], 0.0)
    out = torch.einsum("hqgn,hnd->hqgd", weights, v)
    return out.transpose(0, 1).flatten(1, 2), lse.transpose(0, 1).flatten(1, 2)


# Triton


FILE = "decode_kernels"
MOST_ROWS = {2: 64, 4: 16}
"""Queries × heads of a group in one program, by the bytes of an element; further ones go to other programs, which read
K and V again. Float32 has no tensor cores that are exact, and more rows do not fit into registers."""
_TILE_NBYTES = 32768
"""Bytes of K and V that a program loads at a time. It has up to three such tiles on their way."""


class SplitTile(NamedTuple):
    """Tokens that a program loads at a time, its warps, its stages of loading, and programs at once on an SM."""

    cols: int
    warps: int
    stages: int
    resident: int


class TritonDecode:
    """Triton kernels. `device_type` differs from "cuda" only under Triton's interpreter; `tile` replaces the one that
    suits the call."""

    name = "triton"

    def __init__(self, device_type: str = "cuda", *, tile: SplitTile | None = None) -> None:
        self.device_type = device_type
        self._tile = tile
        self._scratches: dict[tuple[torch.device, int], Tensor] = {}

    def unsupported_reason(self, demand: Demand) -> str | None:
        if demand.device != self.device_type:
            return f"runs on {self.device_type}, not on {demand.device}"
        if demand.dtype == torch.float64:
            return "needs a dtype of at most 32 bits, not torch.float64"
        dims = demand.head_dim_qk, demand.head_dim_v
        if max(dims) > LARGEST_HEAD:
            return f"needs head sizes up to {LARGEST_HEAD}, not {dims[0]} and {dims[1]}"
        return triton_unsupported_reason(torch.device(demand.device))

    def attend(
        self, q: Tensor, blocks: Blocks, reach: Reach, *, scale: float, softcap: float, out: Tensor, lse: Tensor
    ) -> None:
        assert out.stride(-1) == 1
        if q.stride(-1) != 1:
            q = q.contiguous()
        shapes = (q.shape, blocks.k.shape, blocks.v.shape, *(each.shape for each in reach), out.shape, lse.shape)
        work = _work(shapes, q.dtype, q.device, self._tile)
        if not work.sequences * work.queries:
            return
        scratch = self._scratch(q.device, work.scratch_size)
        tensors = (q, *blocks, *reach, scratch)
        launch(("attend_split", work, scale, softcap), tensors, lambda: _attend_launch(work, tensors, scale, softcap))
        merged = (scratch, out, lse)
        launch(("merge_splits", work), merged, lambda: _merge_launch(work, merged))

    def merge(self, parts: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
        assert parts.shape == (*lses.shape, out.shape[-1])
        assert out.shape[:-1] == lse.shape == lses.shape[1:]
        assert out.stride(-1) == parts.stride(-1) == 1
        if lse.numel():
            tensors = (parts, lses, out, lse)
            launch(("merge_parts", parts.shape), tensors, lambda: _parts_launch(tensors))

    def _scratch(self, device: torch.device, size: int) -> Tensor:
        """Kept for as long as the kernel, because captured launches know its address."""
        key = device, 1 << (size - 1).bit_length()
        scratch = self._scratches.get(key)
        if scratch is None:
            scratch = self._scratches[key] = torch.empty(key[1], dtype=torch.float32, device=device)
        return scratch


class _Work(NamedTuple):
    """How a call is spread over programs; the same for every call with these shapes.

    `rows` of one KV head go to one program. `splits` are the most that all sequences together are cut into, `aim` is
    the number for the smallest size of a split, and `wave` splits run at once.
    """

    sequences: int
    queries: int
    heads: int
    kv_heads: int
    dim: int
    dim_v: int
    block_tokens: int
    rows: int
    row_tiles: int
    splits: int
    aim: int
    wave: int
    tile: SplitTile

    @property
    def scratch_size(self) -> int:
        """For each split a part, its largest scores and its sums of weights; for each sequence its splits."""
        return self.splits * self.queries * self.heads * (self.dim_v + 2) + 2 * self.sequences


@lru_cache(maxsize=1024)
def _work(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device, tile: SplitTile | None
) -> _Work:
    q, k, v, table, first, stop, out, lse = shapes
    sequences, queries, heads, dim = q
    _, block_tokens, kv_heads, dim_v = v
    # A kernel would read or write past the end of tensors whose shapes do not fit together.
    assert k == (*v[:3], dim)
    assert heads % kv_heads == 0
    assert out == (*q[:3], dim_v)
    assert lse == q[:3]
    assert first == stop == (*table[:1], queries) == q[:2]
    all_rows = queries * (heads // kv_heads)
    rows = min(MOST_ROWS[dtype.itemsize], max(16, 1 << (all_rows - 1).bit_length()))
    row_tiles = -(-all_rows // rows)
    tile = tile or _tile((padded_dim(dim) + padded_dim(dim_v)) * dtype.itemsize, rows, device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    wave = max(1, sms * tile.resident // (kv_heads * max(1, row_tiles)))
    splits, aim = _most_splits(sequences, wave)
    return _Work(
        sequences, queries, heads, kv_heads, dim, dim_v, block_tokens, rows, row_tiles, splits, aim, wave, tile
    )  # fmt: skip


def _most_splits(sequences: int, wave: int) -> tuple[int, int]:
    """The most splits of all sequences together, and the number to aim at.

    A few sequences are cut into at most one wave: programs without a split would keep others from being spread evenly
    over SMs. Many need some waves, so that the last one is not long.
    """
    return (wave, wave) if 2 * sequences <= wave else (sequences + 3 * wave, 3 * wave)


def _tile(token_nbytes: int, rows: int, device: torch.device) -> SplitTile:
    """A tile for K and V that take `token_nbytes` a token together."""
    cols = max(16, min(128, 1 << (_TILE_NBYTES // token_nbytes).bit_length() - 1))
    stages = 4 if rows < 64 and shared_nbytes(device).program >= 4 * _TILE_NBYTES else 3
    needed = (stages - 1) * _TILE_NBYTES + 8192
    return SplitTile(cols, 4, stages, max(1, min(2, shared_nbytes(device).multiprocessor // needed)))


# Arguments


def _attend_launch(work: _Work, tensors: Sequence[Tensor], scale: float, softcap: float) -> Launch:
    q, k, v, table, first, stop, _ = tensors
    assert k.stride(-1) == v.stride(-1) == table.stride(-1) == 1
    assert table.dtype == first.dtype == stop.dtype == torch.int32
    assert q.dtype == k.dtype == v.dtype
    unit = stride_unit((q, k, v))
    steps = [
        *(tuple(stride // unit for stride in x.stride()[:-1]) for x in (q, k, v)),
        *(table.stride()[:1], first.stride(), stop.stride(), ()),
    ]
    most = 1 << (work.sequences - 1).bit_length()
    some = min(1 << (work.queries - 1).bit_length(), max(1, _PLANNED // most))
    tries = max(16, min(64, _PLANNED // most))
    rest = (
        *(work.sequences, work.queries, work.kv_heads, work.row_tiles, work.splits, work.aim, work.wave),
        *(*score_factors(scale, softcap), work.heads // work.kv_heads),
        *(work.dim, work.dim_v, padded_dim(work.dim), padded_dim(work.dim_v), unit, work.block_tokens, bool(softcap)),
        *(work.rows, work.tile.cols, most, some, -(-work.queries // some), tries),
    )
    grid = (work.splits * work.row_tiles * work.kv_heads, 1, 1)
    options = {"num_warps": work.tile.warps, "num_stages": work.tile.stages}
    return Launch(FILE, "attend_split", grid, with_strides(steps, rest), options)


_PLANNED = 1024
"""Numbers that a program works with at once to find its split."""


def _merge_launch(work: _Work, tensors: Sequence[Tensor]) -> Launch:
    _, out, lse = tensors
    steps = ((), out.stride()[:-1], lse.stride())
    block, chunk, warps = _merge_tile(work.dim_v, work.splits)
    rest = (work.queries, work.splits, work.heads, work.dim_v, block, chunk)
    grid = (work.sequences * work.queries * work.heads, 1, 1)
    return Launch(FILE, "merge_splits", grid, with_strides(steps, rest), {"num_warps": warps})


def _parts_launch(tensors: Sequence[Tensor]) -> Launch:
    parts, lses, out, lse = tensors
    number, tokens, heads, dim = parts.shape
    steps = (parts.stride()[:-1], lses.stride(), out.stride()[:-1], lse.stride())
    block, chunk, warps = _merge_tile(dim, number)
    rest = (number, heads, dim, block, chunk)
    return Launch(FILE, "merge_parts", (tokens * heads, 1, 1), with_strides(steps, rest), {"num_warps": warps})


def _merge_tile(dim: int, number: int) -> tuple[int, int, int]:
    """Dim rounded up, parts that a program loads at a time, and its warps: 16 elements or more for a thread."""
    block = padded_dim(dim)
    chunk = min(8192 // block, 1 << (number - 1).bit_length() if number else 1)
    return block, chunk, max(1, min(4, block * chunk // 512))


# Choice


DECODES: tuple[Callable[[], DecodeKernel], ...] = (TritonDecode, TorchDecode)
"""Kernels in the order they are asked; torch's, which works anywhere, comes last."""


def choose_decode(demand: Demand) -> DecodeKernel:
    """The first kernel that supports the demand, with a scratch of its own."""
    return first_that_supports("decoding", [make() for make in DECODES], demand)
