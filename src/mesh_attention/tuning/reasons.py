"""Explains why a trial lost, from its numbers and those of the chosen one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from mesh_attention.plan.steps import Direction
from mesh_attention.planning.choice import FAMILIES, Choice
from mesh_attention.problem import Problem
from mesh_attention.tuning.result import Trial
from mesh_attention.tuning.traffic import traffic
from mesh_attention.units import format_nbytes, format_time

if TYPE_CHECKING:
    from mesh_attention.tuning.search import PassSearch


def why_not(loser: Trial, chosen: Trial, near_tie: float) -> str:
    """One line that names the largest cost of the loser."""
    lost = loser.time_s - chosen.time_s
    if lost <= near_tie * chosen.time_s:
        return "about as fast, and not as simple" if loser.time_s < chosen.time_s or lost > 0 else "as fast"
    exposed, computed = loser.exposed_s - chosen.exposed_s, loser.compute_s - chosen.compute_s
    if computed > exposed:
        return f"more and smaller kernel calls: computes {_ratio(loser.compute_s, chosen.compute_s)} as long"
    times = f"{format_time(loser.exposed_s)} exposed, with the chosen {format_time(chosen.exposed_s)}"
    if all(choice.is_collective for choice in loser.choices.values()):
        return f"nothing overlaps: {times}"
    if loser.between_nbytes > 1.2 * chosen.between_nbytes > 0:
        return f"sends {_ratio(loser.between_nbytes, chosen.between_nbytes)} the bytes between nodes: {times}"
    if loser.sent_nbytes > 1.2 * chosen.sent_nbytes > 0:
        return f"sends {_ratio(loser.sent_nbytes, chosen.sent_nbytes)} the bytes: {times}"
    return f"hides less behind compute: {times}"


def cannot_be_used(
    problem: Problem,
    found: Collection[str],
    searches: Mapping[Direction, PassSearch],
    limit_nbytes: float,
    candidates: Sequence[Choice],
) -> dict[str, str]:
    """The families that have no trial, and why."""
    left_out: dict[str, str] = {}
    for family in FAMILIES:
        if family in found:
            continue
        needs = [[f.peak_nbytes for c, f in s.tried.items() if c.family == family] for s in searches.values()]
        if all(needs):
            most = max(map(min, needs))
            left_out[family] = f"needs {format_nbytes(most)}, {format_nbytes(limit_nbytes)} allowed"
        elif same := [choice for choice in candidates if choice.family == family]:
            least_s = sum(
                min(traffic(c, problem, search.topology, direction).bound_s for c in same)
                for direction, search in searches.items()
            )
            left_out[family] = f"not simulated; takes at least {format_time(least_s)}"
        elif family == "ulysses":
            left_out[family] = f"{problem.kv_heads} KV heads cannot be spread over {problem.ranks} ranks"
        elif family == "double ring":
            left_out[family] = "needs several nodes of several ranks"
        else:
            left_out[family] = "every tile and degree possible here belongs to another method"
    return left_out


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.{2 if ours < 1.1 * theirs else 1}f} times" if theirs else "more"
