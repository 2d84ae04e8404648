"""The Triton kernels behind `merging`. Importing this imports triton; only `launching` does, when it first launches
one.

A *row* is a token and a head. A program takes a tile of rows × dim, heads first, because heads are adjacent in memory.
Every tensor is passed as its address and strides. The strides of tensors with dim, except the one over dim, are in
units of `unit` elements, so that the compiler knows that rows are aligned and loads 16 bytes at once. Sizes and strides
are 64 bits wide and not specialised on, so a new number of tokens needs no compilation; the stride over dim is
specialised on 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NOT_SPECIALIZED = [  # arguments whose values do not select a compilation
    *(
        f"{name}_{axis}"
        for name in ("a", "b", "c", "a_stat", "b_stat", "c_stat")
        for axis in ("batch", "head", "token")
    ),
    "tokens",
    "tiles",
]


@triton.jit
def _locate(tokens, tiles, heads: tl.constexpr, rows: tl.constexpr):
    """This program's batch entry and first token; for each row its token relative to the first, its head, and if it
    exists.

    Only the scalars are divided in 64 bits; rows are divided by a constant.
    """
    program = tl.program_id(0)
    batch = program // tiles
    first = (program - batch * tiles).to(tl.int64) * rows
    token = first // heads
    row = (first - token * heads).to(tl.int32) + tl.arange(0, rows)
    onward = (row // heads).to(tl.int64)
    return batch.to(tl.int64), token, onward, (row % heads).to(tl.int64), onward < tokens - token


@triton.jit
def _rows(base, per_batch, per_head, per_token, batch, token, onward, head, unit: tl.constexpr):
    """Pointers to the starts of rows. The scalar part is separate, so that it is computed once."""
    start = batch * per_batch + token * per_token
    return base + start * unit + (onward * per_token + head * per_head) * unit


@triton.jit
def _across(row_pointers, per_dim, block: tl.constexpr):
    """Pointers to the elements of rows."""
    return row_pointers[:, None] + (tl.arange(0, block).to(tl.int64) * per_dim)[None, :]


@triton.jit
def _within(is_row, dim: tl.constexpr, block: tl.constexpr):
    return is_row[:, None] & (tl.arange(0, block) < dim)[None, :]


@triton.jit
def _cast(values, dtype: tl.constexpr):
    """Cast as torch does: a float64 goes through float32 on its way to 16 bits."""
    if values.dtype == tl.float64 and dtype.primitive_bitwidth == 16:
        values = values.to(tl.float32)
    return values.to(dtype)


@triton.jit
def _log1p(x, terms: tl.constexpr):
    """log(1 + x) for x in [0, 1], by the series of atanh; the hardware's logarithm is too coarse near 1."""
    s = x / (2.0 + x)
    square = s * s
    series = tl.zeros_like(s)
    for k in tl.static_range(terms):
        series = series * square + 1.0 / (2 * (terms - k) - 1)
    return 2.0 * s * series


@triton.jit
def _join(a, b, dtype: tl.constexpr):
    """The joint LSE of two, and the weight of each; weights add up to 1, or are 0 where the LSE is -inf.

    1/(1+e) and e/(1+e) instead of exp(a - joint): the joint LSE is rounded, and its error would be in both weights.
    Weights have `dtype`, that of the outputs; a wider LSE is only subtracted and added.
    """
    nothing = float("-inf")
    terms: tl.constexpr = 18 if dtype == tl.float64 else 9
    e = tl.where((a == nothing) | (b == nothing), 0.0, tl.exp(-tl.abs(a - b).to(dtype)))
    heavy = 1.0 / (1.0 + e)
    light = e * heavy
    a_weight = tl.where(a == nothing, 0.0, tl.where(a >= b, heavy, light))
    b_weight = tl.where(b == nothing, 0.0, tl.where(a >= b, light, heavy))
    larger = tl.where((a > b) | (a != a), a, b)  # NaN if either is
    return larger + _log1p(e, terms), a_weight, b_weight


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def merge_rows(
    a, a_batch: tl.int64, a_head: tl.int64, a_token: tl.int64, a_dim,
    a_stat, a_stat_batch: tl.int64, a_stat_head: tl.int64, a_stat_token: tl.int64,
    b, b_batch: tl.int64, b_head: tl.int64, b_token: tl.int64, b_dim,
    b_stat, b_stat_batch: tl.int64, b_stat_head: tl.int64, b_stat_token: tl.int64,
    tokens: tl.int64, tiles: tl.int32,
    heads: tl.constexpr, dim: tl.constexpr, block: tl.constexpr, rows: tl.constexpr, unit: tl.constexpr,
    is_first: tl.constexpr,
):  # fmt: skip
    """Merge output b with its LSE into the running output a; if `is_first`, replace a without reading it."""
    batch, token, onward, head, is_row = _locate(tokens, tiles, heads, rows)
    a_lse_at = _rows(a_stat, a_stat_batch, a_stat_head, a_stat_token, batch, token, onward, head, 1)
    b_lse_at = _rows(b_stat, b_stat_batch, b_stat_head, b_stat_token, batch, token, onward, head, 1)
    a_at = _across(_rows(a, a_batch, a_head, a_token, batch, token, onward, head, unit), a_dim, block)
    b_at = _across(_rows(b, b_batch, b_head, b_token, batch, token, onward, head, unit), b_dim, block)
    here = _within(is_row, dim, block)
    joint = _cast(tl.load(b_lse_at, mask=is_row, other=0.0), a_stat.dtype.element_ty)
    merged = _cast(tl.load(b_at, mask=here, other=0.0), a.dtype.element_ty)
    if not is_first:
        before = tl.load(a_at, mask=here, other=0.0)
        joint, a_weight, b_weight = _join(tl.load(a_lse_at, mask=is_row, other=0.0), joint, a.dtype.element_ty)
        merged = before * a_weight[:, None] + merged * b_weight[:, None]
    tl.store(a_at, merged, mask=here)
    if not is_first:
        tl.debug_barrier()  # every warp reads the LSE of its rows; one of them writes it
    tl.store(a_lse_at, joint, mask=is_row)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def add_rows(
    a, a_batch: tl.int64, a_head: tl.int64, a_token: tl.int64, a_dim,
    b, b_batch: tl.int64, b_head: tl.int64, b_token: tl.int64, b_dim,
    tokens: tl.int64, tiles: tl.int32,
    heads: tl.constexpr, dim: tl.constexpr, block: tl.constexpr, rows: tl.constexpr, unit: tl.constexpr,
    is_first: tl.constexpr,
):  # fmt: skip
    """a += b; if `is_first`, a = b without reading a."""
    batch, token, onward, head, is_row = _locate(tokens, tiles, heads, rows)
    a_at = _across(_rows(a, a_batch, a_head, a_token, batch, token, onward, head, unit), a_dim, block)
    b_at = _across(_rows(b, b_batch, b_head, b_token, batch, token, onward, head, unit), b_dim, block)
    here = _within(is_row, dim, block)
    values = _cast(tl.load(b_at, mask=here, other=0.0), a.dtype.element_ty)
    if not is_first:
        values += tl.load(a_at, mask=here, other=0.0)
    tl.store(a_at, values, mask=here)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def dot_rows(
    a, a_batch: tl.int64, a_head: tl.int64, a_token: tl.int64, a_dim,
    b, b_batch: tl.int64, b_head: tl.int64, b_token: tl.int64, b_dim,
    c_stat, c_stat_batch: tl.int64, c_stat_head: tl.int64, c_stat_token: tl.int64,
    tokens: tl.int64, tiles: tl.int32,
    heads: tl.constexpr, dim: tl.constexpr, block: tl.constexpr, rows: tl.constexpr, unit: tl.constexpr,
):  # fmt: skip
    """c = rowsum(a∘b), in the dtype of c."""
    batch, token, onward, head, is_row = _locate(tokens, tiles, heads, rows)
    a_at = _across(_rows(a, a_batch, a_head, a_token, batch, token, onward, head, unit), a_dim, block)
    b_at = _across(_rows(b, b_batch, b_head, b_token, batch, token, onward, head, unit), b_dim, block)
    here = _within(is_row, dim, block)
    wide = c_stat.dtype.element_ty
    left = tl.load(a_at, mask=here, other=0.0).to(wide)
    right = tl.load(b_at, mask=here, other=0.0).to(wide)
    sum_at = _rows(c_stat, c_stat_batch, c_stat_head, c_stat_token, batch, token, onward, head, 1)
    tl.store(sum_at, tl.sum(left * right, axis=1), mask=is_row)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def stand_in_rows(
    a, a_batch: tl.int64, a_head: tl.int64, a_token: tl.int64, a_dim,
    a_stat, a_stat_batch: tl.int64, a_stat_head: tl.int64, a_stat_token: tl.int64,
    b, b_batch: tl.int64, b_head: tl.int64, b_token: tl.int64, b_dim,
    b_stat, b_stat_batch: tl.int64, b_stat_head: tl.int64, b_stat_token: tl.int64,
    c_stat, c_stat_batch: tl.int64, c_stat_head: tl.int64, c_stat_token: tl.int64,
    tokens: tl.int64, tiles: tl.int32,
    heads: tl.constexpr, dim: tl.constexpr, block: tl.constexpr, rows: tl.constexpr, unit: tl.constexpr,
):  # fmt: skip
    """b with rowsum(b∘a) = a_stat, and c_stat = b_stat with 0 for -inf."""
    batch, token, onward, head, is_row = _locate(tokens, tiles, heads, rows)
    a_at = _across(_rows(a, a_batch, a_head, a_token, batch, token, onward, head, unit), a_dim, block)
    b_at = _across(_rows(b, b_batch, b_head, b_token, batch, token, onward, head, unit), b_dim, block)
    here = _within(is_row, dim, block)
    delta_at = _rows(a_stat, a_stat_batch, a_stat_head, a_stat_token, batch, token, onward, head, 1)
    delta = tl.load(delta_at, mask=is_row, other=0.0)
    wide = tl.load(a_at, mask=here, other=0.0).to(delta.dtype)
    top = tl.max(tl.abs(wide), axis=1)
    tiny: tl.constexpr = 2.2250738585072014e-308 if delta.dtype == tl.float64 else 1.1754943508222875e-38
    largest = tl.where(top < tiny, tiny, top)
    scaled = wide * (1.0 / largest)[:, None]
    norm = tl.sum(scaled * scaled, axis=1)
    ratio = tl.where(norm > 0, delta / largest / norm, 0.0)
    tl.store(b_at, _cast(scaled * ratio[:, None], b.dtype.element_ty), mask=here)
    from_at = _rows(b_stat, b_stat_batch, b_stat_head, b_stat_token, batch, token, onward, head, 1)
    to_at = _rows(c_stat, c_stat_batch, c_stat_head, c_stat_token, batch, token, onward, head, 1)
    lse = tl.load(from_at, mask=is_row, other=0.0)
    tl.store(to_at, tl.where(lse == float("-inf"), 0.0, lse), mask=is_row)


@triton.jit
def _fill_with_nan(a, size, start, step, block: tl.constexpr):
    for at in range(start, size, step):
        index = at + tl.arange(0, block)
        tl.store(a + index, float("nan"), mask=index < size)


@triton.jit(do_not_specialize=["a_size", "b_size", "c_size"])
def poison_if_different(
    largest, state, seen,
    a, a_size: tl.int64,
    b, b_size: tl.int64,
    c, c_size: tl.int64,
    counts: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Fill a, b and c with NaN if ranks differ now (the two numbers in `largest` do not add up to 0), differed before
    (state[0] is NaN), or this rank gave up (seen[2] is NaN). A difference sets state[0] to NaN; `counts` adds 1 to
    state[1]; seen[:2] mirrors the state."""
    is_different = tl.load(largest) + tl.load(largest + 1) != 0
    poisoned = tl.load(state) + tl.load(seen + 2, volatile=True)
    program = tl.program_id(0)
    if program == 0:
        if is_different:
            tl.store(state, float("nan"))
            tl.store(seen, float("nan"))
        if counts:
            over = tl.load(state + 1) + 1
            tl.store(state + 1, over)
            tl.store(seen + 1, over)
    if is_different | (poisoned != poisoned):
        start, step = program.to(tl.int64) * block, tl.num_programs(0).to(tl.int64) * block
        _fill_with_nan(a, a_size, start, step, block)
        _fill_with_nan(b, b_size, start, step, block)
        _fill_with_nan(c, c_size, start, step, block)
