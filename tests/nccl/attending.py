"""Calls over NCCL, beside dense attention: which cases each planner meets, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from attending import CASES, Attended, Call, planners, widened

from mesh_attention import MeshAttention
from nccl.rig import DEVICE

DTYPES = ("float32", "bfloat16", "float64", "float16")
ALWAYS = ("causal-documents-window", "shorter-than-the-ranks")
"""Cases for every planner on 8 ranks: all features of a mask at once, and ranks without tokens."""
EVERY = [(8, name) for name in planners(8)] + [(3, name) for name in planners(3)] + [(2, "ring, routed"), (2, "mesh")]
"""What NCCL may pair wrongly is which messages of two ranks meet. That depends on the planner, on an even or odd number
of ranks, and on two ranks being both neighbours of each other. Over Gloo, all planners meet all numbers of ranks."""


def cases_of(ranks: int, planner: str) -> dict[str, Call]:
    """Every sixth case, each in one dtype, other ones for each planner: most of a case's time is planning.

    Every case is met on 8 ranks. Over Gloo and in one process, all of them meet every planner.
    """
    turn = list(planners(ranks)).index(planner) + ranks
    chosen = [
        (i, name)
        for i, name in enumerate(CASES)
        if (i - turn) % 6 == 0 or (ranks == 8 and name in ALWAYS and i % 2 == turn % 2)
    ]
    return {name: replace(CASES[name], dtype=DTYPES[(i // 4 + turn) % len(DTYPES)]) for i, name in chosen}


def case(name: str, dtype: str = "float32", **changes: Any) -> Call:
    return replace(CASES[name], dtype=dtype, **changes)


def worst(errors: Iterable[float]) -> float:
    """The largest, or NaN if one of them is: `max` may pass over it."""
    return float(torch.tensor(list(errors), dtype=torch.float64).max())


def made(attention: MeshAttention, call: Call) -> Attended:
    return Attended(attention, call, DEVICE)


def wrong_with(group: Any, options: dict[str, Any], calls: Sequence[Call]) -> list[str]:
    """What is wrong with some calls, made by one MeshAttention one after the other."""
    attention, wrong = MeshAttention(group, **options), []
    for call in calls:
        try:
            wrong += made(attention, widened(call, options)).wrong()
        except Exception as error:
            raise RuntimeError(f"{call}") from error
    return wrong


def assert_right(answers: list[list[str]]) -> None:
    """Of all ranks."""
    assert not any(answers), answers
