"""The Triton kernels behind `decode`. Importing this imports triton; only `launching` does, when it first
launches one.

A *row* is a query and one of the heads that share a KV head. The tokens that a sequence's queries see are cut into
*splits*. Each program of `attend_split` takes one split of one sequence, and one tile of the rows that share a KV head.
Every program reads the lengths of all sequences and works out which split is its own. So sequences of any lengths
share the device evenly, and a captured launch stays right when they change. Tiles of tokens start at multiples of
`cols`. Scores are in units of log 2, because the hardware has 2^x.

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
    *(
        "table_sequence",
        "sequences",
        "queries",
        "kv_heads",
        "row_tiles",
        "splits",
        "aim",
        "wave",
        "scale",
        "bend",
        "cap",
    ),
    *("parts_part", "parts_row", "lses_part", "lses_row", "out_row", "lse_row", "number"),
]
_UNALIGNED = ["out", "lse", "parts", "lses", "first", "stop", "table"]


@triton.jit
def _block_ids(table, tile, stop, block_tokens: tl.constexpr, cols: tl.constexpr):
    """The blocks of a tile's tokens: one for all of them if tiles never cross blocks. Reads no entry past `stop`."""
    if block_tokens % cols == 0:
        ids = tl.load(table + tile * cols // block_tokens, mask=tile * cols < stop, other=0)
    else:
        token = tile * cols + tl.arange(0, cols)
        ids = tl.load(table + token // block_tokens, mask=token < stop, other=0)
    return ids.to(tl.int64)


@triton.jit
def _load_tokens(base, ids, tile, here, per_block, per_token: tl.constexpr, block_tokens: tl.constexpr,
                 cols: tl.constexpr, dim: tl.constexpr, block: tl.constexpr, unit: tl.constexpr):  # fmt: skip
    """A tile of tokens × dim; tokens that are not `here` are zero, and not read."""
    token, col = tl.arange(0, cols), tl.arange(0, block)
    if block_tokens % cols == 0:  # one address, and offsets that are the same in every tile
        start = ids * per_block + (tile * cols % block_tokens) * per_token
        at = base + start * unit + (token * per_token)[:, None] * unit + col[None, :]
    else:
        start = ids * per_block + ((tile * cols + token) % block_tokens) * per_token
        at = base + start[:, None] * unit + col[None, :]
    here = here[:, None]
    if dim < block:
        here = here & (col < dim)[None, :]
    return tl.load(at, mask=here, other=0.0)


@triton.jit
def _spans(first, first_sequence, first_query, stop, stop_sequence, stop_query, sequences, queries,
           most: tl.constexpr, some: tl.constexpr, steps: tl.constexpr):  # fmt: skip
    """For each of `most` sequences, the lowest token that a query sees and the end of the highest; 0 and 0 if none."""
    sequence = tl.arange(0, most).to(tl.int64)[:, None]
    start = tl.full((most,), 2147483647, dtype=tl.int32)
    end = tl.zeros((most,), dtype=tl.int32)
    for step in tl.static_range(steps):  # another loop here would hinder the pipelining of the one over tokens
        query = step * some + tl.arange(0, some)[None, :]
        here = (sequence < sequences) & (query < queries)
        low = tl.load(first + sequence * first_sequence + query * first_query, mask=here, other=0)
        high = tl.load(stop + sequence * stop_sequence + query * stop_query, mask=here, other=0)
        start = tl.minimum(start, tl.min(tl.where(low < high, low, 2147483647), axis=1))
        end = tl.maximum(end, tl.max(tl.where(low < high, high, 0), axis=1))
    return tl.minimum(start, end), end


@triton.jit
def _split_numbers(tiles, is_sequence, splits, aim, wave, tries: tl.constexpr):
    """The number of splits of each sequence: one at least, and not more than `splits` in all.

    Tries split sizes from the one that makes `aim` splits up to five times that, and takes the one that finishes first
    if `wave` splits run at once. A program takes the time of 2 tiles to start and end.
    """
    smallest = tl.maximum(tl.cdiv(tl.sum(tiles, axis=0), aim), 1)
    size = smallest + (smallest * tl.arange(0, tries).to(tl.int64) * 4 // tries).to(tl.int32)
    number = tl.where(is_sequence[:, None], tl.maximum(tl.cdiv(tiles[:, None], size[None, :]), 1), 0)
    number = tl.sum(number, axis=0)
    cost = tl.where(number <= splits, tl.cdiv(number, wave).to(tl.float32) * (size + 2), float("inf"))
    size = tl.max(tl.where(cost == tl.min(cost, axis=0), size, 1), axis=0)
    return tl.where(is_sequence, tl.maximum(tl.cdiv(tiles, size), 1), 0)


@triton.jit
def _pick(values, here):
    return tl.sum(tl.where(here, values, 0), axis=0)


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_UNALIGNED)
def attend_split(
    q, q_sequence: tl.int64, q_query: tl.int64, q_head: tl.int64,
    k, k_block: tl.int64, k_token: tl.constexpr, k_head: tl.int64,
    v, v_block: tl.int64, v_token: tl.constexpr, v_head: tl.int64,
    table, table_sequence: tl.int64,
    first, first_sequence: tl.int64, first_query: tl.int64,
    stop, stop_sequence: tl.int64, stop_query: tl.int64,
    scratch,
    sequences: tl.int32, queries: tl.int32, kv_heads: tl.int32, row_tiles: tl.int32, splits: tl.int32,
    aim: tl.int32, wave: tl.int32, scale: tl.float32, bend: tl.float32, cap: tl.float32,
    group: tl.constexpr, dim: tl.constexpr, dim_v: tl.constexpr, block: tl.constexpr, block_v: tl.constexpr,
    unit: tl.constexpr, block_tokens: tl.constexpr, has_cap: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr,
    most: tl.constexpr, some: tl.constexpr, steps: tl.constexpr, tries: tl.constexpr,
):  # fmt: skip
    """Partial outputs, largest scores and sums of weights of up to `splits` splits, then each sequence's splits.

    Programs of all KV heads of the same tokens are neighbours, because their tokens are neighbours in memory.
    """
    program = tl.program_id(0)
    kv_head, program = program % kv_heads, program // kv_heads
    row_tile, split = program % row_tiles, program // row_tiles
    heads = kv_heads * group
    count = splits.to(tl.int64) * queries * heads

    starts, ends = _spans(
        first, first_sequence, first_query, stop, stop_sequence, stop_query, sequences, queries, most, some, steps
    )
    tiles = tl.cdiv(ends, cols) - starts // cols
    is_sequence = tl.arange(0, most) < sequences
    numbers = _split_numbers(tiles, is_sequence, splits, aim, wave, tries)
    until = tl.cumsum(numbers, axis=0)
    mine = tl.sum((is_sequence & (until <= split)).to(tl.int32), axis=0)
    here = tl.arange(0, most) == mine  # of no sequence if there are fewer splits; a return would hinder the pipelining
    start, end = _pick(starts, here), _pick(ends, here)
    tile, tiles = start // cols, _pick(tiles, here).to(tl.int64)
    number = tl.maximum(_pick(numbers, here), 1)
    leading = _pick(until, here) - number
    begin = tile + (tiles * (split - leading) // number).to(tl.int32)
    until = tile + (tiles * (split - leading + 1) // number).to(tl.int32)

    sequence = mine.to(tl.int64)
    row = row_tile * rows + tl.arange(0, rows)
    is_row = (row < queries * group) & (mine < sequences)
    query, head = row // group, kv_head * group + row % group
    low = tl.load(first + sequence * first_sequence + query * first_query, mask=is_row, other=0)
    high = tl.load(stop + sequence * stop_sequence + query * stop_query, mask=is_row, other=0)
    col = tl.arange(0, block)
    q_at = q + (sequence * q_sequence + query * q_query + head * q_head)[:, None] * unit + col[None, :]
    vectors = tl.load(q_at, mask=is_row[:, None] & (col < dim)[None, :], other=0.0)
    k += kv_head * k_head * unit
    v += kv_head * v_head * unit
    table += sequence * table_sequence
    acc = tl.zeros((rows, block_v), dtype=tl.float32)
    total = tl.zeros((rows,), dtype=tl.float32)
    top = tl.full((rows,), float("-inf"), dtype=tl.float32)
    ids = _block_ids(table, begin, tl.where(begin < until, end, 0), block_tokens, cols)
    for tile in range(begin, until):
        # One tile ahead, so that addresses are there when the loads of K and V are issued.
        next_ids = _block_ids(table, tile + 1, end, block_tokens, cols)
        token = tile * cols + tl.arange(0, cols)
        is_token = (token >= start) & (token < end)
        key = _load_tokens(k, ids, tile, is_token, k_block, k_token, block_tokens, cols, dim, block, unit)
        value = _load_tokens(v, ids, tile, is_token, v_block, v_token, block_tokens, cols, dim_v, block_v, unit)
        scores = tl.dot(vectors, tl.trans(key), input_precision="ieee")
        if has_cap:
            scores, _ = _bent(scores, bend, cap)
        else:
            scores = scores * scale
        seen = (token[None, :] >= low[:, None]) & (token[None, :] < high[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
        top = highest
        ids = next_ids

    place = (split.to(tl.int64) * queries + query) * heads + head
    col_v = tl.arange(0, block_v)
    tl.store(scratch + place[:, None] * dim_v + col_v[None, :], acc, mask=is_row[:, None] & (col_v < dim_v)[None, :])
    tl.store(scratch + count * dim_v + place, top, mask=is_row)
    tl.store(scratch + count * (dim_v + 1) + place, total, mask=is_row)
    if (split == leading) & (kv_head == 0) & (row_tile == 0):  # skipped without such a split: leading is -1
        tl.store(scratch + count * (dim_v + 2) + 2 * mine, leading.to(tl.float32))
        tl.store(scratch + count * (dim_v + 2) + 2 * mine + 1, number.to(tl.float32))


@triton.jit
def _power(x, is_of_two: tl.constexpr):
    return tl.exp2(x) if is_of_two else tl.exp(x)


@triton.jit
def _merge_row(parts, parts_part, tops, totals, tops_part, number, dim: tl.constexpr, block: tl.constexpr,
               chunk: tl.constexpr, has_totals: tl.constexpr):  # fmt: skip
    """One row of `number` parts: their mean by weight, the largest of their tops (0 for -inf), and the sum of weights.

    With totals, parts are sums by weight, and tops are in units of log 2; without, parts are means and tops are LSEs.
    Weights are divided by their own sum, so they add up to 1. Adds up in a fixed order.
    """
    col = tl.arange(0, block)
    acc = tl.zeros((block,), dtype=tl.float32)
    total, top = 0.0, float("-inf")
    for start in range(0, number, chunk):  # once, unless there are many
        at = start + tl.arange(0, chunk)
        is_part = at < number
        part_at = parts + (at * parts_part)[:, None] + col[None, :]
        part = tl.load(part_at, mask=is_part[:, None] & (col < dim)[None, :], other=0.0).to(tl.float32)
        levels = tl.load(tops + at * tops_part, mask=is_part, other=float("-inf"))
        highest = tl.maximum(top, tl.max(levels, axis=0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        fade, weights = _power(top - base, has_totals), _power(levels - base, has_totals)
        acc = acc * fade + tl.sum(part * weights[:, None], axis=0)
        if has_totals:
            weights = weights * tl.load(totals + at * tops_part, mask=is_part, other=0.0)
        total = total * fade + tl.sum(weights, axis=0)
        top = highest
    return acc / tl.where(total == 0.0, 1.0, total), tl.where(top == float("-inf"), 0.0, top), total


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_UNALIGNED)
def merge_splits(
    scratch,
    out, out_sequence: tl.int64, out_query: tl.int64, out_head: tl.int64,
    lse, lse_sequence: tl.int64, lse_query: tl.int64, lse_head: tl.int64,
    queries: tl.int32, splits: tl.int32,
    heads: tl.constexpr, dim: tl.constexpr, block: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Output and LSE of one query and head, from the partials of `attend_split`."""
    row = tl.program_id(0)
    per_split = (queries * heads).to(tl.int64)
    sequence, row = row // (queries * heads), row % (queries * heads)
    count = splits * per_split
    leading = tl.load(scratch + count * (dim + 2) + 2 * sequence).to(tl.int32)
    number = tl.load(scratch + count * (dim + 2) + 2 * sequence + 1).to(tl.int32)
    place = leading * per_split + row
    tops = scratch + count * dim + place
    acc, top, total = _merge_row(
        scratch + place * dim, per_split * dim, tops, tops + count, per_split, number, dim, block, chunk, True
    )
    query, head = row // heads, row % heads
    col = tl.arange(0, block)
    out += sequence * out_sequence + query * out_query + head * out_head
    tl.store(out + col, acc.to(out.dtype.element_ty), mask=col < dim)
    lse += sequence * lse_sequence + query * lse_query + head * lse_head
    tl.store(lse, tl.where(total == 0.0, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453))


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_UNALIGNED)
def merge_parts(
    parts, parts_part: tl.int64, parts_token: tl.int64, parts_head: tl.int64,
    lses, lses_part: tl.int64, lses_token: tl.int64, lses_head: tl.int64,
    out, out_token: tl.int64, out_head: tl.int64,
    lse, lse_token: tl.int64, lse_head: tl.int64,
    number: tl.int32,
    heads: tl.constexpr, dim: tl.constexpr, block: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """One token and head of `DecodeKernel.merge`."""
    token, head = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0).to(tl.int64) % heads
    parts += token * parts_token + head * parts_head
    tops = lses + token * lses_token + head * lses_head
    acc, top, total = _merge_row(parts, parts_part, tops, tops, lses_part, number, dim, block, chunk, False)
    col = tl.arange(0, block)
    tl.store(out + token * out_token + head * out_head + col, acc.to(out.dtype.element_ty), mask=col < dim)
    tl.store(lse + token * lse_token + head * lse_head, tl.where(total == 0.0, float("-inf"), top + tl.log(total)))
