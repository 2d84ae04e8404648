"""What `mesh-attention simulate` found: forecasts side by side, for people and as JSON, and what ranks do when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from mesh_attention.cli.lanes import SHADES, draw_lanes
from mesh_attention.cli.passes import joined
from mesh_attention.cli.tables import Column, table_of
from mesh_attention.cli.words import cluster_words, mask_words, size_words
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import Direction
from mesh_attention.planning.limits import limits
from mesh_attention.timeline import Timeline
from mesh_attention.topology import Topology
from mesh_attention.units import format_nbytes, format_time, three_digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A method with its plans and what was forecast of them, a pass each."""

    plans: Mapping[Direction, Plan]
    timelines: Mapping[Direction, Timeline]

    @property
    def method(self) -> str:
        return next(iter(self.plans.values())).method

    @property
    def whole(self) -> Timeline:
        """All its passes, one after the other."""
        return joined(self.timelines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A forecast in numbers. Bytes are what an average rank sends; `against_…` says how many times the lower bound.

    What was kept from forward need not travel in backward: then there is no bound for bytes.
    """

    time_s: float
    compute_s: float
    exposed_s: float
    overlap: float
    utilisation: float
    tflops: float
    inside_nbytes: float
    between_nbytes: float
    peak_nbytes: int
    against_compute: float | None
    against_nbytes: float | None


def facts_of(timeline: Timeline, plans: Sequence[Plan], topology: Topology) -> Facts:
    """The timeline is that of all these plans."""
    ranks = topology.ranks
    inside, between = (timeline.sent_nbytes[link_class] / ranks for link_class in ("inside", "between"))
    bound_s, bound_nbytes = bounds_of(plans, topology)
    has_kept = any(plan.schedule.keep for plan in plans if plan.direction == "backward")
    return Facts(
        time_s=timeline.time_s,
        compute_s=timeline.compute_s,
        exposed_s=timeline.exposed_s,
        overlap=timeline.overlap,
        utilisation=timeline.utilisation,
        tflops=timeline.tflops,
        inside_nbytes=inside,
        between_nbytes=between,
        peak_nbytes=timeline.peak_nbytes,
        against_compute=timeline.time_s / bound_s if bound_s else None,
        against_nbytes=(inside + between) / bound_nbytes if bound_nbytes and not has_kept else None,
    )


def bounds_of(plans: Sequence[Plan], topology: Topology) -> tuple[float, float]:
    """Seconds that computing takes at least, and bytes that an average rank receives at least."""
    rates = {"forward": topology.device.forward.tflops, "backward": topology.device.backward.tflops}
    least = {plan.direction: limits(plan.problem, plan.direction) for plan in plans}
    bound_s = sum(one.flops / (rates[direction] * 1e12) for direction, one in least.items())
    return bound_s, sum(one.received_nbytes for one in least.values())


def as_json(contender: Contender, topology: Topology) -> dict[str, Any]:
    passes = {
        direction: {
            "tile": str(plan.assignment.tile),
            "ulysses": plan.assignment.ulysses,
            "digest": plan.digest,
            **asdict(facts_of(contender.timelines[direction], [plan], topology)),
        }
        for direction, plan in contender.plans.items()
    }
    whole = facts_of(contender.whole, list(contender.plans.values()), topology)
    return {"method": contender.method, "passes": passes, "together": asdict(whole)}


def print_forecasts(contenders: Sequence[Contender], topology: Topology, *, shown_ranks: Sequence[int]) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    this = contenders[0]
    plan = next(iter(this.plans.values()))
    problem = plan.problem
    console.print(f"{this.whole.name}; {size_words(problem)}, {mask_words(problem)}, {plan.layout.name}", style="bold")
    console.print(f"on {cluster_words(topology)}")
    console.print()
    console.print(_table(contenders, topology, width=console.width))
    console.print(_caption(contenders, topology), style="dim")
    for direction, timeline in this.timelines.items():
        console.print(f"\n{direction}, {format_time(timeline.time_s)}", style="bold")
        console.print(draw_lanes(timeline, ranks=shown_ranks, width=console.width))
    console.print(f"{SHADES[-1]} busy all the time, {SHADES[1]} for a part of it", style="dim")


def _table(contenders: Sequence[Contender], topology: Topology, *, width: int) -> Table:
    labels = list(_cells(facts_of(contenders[0].whole, list(contenders[0].plans.values()), topology), topology))
    columns = [Column(header="", cells=labels, is_text=True)]
    for contender in contenders:
        for direction, plan in contender.plans.items():
            header = f"{plan.method}\n{plan.assignment}\n{direction}"
            facts = facts_of(contender.timelines[direction], [plan], topology)
            columns.append(Column(header=header, cells=list(_cells(facts, topology).values())))
        if len(contender.plans) > 1:
            facts = facts_of(contender.whole, list(contender.plans.values()), topology)
            columns.append(Column(header=f"{contender.method}\n\nboth", cells=list(_cells(facts, topology).values())))
    return table_of(columns, bold=[label == "time" for label in labels], width=width)


def _cells(facts: Facts, topology: Topology) -> dict[str, str]:
    cells = {
        "time": format_time(facts.time_s),
        "compute": format_time(facts.compute_s),
        "exposed": format_time(facts.exposed_s),
        "overlap": f"{facts.overlap:.1%}",
        "utilisation": f"{facts.utilisation:.1%}",
        "TFLOP/s": three_digits(facts.tflops),
        "sent inside nodes": format_nbytes(round(facts.inside_nbytes)),
        "sent between nodes": format_nbytes(round(facts.between_nbytes)),
        "peak memory": format_nbytes(facts.peak_nbytes),
        "× compute bound": times(facts.against_compute),
        "× bytes bound": times(facts.against_nbytes),
    }
    if topology.nodes == 1:
        del cells["sent between nodes"]
    return cells


def times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def _caption(contenders: Sequence[Contender], topology: Topology) -> str:
    bound_s, bound_nbytes = bounds_of(list(contenders[0].plans.values()), topology)
    beside = "ring: passed on along the ring, one block a call. " if len(contenders) > 1 else ""
    is_exact = all(contender.whole.is_exact for contender in contenders)
    prices = (
        "Prices are exact: every rank's calls are priced one by one."
        if is_exact
        else "Prices are sampled: calls of some ranks stand for those of their neighbours."
    )
    return (
        f"{beside}exposed: what communication adds to the busiest rank's compute. overlap: the share of the busiest "
        "link's time that compute hides. utilisation: the share of all ranks' time in which they compute. Bytes are an "
        f"average rank's. Lower bounds: {format_time(bound_s)} of compute at the full kernel rate, "
        f"{format_nbytes(round(bound_nbytes))} received by an average rank. {prices}"
    )
