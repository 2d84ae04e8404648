"""A second stand-in for flash-attn: plain dense attention with its masks. Slow, forward only, for any lengths.

It shows what other libraries do with windows, softcaps and lengths, which torch's flash operators do not take.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Output and LSE of (batch, tokens, heads, dim). As in flash-attn, masks are aligned at the bottom right, and a
    query that sees no key gets zeros and an LSE of +inf."""
    group = q.shape[2] // k.shape[2]
    keys, values = (tensor.repeat_interleave(group, dim=2) for tensor in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * (q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    hidden = ~visible(q.shape[1], k.shape[1], causal=causal, window=window)
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, values)
    return out, lse.masked_fill(hidden.all(-1), torch.inf)


def visible(queries: int, keys: int, *, causal: bool, window: tuple[int, int]) -> Tensor:
    """True where a query (row) sees a key (column)."""
    left, right = window
    right = 0 if causal else right
    ahead = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
    return (ahead >= -left if left >= 0 else ahead == ahead) & (ahead <= right if right >= 0 else ahead == ahead)


# The signatures are flash-attn's, because callers read their defaults.


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
    _refuse_options(dropout_p, alibi_slopes)
    window = (window_size_left, window_size_right)
    out, lse = attend(q, k, v, softmax_scale=softmax_scale, causal=causal, window=window, softcap=softcap)
    return out, lse, None, None


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, None, None]:
    _refuse_options(dropout_p, alibi_slopes)
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap}
    parts = [
        attend(q[None, a:b], k[None, c:d], v[None, c:d], window=(window_size_left, window_size_right), **options)
        for (a, b), (c, d) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    ]
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], dim=1), None, None


def refuse(*arguments: Any, **options: Any) -> Any:
    raise NotImplementedError("this stand-in for flash-attn has no backward")


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_flash_attn_forward": forward,
    "_flash_attn_varlen_forward": varlen_forward,
    "_flash_attn_backward": refuse,
    "_flash_attn_varlen_backward": refuse,
    "flash_attn_func": refuse,
    "flash_attn_varlen_func": refuse,
}


def _refuse_options(dropout_p: float, alibi_slopes: Tensor | None) -> None:
    if dropout_p or alibi_slopes is not None:
        raise NotImplementedError("this stand-in for flash-attn has no dropout and no ALiBi")
