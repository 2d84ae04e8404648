"""The Triton kernels behind `intervals`. Importing this imports triton; only `launching` does, when it first
launches one.

Query i sees the keys lo[i]:hi[i], and key j is seen by the queries lo[j]:hi[j]; neither end ever falls. A program takes
a tile of rows and walks over the columns in tiles: first over those that all of its rows see, without a mask, then over
the edges on both sides. Scores are in units of log 2, because the hardware has 2^x.

Every tensor is passed as its address and its strides over batch, heads and tokens, in units of `unit` elements, so that
the compiler knows that tokens are aligned and loads 16 bytes at once. Sizes and strides are not specialised on, so a
new length needs no compilation.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NOT_SPECIALIZED = [  # arguments whose values do not select a compilation
    *(
        f"{name}_{axis}"
        for name in ("q", "k", "v", "out", "do", "dq", "dk", "dv", "lse", "delta")
        for axis in ("batch", "head", "token")
    ),
    *("queries", "keys", "heads", "groups", "scale", "bend", "cap"),
]
_ANY_ALIGNMENT = ["lse", "delta"]


@triton.jit
def _spans(lo, hi, first, count, others, rows: tl.constexpr, cols: tl.constexpr):
    """The intervals of a tile's rows; then how its columns are walked: the start of the first edge and its tiles, the
    start and the tiles of the part that every row sees, the start of the second edge, and the tiles of both edges."""
    row = first + tl.arange(0, rows)
    is_row = row < count
    low = tl.load(lo + row, mask=is_row, other=0)
    high = tl.load(hi + row, mask=is_row, other=0)
    sees = low < high
    start = tl.min(tl.where(sees, low, others), axis=0)
    stop = tl.max(tl.where(sees, high, 0), axis=0)
    inner_start = tl.max(low, axis=0)
    inner_stop = tl.min(tl.where(is_row, high, others), axis=0)
    tiles = (tl.maximum(stop - start, 0) + cols - 1) // cols
    lead = tl.minimum((tl.maximum(inner_start - start, 0) + cols - 1) // cols, tiles)
    inner = start + lead * cols
    whole = tl.maximum(inner_stop - inner, 0) // cols
    after = inner + whole * cols
    edges = lead + (tl.maximum(stop - after, 0) + cols - 1) // cols
    return low, high, start, lead, inner, whole, after, edges


@triton.jit
def _load(base, first, count, per_token, rows: tl.constexpr, dim: tl.constexpr, block: tl.constexpr,
          unit: tl.constexpr, is_edge: tl.constexpr):  # fmt: skip
    """A tile of tokens × dim. At an edge, tokens from `count` on are zero."""
    row = tl.arange(0, rows)
    col = tl.arange(0, block)
    at = base + first.to(tl.int64) * per_token * unit + (row * per_token.to(tl.int32))[:, None] * unit + col[None, :]
    if is_edge:
        here = (row < count - first)[:, None]
        if dim < block:
            here = here & (col < dim)[None, :]
        tile = tl.load(at, mask=here, other=0.0)
    elif dim < block:
        tile = tl.load(at, mask=(col < dim)[None, :], other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def _store(base, values, first, count, per_token, rows: tl.constexpr, dim: tl.constexpr, block: tl.constexpr,
           unit: tl.constexpr):  # fmt: skip
    row = tl.arange(0, rows)
    col = tl.arange(0, block)
    at = base + first.to(tl.int64) * per_token * unit + (row * per_token.to(tl.int32))[:, None] * unit + col[None, :]
    here = (row < count - first)[:, None]
    if dim < block:
        here = here & (col < dim)[None, :]
    tl.store(at, values.to(base.dtype.element_ty), mask=here)


@triton.jit
def _bent(products, bend, cap):
    """Scores after the softcap, and r with tanh = 1 - 2r; r is good to a few units of 2^-24, whatever the score."""
    r = 1.0 / (1.0 + tl.exp2(products * bend))
    return cap - (2.0 * cap) * r, r


@triton.jit
def _forward_tiles(acc, total, top, query, low, high, k, v, k_token, v_token, keys, start, lead, after, count,
                   scale, bend, cap, cols: tl.constexpr, dim: tl.constexpr, dim_v: tl.constexpr, block: tl.constexpr,
                   block_v: tl.constexpr, unit: tl.constexpr, has_cap: tl.constexpr,
                   is_edge: tl.constexpr):  # fmt: skip
    """Add tiles of keys to a running output: its weighted sum, the sum of its weights, and its largest score."""
    for index in range(count):
        first = start + index * cols
        if is_edge:
            first = tl.where(index < lead, first, after + (index - lead) * cols)
        key = _load(k, first, keys, k_token, cols, dim, block, unit, is_edge)
        scores = tl.dot(query, tl.trans(key))
        factor = scale
        if has_cap:
            scores, _ = _bent(scores, bend, cap)
            factor = 1.0
        if is_edge:
            at = first + tl.arange(0, cols)
            seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
            scores = tl.where(seen, scores * factor, float("-inf"))
            factor = 1.0
        highest = tl.maximum(top, tl.max(scores, axis=1) * factor)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores * factor - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, axis=1)
        acc = acc * fade[:, None]
        value = _load(v, first, keys, v_token, cols, dim_v, block_v, unit, is_edge)
        acc = tl.dot(weights.to(value.dtype), value, acc)
        top = highest
    return acc, total, top


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def forward(
    q, q_batch: tl.int64, q_head: tl.int64, q_token: tl.int64,
    k, k_batch: tl.int64, k_head: tl.int64, k_token: tl.int64,
    v, v_batch: tl.int64, v_head: tl.int64, v_token: tl.int64,
    out, out_batch: tl.int64, out_head: tl.int64, out_token: tl.int64,
    lse, lo, hi,
    queries: tl.int32, keys: tl.int32, heads: tl.int32, groups: tl.int32,
    scale: tl.float32, bend: tl.float32, cap: tl.float32,
    dim: tl.constexpr, dim_v: tl.constexpr, block: tl.constexpr, block_v: tl.constexpr, unit: tl.constexpr,
    has_cap: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr,
):  # fmt: skip
    """Output, and LSE (batch, heads, queries). The last queries start first: under a causal mask they see the most."""
    blocks = tl.cdiv(queries, rows)
    row_of_heads = tl.program_id(0) // blocks
    first = (blocks - 1 - (tl.program_id(0) - row_of_heads * blocks)) * rows
    batch, head = (row_of_heads // heads).to(tl.int64), row_of_heads % heads
    low, high, start, lead, inner, whole, after, edges = _spans(lo, hi, first, queries, keys, rows, cols)
    query = _load(q + (batch * q_batch + head * q_head) * unit, first, queries, q_token, rows, dim, block, unit, True)
    k += (batch * k_batch + (head // groups) * k_head) * unit
    v += (batch * v_batch + (head // groups) * v_head) * unit
    acc = tl.zeros((rows, block_v), dtype=tl.float32)
    total = tl.zeros((rows,), dtype=tl.float32)
    top = tl.full((rows,), float("-inf"), dtype=tl.float32)
    acc, total, top = _forward_tiles(
        acc, total, top, query, low, high, k, v, k_token, v_token, keys, inner, whole, inner, whole,
        scale, bend, cap, cols, dim, dim_v, block, block_v, unit, has_cap, False,
    )  # fmt: skip
    acc, total, top = _forward_tiles(
        acc, total, top, query, low, high, k, v, k_token, v_token, keys, start, lead, after, edges,
        scale, bend, cap, cols, dim, dim_v, block, block_v, unit, has_cap, True,
    )  # fmt: skip
    sum_or_1 = tl.where(total == 0.0, 1.0, total)
    acc = acc / sum_or_1[:, None]
    _store(out + (batch * out_batch + head * out_head) * unit, acc, first, queries, out_token, rows, dim_v, block_v,
           unit)  # fmt: skip
    at = first + tl.arange(0, rows)
    lse_tile = tl.where(total == 0.0, float("-inf"), (top + tl.log2(sum_or_1)) * 0.6931471805599453)
    tl.store(lse + row_of_heads.to(tl.int64) * queries + at, lse_tile, mask=at < queries)


@triton.jit
def _statistics(lse, delta, lse_token, delta_token, first, queries, rows: tl.constexpr):
    """LSE in units of log 2, and delta. Rows that see nothing are masked; 0 in place of -inf keeps them from NaN."""
    row = tl.arange(0, rows)
    is_row = row < queries - first
    at = first.to(tl.int64) + row
    level = tl.load(lse + at * lse_token, mask=is_row, other=0.0)
    level = tl.where(level == float("-inf"), 0.0, level) * 1.4426950408889634
    return level, tl.load(delta + at * delta_token, mask=is_row, other=0.0)


@triton.jit
def _query_gradient(acc, query, upstream, level, inset, low, high, k, v, k_token, v_token, keys, start, lead, after,
                    count, scale, bend, cap, cols: tl.constexpr, dim: tl.constexpr, dim_v: tl.constexpr,
                    block: tl.constexpr, block_v: tl.constexpr, unit: tl.constexpr, has_cap: tl.constexpr,
                    is_edge: tl.constexpr):  # fmt: skip
    for index in range(count):
        first = start + index * cols
        if is_edge:
            first = tl.where(index < lead, first, after + (index - lead) * cols)
        key = _load(k, first, keys, k_token, cols, dim, block, unit, is_edge)
        value = _load(v, first, keys, v_token, cols, dim_v, block_v, unit, is_edge)
        scores = tl.dot(query, tl.trans(key))
        if has_cap:
            scores, r = _bent(scores, bend, cap)
            weights = tl.exp2(scores - level[:, None])
        else:
            weights = tl.exp2(scores * scale - level[:, None])
        if is_edge:
            at = first + tl.arange(0, cols)
            seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
            weights = tl.where(seen, weights, 0.0)
        slopes = weights * (tl.dot(upstream, tl.trans(value)) - inset[:, None])
        if has_cap:
            slopes = slopes * (4.0 * r * (1.0 - r))
        acc = tl.dot(slopes.to(key.dtype), key, acc)
    return acc


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def backward_queries(
    q, q_batch: tl.int64, q_head: tl.int64, q_token: tl.int64,
    k, k_batch: tl.int64, k_head: tl.int64, k_token: tl.int64,
    v, v_batch: tl.int64, v_head: tl.int64, v_token: tl.int64,
    do, do_batch: tl.int64, do_head: tl.int64, do_token: tl.int64,
    lse, lse_batch: tl.int64, lse_head: tl.int64, lse_token: tl.int64,
    delta, delta_batch: tl.int64, delta_head: tl.int64, delta_token: tl.int64,
    dq, dq_batch: tl.int64, dq_head: tl.int64, dq_token: tl.int64,
    lo, hi,
    queries: tl.int32, keys: tl.int32, heads: tl.int32, groups: tl.int32,
    scale: tl.float32, bend: tl.float32, cap: tl.float32,
    dim: tl.constexpr, dim_v: tl.constexpr, block: tl.constexpr, block_v: tl.constexpr, unit: tl.constexpr,
    has_cap: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr,
):  # fmt: skip
    """dQ, over tiles of queries."""
    blocks = tl.cdiv(queries, rows)
    row_of_heads = tl.program_id(0) // blocks
    first = (blocks - 1 - (tl.program_id(0) - row_of_heads * blocks)) * rows
    batch, head = (row_of_heads // heads).to(tl.int64), row_of_heads % heads
    low, high, start, lead, inner, whole, after, edges = _spans(lo, hi, first, queries, keys, rows, cols)
    query = _load(q + (batch * q_batch + head * q_head) * unit, first, queries, q_token, rows, dim, block, unit, True)
    upstream = _load(do + (batch * do_batch + head * do_head) * unit, first, queries, do_token, rows, dim_v, block_v,
                     unit, True)  # fmt: skip
    level, inset = _statistics(
        lse + batch * lse_batch + head * lse_head, delta + batch * delta_batch + head * delta_head,
        lse_token, delta_token, first, queries, rows,
    )  # fmt: skip
    k += (batch * k_batch + (head // groups) * k_head) * unit
    v += (batch * v_batch + (head // groups) * v_head) * unit
    acc = tl.zeros((rows, block), dtype=tl.float32)
    acc = _query_gradient(
        acc, query, upstream, level, inset, low, high, k, v, k_token, v_token, keys, inner, whole, inner, whole,
        scale, bend, cap, cols, dim, dim_v, block, block_v, unit, has_cap, False,
    )  # fmt: skip
    acc = _query_gradient(
        acc, query, upstream, level, inset, low, high, k, v, k_token, v_token, keys, start, lead, after, edges,
        scale, bend, cap, cols, dim, dim_v, block, block_v, unit, has_cap, True,
    )  # fmt: skip
    acc = acc * (scale * 0.6931471805599453)
    _store(dq + (batch * dq_batch + head * dq_head) * unit, acc, first, queries, dq_token, rows, dim, block, unit)


@triton.jit
def _key_gradients(acc, acc_v, key, value, low, high, q, do, lse, delta, q_head, q_token, do_head, do_token, lse_head,
                   lse_token, delta_head, delta_token, queries, start, lead, after, count, groups, scale, bend, cap,
                   cols: tl.constexpr, dim: tl.constexpr, dim_v: tl.constexpr, block: tl.constexpr,
                   block_v: tl.constexpr, unit: tl.constexpr, has_cap: tl.constexpr,
                   is_edge: tl.constexpr):  # fmt: skip
    """Add tiles of queries, of one head of the group after another, to dK and dV."""
    for step in range(count * groups):
        member = step // count
        index = step - member * count
        first = start + index * cols
        if is_edge:
            first = tl.where(index < lead, first, after + (index - lead) * cols)
        query = _load(q + member * q_head * unit, first, queries, q_token, cols, dim, block, unit, is_edge)
        upstream = _load(do + member * do_head * unit, first, queries, do_token, cols, dim_v, block_v, unit, is_edge)
        level, inset = _statistics(
            lse + member * lse_head, delta + member * delta_head, lse_token, delta_token, first, queries, cols
        )
        scores = tl.dot(key, tl.trans(query))
        if has_cap:
            scores, r = _bent(scores, bend, cap)
            weights = tl.exp2(scores - level[None, :])
        else:
            weights = tl.exp2(scores * scale - level[None, :])
        if is_edge:
            at = first + tl.arange(0, cols)
            seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
            weights = tl.where(seen, weights, 0.0)
        acc_v = tl.dot(weights.to(upstream.dtype), upstream, acc_v)
        slopes = weights * (tl.dot(value, tl.trans(upstream)) - inset[None, :])
        if has_cap:
            slopes = slopes * (4.0 * r * (1.0 - r))
        acc = tl.dot(slopes.to(query.dtype), query, acc)
    return acc, acc_v


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def backward_keys(
    q, q_batch: tl.int64, q_head: tl.int64, q_token: tl.int64,
    k, k_batch: tl.int64, k_head: tl.int64, k_token: tl.int64,
    v, v_batch: tl.int64, v_head: tl.int64, v_token: tl.int64,
    do, do_batch: tl.int64, do_head: tl.int64, do_token: tl.int64,
    lse, lse_batch: tl.int64, lse_head: tl.int64, lse_token: tl.int64,
    delta, delta_batch: tl.int64, delta_head: tl.int64, delta_token: tl.int64,
    dk, dk_batch: tl.int64, dk_head: tl.int64, dk_token: tl.int64,
    dv, dv_batch: tl.int64, dv_head: tl.int64, dv_token: tl.int64,
    lo, hi,
    queries: tl.int32, keys: tl.int32, heads: tl.int32, groups: tl.int32,
    scale: tl.float32, bend: tl.float32, cap: tl.float32,
    dim: tl.constexpr, dim_v: tl.constexpr, block: tl.constexpr, block_v: tl.constexpr, unit: tl.constexpr,
    has_cap: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr,
):  # fmt: skip
    """dK and dV, over tiles of keys. The first keys start first: under a causal mask most queries see them."""
    blocks = tl.cdiv(keys, rows)
    row_of_heads = tl.program_id(0) // blocks
    first = (tl.program_id(0) - row_of_heads * blocks) * rows
    kv_heads = heads // groups
    batch, head = (row_of_heads // kv_heads).to(tl.int64), row_of_heads % kv_heads
    low, high, start, lead, inner, whole, after, edges = _spans(lo, hi, first, keys, queries, rows, cols)
    key = _load(k + (batch * k_batch + head * k_head) * unit, first, keys, k_token, rows, dim, block, unit, True)
    value = _load(v + (batch * v_batch + head * v_head) * unit, first, keys, v_token, rows, dim_v, block_v, unit, True)
    q += (batch * q_batch + head * groups * q_head) * unit
    do += (batch * do_batch + head * groups * do_head) * unit
    lse += batch * lse_batch + head * groups * lse_head
    delta += batch * delta_batch + head * groups * delta_head
    acc = tl.zeros((rows, block), dtype=tl.float32)
    acc_v = tl.zeros((rows, block_v), dtype=tl.float32)
    acc, acc_v = _key_gradients(
        acc, acc_v, key, value, low, high, q, do, lse, delta, q_head, q_token, do_head, do_token, lse_head, lse_token,
        delta_head, delta_token, queries, inner, whole, inner, whole, groups, scale, bend, cap, cols, dim, dim_v,
        block, block_v, unit, has_cap, False,
    )  # fmt: skip
    acc, acc_v = _key_gradients(
        acc, acc_v, key, value, low, high, q, do, lse, delta, q_head, q_token, do_head, do_token, lse_head, lse_token,
        delta_head, delta_token, queries, start, lead, after, edges, groups, scale, bend, cap, cols, dim, dim_v,
        block, block_v, unit, has_cap, True,
    )  # fmt: skip
    acc = acc * (scale * 0.6931471805599453)
    _store(dk + (batch * dk_batch + head * dk_head) * unit, acc, first, keys, dk_token, rows, dim, block, unit)
    _store(dv + (batch * dv_batch + head * dv_head) * unit, acc_v, first, keys, dv_token, rows, dim_v, block_v, unit)
