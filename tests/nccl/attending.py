"""One attention call on this rank, forward and backward, and how far it is from dense attention in float64."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from attention_cases import BY_NAME, CASES, Answer, AttendedCase, Case, dense_answer, tiles
from gpu.test_attention import ROUNDINGS, SLACK

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


class Attended(AttendedCase):
    """A case by its name, on this rank; errors are in tolerances of the dtype."""

    def __init__(
        self, attention: MeshAttention, name: str, dtype: torch.dtype, *, degree: int = 1, seed: int = 0, **call: Any
    ) -> None:
        case, due = widened(BY_NAME[name], degree), truth(name, dtype, degree, seed)
        super().__init__(attention, case, due, dtype, device=DEVICE, seed=seed, **call)

    def forward_error(self) -> float:
        """The largest error of the output and the LSE."""
        return worst(self.forward_errors(1.0)) / (SLACK * ROUNDINGS[self.dtype])

    def error(self) -> float:
        """The same of both passes."""
        backward = worst(self.gradient_errors(1.0)) / (SLACK * ROUNDINGS[self.dtype])
        return worst([self.forward_error(), backward])


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
