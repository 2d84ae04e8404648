"""Checks that every kernel must pass: forward and backward against dense attention in float64.

    for check in CHECKS:
        check(MyKernel(), Setting(device="cuda", dtype=torch.bfloat16, head_dim=64, head_dim_v=128, seq_len=100))

Two head sizes, softcap, a gradient into the LSE and determinism are optional: their checks pass if the kernel gives an
`unsupported_reason` for them. Everything else is required of every kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations, product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesh_attention.kernels.base import CallMask, Demand, Gradients, Kernel, RowGradient, Scores
from mesh_attention.masks import Mask, Segment, causal, documents, window

BATCH, HEADS = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Device, dtype and sizes of the calls. `head_dim_v` is for the check of two head sizes; most calls have about
    `seq_len` queries and keys."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    head_dim: int = 6
    head_dim_v: int = 4
    seq_len: int = 16


Check = Callable[[Kernel, Setting], None]


class KernelCase(NamedTuple):
    """The tensors of one call. The LSE and delta in `row` are over more keys than the call's, as they are in a plan."""

    q: Tensor
    k: Tensor
    v: Tensor
    row: RowGradient
    scores: Scores


def a_plain_call_is_supported(kernel: Kernel, setting: Setting) -> None:
    reason = kernel.unsupported_reason(_demand(setting))
    assert reason is None, f"{kernel.name} {reason}; use a setting that it supports"


# Masks


def unmasked_calls_are_exact(kernel: Kernel, setting: Setting) -> None:
    _check_masks(kernel, setting, *(CallMask.full(setting.seq_len, setting.seq_len + more) for more in (0, 3, -3)))


def causal_calls_are_exact(kernel: Kernel, setting: Setting) -> None:
    _check_masks(kernel, setting, CallMask.causal(setting.seq_len))


def bands_are_exact(kernel: Kernel, setting: Setting) -> None:
    """Windows over some of the tokens, over every third token, and with more keys than queries."""
    n = setting.seq_len
    _check_masks(
        kernel,
        setting,
        _positions(window(n // 2, 0), range(n), range(n), n),
        _positions(window(3, 1), range(n // 4, n - 2), range(2, n - 3), n),
        _positions(causal(), range(1, 3 * n, 3), range(2, 3 * n, 3), 3 * n),
        _positions(causal(), range(n), range(0, 2 * n, 2), 2 * n),
        _positions(causal(), range(n), range(n + 5), n, n + 5),
    )


def documents_are_exact(kernel: Kernel, setting: Setting) -> None:
    n = setting.seq_len
    packed = documents([0, n // 4, n // 4 + 1, n // 2, n])
    first = _positions(packed, range(n), range(n), n)
    _check_masks(kernel, setting, first, _positions(causal() & packed, range(2, n - 2), range(n - 5), n))


def documents_stay_apart(kernel: Kernel, setting: Setting) -> None:
    """Whatever one document has, also NaN and infinities, the others keep their bits, forward and backward.

    Not one of `CHECKS`: kernels whose tiles span documents do not pass it. A dense kernel does in a `PerDocument`.
    """
    n = setting.seq_len
    cuts = [0, n // 2, n // 2 + 3, n]
    parts = (range(1, n // 3), range(n // 2, n))  # the last begins with the second document
    packed, causal_packed = documents(cuts), causal() & documents(cuts)
    whole, some = _positions(packed, range(n), range(n), n), CallMask("positions", causal_packed, parts, parts, n, n)
    for mask, value, spoiled in product((whole, some), (torch.nan, torch.inf), range(3)):
        call, runs = _call(mask, setting), []
        tokens = torch.tensor([token for segment in mask.q for token in segment], device=setting.device)
        inside = (tokens >= cuts[spoiled]) & (tokens < cuts[spoiled + 1])
        for is_spoiled in (False, True):
            q, k, v, do, lse, delta = (x.clone() for x in (*call[:3], call.row.do, call.row.lse, _delta(call)))
            if is_spoiled:
                for x in (q, k, v, do, lse, delta):
                    x[:, :, inside] = value
            gradients = kernel.backward(q, k, v, RowGradient(do, lse, delta), call.scores)
            runs.append([x[:, :, ~inside] for x in (*kernel.forward(q, k, v, call.scores), *gradients)])
        for name, ours, due in zip(("output", "LSE", "dQ", "dK", "dV"), *runs, strict=True):
            assert torch.equal(ours, due), f"{kernel.name}: {value} of one document reaches the {name} of others"


def tokens_in_several_segments_are_exact(kernel: Kernel, setting: Setting) -> None:
    """Tokens such as those of a zigzag shard."""
    n = setting.seq_len
    ends = (range(n // 2), range(3 * n // 2, 2 * n))
    _check_masks(kernel, setting, CallMask("positions", causal(), ends, ends, 2 * n, 2 * n))


def rows_that_see_nothing_have_output_0_and_lse_minus_infinity(kernel: Kernel, setting: Setting) -> None:
    n = setting.seq_len
    some = _positions(window(1, 0), range(n), range(n // 2, n - 2), n)
    none = _positions(window(0, 0), range(n // 2), range(n // 2, n), n)
    for mask in (some, none):
        call = _call(mask, setting)
        out, lse = _check_exact(kernel, call)
        blind = slice(0, n // 2)
        assert (lse[:, :, blind] == -torch.inf).all(), f"{kernel.name}: rows that see nothing have a finite LSE"
        assert not out[:, :, blind].any(), f"{kernel.name}: rows that see nothing have an output"
        # Over all keys of all calls they may see nothing, too.
        call.row.lse[:, :, blind] = -torch.inf
        assert not kernel.backward(*call).dq[:, :, blind].any(), f"{kernel.name}: rows that see nothing have a dQ"
        _check_exact(kernel, call)


# Heads, scores and rows


def query_heads_share_kv_heads(kernel: Kernel, setting: Setting) -> None:
    n = setting.seq_len
    for kv_heads in (1, 2):
        some = _positions(window(3, 1), range(n), range(2, n), n)
        _check_masks(kernel, setting, CallMask.full(n, n), CallMask.causal(n), some, kv_heads=kv_heads)


def two_head_sizes_are_exact(kernel: Kernel, setting: Setting) -> None:
    if _supports(kernel, setting, head_dim_v=setting.head_dim_v):
        masks = CallMask.full(setting.seq_len, setting.seq_len + 1), CallMask.causal(setting.seq_len)
        _check_masks(kernel, setting, *masks, head_dim_v=setting.head_dim_v, kv_heads=2)


def softcap_is_exact(kernel: Kernel, setting: Setting) -> None:
    if _supports(kernel, setting, softcap=1.5):
        _check_masks(kernel, setting, CallMask.causal(setting.seq_len), softcap=1.5)


def large_scores_keep_their_weights(kernel: Kernel, setting: Setting) -> None:
    """The weights of a row add up to 1, however large its scores are, with every mask.

    All values are equal, so the output is that value: a kernel that merges parts need not weigh them equally.
    """
    n = setting.seq_len
    for size in (1e4,) if setting.dtype == torch.float16 else (1e4, 1e8, -1e8):
        for mask in _each_form(n):
            call = _level(_call(mask, setting), size)
            call = call._replace(v=call.v[:, :, :1].expand_as(call.v).contiguous())
            out, lse = kernel.forward(*call[:3], call.scores)
            due, due_lse, _ = _truth(call)
            _check_near(kernel, out, due, 2, setting.dtype, f"output with scores of {size:.0e}")
            near = torch.isclose(lse.double(), due_lse, rtol=4 * torch.finfo(lse.dtype).eps, atol=0.0)
            assert near.all(), f"{kernel.name}: LSE with scores of {size:.0e}"


def scores_that_overflow_do_not_count(kernel: Kernel, setting: Setting) -> None:
    """Rows whose scores are all -inf, because they are too small for their dtype, see nothing; or they are NaN."""
    if setting.dtype == torch.float16:  # whose products do not overflow
        return
    n, size = setting.seq_len, torch.finfo(setting.dtype).max ** 0.55
    for mask in _each_form(n):
        q, k, v, row, scores = _level(_call(mask, setting), -size)
        call = KernelCase(q, k * size, v, row, scores)
        out, lse = kernel.forward(*call[:3], scores)
        assert not (lse > -torch.inf).any(), f"{kernel.name}: rows without a score above -inf have an LSE"
        assert not out.nan_to_num(0.0).any(), f"{kernel.name}: rows without a score above -inf have an output"
        gradients = (x.nan_to_num(0.0) for x in kernel.backward(*call))
        assert not any(x.any() for x in gradients), f"{kernel.name}: scores of -inf have gradients"


def a_gradient_into_the_lse_is_exact_where_do_is_zero(kernel: Kernel, setting: Setting) -> None:
    """Delta is rowsum(O∘dO) less dLSE: no output that stands in for O gives it if dO is zero."""
    if _supports(kernel, setting, lse_gradient=True):
        call = _call(CallMask.causal(setting.seq_len), setting)
        call.row.do[:, :, ::2] = 0.0
        _check_exact(kernel, call)


def the_output_may_be_given_instead_of_delta(kernel: Kernel, setting: Setting) -> None:
    call = _call(CallMask.causal(setting.seq_len), setting)
    out, lse, _ = _truth(call)
    out, lse = out.to(setting.dtype), lse.to(call.row.lse.dtype)
    delta = (out.double() * call.row.do.double()).sum(-1)
    due = _truth(call._replace(row=RowGradient(call.row.do, lse, delta)))[2]
    with_out = call._replace(row=RowGradient(call.row.do, lse, out=out))
    _check_gradients(kernel, kernel.backward(*with_out), due, setting.dtype)


def small_gradients_do_not_vanish(kernel: Kernel, setting: Setting) -> None:
    if setting.dtype != torch.float16:  # which cannot hold them
        call = _call(CallMask.full(setting.seq_len, setting.seq_len), setting)
        for size in (2.0**-60, 2.0**-80):
            row = RowGradient(call.row.do * size, call.row.lse, _delta(call) * size)
            _check_exact(kernel, call._replace(row=row), f"with dO times {size:.0e}")


def deterministic_kernels_give_the_same_bits(kernel: Kernel, setting: Setting) -> None:
    if _supports(kernel, setting, deterministic=True):
        call = _call(CallMask.causal(8 * setting.seq_len), setting, kv_heads=1)
        runs = [(*kernel.forward(*call[:3], call.scores), *kernel.backward(*call)) for _ in range(4)]
        assert all(map(torch.equal, runs[0] * 3, sum(runs[1:], ()))), f"{kernel.name}: one call gave different bits"


# Lengths and strides


def no_length_is_special(kernel: Kernel, setting: Setting) -> None:
    n = setting.seq_len
    pairs = ((1, 1), (1, n), (n, 1), (n - 1, n // 2 + 1), (2 * n + 1, n), (n + 1, 3 * n - 1))
    _check_masks(kernel, setting, *(CallMask.full(*pair) for pair in pairs))
    _check_masks(kernel, setting, *map(CallMask.causal, (1, 2, n - 1, n + 1, 2 * n + 1)))


def calls_without_queries_or_keys_are_exact(kernel: Kernel, setting: Setting) -> None:
    for queries, keys in ((0, setting.seq_len), (setting.seq_len, 0), (0, 0)):
        some = _positions(causal(), range(queries), range(keys), setting.seq_len)
        _check_masks(kernel, setting, CallMask.full(queries, keys), some)


def strides_are_followed(kernel: Kernel, setting: Setting) -> None:
    """Every tensor with its axes in every order in memory, so that the last may not be contiguous; dense, or past the
    start of its storage and with NaN around every run."""
    n, orders, fewer = setting.seq_len, list(permutations(range(4))), list(permutations(range(3)))
    masks = CallMask.full(n, n - 1), _positions(window(n // 2, 1), range(n), range(1, n), n)
    for index, mask, gap in product(range(len(orders)), masks, (0, 1)):
        picked = [orders[(index + 5 * number) % len(orders)] for number in range(4)]  # all different
        call = _call(mask, setting, kv_heads=2)
        q, k, v, do = (_laid(x, order, gap) for x, order in zip((*call[:3], call.row.do), picked, strict=True))
        lse, delta = _laid(call.row.lse, fewer[index % 6], gap), _laid(_delta(call), fewer[(index + 1) % 6], gap)
        laid = KernelCase(q, k, v, RowGradient(do, lse, delta), call.scores)
        _check_exact(kernel, laid, f"with the axes of q, k, v, dO in memory as {picked}, gaps of {gap}")


def expanded_tensors_are_exact(kernel: Kernel, setting: Setting) -> None:
    """Strides of zero along any axis: one KV head for all, one token for all, the gradient of a sum."""
    n = setting.seq_len
    for mask in (CallMask.full(n, n), _positions(window(n // 2, 1), range(n), range(n), n)):
        call = _call(mask, setting)
        for what, axes in {"batch": (0,), "heads": (1,), "tokens": (2,), "dim": (3,), "all axes": (0, 1, 2, 3)}.items():
            q, k, v, do = (_expanded(x, axes) for x in (*call[:3], call.row.do))
            row = call.row._replace(do=do)
            for changed in ({"q": q}, {"k": k}, {"v": v}, {"row": row}, {"k": k, "v": v}):
                _check_exact(
                    kernel, _covered(call._replace(**changed)), f"with {', '.join(changed)} expanded over {what}"
                )
        lse, delta = _expanded(call.row.lse, (2,)), _expanded(_delta(call), (0, 1, 2))
        _check_exact(kernel, call._replace(row=RowGradient(call.row.do, lse, delta)), "with LSE and delta expanded")


def unusual_strides_are_followed(kernel: Kernel, setting: Setting) -> None:
    """One batch entry, whose stride means nothing, of tokens with gaps between them or of one token for all."""
    call = _call(CallMask.full(setting.seq_len, setting.seq_len - 1), setting)
    single = [x[:1] for x in (*call[:3], call.row.do, call.row.lse, _delta(call))]
    for stride, is_expanded in product((0, 1, 10**6), (False, True)):
        laid = [_expanded(x, (2,)) if is_expanded else _laid(x, (0, 2, 1, 3), 1) for x in single[:4]]
        q, k, v, do = (x.as_strided(x.shape, (stride, *x.stride()[1:])) for x in laid)
        changed = KernelCase(q, k, v, RowGradient(do, single[4], single[5]), call.scores)
        _check_exact(kernel, _covered(changed), f"with a stride of {stride} over one batch entry")


def inputs_are_not_written_to(kernel: Kernel, setting: Setting) -> None:
    for mask in _each_form(setting.seq_len):
        call = _call(mask, setting)
        inputs = (*call[:3], call.row.do, call.row.lse, _delta(call))
        before = [x.clone() for x in inputs]
        kernel.forward(*call[:3], call.scores)
        kernel.backward(*call)
        assert all(map(torch.equal, before, inputs)), f"{kernel.name} writes to its inputs"


CHECKS: tuple[Check, ...] = (
    a_plain_call_is_supported,
    unmasked_calls_are_exact,
    causal_calls_are_exact,
    bands_are_exact,
    documents_are_exact,
    tokens_in_several_segments_are_exact,
    rows_that_see_nothing_have_output_0_and_lse_minus_infinity,
    query_heads_share_kv_heads,
    two_head_sizes_are_exact,
    softcap_is_exact,
    large_scores_keep_their_weights,
    scores_that_overflow_do_not_count,
    a_gradient_into_the_lse_is_exact_where_do_is_zero,
    the_output_may_be_given_instead_of_delta,
    small_gradients_do_not_vanish,
    deterministic_kernels_give_the_same_bits,
    no_length_is_special,
    calls_without_queries_or_keys_are_exact,
    strides_are_followed,
    expanded_tensors_are_exact,
    unusual_strides_are_followed,
    inputs_are_not_written_to,
)


# Calls


def _each_form(n: int) -> tuple[CallMask, ...]:
    return CallMask.full(n, n), CallMask.causal(n), _positions(window(n // 2, 0), range(n), range(n), n)


def _positions(mask: Mask, q: Segment, kv: Segment, seq_q: int, seq_kv: int | None = None) -> CallMask:
    return CallMask("positions", mask, (q,), (kv,), seq_q, seq_q if seq_kv is None else seq_kv)


def _call(
    mask: CallMask, setting: Setting, *, head_dim_v: int | None = None, kv_heads: int = HEADS, softcap: float = 0.0
) -> KernelCase:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = setting.dtype) -> Tensor:
        return torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64).to(setting.device, dtype)

    queries, keys = (sum(map(len, side)) for side in (mask.q, mask.kv))
    d_qk, d_v = setting.head_dim, head_dim_v or setting.head_dim
    wide = torch.promote_types(setting.dtype, torch.float32)
    q, k, v = random(HEADS, queries, d_qk), random(kv_heads, keys, d_qk), random(kv_heads, keys, d_v)
    scores = Scores(mask, 1.3 * d_qk**-0.5, softcap)
    statistics = random(2, HEADS, queries, dtype=wide).unbind(1)
    lse = torch.logaddexp(_scored(q.double(), k.double(), scores).logsumexp(-1).to(wide), statistics[0])
    return KernelCase(q, k, v, RowGradient(random(HEADS, queries, d_v), lse, statistics[1]), scores)


def _expanded(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The first entry along these axes in place of all."""
    first = tensor
    for axis in axes:
        first = first.narrow(axis, 0, 1)
    return first.expand_as(tensor)


def _covered(call: KernelCase) -> KernelCase:
    """The call with an LSE over at least its own keys."""
    own = _scored(call.q.double(), call.k.double(), call.scores).logsumexp(-1).to(call.row.lse.dtype)
    return call._replace(row=call.row._replace(lse=torch.maximum(call.row.lse, own)))


def _level(call: KernelCase, size: float) -> KernelCase:
    """The call with scores that are all `size`, rounded to the dtype."""
    q, k = torch.zeros_like(call.q), torch.zeros_like(call.k)
    q[..., 0], k[..., 0] = size, 1.0
    return call._replace(q=q, k=k, scores=call.scores._replace(scale=1.0))


def _laid(tensor: Tensor, order: tuple[int, ...], gap: int) -> Tensor:
    """A copy with its axes in this order in memory, outermost first, and a gap after each."""
    room = [tensor.shape[axis] + gap for axis in order]
    whole = tensor.new_full((gap + prod(room),), torch.nan)[gap:].view(room)
    laid = whole.permute([order.index(axis) for axis in range(len(order))])
    return laid[tuple(slice(size) for size in tensor.shape)].copy_(tensor)


def _delta(call: KernelCase) -> Tensor:
    assert call.row.delta is not None
    return call.row.delta


def _demand(setting: Setting, **changes: Any) -> Demand:
    sizes = {"head_dim_qk": setting.head_dim, "head_dim_v": setting.head_dim}
    return Demand(device=setting.device, dtype=setting.dtype, **(sizes | changes))


def _supports(kernel: Kernel, setting: Setting, **changes: Any) -> bool:
    return kernel.unsupported_reason(_demand(setting, **changes)) is None


# Truth


def _scored(q: Tensor, k: Tensor, scores: Scores) -> Tensor:
    products = q @ k.repeat_interleave(HEADS // k.shape[1], 1).mT * scores.scale
    if scores.softcap:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    return products.masked_fill(~_seen(scores.mask).to(q.device), -torch.inf)


@lru_cache(maxsize=16)
def _seen(mask: CallMask) -> Tensor:
    """(queries, keys), True where the query sees the key; from the definition, pair by pair."""
    q_at, kv_at = ([x for segment in side for x in segment] for side in (mask.q, mask.kv))
    seen = [[mask.form == "full" or is_unmasked(mask.mask, x, y, mask.seq_q, mask.seq_kv) for y in kv_at] for x in q_at]
    return torch.tensor(seen, dtype=torch.bool).view(len(q_at), len(kv_at))


def is_unmasked(mask: Mask, x: int, y: int, seq_q: int, seq_kv: int) -> bool:
    """The definition of a mask, pair by pair: True if the query at position x sees the key at position y."""
    docs = mask.documents
    cuts_q, cuts_kv = (docs.q, docs.kv) if docs else ((0, seq_q), (0, seq_kv))
    for q0, q1, kv0, kv1 in zip(cuts_q, cuts_q[1:], cuts_kv, cuts_kv[1:], strict=False):
        if q0 <= x < q1 and kv0 <= y < kv1:
            distance = (y - kv1) - (x - q1)  # bottom-right: the last query stands at the last key
            return (mask.left is None or distance >= -mask.left) and (mask.right is None or distance <= mask.right)
    return False


def _truth(call: KernelCase) -> tuple[Tensor, Tensor, Gradients]:
    """Output, LSE and gradients in float64; autograd of sum(O∘dO) - sum(delta · row sums of the weights)."""
    q, k, v = inputs = [x.detach().double().requires_grad_() for x in call[:3]]
    with torch.enable_grad():
        scored, values = _scored(q, k, call.scores), v.repeat_interleave(HEADS // v.shape[1], 1)
        weights = (scored - _finite(call.row.lse.double())).exp()
        worth = ((weights @ values) * call.row.do.double()).sum() - (weights.sum(-1) * _delta(call).double()).sum()
        gradients = Gradients(*torch.autograd.grad(worth, inputs))
    lse = scored.detach().logsumexp(-1)
    weights = scored.detach().softmax(-1).masked_fill((lse == -torch.inf)[..., None], 0.0)
    return weights @ values.detach(), lse, gradients


def _finite(lse: Tensor) -> Tensor:
    return lse.clamp_min(torch.finfo(lse.dtype).min)[..., None]


# Comparison


def _check_masks(kernel: Kernel, setting: Setting, *masks: CallMask, **options: Any) -> None:
    for mask in masks:
        _check_exact(kernel, _call(mask, setting, **options), f"with {mask}")


def _check_exact(kernel: Kernel, call: KernelCase, note: str = "") -> tuple[Tensor, Tensor]:
    """Check output, LSE and gradients against the truth; returns the kernel's output and LSE."""
    due, due_lse, due_gradients = _truth(call)
    dtype = call.q.dtype
    out, lse = kernel.forward(*call[:3], call.scores)
    _check_near(kernel, out, due, 2, dtype, f"output {note}".strip())
    _check_lse(kernel, lse, due_lse, dtype, note)
    _check_gradients(kernel, kernel.backward(*call), due_gradients, dtype, note)
    return out, lse


def _check_gradients(kernel: Kernel, ours: Gradients, due: Gradients, dtype: torch.dtype, note: str = "") -> None:
    for name in Gradients._fields:
        _check_near(kernel, getattr(ours, name), getattr(due, name), 6, dtype, f"{name} {note}".strip())


def _check_near(kernel: Kernel, ours: Tensor, due: Tensor, roundings: int, dtype: torch.dtype, what: str) -> None:
    """Check that the relative error is within `roundings` roundings to the dtype, plus that of sums in `wide`."""
    wide = torch.promote_types(dtype, torch.float32)
    allowed = roundings * torch.finfo(dtype).eps / 2 + 64 * torch.finfo(wide).eps
    assert ours.shape == due.shape, f"{kernel.name}: {what}: shape {tuple(ours.shape)}, expected {tuple(due.shape)}"
    assert torch.promote_types(ours.dtype, dtype) == ours.dtype, f"{kernel.name}: {what}: {ours.dtype} is too narrow"
    size = due.norm().clamp_min(torch.finfo(due.dtype).tiny)
    error = float((ours.double() - due).norm() / size)
    assert error <= allowed, f"{kernel.name}: {what}: off by {error:.1e} of its size, expected {allowed:.1e} at most"


def _check_lse(kernel: Kernel, ours: Tensor, due: Tensor, dtype: torch.dtype, note: str = "") -> None:
    """Absolute: 2^-12 for 16-bit dtypes, whose kernels may take exponentials of two that are not exact."""
    allowed = 2.0**-12 if dtype.itemsize == 2 else 64 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        ours.double(), due, rtol=0, atol=allowed, msg=lambda text: f"{kernel.name}: LSE {note}: {text}"
    )
