"""What must work, as data, and how far a call is from dense attention: in one process, and on one rank of several."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor

from mesh_attention import MeshAttention, causal, documents, full, window
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


def relative_error(ours: Tensor, theirs: Tensor, least: float = 0.01) -> float:
    """Against `least` at least: gradients that are zero have nothing to be relative to."""
    if not theirs.numel():
        return 0.0
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp_min(least))


# All ranks in one process


def attend(
    attention: MeshAttention, case: Case, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
) -> Answer:
    """The whole case through a local group: shard, attend, unshard, backward."""
    q, k, v, d_out, d_lse = (tensor.to(device) for tensor in whole_tensors(case, dtype))
    inputs = [t.requires_grad_(need) for t, need in zip((q, k, v), case.needs_grad, strict=True)]
    shards = [attention.shard(t) for t in inputs]
    if case.strided:
        shards = [[spread_out(t) for t in side] for side in shards]
    if case.packed:
        shards = [[t[0] for t in side] for side in shards]
    call = {"seq_len": case.seq_q, "seq_len_k": case.seq_kv} | case.call
    outs, lses = attention(*shards, return_lse=True, **call)
    if case.packed:
        outs, lses = [t[None] for t in outs], [t[None] for t in lses]
    out, lse = attention.unshard(outs), attention.unshard(lses, dim=2)
    loss = (out.double() * d_out.double()).sum()
    if case.lse_gradient:
        loss = loss + (lse.double() * d_lse.double()).sum()
    given_back = iter(torch.autograd.grad(loss, [t for t in inputs if t.requires_grad]))
    gradients = tuple((next(given_back) if t.requires_grad else torch.zeros_like(t)).cpu() for t in inputs)
    return Answer(out.detach().cpu(), lse.detach().cpu(), gradients)  # type: ignore[arg-type]


def assert_close(case: Case, ours: Answer, truth: Answer, tolerance: float = 1e-12, least: float = 0.01) -> None:
    assert relative_error(ours.out, truth.out, least) <= tolerance
    seen = truth.lse.isfinite()
    assert torch.equal(ours.lse.isfinite(), seen)
    assert relative_error(ours.lse[seen], truth.lse[seen], least) <= tolerance
    for mine, theirs, need in zip(ours.gradients, truth.gradients, case.needs_grad, strict=True):
        if need:
            assert relative_error(mine, theirs, least) <= tolerance


# One rank of several


class AttendedCase:
    """A case on this rank: its forward pass is made at once, its backward pass by `gradients`."""

    def __init__(
        self,
        attention: MeshAttention,
        case: Case,
        truth: Answer,
        dtype: torch.dtype = torch.float64,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        **call: Any,
    ) -> None:
        self.attention, self.case, self.truth, self.dtype, self.device = attention, case, truth, dtype, device
        q, k, v, self.d_out, self.d_lse = whole_tensors(case, dtype, seed)
        self.inputs = [self.mine(t).requires_grad_(need) for t, need in zip((q, k, v), case.needs_grad, strict=True)]
        given = [spread_out(t) if case.strided else t[0] if case.packed else t for t in self.inputs]
        call = {"seq_len": case.seq_q, "seq_len_k": case.seq_kv, "return_lse": True} | case.call | call
        self.out, self.lse = attention(*given, **call)
        if case.packed:
            self.out, self.lse = self.out[None], self.lse[None]

    def mine(self, whole: Tensor, dim: int = 1) -> Tensor:
        shard: Tensor = self.attention.shard(whole, dim=dim)
        return shard.to(self.device)

    def loss(self) -> Tensor:
        loss = (self.out.double() * self.mine(self.d_out).double()).sum()
        return loss + (self.lse.double() * self.mine(self.d_lse, 2).double()).sum() if self.case.lse_gradient else loss

    def gradients(self) -> list[Tensor]:
        return list(torch.autograd.grad(self.loss(), [t for t in self.inputs if t.requires_grad]))

    def forward_errors(self, least: float = 0.01) -> list[float]:
        """Of the output, the LSE and the whole output. Nothing is raised: the other ranks go on."""
        lse, due = self.lse.detach().cpu(), self.mine(self.truth.lse, 2).cpu()
        seen = due.isfinite()
        whole = self.attention.unshard(self.out.detach()).cpu()
        return [
            relative_error(self.out.detach().cpu(), self.mine(self.truth.out).cpu(), least),
            relative_error(lse[seen], due[seen], least),
            relative_error(whole, self.truth.out, least),
            0.0 if torch.equal(lse.isfinite(), seen) else inf,
        ]

    def gradient_errors(self, least: float = 0.01) -> list[float]:
        due = [self.mine(t) for t, need in zip(self.truth.gradients, self.case.needs_grad, strict=True) if need]
        return [relative_error(a.cpu(), b.cpu(), least) for a, b in zip(self.gradients(), due, strict=True)]


# Planners


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
