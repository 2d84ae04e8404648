"""`mesh-attention simulate`: forecast a plan on a cluster, next to Ring-Attention."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mesh_attention.plan.counts import MANY_RANKS
from mesh_attention.plan.layout import TypicalTurn
from mesh_attention.plan.plan import Plan
from mesh_attention.planners.choice import default_layout
from mesh_attention.planners.costs import least_received_nbytes
from mesh_attention.problem import Direction
from mesh_attention.simulation.simulate import simulate
from mesh_attention.timeline import Timeline, joined
from mesh_attention.topology import Topology
from mesh_attention.tuning.result import Forecast
from mesh_attention.tuning.search import MOST_TRANSFERS
from mesh_attention.tuning.traffic import plan_on
from mesh_attention.units import Progress, format_nbytes, format_time, three_digits
from mesh_attention_lab.cli import options as opt
from mesh_attention_lab.cli.files import problem_to_json
from mesh_attention_lab.cli.serving import cache_words, layers_words
from mesh_attention_lab.cli.terminal import (
    Column,
    cluster_words,
    plain_console,
    print_fact,
    print_first,
    print_table,
    problem_words,
    progress,
    time_words,
    times,
)
from mesh_attention_lab.comparison import grouped, sampled_ranks, usual_ring_plan
from mesh_attention_lab.drawing.trace import write_trace


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(opt.PlannedOptions):
    file: Annotated[
        Path | None,
        typer.Argument(metavar="PLAN", help="A plan file, instead of a problem and a choice.", show_default=False),
    ] = None
    trace: opt.TraceFile = None
    json: opt.AsJson = False
    layers: opt.Layers = 1
    backward: opt.BothPasses = False


def simulate_command(options: SimulateOptions) -> None:
    """Forecast a plan on a cluster: time, exposed communication, bytes and memory, next to ring.

    Exit code 0: done. 1: the plan file breaks a rule. 2: invalid input.
    """
    topology = options.topology
    with progress("planners") as report:
        what, plans = _plans(options, topology, report)
        first = next(iter(plans.values()))
        opt.check_layers(options.layers, is_served=first.layout == TypicalTurn())
        spans_of = sampled_ranks(topology.ranks) if options.trace else ()
        forecasts = [_forecast(plans, topology, spans_of, report)]
        has_ring = topology.ranks <= MOST_TRANSFERS
        ring = {direction: usual_ring_plan(plan, topology) for direction, plan in plans.items()} if has_ring else plans
        if ring != plans:
            forecasts.append(_forecast(ring, topology, (), report))
        if options.trace is not None:
            report(f"writing {options.trace.name}", 1.0)
            write_trace(options.trace, forecasts[0].whole)
    if options.json:
        more = {"trace": options.trace and str(options.trace), "layers": options.layers}
        typer.echo(json.dumps(_as_json(forecasts, topology) | more))
        return
    _print(what, forecasts, topology, layers=options.layers)
    if options.trace is not None:
        typer.echo(f"wrote {options.trace}")


def _plans(options: SimulateOptions, topology: Topology, report: Progress) -> tuple[str, dict[Direction, Plan]]:
    """What is simulated, in words, and its plans."""
    if options.file is not None:
        plan = options.plan_in(options.file, report)
        opt.refuse_uneven(plan.problem, plan.layout, topology)
        return str(options.file), {plan.direction: plan}
    problem, choice = options.problem(topology.ranks), options.choice
    opt.refuse_uneven(problem, choice.layout or default_layout(problem), topology)
    choices = {d: grouped(choice, problem, d, blocks_per_call=1) for d in options.passes(both=options.backward)}
    plans = {d: plan_on(topology, problem, choice, d) for d, choice in choices.items()}
    return ", backward ".join(dict.fromkeys(map(str, choices.values()))), plans


# Forecasts


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasts:
    """A method's plans and their timelines, by pass."""

    topology: Topology
    plans: Mapping[Direction, Plan]
    timelines: Mapping[Direction, Timeline]

    @property
    def method(self) -> str:
        return next(iter(self.plans.values())).method

    @property
    def whole(self) -> Timeline:
        """The passes joined into one timeline."""
        return joined(self.timelines.values())

    def bounds(self, direction: Direction | None = None) -> tuple[float, float]:
        """Lower bounds of one pass or of all: seconds of compute, and bytes that an average rank receives."""
        problems = {d: plan.problem for d, plan in self.plans.items() if direction in (None, d)}
        rates = {d: self.topology.device.rate(d).tflops * 1e12 for d in problems}
        bound_s = sum(problem.flops(d) / problem.ranks / rates[d] for d, problem in problems.items())
        return bound_s, sum(least_received_nbytes(problem, d) for d, problem in problems.items())

    def facts(self, direction: Direction | None = None) -> dict[str, Any]:
        """Numbers of one pass or of all. Bytes are sent by an average rank; `against_…` is relative to a bound.

        Inputs that forward kept are not sent again in backward, and then no bound on bytes is known.
        """
        timeline = self.whole if direction is None else self.timelines[direction]
        forecast, (bound_s, bound_nbytes) = Forecast.of(timeline), self.bounds(direction)
        has_kept = direction != "forward" and "backward" in self.plans and self.plans["backward"].schedule.keep
        return asdict(forecast) | {
            "overlap": timeline.overlap,
            "utilisation": timeline.utilisation,
            "against_compute": timeline.time_s / bound_s if bound_s else None,
            "against_nbytes": forecast.sent_nbytes / bound_nbytes if bound_nbytes and not has_kept else None,
        }


def _forecast(
    plans: Mapping[Direction, Plan], topology: Topology, spans_of: Sequence[int], report: Progress
) -> Forecasts:
    timelines = {d: simulate(plan, topology, spans_of=spans_of, on_progress=report) for d, plan in plans.items()}
    return Forecasts(topology=topology, plans=plans, timelines=timelines)


def _as_json(forecasts: Sequence[Forecasts], topology: Topology) -> dict[str, Any]:
    plan = next(iter(forecasts[0].plans.values()))
    bound_s, bound_nbytes = forecasts[0].bounds()
    return {
        "problem": problem_to_json(plan.problem),
        "cluster": asdict(topology),
        "layout": plan.layout.name,
        "is_exact": all(forecast.whole.is_exact for forecast in forecasts),
        "bound_s": bound_s,
        "bound_nbytes": bound_nbytes,
        "forecasts": [
            {
                "method": forecast.method,
                "passes": {
                    d: {
                        "tile": str(plan.assignment.tile),
                        "ulysses": plan.assignment.ulysses_degree,
                        "digest": plan.digest,
                    }
                    | forecast.facts(d)
                    for d, plan in forecast.plans.items()
                },
                "together": forecast.facts(),
            }
            for forecast in forecasts
        ],
    }


# For people


def _print(what: str, forecasts: Sequence[Forecasts], topology: Topology, *, layers: int) -> None:
    console, this = plain_console(), forecasts[0]
    plan, whole = next(iter(this.plans.values())), this.whole
    is_turn = plan.layout == TypicalTurn()
    times_s = {direction: timeline.time_s for direction, timeline in this.timelines.items()}
    bound_s, _ = this.bounds()
    print_first(
        console,
        plan=what,
        time=time_words(times_s, bound_s, layers_words(whole.time_s, layers) if is_turn else ""),
        memory=f"{format_nbytes(whole.peak_nbytes)} per rank, for the buffers of a call",
    )
    console.print(f"{whole.name}; {problem_words(plan.problem, plan.layout.name)}", style="bold")
    console.print(f"on {cluster_words(topology)}")
    console.print()
    if is_turn:
        print_fact(console, "cache", cache_words(plan.problem, layers))
        console.print()
    columns = _columns(forecasts, topology)
    print_table(console, columns, bold=[label == "time" for label in columns[0].cells])
    console.print(_caption(forecasts, topology), style="dim")


def _columns(forecasts: Sequence[Forecasts], topology: Topology) -> list[Column]:
    columns = [Column(header="", cells=list(_cells(forecasts[0].facts(), topology)), is_text=True)]
    for forecast in forecasts:
        facts = {
            f"{plan.assignment}\n{direction}": forecast.facts(direction) for direction, plan in forecast.plans.items()
        }
        if len(facts) > 1:
            facts["\nboth"] = forecast.facts()
        columns += [
            Column(header=f"{forecast.method}\n{what}", cells=list(_cells(of, topology).values()))
            for what, of in facts.items()
        ]
    return columns


def _cells(facts: Mapping[str, Any], topology: Topology) -> dict[str, str]:
    cells = {
        "time": format_time(facts["time_s"]),
        "compute": format_time(facts["compute_s"]),
        "exposed": format_time(facts["exposed_s"]),
        "overlap": f"{facts['overlap']:.1%}",
        "utilisation": f"{facts['utilisation']:.1%}",
        "TFLOP/s": three_digits(facts["tflops"]),
        "sent inside nodes": format_nbytes(facts["inside_nbytes"]),
        "sent between nodes": format_nbytes(facts["between_nbytes"]),
        "peak memory": format_nbytes(facts["peak_nbytes"]),
        "× compute bound": times(facts["against_compute"]),
        "× bytes bound": times(facts["against_nbytes"]),
    }
    if topology.nodes == 1:
        del cells["sent between nodes"]
    return cells


def _caption(forecasts: Sequence[Forecasts], topology: Topology) -> str:
    bound_s, bound_nbytes = forecasts[0].bounds()
    ring = "ring: shards are passed on along the ring, forecast block per call. " if len(forecasts) > 1 else ""
    prices = (
        "Prices are exact: every rank's calls are priced."
        if all(forecast.whole.is_exact for forecast in forecasts)
        else "Prices are sampled: only some ranks' calls are priced."
    )
    if topology.ranks >= MANY_RANKS:
        prices = "The last rank's calls stand for those of all."
    if topology.ranks > MOST_TRANSFERS:
        prices += f" Ring is not simulated on more than {MOST_TRANSFERS:,} ranks."
    return (
        f"{ring}exposed: the time in which the busiest rank does not compute. overlap: the share of the busiest "
        "link's time that compute hides. Bytes are those of an average rank. Lower bounds: "
        f"{format_time(bound_s)} of compute, {format_nbytes(bound_nbytes)} received. {prices}"
    )
