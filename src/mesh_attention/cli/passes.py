"""Forecasts of one or both passes: simulated one by one, and joined into one timeline."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import reduce

from mesh_attention.cli.progress import Report
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import DIRECTIONS, Direction
from mesh_attention.simulation.simulate import simulate
from mesh_attention.timeline import RankTimes, Span, Timeline
from mesh_attention.topology import Topology


def passes(*, both: bool) -> tuple[Direction, ...]:
    return DIRECTIONS if both else DIRECTIONS[:1]


def forecast(
    plans: Mapping[Direction, Plan], topology: Topology, *, spans_of: Collection[int], report: Report
) -> dict[Direction, Timeline]:
    return {
        direction: simulate(plan, topology, spans_of=spans_of, on_progress=report) for direction, plan in plans.items()
    }


def joined(timelines: Mapping[Direction, Timeline]) -> Timeline:
    """A pass begins when the last rank is done with the one before."""
    return reduce(_after, timelines.values())


def _after(first: Timeline, second: Timeline) -> Timeline:
    start_s = first.time_s
    return Timeline(
        name=_name(first.name, second.name),
        ranks=tuple(_totals(a, b, start_s) for a, b in zip(first.ranks, second.ranks, strict=True)),
        sent_nbytes={
            "inside": first.sent_nbytes["inside"] + second.sent_nbytes["inside"],
            "between": first.sent_nbytes["between"] + second.sent_nbytes["between"],
        },
        peak_nbytes=max(first.peak_nbytes, second.peak_nbytes),
        flops=first.flops + second.flops,
        spans=(*first.spans, *(_later(span, start_s) for span in second.spans)),
        is_exact=first.is_exact and second.is_exact,
    )


def _name(first: str, second: str) -> str:
    """The words that both begin with are said once."""
    plan, _, direction = first.rpartition(" ")
    other, _, later = second.rpartition(" ")
    return f"{plan} {direction} and {later}" if plan == other else f"{first} and {second}"


def _totals(first: RankTimes, second: RankTimes, start_s: float) -> RankTimes:
    stop_s, compute_s = start_s + second.stop_s, first.compute_s + second.compute_s
    return RankTimes(
        rank=first.rank,
        stop_s=stop_s,
        compute_s=compute_s,
        wait_s=stop_s - compute_s,
        link_s=first.link_s + second.link_s,
    )


def _later(span: Span, by_s: float) -> Span:
    return span._replace(start_s=span.start_s + by_s, stop_s=span.stop_s + by_s)
