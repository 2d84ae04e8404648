"""Attention with Triton, for every mask, softcap and gradients into the LSE.

Every mask here is a band inside documents. If the tokens of a call are in the order of their positions, a query sees
one interval of its keys, and a key is seen by one interval of queries. The kernels read these intervals and nothing
else of a mask. They add up in a fixed order, so the same call gives the same bits every time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mesh_attention.kernels.base import (
    CallMask,
    Demand,
    Gradients,
    RowGradient,
    Scores,
    aligned,
    positions,
    tokens_first,
)
from mesh_attention.kernels.launching import Launch, launch, shared_nbytes, triton_unsupported_reason, with_strides
from mesh_attention.kernels.merging import delta_of
from mesh_attention.kernels.reference import REFERENCE
from mesh_attention.masks import Documents

LARGEST_HEAD = 256


class ProgramTile(NamedTuple):
    """What a program works on at a time, and how: rows it keeps, columns it walks over, warps, stages of loading."""

    rows: int
    cols: int
    warps: int
    stages: int


Tiles = Mapping[str, Mapping[int, ProgramTile]]
"""By kernel, and by the largest head size that a tile is for."""

TILES: Tiles = {
    "forward": {128: ProgramTile(64, 64, 4, 3), 256: ProgramTile(64, 64, 8, 2)},
    "backward_queries": {128: ProgramTile(128, 64, 8, 3), 256: ProgramTile(64, 32, 8, 2)},
    "backward_keys": {128: ProgramTile(64, 32, 4, 3), 256: ProgramTile(64, 32, 8, 1)},
}
"""The best of those tried on an H200, for masks that leave a query few keys; within 7 % of the best for others."""

SMALL_TILES: Tiles = {
    "forward": {128: ProgramTile(64, 32, 4, 2), 256: ProgramTile(32, 32, 4, 1)},
    "backward_queries": {128: ProgramTile(64, 32, 4, 2), 256: ProgramTile(32, 16, 4, 1)},
    "backward_keys": {128: ProgramTile(64, 32, 4, 1), 256: ProgramTile(32, 16, 4, 1)},
}
"""For GPUs with less shared memory than `TILES` need: compute capability 8.6, 8.9 and 12."""

_TILES_NBYTES = 160 * 2**10


class Intervals(NamedTuple):
    """Query i sees the keys key_start[i]:key_stop[i]; the queries query_start[j]:query_stop[j] see key j.

    All are int32, and none ever falls.
    """

    key_start: Tensor
    key_stop: Tensor
    query_start: Tensor
    query_stop: Tensor


class IntervalKernel:
    """`device_type` differs from "cuda" only under Triton's interpreter; `tiles` replace those for the device."""

    name = "triton intervals"

    def __init__(self, device_type: str = "cuda", tiles: Tiles | None = None) -> None:
        self.device_type = device_type
        self._tiles = tiles

    def unsupported_reason(self, demand: Demand) -> str | None:
        if demand.device != self.device_type:
            return f"runs on {self.device_type}, not on {demand.device}"
        if demand.dtype not in (torch.bfloat16, torch.float16):
            return f"needs bfloat16 or float16, not {demand.dtype}"
        dims = demand.head_dim_qk, demand.head_dim_v
        if any(dim % 8 or dim > LARGEST_HEAD for dim in dims):
            return f"needs head sizes that are multiples of 8, up to {LARGEST_HEAD}, not {dims[0]} and {dims[1]}"
        return triton_unsupported_reason(torch.device(demand.device))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        if not is_ascending(scores.mask):
            return REFERENCE.forward(q, k, v, scores)
        batch, heads, queries, _ = q.shape
        out = q.new_empty((batch, queries, heads, v.shape[-1])).transpose(1, 2)
        lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
        if not lse.numel():
            return out, lse
        at = intervals(scores.mask, q.device)
        q, k, v = _signed(_laid(q), scores), _laid(k), _laid(v)
        self._launch("forward", (q, k, v, out, lse, at.key_start, at.key_stop), scores)
        return out, lse

    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: RowGradient, scores: Scores) -> Gradients:
        if not is_ascending(scores.mask):
            return REFERENCE.backward(q, k, v, row, scores)
        by_token = (x.transpose(1, 2) for x in (q, k, v))
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format).transpose(1, 2) for x in by_token)
        if not q.numel() or not k.numel():
            return Gradients(dq.zero_(), dk.zero_(), dv.zero_())
        at = intervals(scores.mask, q.device)
        delta = delta_of(row)
        q, k, v, do = _signed(_laid(q), scores), _laid(k), _laid(v), _laid(row.do)
        inputs = (q, k, v, do, row.lse, delta)
        self._launch("backward_keys", (*inputs, dk, dv, at.query_start, at.query_stop), scores)
        self._launch("backward_queries", (*inputs, dq, at.key_start, at.key_stop), scores)
        return Gradients(_signed(dq, scores), dk, dv)

    def prepare(self, q: Tensor, v: Tensor, mask: CallMask) -> None:
        """Make the intervals of a mask: a copy from the host, which waits for what is queued before it."""
        if is_ascending(mask):
            intervals(mask, q.device)

    def _launch(self, name: str, tensors: tuple[Tensor, ...], scores: Scores) -> None:
        """Launch a kernel over tensors that begin with Q, K and V and end with the intervals."""
        key = (self, name, tensors[0].shape, tensors[2].shape, scores.scale, scores.softcap)
        launch(key, tensors, lambda: self._prepare(name, tensors, scores))

    def _prepare(self, name: str, tensors: tuple[Tensor, ...], scores: Scores) -> Launch:
        batch, heads, queries, dim = tensors[0].shape
        _, kv_heads, keys, dim_v = tensors[2].shape
        block, block_v = padded_dim(dim), padded_dim(dim_v)
        table = (self._tiles or _tiles(tensors[0].device))[name]
        tile = table[min(size for size in table if size >= max(block, block_v))]
        rows, over_heads = (keys, kv_heads) if name == "backward_keys" else (queries, heads)
        unit = 16 // tensors[0].itemsize
        steps = [_steps(tensor, unit) if name != "forward" or tensor.dim() == 4 else () for tensor in tensors]
        rest = (
            *(queries, keys, heads, heads // kv_heads, *score_factors(abs(scores.scale), scores.softcap)),
            *(dim, dim_v, block, block_v, unit, bool(scores.softcap), tile.rows, tile.cols),
        )
        grid = (batch * over_heads * -(-rows // tile.rows), 1, 1)
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        return Launch("interval_kernels", name, grid, with_strides(steps, rest), options)


def _tiles(device: torch.device) -> Tiles:
    return TILES if shared_nbytes(device).program >= _TILES_NBYTES else SMALL_TILES


INTERVALS = IntervalKernel()

# Intervals


def is_ascending(mask: CallMask) -> bool:
    """True if the tokens of both sides are in the order of their positions, or positions do not matter."""
    return mask.form != "positions" or all(
        a[-1] < b[0] for side in (mask.q, mask.kv) for a, b in pairwise([segment for segment in side if segment])
    )


def intervals(mask: CallMask, device: torch.device) -> Intervals:
    """Made at the first call, which is before a CUDA graph is captured, and kept as long as the mask."""
    kept = _KEPT.setdefault(mask, {})
    made = kept.get(device)
    if made is None:
        made = kept[device] = _intervals(mask, device)
    return made


_KEPT: WeakKeyDictionary[CallMask, dict[torch.device, Intervals]] = WeakKeyDictionary()


def _intervals(mask: CallMask, device: torch.device) -> Intervals:
    start, stop = _ends(mask)
    keys = torch.arange(sum(map(len, mask.kv)), device=start.device)
    ends = start, stop, torch.searchsorted(stop, keys, right=True), torch.searchsorted(start, keys, right=True)
    return Intervals(*(end.to(torch.int32).to(device) for end in ends))


def _ends(mask: CallMask) -> tuple[Tensor, Tensor]:
    """The interval of keys that each query sees, on the CPU."""
    cpu = torch.device("cpu")
    queries, keys = (sum(map(len, side)) for side in (mask.q, mask.kv))
    if mask.form != "positions":
        start = torch.zeros(queries, dtype=torch.int64, device=cpu)
        return start, torch.arange(1, queries + 1, device=cpu) if mask.form == "causal" else start + keys
    q, kv = (positions(side, cpu) for side in (mask.q, mask.kv))
    cuts = mask.mask.documents or Documents((0, mask.seq_q), (0, mask.seq_kv))
    q_cuts, kv_cuts = (torch.tensor(ends, device=cpu) for ends in (cuts.q, cuts.kv))
    document = torch.searchsorted(q_cuts, q, right=True)
    low, high = kv_cuts[document - 1], kv_cuts[document]
    at = q + kv_cuts[document] - q_cuts[document]
    start = low if mask.mask.left is None else (at - mask.mask.left).clamp(low, high)
    stop = high if mask.mask.right is None else (at + mask.mask.right + 1).clamp(low, high)
    start, stop = (torch.searchsorted(kv, end) for end in (start, stop))
    return start, torch.maximum(start, stop)


# Arguments


def _laid(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it, that the kernels can read: offsets inside a tile take 32 bits."""
    return aligned(tensor) if tensor.stride(2) < 2**23 else tokens_first(tensor)


def _steps(tensor: Tensor, unit: int) -> tuple[int, ...]:
    """Strides over batch, heads and tokens: of tensors with a head size in units, of statistics in elements.

    That over an axis of one entry means nothing, and may not be a multiple. Intervals have none.
    """
    if tensor.dim() < 4:
        return tensor.stride() if tensor.dim() == 3 else ()
    sizes = zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    return tuple(0 if size == 1 else stride // unit for size, stride in sizes)


def _signed(tensor: Tensor, scores: Scores) -> Tensor:
    """Q or dQ of a call whose scale is taken as positive: the largest score is looked for before it is scaled."""
    return -tensor if scores.scale < 0 else tensor


def score_factors(scale: float, softcap: float) -> tuple[float, float, float]:
    """From a product to its score, in units of log 2; from a product to the exponent of 2 in tanh; and the softcap."""
    unit = 1 / math.log(2)
    return scale * unit, 2 * unit * scale / softcap if softcap else 0.0, softcap * unit


def padded_dim(dim: int) -> int:
    """The head size of a tile: a power of two that tensor cores take."""
    return max(16, 1 << (dim - 1).bit_length())
