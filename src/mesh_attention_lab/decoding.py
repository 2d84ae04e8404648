"""Forecasts of a decoded step of one layer, in closed form: read K and V, exchange partial results, merge them.

Every kind of `DecodePlan` is priced, and next to them pass-KV, which brings all keys and values to every rank and
shows why partial results travel instead. An exchange is between all ranks at once: it takes the latency of its slowest
link, and the time that the busiest port or NIC needs for its bytes. What many small messages cost besides is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from mesh_attention.errors import ProblemError, TopologyError
from mesh_attention.plan.serving import MOST_DECODED, Combine, DecodePlan, Queries, kv_token_nbytes
from mesh_attention.problem import Problem
from mesh_attention.topology import LinkClass, Topology
from mesh_attention.units import format_nbytes, format_time

PASS_KV = "pass-KV"
CANDIDATES: tuple[tuple[Queries, Combine], ...] = (
    ("replicated", "all_gather"),
    ("replicated", "reduce_scatter"),
    ("sharded", "reduce_scatter"),
)
"""Simplest first."""
Message = Callable[[int, int], int]
"""Bytes that a rank sends to another in an exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeForecast:
    """The parts of one decoded step of one layer, on the busiest rank. `plan` is None for pass-KV."""

    plan: DecodePlan | None
    attend_s: float
    exchange_s: float
    merge_s: float
    sent_nbytes: int
    received_nbytes: int
    reason: str = ""

    @property
    def time_s(self) -> float:
        return self.attend_s + self.exchange_s + self.merge_s

    @property
    def name(self) -> str:
        return PASS_KV if self.plan is None else self.plan.name

    @property
    def exchanges(self) -> int:
        return 1 if self.plan is None else self.plan.exchanges


def decode_plan(problem: Problem, queries: Queries, combine: Combine) -> DecodePlan:
    """The plan of a step: each batch entry is a sequence, whose queries are its new tokens."""
    return DecodePlan(
        ranks=problem.ranks,
        sequences=problem.batch,
        new_tokens=problem.seq_q,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        head_dim_qk=problem.head_dim_qk,
        head_dim_v=problem.head_dim_v,
        dtype=problem.dtype,
        queries=queries,
        combine=combine,
    )


def forecast_decoding(
    problem: Problem, topology: Topology, *, queries: Queries | None = None
) -> tuple[DecodeForecast, ...]:
    """The chosen plan, then the others, fastest first; only those of `queries`, if given, and pass-KV, which comes last
    and is never chosen."""
    if problem.ranks != topology.ranks:
        raise TopologyError(f"the problem has {problem.ranks} ranks and {topology.name} has {topology.ranks}")
    if problem.seq_q > MOST_DECODED:
        raise ProblemError(
            f"a decoded step takes at most {MOST_DECODED} new tokens of each sequence, got {problem.seq_q:,}; a turn "
            "takes more"
        )
    plans = [decode_plan(problem, *candidate) for candidate in CANDIDATES if queries in (None, candidate[0])]
    first, *others = sorted(
        (forecast_plan(plan, problem, topology) for plan in plans), key=lambda forecast: forecast.time_s
    )
    losers = [*others, _pass_kv(problem, topology)]
    return first, *(replace(loser, reason=_why_not(loser, first)) for loser in losers)


def forecast_plan(plan: DecodePlan, problem: Problem, topology: Topology) -> DecodeForecast:
    merged = plan.rows if plan.combine == "all_gather" else max(map(len, plan.slices))
    touched = (plan.ranks + 1) * merged * plan.row_nbytes
    merge_s = topology.device.touch_seconds(touched) if plan.ranks > 1 else 0.0
    exchanges = [partial(plan.exchanged_nbytes, number) for number in range(plan.exchanges)]
    return DecodeForecast(
        plan=plan,
        attend_s=_attend_s(problem, topology, kv_nbytes(problem), pairs=problem.pairs / problem.ranks),
        exchange_s=sum(_exchange_s(message, topology) for message in exchanges),
        merge_s=merge_s,
        sent_nbytes=max(plan.sent_nbytes(rank) for rank in _ends(plan.ranks)),
        received_nbytes=max(plan.received_nbytes(rank) for rank in _ends(plan.ranks)),
    )


def kv_nbytes(problem: Problem) -> int:
    """Bytes of K and V that the rank with the most tokens reads in one layer."""
    return problem.batch * -(-problem.seq_kv // problem.ranks) * kv_token_nbytes(problem)


def read_s(problem: Problem, gb_per_s: float) -> float:
    """Seconds to read a rank's K and V of one layer once: no step is faster."""
    return kv_nbytes(problem) / (gb_per_s * 1e9)


def forecast_as_json(forecast: DecodeForecast) -> dict[str, Any]:
    figures = {name: getattr(forecast, name) for name in ("name", "time_s", "exchanges")}
    return figures | asdict(forecast)


def travel_words(problem: Problem) -> str:
    """The reason why partial results travel, and not keys and values."""
    plan = decode_plan(problem, "replicated", "all_gather")
    partials, kv = format_nbytes(plan.rows * plan.row_nbytes), format_nbytes(kv_nbytes(problem))
    return f"Partial results are {partials} a rank, keys and values {kv}: partial results travel."


# Prices


def _attend_s(problem: Problem, topology: Topology, nbytes: int, *, pairs: float) -> float:
    """An attention call reads K and V; many queries that share them may take longer to compute."""
    device = topology.device
    compute_s = problem.flops("forward", pairs=1) * pairs / (device.forward.tflops * 1e12)
    return device.forward.call_us * 1e-6 + max(compute_s, nbytes / (device.memory_gb_per_s * 1e9))


def _exchange_s(message: Message, topology: Topology) -> float:
    return max(_rank_s(message, topology, rank) for rank in _ends(topology.ranks))


def _ends(ranks: int) -> tuple[int, int]:
    """The first rank and the last: slices are even, and larger ones come first."""
    return 0, ranks - 1


def _rank_s(message: Message, topology: Topology, rank: int) -> float:
    """Seconds until a rank has sent and received everything; port and NIC work at the same time."""
    sent: dict[LinkClass, int] = {"inside": 0, "between": 0}
    received, peers = dict(sent), dict(sent)
    for other in range(topology.ranks):
        if other != rank:
            kind = topology.link_class(rank, other)
            peers[kind] += 1
            sent[kind] += message(rank, other)
            received[kind] += message(other, rank)
    ranks_per_nic = -(-min(topology.ranks, topology.ranks_per_node) // topology.nics_per_node)
    times = [0.0]
    for kind in sent:
        if peers[kind]:
            nbytes = max(sent[kind], received[kind]) if topology.full_duplex else sent[kind] + received[kind]
            times.append(topology.link(kind).seconds(nbytes * (ranks_per_nic if kind == "between" else 1)))
    return max(times)


def _pass_kv(problem: Problem, topology: Topology) -> DecodeForecast:
    """All keys and values go to every rank, which attends to all of them."""
    nbytes, others = kv_nbytes(problem), problem.ranks - 1
    return DecodeForecast(
        plan=None,
        attend_s=_attend_s(problem, topology, problem.ranks * nbytes, pairs=problem.pairs),
        exchange_s=_exchange_s(lambda source, dest: nbytes, topology),
        merge_s=0.0,
        sent_nbytes=others * nbytes,
        received_nbytes=others * nbytes,
    )


def _why_not(loser: DecodeForecast, chosen: DecodeForecast) -> str:
    if loser.plan is None:
        return "brings all keys and values to every rank"
    if loser.time_s <= chosen.time_s:
        return "as fast"
    if loser.exchange_s - chosen.exchange_s < loser.merge_s - chosen.merge_s:
        return f"merges every row on every rank: {format_time(loser.merge_s)}"
    if loser.exchanges > chosen.exchanges and loser.sent_nbytes <= chosen.sent_nbytes:
        return "one more exchange, and its latency"
    more = f"sends {loser.sent_nbytes / max(1, chosen.sent_nbytes):.1f} times the bytes"
    return more if loser.exchanges <= chosen.exchanges else f"one more exchange, and {more}"
