"""A turn against a cache (a first prompt, if nothing is cached): its usual rivals, and what travels, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from mesh_attention.plan.assignment import Tile
from mesh_attention.plan.counts import MANY_RANKS
from mesh_attention.plan.layout import Turn
from mesh_attention.plan.serving import kv_token_nbytes
from mesh_attention.planning.choice import Choice
from mesh_attention.planning.comparison import MOST_TRANSFERS
from mesh_attention.problem import Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.topology import Topology
from mesh_attention.tuning.result import Forecast
from mesh_attention.tuning.search import Report
from mesh_attention.tuning.traffic import plan_on
from mesh_attention.units import format_nbytes

GROUPINGS = (1, 4, 16, None)
"""Blocks per call that are tried for a rival; None is cost-based."""
PRICED_RANKS = 8
GROUPINGS_OF_MANY, PRICED_OF_MANY = (16,), 1
"""The same on many ranks, where every forecast takes a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A method of other systems for serving, with the grouping that suits it best."""

    name: str
    choice: Choice
    forecast: Forecast


def turn_rivals(problem: Problem, topology: Topology, *, report: Report) -> tuple[Rival, ...]:
    """Pass-KV ring, pass-Q ring and all-gather, each forecast whether it fits into memory or not; none on so many ranks
    that their programs take too long to build."""
    if problem.ranks > MOST_TRANSFERS:
        return ()
    found = []
    for number, (name, choices) in enumerate(_rivals(problem)):
        report(f"simulating {name}", number / 3)
        forecasts = {choice: _forecast(choice, problem, topology) for choice in choices}
        best = min(forecasts, key=lambda choice: forecasts[choice].time_s)
        found.append(Rival(name=name, choice=best, forecast=forecasts[best]))
    return tuple(found)


def _rivals(problem: Problem) -> Iterator[tuple[str, list[Choice]]]:
    for name, choice in (
        ("pass-KV ring", Choice(method="ring", layout=Turn(), route="ring")),
        ("pass-Q ring", Choice(method="pass-q", layout=Turn(), route="ring")),
    ):
        resolved = choice.resolved(problem, "forward")
        groupings = GROUPINGS if problem.ranks < MANY_RANKS else GROUPINGS_OF_MANY
        yield name, [replace(resolved, blocks_per_call=blocks) for blocks in groupings]
    yield "all-gather", [Choice(method="attention2d", tile=Tile(1, problem.ranks), ulysses_degree=1, layout=Turn())]


def _forecast(choice: Choice, problem: Problem, topology: Topology) -> Forecast:
    priced_ranks = PRICED_RANKS if problem.ranks < MANY_RANKS else PRICED_OF_MANY
    return Forecast.of(simulate(plan_on(topology, problem, choice, "forward"), topology, priced_ranks=priced_ranks))


def rival_as_json(rival: Rival) -> dict[str, Any]:
    return {"name": rival.name, "choice": rival.choice.options, **asdict(rival.forecast)}


def travel_words(problem: Problem, choice: Choice) -> str:
    """The sizes of queries and of keys and values, and which of them travel under a choice."""
    tile, ulysses = choice.assignment.tile, choice.assignment.ulysses
    queries = problem.batch * problem.seq_q * problem.heads * problem.head_dim_qk * problem.itemsize
    kv = problem.batch * problem.seq_kv * kv_token_nbytes(problem)
    sizes = (
        f"{problem.seq_q:,} new queries are {format_nbytes(queries)}, keys and values {format_nbytes(kv)}, "
        f"{format_nbytes(kv / problem.ranks)} a rank"
    )
    travels = {
        (False, False): "nothing else travels" if ulysses > 1 else "nothing travels",
        (True, False): "queries travel",
        (False, True): "keys and values travel",
        (True, True): f"both travel, {tile.rows} shards of queries and {tile.cols} of keys and values to a rank",
    }[tile.rows > 1, tile.cols > 1]
    traded = f"{ulysses} ranks trade heads for tokens, then " if ulysses > 1 else ""
    return f"{sizes}: {traded}{travels}."
