"""A stand-in for the flash-attn package, on torch's own flash operators: just what the other libraries call.

Causal calls need as many queries as keys. Torch's backward allocates its results, so they are copied to where the
caller wants them, which costs some microseconds a call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

VERSION = "2.8.3"
"""The version whose signatures these are."""
aten = torch.ops.aten


@contextmanager
def standing_in(functions: Mapping[str, Callable[..., Any]] | None = None) -> Iterator[None]:
    """While other libraries are imported, `flash_attn` is the stand-in, or has other functions, by their names there.

    Our own kernels must not find it later.
    """
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    for name, function in (FUNCTIONS if functions is None else functions).items():
        setattr(interface, name, function)
        setattr(package, name, function)
    package.flash_attn_interface, package.__version__ = interface, VERSION  # type: ignore[attr-defined]
    modules = {module.__name__: module for module in (package, interface)}
    hidden = {name: sys.modules.pop(name) for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(hidden)


# The signatures are flash-attn's, because callers read their defaults. Tensors are (batch, tokens, heads, dim).


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    _refuse_options(q, k, causal, dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    if q.is_cuda:
        lengths = (q.shape[1], k.shape[1])
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, None, None, *lengths, 0.0, causal, False, scale=softmax_scale
        )
    else:
        heads_first = _heads_first(q, *_for_each_head(q, k, v))
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*heads_first, 0.0, causal, scale=softmax_scale)
        out = out.transpose(1, 2)
    return out, lse, None, None


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> Tensor:
    _refuse_options(q, k, causal, dropout_p, window_size_left, window_size_right, softcap, alibi_slopes)
    dout, out, softmax_lse = (tensor.contiguous() for tensor in (dout, out, softmax_lse))
    if q.is_cuda:
        lengths = (q.shape[1], k.shape[1])
        given = (dout, q, k, v, out, softmax_lse, None, None, *lengths, 0.0, causal, *_no_seed(q.device))
        found = aten._flash_attention_backward(*given, scale=softmax_scale)
    else:
        keys, values = _for_each_head(q, k, v)
        given = (*_heads_first(dout, q, keys, values, out), softmax_lse, 0.0, causal)
        operator = aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = _heads_first(*operator(*given, scale=softmax_scale))
        found = (gradients[0], *(gradient.unflatten(2, (k.shape[2], -1)).sum(3) for gradient in gradients[1:]))
    for wanted, gradient in zip((dq, dk, dv), found, strict=True):
        wanted.copy_(gradient)
    return softmax_lse


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool) -> Tensor:
        out, lse, *_ = forward(q, k, v, softmax_scale=softmax_scale, causal=causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.softmax_scale, ctx.causal = softmax_scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        gradients = [torch.empty_like(tensor) for tensor in (q, k, v)]
        backward(dout, q, k, v, out, lse, *gradients, softmax_scale=ctx.softmax_scale, causal=ctx.causal)
        return *gradients, None, None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    _refuse_options(q, k, causal, dropout_p, *window_size, softcap, alibi_slopes)
    result: Tensor = _Function.apply(q, k, v, softmax_scale, causal)  # type: ignore[no-untyped-call]
    return result


def refuse(*arguments: Any, **options: Any) -> Any:
    raise NotImplementedError("the stand-in for flash-attn has no sequences of varying length")


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_flash_attn_forward": forward,
    "_flash_attn_backward": backward,
    "flash_attn_func": flash_attn_func,
    "_flash_attn_varlen_forward": refuse,
    "_flash_attn_varlen_backward": refuse,
    "flash_attn_varlen_func": refuse,
}


def _refuse_options(
    q: Tensor, k: Tensor, causal: bool, dropout_p: float, left: int, right: int, softcap: float, alibi: Tensor | None
) -> None:
    has_window = left != -1 or right not in (-1, 0 if causal else -1)
    if dropout_p or has_window or softcap or alibi is not None or (causal and q.shape[1] != k.shape[1]):
        raise NotImplementedError("the stand-in for flash-attn has no dropout, window, softcap, ALiBi or causal offset")


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def _for_each_head(q: Tensor, *tensors: Tensor) -> list[Tensor]:
    """K and V with as many heads as Q, as the operator for the CPU needs them."""
    return [tensor.repeat_interleave(q.shape[2] // tensor.shape[2], dim=2) for tensor in tensors]


_SEEDS: dict[torch.device, tuple[Tensor, Tensor]] = {}


def _no_seed(device: torch.device) -> tuple[Tensor, Tensor]:
    """What backward takes as the state of dropout, where there is none."""
    if device not in _SEEDS:
        make = torch.zeros(2, dtype=torch.uint64, device=device), torch.zeros((), dtype=torch.uint64, device=device)
        _SEEDS[device] = make
    return _SEEDS[device]
