"""Decoding with Triton: the tokens of a sequence are split over programs, and a second kernel merges the splits.

Nothing is read back to the host, and the scratch is kept, so a call can be part of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mesh_attention.kernels.base import Demand
from mesh_attention.kernels.intervals import LARGEST_HEAD, _block, _factors
from mesh_attention.kernels.launching import Launch, lacks, launch

if TYPE_CHECKING:
    from mesh_attention.kernels.decode import Blocks, Reach

FILE = "decode_kernels"
MOST_ROWS = 64
"""Queries × heads of a group in one program; further ones go to other programs, which read K and V again."""


class Tile(NamedTuple):
    """Tokens that a program loads at a time, its warps, its stages of loading, and programs at once on an SM."""

    cols: int
    warps: int
    stages: int
    programs: int


class TritonDecode:
    """Triton kernels. `device_type` differs from "cuda" only under Triton's interpreter; `tile` and `splits` replace
    those that suit the call."""

    name = "triton"

    def __init__(self, device_type: str = "cuda", *, tile: Tile | None = None, splits: int | None = None) -> None:
        self.device_type = device_type
        self._tile = tile
        self._splits = splits
        self._scratches: dict[tuple[torch.device, int], Tensor] = {}

    def supports(self, demand: Demand) -> str | None:
        if demand.device != self.device_type:
            return f"runs on {self.device_type}, not on {demand.device}"
        if demand.dtype == torch.float64:
            return "needs a dtype of at most 32 bits, not torch.float64"
        dims = demand.head_dim_qk, demand.head_dim_v
        if max(dims) > LARGEST_HEAD:
            return f"needs head sizes up to {LARGEST_HEAD}, not {dims[0]} and {dims[1]}"
        return lacks(torch.device(demand.device))

    def attend(
        self, q: Tensor, blocks: Blocks, reach: Reach, *, scale: float, softcap: float, out: Tensor, lse: Tensor
    ) -> None:
        if not lse.numel():
            return
        if q.stride(-1) != 1:
            q = q.contiguous()
        work = _work(q.shape, blocks.v.shape, reach.table.shape[1], q.dtype, q.device, self._tile, self._splits)
        _check(q, blocks, reach, out, lse)
        scratch = self._scratch(q.device, work.count * (work.dim_v + 2))
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
        found = self._scratches.get(key)
        if found is None:
            found = self._scratches[key] = torch.empty(key[1], dtype=torch.float32, device=device)
        return found


class _Work(NamedTuple):
    """How a call is spread over programs; the same for every call with these shapes."""

    sequences: int
    queries: int
    heads: int
    kv_heads: int
    dim: int
    dim_v: int
    block_tokens: int
    rows: int
    splits: int
    tile: Tile

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def row_tiles(self) -> int:
        return -(-self.queries * self.group // self.rows)

    @property
    def count(self) -> int:
        return self.sequences * self.queries * self.heads * self.splits


@lru_cache(maxsize=1024)
def _work(
    q: tuple[int, ...],
    v: tuple[int, ...],
    most_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    tile: Tile | None,
    splits: int | None,
) -> _Work:
    sequences, queries, heads, dim = q
    _, block_tokens, kv_heads, dim_v = v
    group = heads // kv_heads
    rows = min(MOST_ROWS, max(16, 1 << (queries * group - 1).bit_length()))
    tile = tile or _tile(_block(dim) + _block(dim_v), dtype.itemsize, device)
    programs = sequences * kv_heads * -(-queries * group // rows)
    splits = splits or _splits(programs, _sms(device) * tile.programs, -(-most_blocks * block_tokens // tile.cols))
    return _Work(sequences, queries, heads, kv_heads, dim, dim_v, block_tokens, rows, splits, tile)


def _tile(width: int, itemsize: int, device: torch.device) -> Tile:
    """For K and V of `width` elements a token together."""
    return Tile(64, 4, 3, 2)


def _splits(programs: int, places: int, tiles: int) -> int:
    """Splits of each sequence, so that programs fill whole waves over the device's places."""
    most = max(1, min(tiles, 4 * places // programs))

    def filled(splits: int) -> float:
        waves = programs * splits / places
        return waves / -(-programs * splits // places)

    best = max(map(filled, range(1, most + 1)))
    return next(splits for splits in range(1, most + 1) if filled(splits) >= 0.95 * best)


@lru_cache(maxsize=64)
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# Arguments


def _attend_launch(work: _Work, tensors: Sequence[Tensor], scale: float, softcap: float) -> Launch:
    q, k, v, table, first, stop, _ = tensors
    unit = _unit((q, k, v))
    steps = [
        *(tuple(stride // unit for stride in x.stride()[:-1]) for x in (q, k, v)),
        *(table.stride()[:1], first.stride(), stop.stride(), (work.count,)),
    ]
    factors = _factors(scale, softcap)
    rest = (
        *(work.queries, work.kv_heads, work.splits, work.row_tiles, *factors),
        *(work.group, work.dim, work.dim_v, _block(work.dim), _block(work.dim_v), unit, work.block_tokens),
        *(bool(softcap), work.rows, work.tile.cols),
    )

    def arguments(given: Sequence[Any]) -> list[Any]:
        return [*(x for each, own in zip(given, steps, strict=True) for x in (each, *own)), *rest]

    grid = (work.sequences * work.splits * work.row_tiles * work.kv_heads, 1, 1)
    return Launch(FILE, "attend_split", grid, arguments, {"num_warps": work.tile.warps, "num_stages": work.tile.stages})


def _merge_launch(work: _Work, tensors: Sequence[Tensor]) -> Launch:
    _, out, lse = tensors
    steps = ((work.count,), out.stride()[:-1], lse.stride())
    block, chunk, warps = _merge_tile(work.dim_v, work.splits)
    rest = (work.queries, work.splits, work.heads, work.dim_v, block, chunk)

    def arguments(given: Sequence[Any]) -> list[Any]:
        return [*(x for each, own in zip(given, steps, strict=True) for x in (each, *own)), *rest]

    grid = (work.sequences * work.queries * work.heads, 1, 1)
    return Launch(FILE, "merge_splits", grid, arguments, {"num_warps": warps})


def _parts_launch(tensors: Sequence[Tensor]) -> Launch:
    parts, lses, out, lse = tensors
    number, rows, dim = parts.shape
    steps = (parts.stride()[:-1], lses.stride(), out.stride()[:-1], lse.stride())
    block, chunk, warps = _merge_tile(dim, number)
    rest = (number, dim, block, chunk)

    def arguments(given: Sequence[Any]) -> list[Any]:
        return [*(x for each, own in zip(given, steps, strict=True) for x in (each, *own)), *rest]

    return Launch(FILE, "merge_parts", (rows, 1, 1), arguments, {"num_warps": warps})


def _merge_tile(dim: int, number: int) -> tuple[int, int, int]:
    """Dim rounded up, parts that a program loads at a time, and its warps: 16 elements or more for a thread."""
    block = _block(dim)
    chunk = min(8192 // block, 1 << (number - 1).bit_length() if number else 1)
    return block, chunk, max(1, min(4, block * chunk // 512))


def _unit(tensors: Sequence[Tensor]) -> int:
    """Elements in a unit of strides: 16 bytes if that divides all of them, else the largest power of two that does."""
    unit = 16 // tensors[0].itemsize
    while any(stride % unit for tensor in tensors for stride in tensor.stride()[:-1]):
        unit //= 2
    return unit


def _check(q: Tensor, blocks: Blocks, reach: Reach, out: Tensor, lse: Tensor) -> None:
    """A kernel would read or write past the end of tensors that do not fit together."""
    sequences, queries, heads, dim = q.shape
    kv_heads, dim_v = blocks.v.shape[2:]
    assert blocks.k.shape == (*blocks.v.shape[:3], dim)
    assert heads % kv_heads == 0
    assert out.shape == (sequences, queries, heads, dim_v)
    assert lse.shape == (sequences, queries, heads)
    assert reach.first.shape == reach.stop.shape == (sequences, queries)
    assert reach.table.shape[0] == sequences
    assert blocks.k.stride(-1) == blocks.v.stride(-1) == out.stride(-1) == 1
    assert reach.table.stride(-1) == 1
