"""Stand-ins for fused attention, computed densely: they check what they are given, and write down their calls."""

from __future__ import annotations

import struct
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mesh_attention.kernels.windowed import Window


def seen_by_flash2(queries: int, keys: int, left: int, right: int) -> Tensor:
    """The mask that flash-attn 2 makes of a window, with the way it rewrites its reaches (csrc/flash_api.cpp)."""
    left = -1 if left >= keys else left
    right = -1 if right >= keys else right
    if left < 0 and right < 0:
        return torch.ones(queries, keys, dtype=torch.bool)
    left = keys if left < 0 else left
    right = keys if right < 0 else right
    distance = torch.arange(keys)[None] - torch.arange(queries)[:, None] - (keys - queries)
    return (distance >= -left) & (distance <= right)


def seen_in(window: Window) -> Tensor:
    left, right = (-1 if reach is None else reach for reach in (window.left, window.right))
    return seen_by_flash2(len(window.q), len(window.kv), left, right)


def dense_forward(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    assert seen.any(1).all(), "fused kernels disagree about rows that see nothing"
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def dense_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Tensor, scale: float
) -> tuple[Tensor, ...]:
    groups = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(groups, 1) for x in (k, v))
    weights = (q @ wide_k.mT * scale - lse[..., None]).exp().masked_fill(~seen, 0.0)
    d_scores = weights * (do @ wide_v.mT - (out * do).sum(-1, keepdim=True)) * scale
    dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (d_scores.mT @ q, weights.mT @ do))
    return d_scores @ wide_k, dk, dv


def assert_loadable(*tensors: Tensor) -> None:
    """16 bytes at a time, from the start of every head of every token."""
    for tensor in tensors:
        assert tensor.data_ptr() % 16 == 0
        assert tensor.stride(-1) == 1
        steps = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
        assert all(stride * tensor.element_size() % 16 == 0 for stride in steps if stride != 1)


class FakeAten:
    """torch's operators for cuDNN and flash-attn 2. `calls`: which ran, and for cuDNN whether causally."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.modes: list[int] = []

    def cudnn_forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> tuple[Any, ...]:
        bias, wants_lse, dropout, is_causal, wants_debug = rest
        assert (bias, wants_lse, dropout, wants_debug) == (None, True, 0.0, False)
        assert_loadable(q, k, v)
        out, lse = dense_forward(q, k, v, self._seen_by_cudnn(q, k, is_causal), scale)
        self.calls.append(f"cudnn forward{' causal' * is_causal}")
        return out, lse[..., None], None, None, q.shape[2], k.shape[2], None, None, None

    def cudnn_backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> tuple[Any, ...]:
        out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, is_causal = rest
        assert (bias, cum_q, cum_k, max_q, max_k, dropout) == (None, None, None, q.shape[2], k.shape[2], 0.0)
        assert seed.dtype == offset.dtype == torch.int64
        assert_loadable(do, q, k, v, out)
        assert lse.is_contiguous()
        # Plans are kept by the strides of Q, K and V and the bytes of the other arguments; torch's own may be of any O.
        assert struct.pack("f", dropout) != struct.pack("f", 0.0), "a plan of torch's own is used"
        assert out.shape == q.shape
        for given in (out, do):
            strides = zip(q.shape, given.stride(), torch.empty_like(q).stride(), strict=True)
            assert all(size == 1 or a == b for size, a, b in strides), "a plan for other strides is used"
        self.calls.append(f"cudnn backward{' causal' * is_causal}")
        return dense_backward(do, q, k, v, out, lse[..., 0], self._seen_by_cudnn(q, k, is_causal), scale)

    def flash_forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **window: Any) -> tuple[Any, ...]:
        assert rest == (None, None, q.shape[1], k.shape[1], 0.0, False, False)
        assert_loadable(q, k, v)
        self.calls.append("flash forward")
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = dense_forward(q, k, v, self._seen_by_flash(q, k, window), window["scale"])
        return out.transpose(1, 2), lse, None, None, None

    def flash_backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **window: Any) -> tuple[Any, ...]:
        out, lse, cum_q, cum_k, max_q, max_k, dropout, is_causal, _, _ = rest
        assert (cum_q, cum_k, max_q, max_k, dropout, is_causal) == (None, None, q.shape[1], k.shape[1], 0.0, False)
        assert_loadable(do, q, k, v, out)
        assert lse.is_contiguous()
        self.calls.append("flash backward")
        self.modes.append(torch.get_deterministic_debug_mode())
        do, q, k, v, out = (x.transpose(1, 2) for x in (do, q, k, v, out))
        found = dense_backward(do, q, k, v, out, lse, self._seen_by_flash(q, k, window), window["scale"])
        return tuple(gradient.transpose(1, 2) for gradient in found)

    def _seen_by_cudnn(self, q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
        queries, keys = q.shape[2], k.shape[2]
        assert keys > 1, "cuDNN refuses one key"
        assert queries == keys or not is_causal, "cuDNN aligns at the top left"
        return torch.ones(queries, keys, dtype=torch.bool).tril() if is_causal else torch.ones(1, 1, dtype=torch.bool)

    def _seen_by_flash(self, q: Tensor, k: Tensor, window: dict[str, Any]) -> Tensor:
        left, right = (-1 if window[f"window_size_{side}"] is None else window[f"window_size_{side}"] for side in SIDES)
        return seen_by_flash2(q.shape[2], k.shape[2], left, right)


SIDES = ("left", "right")


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int | None, right: int | None) -> tuple[Any, ...]:
    assert_loadable(q, k, v)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = dense_forward(q, k, v, _seen(q, k, left, right), scale)
    return out.transpose(1, 2).contiguous(), lse


def _backward(grads: tuple[Tensor, ...], tensors: tuple[Tensor, ...], lse: Tensor, scale: float, reach: Any) -> None:
    assert_loadable(*grads, *tensors)
    assert lse.is_contiguous()
    do, q, k, v, out = (x.transpose(1, 2) for x in tensors)
    for gradient, found in zip(grads, dense_backward(do, q, k, v, out, lse, _seen(q, k, *reach), scale), strict=True):
        gradient.copy_(found.transpose(1, 2))


def _seen(q: Tensor, k: Tensor, left: int | None, right: int | None) -> Tensor:
    return seen_by_flash2(q.shape[2], k.shape[2], -1 if left is None else left, -1 if right is None else right)


def flash_attn_2(calls: list[str]) -> ModuleType:
    """The parameters of flash-attn 2.7 and later: none of them has a default."""

    def forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax
    ):  # fmt: skip
        assert (dropout_p, causal, softcap, alibi_slopes, return_softmax) == (0.0, False, 0.0, None, False)
        assert isinstance(window_size_left, int)
        calls.append("2 forward")
        return *_forward(q, k, v, softmax_scale, window_size_left, window_size_right), None, None

    def backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None
    ):  # fmt: skip
        assert (dropout_p, causal, softcap, alibi_slopes, deterministic) == (0.0, False, 0.0, None, False)
        calls.append("2 backward")
        reach = window_size_left, window_size_right
        _backward((dq, dk, dv), (dout, q, k, v, out), softmax_lse, softmax_scale, reach)

    return _module("flash_attn.flash_attn_interface", _flash_attn_forward=forward, _flash_attn_backward=backward)


def flash_attn_3(calls: list[str]) -> ModuleType:
    """The parameters of flash-attn 3, as custom operators, which show ``*args`` for a signature."""

    def forward(
        q, k, v, k_new=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0
    ):
        assert (k_new, causal, softcap) == (None, False, 0.0)
        calls.append("3 forward")
        return *_forward(q, k, v, softmax_scale, window_size_left, window_size_right), None, None

    def backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, dq=None, dk=None, dv=None, softmax_scale=None,
        is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False
    ):  # fmt: skip
        assert (cu_seqlens_q, is_causal, softcap, deterministic) == (None, False, 0.0, False)
        assert isinstance(window_size_right, int)
        calls.append("3 backward")
        reach = window_size_left, window_size_right
        _backward((dq, dk, dv), (dout, q, k, v, out), softmax_lse, softmax_scale, reach)

    return _module(
        "flash_attn_interface", _flash_attn_forward=_Operator(forward), _flash_attn_backward=_Operator(backward)
    )


def flash_attn_4(calls: list[str]) -> ModuleType:
    """The parameters of flash-attn 4: unbounded is None, the LSE is asked for, no windows in backward."""

    def forward(
        q, k, v, softmax_scale=None, causal=False, softcap=None, window_size_left=None, window_size_right=None,
        return_lse=False
    ):  # fmt: skip
        assert (causal, softcap, return_lse) == (False, 0.0, True)
        assert (window_size_left, window_size_right) in ((None, None), (None, 0))
        calls.append("4 forward")
        return _forward(q, k, v, softmax_scale, window_size_left, window_size_right)

    def backward(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, deterministic=False, dq=None, dk=None, dv=None
    ):  # fmt: skip
        assert (causal, softcap, deterministic) == (False, 0.0, False)
        assert (window_size_left, window_size_right) in ((None, None), (None, 0))
        calls.append("4 backward")
        _backward((dq, dk, dv), (dout, q, k, v, out), lse, softmax_scale, (window_size_left, window_size_right))

    return _module("flash_attn.cute.interface", _flash_attn_fwd=forward, _flash_attn_bwd=backward)


class _Operator:
    def __init__(self, function: Any) -> None:
        self._init_fn = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._init_fn(*args, **kwargs)


def _module(name: str, **functions: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(functions)
    return module
