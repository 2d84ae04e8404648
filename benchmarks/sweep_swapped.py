"""The Triton kernels behind `decode_triton`. Importing this imports triton; only `launching` does, when it first
launches one.

A *row* is a query and one of the heads that share a KV head. A program of `attend_split` takes a tile of the rows of
one sequence and one KV head, and walks over its share of the tokens that these rows see. Tiles of tokens start at
multiples of `cols`. Lengths are read here, on the device, so a captured launch stays right when they change. Scores are
in units of log 2, because the hardware has 2^x.

Strides of Q, K and V are in units of `unit` elements, so that the compiler knows that tokens are aligned and loads 16
bytes at once. Sizes and strides are not specialised on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mesh_attention.kernels.interval_kernels import _bent

_PLAIN = [  # arguments whose values do not select a compilation
    *(f"{name}_{axis}" for name in ("q", "out", "lse") for axis in ("sequence", "query", "head")),
    *(f"{name}_{axis}" for name in ("k", "v") for axis in ("block", "head")),
    *(f"{name}_{axis}" for name in ("first", "stop") for axis in ("sequence", "query")),
    *("table_sequence", "queries", "kv_heads", "splits", "count", "row_tiles", "scale", "bend", "cap"),
    *("parts_part", "parts_row", "lses_part", "lses_row", "out_row", "lse_row"),
]
_UNALIGNED = ["out", "lse", "parts", "lses", "first", "stop", "table"]



from mesh_attention.kernels.decode_kernels import _block_ids, _load_tokens


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_UNALIGNED)
def attend_split_b(
    q, q_sequence: tl.int64, q_query: tl.int64, q_head: tl.int64,
    k, k_block: tl.int64, k_token: tl.constexpr, k_head: tl.int64,
    v, v_block: tl.int64, v_token: tl.constexpr, v_head: tl.int64,
    table, table_sequence: tl.int64,
    first, first_sequence: tl.int64, first_query: tl.int64,
    stop, stop_sequence: tl.int64, stop_query: tl.int64,
    scratch, count: tl.int64,
    queries: tl.int32, kv_heads: tl.int32, splits: tl.int32, row_tiles: tl.int32,
    scale: tl.float32, bend: tl.float32, cap: tl.float32,
    group: tl.constexpr, dim: tl.constexpr, dim_v: tl.constexpr, block: tl.constexpr, block_v: tl.constexpr,
    unit: tl.constexpr, block_tokens: tl.constexpr, has_cap: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr,
):  # fmt: skip
    """Partial outputs, largest scores and sums of weights, into a scratch of `count` rows × splits of each.

    Programs of all KV heads of the same tokens are neighbours, because their tokens are neighbours in memory.
    """
    program = tl.program_id(0)
    kv_head, program = program % kv_heads, program // kv_heads
    row_tile, program = program % row_tiles, program // row_tiles
    split, sequence = program % splits, (program // splits).to(tl.int64)
    row = row_tile * rows + tl.arange(0, rows)
    is_row = row < queries * group
    query, head = row // group, kv_head * group + row % group

    low = tl.load(first + sequence * first_sequence + query * first_query, mask=is_row, other=0)
    high = tl.load(stop + sequence * stop_sequence + query * stop_query, mask=is_row, other=0)
    sees = low < high
    start = tl.min(tl.where(sees, low, 2147483647), axis=0)
    end = tl.max(tl.where(sees, high, 0), axis=0)
    tile = start // cols
    tiles = tl.maximum((end + cols - 1) // cols - tile, 0).to(tl.int64)
    begin = tile + (tiles * split // splits).to(tl.int32)
    until = tile + (tiles * (split + 1) // splits).to(tl.int32)

    col = tl.arange(0, block)
    q_at = q + (sequence * q_sequence + query * q_query + head * q_head)[:, None] * unit + col[None, :]
    vectors = tl.load(q_at, mask=is_row[:, None] & (col < dim)[None, :], other=0.0)
    k += kv_head * k_head * unit
    v += kv_head * v_head * unit
    table += sequence * table_sequence
    acc = tl.zeros((block_v, rows), dtype=tl.float32)
    vectors_t = tl.trans(vectors)
    total = tl.zeros((rows,), dtype=tl.float32)
    top = tl.full((rows,), float("-inf"), dtype=tl.float32)
    ids = _block_ids(table, begin, tl.where(begin < until, end, 0), block_tokens, cols)
    for tile in range(begin, until):
        # One tile ahead, so that addresses are there when the loads of K and V are issued.
        next_ids = _block_ids(table, tile + 1, end, block_tokens, cols)
        token = tile * cols + tl.arange(0, cols)
        here = (token >= start) & (token < end)
        key = _load_tokens(k, ids, tile, here, k_block, k_token, block_tokens, cols, dim, block, unit)
        value = _load_tokens(v, ids, tile, here, v_block, v_token, block_tokens, cols, dim_v, block_v, unit)
        scores = tl.dot(key, vectors_t, input_precision="ieee")
        if has_cap:
            scores, _ = _bent(scores, bend, cap)
        else:
            scores = scores * scale
        seen = (token[:, None] >= low[None, :]) & (token[:, None] < high[None, :])
        scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - base[None, :])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, axis=0)
        acc = tl.dot(tl.trans(value), weights.to(value.dtype), acc * fade[None, :], input_precision="ieee")
        top = highest
        ids = next_ids

    heads = kv_heads * group
    place = ((sequence * queries + query) * heads + head) * splits + split
    col_v = tl.arange(0, block_v)
    tl.store(scratch + place[None, :] * dim_v + col_v[:, None], acc, mask=is_row[None, :] & (col_v < dim_v)[:, None])
    tl.store(scratch + count * dim_v + place, top, mask=is_row)
    tl.store(scratch + count * (dim_v + 1) + place, total, mask=is_row)


