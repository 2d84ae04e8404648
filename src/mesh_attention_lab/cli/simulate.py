"""`mesh-attention simulate`: forecast a plan on a cluster, next to Ring-Attention."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import typer

from mesh_attention.plan.layout import TypicalTurn
from mesh_attention.plan.plan import Plan
from mesh_attention.problem import Direction
from mesh_attention.simulation.simulate import simulate
from mesh_attention.topology import Topology
from mesh_attention.tuning.search import MOST_TRANSFERS
from mesh_attention.units import Progress, format_nbytes, format_time
from mesh_attention_lab.bounds import lower_bounds
from mesh_attention_lab.cli import options as opt
from mesh_attention_lab.cli import terminal as term
from mesh_attention_lab.cli.files import problem_to_json
from mesh_attention_lab.comparison import PlanTrial, sampled_ranks, usual_ring_plan
from mesh_attention_lab.drawing.trace import joined, write_trace


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(opt.PlannedOptions):
    trace: opt.TraceFile = None
    json: opt.AsJson = False
    layers: opt.Layers = 1
    backward: opt.BothPasses = False


def simulate_command(options: SimulateOptions) -> None:
    """Forecast a plan on a cluster: time, exposed communication, bytes and memory, next to ring.

    Exit code 0: done. 1: the plan file breaks a rule. 2: invalid input.
    """
    topology = options.topology
    with term.progress("planners") as report:
        plans = options.plans(report, both=options.backward)
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
            write_trace(options.trace, joined(forecasts[0].timelines.values()))
    if options.json:
        more = {"trace": options.trace and str(options.trace), "layers": options.layers}
        typer.echo(json.dumps(_as_json(forecasts, topology) | more))
        return
    _print(forecasts, topology, layers=options.layers)
    if options.trace is not None:
        typer.echo(f"wrote {options.trace}")


# Forecasts


def _forecast(
    plans: Mapping[Direction, Plan], topology: Topology, spans_of: Sequence[int], report: Progress
) -> PlanTrial:
    timelines = {d: simulate(plan, topology, spans_of=spans_of, on_progress=report) for d, plan in plans.items()}
    name = "; ".join(dict.fromkeys(f"{plan.method} {plan.assignment}" for plan in plans.values()))
    return PlanTrial.of(name, plans, timelines)


def _as_json(forecasts: Sequence[PlanTrial], topology: Topology) -> dict[str, Any]:
    plan = next(iter(forecasts[0].plans.values()))
    bound_s, bound_nbytes = lower_bounds(plan.problem, forecasts[0].plans, topology.device)
    return {
        "problem": problem_to_json(plan.problem),
        "cluster": asdict(topology),
        "layout": plan.layout.name,
        "is_exact": all(timeline.is_exact for trial in forecasts for timeline in trial.timelines.values()),
        "bound_s": bound_s,
        "bound_nbytes": bound_nbytes,
        "trials": [trial.to_json() for trial in forecasts],
    }


# For people


def _print(forecasts: Sequence[PlanTrial], topology: Topology, *, layers: int) -> None:
    console, this = term.plain_console(), forecasts[0]
    plan = next(iter(this.plans.values()))
    bounds = lower_bounds(plan.problem, this.plans, topology.device)
    is_turn = plan.layout == TypicalTurn()
    times_s = {direction: timeline.time_s for direction, timeline in this.timelines.items()}
    term.print_first(
        console,
        time=term.time_words(times_s, bounds[0], term.layers_words(this.time_s, layers) if is_turn else ""),
        memory=f"{format_nbytes(this.peak_nbytes)} per rank, for the buffers of a call",
    )
    passes = " and ".join(timeline.name for timeline in this.timelines.values())
    console.print(f"{passes}; {term.problem_words(plan.problem, plan.layout.name)}", style="bold")
    console.print(f"on {term.cluster_words(topology)}")
    console.print()
    if is_turn:
        term.print_fact(console, "cache", term.cache_words(plan.problem, layers))
        console.print()
    term.print_trials(console, forecasts, topology)
    console.print(_caption(forecasts, topology, *bounds), style="dim")


def _caption(forecasts: Sequence[PlanTrial], topology: Topology, bound_s: float, bound_nbytes: float) -> str:
    ring = "ring: shards are passed on along the ring, forecast block per call. " if len(forecasts) > 1 else ""
    many = f" Ring is not simulated on more than {MOST_TRANSFERS:,} ranks." if topology.ranks > MOST_TRANSFERS else ""
    return (
        f"{ring}exposed: the time in which the busiest rank does not compute. Bytes are those that an average rank "
        f"sends. Lower bounds: {format_time(bound_s)} of compute, {format_nbytes(bound_nbytes)} received.{many}"
    )
