"""What must work, as data: each case is run in one process and with real processes, against dense attention."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mesh_attention import causal, documents, full, window
from mesh_attention.masks import Mask
from mesh_attention.testing.kernel_conformance import is_unmasked


@dataclass(frozen=True)
class Case:
    name: str
    seq_q: int = 37
    seq_kv: int = 37
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 8
    head_dim_v: int = 8
    batch: int = 1
    mask: Mask = field(default_factory=full)
    call: dict[str, Any] = field(default_factory=dict)
    needs_grad: tuple[bool, bool, bool] = (True, True, True)
    lse_gradient: bool = False
    strided: bool = False
    packed: bool = False


def packed_cuts(*cuts: int) -> dict[str, Any]:
    return {"cu_seqlens_q": list(cuts)}


CASES = [
    Case("multi-head"),
    Case("grouped-query", kv_heads=2),
    Case("multi-query", kv_heads=1),
    Case("two-head-sizes", head_dim_v=5),
    Case("causal", kv_heads=2, mask=causal(), call={"causal": True}),
    Case("window", mask=window(7, 2), call={"window_size": (7, 2)}),
    Case("causal-window", kv_heads=2, mask=window(9, 0), call={"causal": True, "window_size": (9, -1)}),
    Case("documents", mask=documents([0, 5, 5, 20, 37]), call=packed_cuts(0, 5, 5, 20, 37)),
    Case(
        "causal-documents-window",
        kv_heads=2,
        mask=window(6, 0) & documents([0, 11, 30, 37]),
        call={"causal": True, "window_size": (6, 0), **packed_cuts(0, 11, 30, 37)},
    ),
    Case(
        "packed",
        kv_heads=2,
        mask=causal() & documents([0, 9, 37]),
        call={"causal": True, **packed_cuts(0, 9, 37)},
        packed=True,
    ),
    Case("cross", seq_q=23, seq_kv=41),
    Case("cross-causal", seq_q=23, seq_kv=41, mask=causal(), call={"causal": True}),
    Case("cross-causal-blind-rows", seq_q=29, seq_kv=11, mask=causal(), call={"causal": True}),
    Case(
        "cross-documents",
        seq_q=20,
        seq_kv=31,
        mask=causal() & documents([0, 7, 20], [0, 21, 31]),
        call={"causal": True, "cu_seqlens_q": [0, 7, 20], "cu_seqlens_k": [0, 21, 31]},
    ),
    Case("shorter-than-the-ranks", seq_q=3, seq_kv=3, mask=causal(), call={"causal": True}),
    Case("one-token", seq_q=1, seq_kv=1),
    Case("batch", batch=3, kv_heads=2, mask=causal(), call={"causal": True}),
    Case("softcap", kv_heads=2, mask=causal(), call={"causal": True, "softcap": 1.5}),
    Case("scale", mask=causal(), call={"causal": True, "softmax_scale": 0.7}),
    Case("lse-gradient", kv_heads=2, mask=causal(), call={"causal": True}, lse_gradient=True),
    Case("not-contiguous", kv_heads=2, batch=2, mask=causal(), call={"causal": True}, strided=True),
    Case("only-q", mask=causal(), call={"causal": True}, needs_grad=(True, False, False)),
    Case("only-v", mask=causal(), call={"causal": True}, needs_grad=(False, False, True)),
]
BY_NAME = {case.name: case for case in CASES}


def whole_tensors(case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """Q, K, V, dO and dLSE of the whole sequence; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (case.batch, case.seq_q, case.heads, case.head_dim),
        (case.batch, case.seq_kv, case.kv_heads, case.head_dim),
        (case.batch, case.seq_kv, case.kv_heads, case.head_dim_v),
        (case.batch, case.seq_q, case.heads, case.head_dim_v),
        (case.batch, case.heads, case.seq_q),
    ]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@dataclass
class Answer:
    out: Tensor
    lse: Tensor
    gradients: tuple[Tensor, Tensor, Tensor]


def dense_answer(case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> Answer:
    """Dense attention in float64, from the definition of the mask, by autograd."""
    q, k, v, d_out, d_lse = (tensor.double() for tensor in whole_tensors(case, dtype, seed))
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    seen = torch.tensor(
        [[is_unmasked(case.mask, x, y, case.seq_q, case.seq_kv) for y in range(case.seq_kv)] for x in range(case.seq_q)]
    )
    groups = case.heads // case.kv_heads
    keys, values = (t.repeat_interleave(groups, 2).transpose(1, 2) for t in (k, v))
    scores = q.transpose(1, 2) @ keys.mT * case.call.get("softmax_scale", case.head_dim**-0.5)
    if cap := case.call.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    blind = ~seen.any(1)
    lse = scores.masked_fill(blind[:, None], 0.0).logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    out = (weights @ values).transpose(1, 2)
    loss = (out * d_out).sum()
    if case.lse_gradient:
        loss = loss + (lse * d_lse).sum()
    gradients = torch.autograd.grad(loss, (q, k, v))
    return Answer(out.detach(), lse.detach().masked_fill(blind, -torch.inf), gradients)


def spread_out(tensor: Tensor) -> Tensor:
    """The same values, with no stride that `contiguous` would give: not even the last is 1."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    if not theirs.numel():
        return 0.0
    # Against 0.01 at least: gradients that are zero have nothing to be relative to.
    return float((ours.double() - theirs.double()).abs().max() / theirs.abs().max().clamp_min(0.01))


def tiles(ranks: int) -> list[tuple[int, int]]:
    return [(a, ranks // a) for a in range(1, ranks + 1) if ranks % a == 0]


def methods(ranks: int, kv_heads: int) -> list[dict[str, Any]]:
    """One of every planner for a number of ranks."""
    squarest = min(tiles(ranks), key=lambda tile: abs(tile[0] - tile[1]))
    found: list[dict[str, Any]] = [
        {"method": "ring", "route": "ring"},
        {"method": "pass-q"},
        {"method": "mesh", "tile": squarest, "route": "ring", "partials": "ring"},
        {"method": "mesh", "tile": squarest, "blocks_per_call": 3},
        {"method": "attention2d", "tile": squarest},
        {"method": "mesh", "tile": squarest, "blocks_per_call": 2, "keep": ("kv",)},
        {"method": "attention2d", "tile": squarest, "keep": ("q", "kv")},
    ]
    if ranks % 2 == 0 and kv_heads % 2 == 0:
        found.append({"method": "mesh", "ulysses_degree": 2})
        found.append({"method": "mesh", "ulysses_degree": 2, "keep": ("q", "kv")})
        found.append({"method": "mesh", "ulysses_degree": 2, "keep": ("own",), "waves": 2, "cut": "rows"})
        found.append({"method": "mesh", "tile": squarest, "waves": 2})
    return found


def all_of(*parts: Any) -> list[Any]:
    return list(itertools.product(*parts))
