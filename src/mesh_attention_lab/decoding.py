"""Forecasts of a decoded step of one layer, in closed form: read K and V, exchange partial results, merge them.

An exchange is between all ranks at once: it takes the latency of its slowest link, and the time that the busiest port
or NIC needs for its bytes. What many small messages cost besides is left out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from mesh_attention.plan.serving import MOST_DECODED, Combine, DecodePlan, Queries, kv_token_nbytes

from mesh_attention.errors import ProblemError, TopologyError
from mesh_attention.problem import Problem
from mesh_attention.topology import LinkClass, Topology
from mesh_attention.units import format_nbytes, format_time

CANDIDATES: tuple[tuple[Queries, Combine], ...] = (
    ("replicated", "all_gather"),
    ("replicated", "reduce_scatter"),
    ("sharded", "reduce_scatter"),
)
"""Simplest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeForecast:
    """The parts of one decoded step of one layer, on the busiest rank, which is the first: it has the largest slice."""

    plan: DecodePlan
    attend_s: float
    exchange_s: float
    merge_s: float
    reason: str = ""

    @property
    def time_s(self) -> float:
        return self.attend_s + self.exchange_s + self.merge_s

    @property
    def sent_nbytes(self) -> int:
        return max(self.plan.sent_nbytes(rank) for rank in (0, self.plan.ranks - 1))


def decode_plans(problem: Problem, queries: Queries | None = None) -> list[DecodePlan]:
    """The plans of a step, or those with such `queries`. Each batch entry is a sequence with its new tokens."""
    if problem.seq_q > MOST_DECODED:
        raise ProblemError(
            f"a decoded step takes at most {MOST_DECODED} new tokens of each sequence, got {problem.seq_q:,}; a turn "
            "takes more"
        )
    return [
        DecodePlan(
            ranks=problem.ranks,
            sequences=problem.batch,
            new_tokens=problem.seq_q,
            heads=problem.heads,
            kv_heads=problem.kv_heads,
            head_dim_qk=problem.head_dim_qk,
            head_dim_v=problem.head_dim_v,
            dtype=problem.dtype,
            queries=held,
            combine=combine,
        )
        for held, combine in CANDIDATES
        if queries in (None, held)
    ]


def forecast_decoding(
    problem: Problem, topology: Topology, *, queries: Queries | None = None
) -> tuple[DecodeForecast, ...]:
    """The chosen plan, then the others, fastest first; only those of `queries`, if given."""
    if problem.ranks != topology.ranks:
        raise TopologyError(f"the problem has {problem.ranks} ranks and {topology.name} has {topology.ranks}")
    forecasts = [forecast_plan(plan, problem, topology) for plan in decode_plans(problem, queries)]
    first, *losers = sorted(forecasts, key=lambda forecast: forecast.time_s)
    return first, *(replace(loser, reason=_why_not(loser, first)) for loser in losers)


def forecast_plan(plan: DecodePlan, problem: Problem, topology: Topology) -> DecodeForecast:
    device = topology.device
    read_s = kv_nbytes(problem) / (device.memory_gb_per_s * 1e9)
    compute_s = problem.flops("forward") / problem.ranks / (device.forward.tflops * 1e12)
    merged = plan.rows if plan.combine == "all_gather" else max(map(len, plan.slices))
    touched = (plan.ranks + 1) * merged * plan.row_nbytes
    return DecodeForecast(
        plan=plan,
        # Many queries that share keys may take longer to compute than the keys take to read.
        attend_s=device.forward.call_us * 1e-6 + max(compute_s, read_s),
        exchange_s=sum(_exchange_s(plan, number, topology) for number in range(plan.exchanges)),
        merge_s=device.touch_seconds(touched) if plan.ranks > 1 else 0.0,
    )


def kv_nbytes(problem: Problem) -> int:
    """Bytes of K and V that the rank with the most tokens reads in one layer."""
    return problem.batch * -(-problem.seq_kv // problem.ranks) * kv_token_nbytes(problem)


def forecast_as_json(forecast: DecodeForecast) -> dict[str, Any]:
    figures = {name: getattr(forecast, name) for name in ("time_s", "sent_nbytes")}
    return {"name": forecast.plan.name, "exchanges": forecast.plan.exchanges} | figures | asdict(forecast)


def travel_words(problem: Problem) -> str:
    """The reason why partial results travel, and not keys and values."""
    plan = decode_plans(problem)[0]
    partials, kv = format_nbytes(plan.rows * plan.row_nbytes), format_nbytes(kv_nbytes(problem))
    return f"Partial results are {partials} a rank, keys and values {kv}: partial results travel."


def _exchange_s(plan: DecodePlan, exchange: int, topology: Topology) -> float:
    """Seconds until a rank has sent and received everything; port and NIC work at the same time."""
    first, last = 0, plan.ranks - 1  # slices are even, and larger ones come first
    nbytes = max(plan.exchanged_nbytes(exchange, *pair) for pair in ((first, last), (last, first)))
    here = min(topology.ranks, topology.ranks_per_node)
    peers: dict[LinkClass, int] = {"inside": here - 1, "between": topology.ranks - here}
    ranks_per_nic = -(-here // topology.nics_per_node)
    streams = {"inside": 1, "between": ranks_per_nic}
    both_ways = 1 if topology.full_duplex else 2
    return max(
        topology.link(kind).seconds(both_ways * number * nbytes * streams[kind])
        for kind, number in peers.items()
        if number
    )


def _why_not(loser: DecodeForecast, chosen: DecodeForecast) -> str:
    if loser.time_s <= chosen.time_s:
        return "as fast"
    if loser.exchange_s - chosen.exchange_s < loser.merge_s - chosen.merge_s:
        return f"merges every row on every rank: {format_time(loser.merge_s)}"
    is_longer = loser.plan.exchanges > chosen.plan.exchanges
    if is_longer and loser.sent_nbytes <= chosen.sent_nbytes:
        return "one more exchange, and its latency"
    more = f"sends {loser.sent_nbytes / max(1, chosen.sent_nbytes):.1f} times the bytes"
    return f"one more exchange, and {more}" if is_longer else more
