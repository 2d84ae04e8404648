"""The ways to plan a decoded step of one layer, and their forecasts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from mesh_attention.plan.blocks import token_nbytes
from mesh_attention.plan.counts import rank_costs
from mesh_attention.plan.footprint import kv_nbytes
from mesh_attention.plan.plan import Plan
from mesh_attention.planners.decode import Combining, Queries, StepShape, plan_decode
from mesh_attention.prices import decode_seconds
from mesh_attention.problem import Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.timeline import Timeline
from mesh_attention.topology import Topology
from mesh_attention.units import format_nbytes, format_time

CANDIDATES: tuple[tuple[Queries, Combining], ...] = (
    ("replicated", "all_gather"),
    ("replicated", "reduce_scatter"),
    ("sharded", "reduce_scatter"),
)
"""Simplest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeForecast:
    """A way to plan a decoded step of one layer, and its times on the busiest rank."""

    queries: Queries
    combine: Combining
    plan: Plan
    timeline: Timeline
    attend_s: float
    reason: str = ""

    @property
    def name(self) -> str:
        return self.queries if self.queries == "sharded" else f"{self.queries}, {self.combine}"

    @property
    def time_s(self) -> float:
        return self.timeline.time_s

    @property
    def exchange_s(self) -> float:
        return self.timeline.exposed_s

    @property
    def merge_s(self) -> float:
        """Merging partials, and copying what is sent."""
        return self.timeline.compute_s - self.attend_s

    @property
    def exchanges(self) -> int:
        """Exchanges between all ranks, one after the other."""
        return 0 if self.plan.problem.ranks == 1 else 1 if self.combine == "all_gather" else 2

    @property
    def sent_nbytes(self) -> int:
        """Bytes that the busiest rank sends: the first, which has the largest slice, or the last."""
        return max(rank_costs(self.plan, rank).sent_nbytes for rank in (0, self.plan.problem.ranks - 1))

    @property
    def steps(self) -> str:
        """What a rank does, in words."""
        words = ["attend all queries to its own tokens"]
        if self.combine == "all_gather":
            words.append("send all partials to all ranks, merge all rows")
        else:
            words.append("send each rank the partials of its slice, merge its own slice")
        words = ["send q, k, v to all ranks", *words] if self.queries == "sharded" else words
        if (self.queries, self.combine) == ("replicated", "reduce_scatter"):
            words.append("send the merged slice to all ranks")
        return "; ".join(words) if self.exchanges else "attend all queries to its own tokens"


def decode_forecasts(
    problem: Problem, topology: Topology, *, queries: Queries | None = None, spans_of: Collection[int] = ()
) -> tuple[DecodeForecast, ...]:
    """Every way to plan a step, simplest first; only those of `queries`, if given. Each batch entry is a sequence with
    its new tokens."""
    attend_s = decode_seconds(topology.device, problem)
    shape = StepShape(
        new_tokens=(problem.seq_q,) * problem.batch,
        ranks=problem.ranks,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        head_dim_qk=problem.head_dim_qk,
        head_dim_v=problem.head_dim_v,
        dtype=problem.dtype,
    )
    forecasts = []
    for held, combine in CANDIDATES:
        if queries in (None, held):
            plan = plan_decode(shape, queries=held, combining=combine)
            timeline = simulate(plan, topology, attend_s=attend_s, spans_of=spans_of)
            forecasts.append(
                DecodeForecast(queries=held, combine=combine, plan=plan, timeline=timeline, attend_s=attend_s)
            )
    return tuple(forecasts)


def by_time(forecasts: Collection[DecodeForecast]) -> tuple[DecodeForecast, ...]:
    """The chosen one, then the others and why they are not, fastest first."""
    first, *losers = sorted(forecasts, key=lambda forecast: forecast.time_s)
    return first, *(replace(loser, reason=_why_not(loser, first)) for loser in losers)


def forecast_as_json(forecast: DecodeForecast) -> dict[str, Any]:
    names = ("name", "queries", "combine", "exchanges", "time_s", "attend_s", "exchange_s", "merge_s", "sent_nbytes")
    figures = {name: getattr(forecast, name) for name in names}
    return figures | {"reason": forecast.reason, "plan": str(forecast.plan), "digest": forecast.plan.digest}


def travel_words(problem: Problem) -> str:
    """The reason why partial results travel, and not keys and values."""
    partials = format_nbytes(problem.batch * problem.seq_q * token_nbytes("o", problem))
    kv = format_nbytes(kv_nbytes(problem))
    return f"Partial results are {partials} a rank, keys and values {kv}: partial results travel."


def _why_not(loser: DecodeForecast, chosen: DecodeForecast) -> str:
    if loser.time_s <= chosen.time_s:
        return "as fast"
    is_longer = loser.exchanges > chosen.exchanges
    if is_longer and loser.sent_nbytes <= chosen.sent_nbytes:
        return "one more exchange, and its latency"
    more = f"sends {loser.sent_nbytes / max(1, chosen.sent_nbytes):.1f} times the bytes"
    if is_longer:
        return f"one more exchange, and {more}"
    if loser.exchange_s - chosen.exchange_s >= loser.merge_s - chosen.merge_s:
        return more
    work = "merges every row on every rank" if loser.combine == "all_gather" else "copies the tokens that it sends"
    return f"{work}: {format_time(loser.merge_s)}"
