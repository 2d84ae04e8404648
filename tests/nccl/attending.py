"""One attention call on this rank, forward and backward, and how far it is from dense attention in float64."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import Any

import torch
from attention_cases import BY_NAME, CASES, Answer, Case, dense_answer, spread_out, tiles, whole_tensors
from gpu.test_attention import ROUNDINGS, SLACK, relative_error
from torch import Tensor

from mesh_attention import MeshAttention
from nccl.rig import DEVICE, SIZES

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
INNER = {4: (2, 1), 6: (1, 3), 8: (2, 2)}
ALWAYS = ("causal-documents-window", "shorter-than-the-ranks")
"""Cases for every planner on 8 ranks: all features of a mask at once, and ranks without tokens."""


def planners(ranks: int) -> dict[str, dict[str, Any]]:
    """Every planner, route and grouping for a number of ranks, by name."""
    tile = min(tiles(ranks), key=lambda tile: abs(tile[0] - tile[1]))
    found: dict[str, dict[str, Any]] = {
        "ring": {"method": "ring"},
        "ring, routed": {"method": "ring", "route": "ring"},
        "pass-q": {"method": "pass-q"},
        "mesh": {"method": "mesh", "tile": tile},
        "mesh, routed": {"method": "mesh", "tile": tile, "route": "ring", "partials": "ring"},
        "mesh, grouped": {"method": "mesh", "tile": tile, "blocks_per_call": 3},
        "mesh, kept": {"method": "mesh", "tile": tile, "blocks_per_call": 2, "keep": ("kv",)},
        "attention2d": {"method": "attention2d", "tile": tile},
        "attention2d, kept": {"method": "attention2d", "tile": tile, "keep": ("q", "kv")},
        "ulysses": {"method": "ulysses", "ulysses_degree": ranks},
    }
    if ranks in INNER:
        degree = 3 if ranks == 6 else 2
        found["mesh, inner"] = {"method": "mesh", "tile": tile, "inner": INNER[ranks]}
        found["ulysses x mesh"] = {"method": "mesh", "ulysses_degree": degree}
        found["ulysses x mesh, kept"] = {"method": "mesh", "ulysses_degree": degree, "keep": ("q", "kv")}
        waves = {"keep": ("own",), "cut": "rows"}
        found["ulysses x mesh, waves"] = {"method": "mesh", "ulysses_degree": degree, "waves": degree, **waves}
        found["ulysses, waves"] = {"method": "ulysses", "ulysses_degree": ranks, "waves": 2, **waves}
        found["usp"] = {"method": "ring", "ulysses_degree": degree}
    return found


def cases_of(ranks: int, planner: str) -> list[tuple[str, torch.dtype]]:
    """Some masks, each in one dtype.

    Most of a case's time is planning, so a planner gets half of the masks, others with each number of ranks. So every
    mask meets every number of ranks and every dtype, but not all of them at once.
    """
    sizes = [size for size in SIZES if planner in planners(size)]
    turn = list(planners(ranks)).index(planner) + sizes.index(ranks)
    stride, always = 2 * len(sizes), ALWAYS if ranks == max(SIZES) else ()
    chosen = [i for i, case in enumerate(CASES) if (i - turn) % stride == 0 or case.name in always]
    return [(CASES[i].name, DTYPES[(i // 4 + SIZES.index(ranks)) % len(DTYPES)]) for i in chosen]


def widened(case: Case, degree: int) -> Case:
    """With as many times the heads, so that Ulysses can share them out."""
    return replace(case, heads=case.heads * degree, kv_heads=case.kv_heads * degree)


@lru_cache(maxsize=512)
def truth(name: str, dtype: torch.dtype, degree: int = 1, seed: int = 0) -> Answer:
    with torch.inference_mode(False), torch.enable_grad():
        return dense_answer(widened(BY_NAME[name], degree), dtype, seed)


def worst(errors: Iterable[float]) -> float:
    """The largest, or NaN if one of them is: `max` may pass over it."""
    return float(torch.tensor(list(errors), dtype=torch.float64).max())


class Attended:
    """A case on this rank: its forward pass is made at once, its backward pass by `errors`."""

    def __init__(
        self, attention: MeshAttention, name: str, dtype: torch.dtype, *, degree: int = 1, seed: int = 0, **call: Any
    ) -> None:
        self.attention, self.dtype = attention, dtype
        self.case = case = widened(BY_NAME[name], degree)
        self.truth = truth(name, dtype, degree, seed)
        q, k, v, self.d_out, self.d_lse = whole_tensors(case, dtype, seed)
        self.inputs = [self.mine(t).requires_grad_(need) for t, need in zip((q, k, v), case.needs_grad, strict=True)]
        given = [spread_out(t) if case.strided else t[0] if case.packed else t for t in self.inputs]
        call = {"seq_len": case.seq_q, "seq_len_k": case.seq_kv, "return_lse": True} | case.call | call
        self.out, self.lse = attention(*given, **call)
        if case.packed:
            self.out, self.lse = self.out[None], self.lse[None]

    def mine(self, whole: Tensor, dim: int = 1) -> Tensor:
        shard: Tensor = self.attention.shard(whole, dim=dim)
        return shard.to(DEVICE)

    def loss(self) -> Tensor:
        loss = (self.out.double() * self.mine(self.d_out).double()).sum()
        return loss + (self.lse.double() * self.mine(self.d_lse, 2).double()).sum() if self.case.lse_gradient else loss

    def gradients(self) -> list[Tensor]:
        return list(torch.autograd.grad(self.loss(), [t for t in self.inputs if t.requires_grad]))

    def forward_error(self) -> float:
        """The largest error of the output and the LSE, in tolerances of the dtype."""
        lse, due = self.lse.detach().cpu(), self.mine(self.truth.lse, 2).cpu()
        seen = due.isfinite()
        whole = self.attention.unshard(self.out.detach()).cpu()
        errors = [
            relative_error(self.out.detach().cpu(), self.mine(self.truth.out).cpu()),
            relative_error(lse[seen], due[seen]),
            relative_error(whole, self.truth.out),
            0.0 if torch.equal(lse.isfinite(), seen) else inf,  # raised later: the other ranks go on
        ]
        return worst(errors) / (SLACK * ROUNDINGS[self.dtype])

    def error(self) -> float:
        """The same of both passes."""
        due = [self.mine(t) for t, need in zip(self.truth.gradients, self.case.needs_grad, strict=True) if need]
        errors = [relative_error(ours.cpu(), theirs.cpu()) for ours, theirs in zip(self.gradients(), due, strict=True)]
        return worst([self.forward_error(), worst(errors) / (SLACK * ROUNDINGS[self.dtype])])


def errors_of_cases(
    group: Any, options: dict[str, Any], cases: Sequence[tuple[str, torch.dtype]], call: dict[str, Any]
) -> dict[str, float]:
    """The error of each case, in tolerances, by name and dtype; all by one MeshAttention."""
    attention, degree = MeshAttention(group, **options), options.get("ulysses_degree", 1)
    errors: dict[str, float] = {}
    for name, dtype in cases:
        where = f"{name}, {dtype}"
        try:
            errors[where] = Attended(attention, name, dtype, degree=degree, **call).error()
        except Exception as error:
            raise RuntimeError(where) from error
    return errors


def assert_all_close(answers: list[dict[str, float]]) -> None:
    for rank, errors in enumerate(answers):
        wrong = {where: f"{error:.3g} tolerances" for where, error in errors.items() if not error <= 1}
        assert not wrong, f"rank {rank}: {wrong}"
