"""`mesh-attention simulate`: forecast a plan on a cluster, next to Ring-Attention."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mesh_attention.plan.layout import TypicalTurn
from mesh_attention.plan.plan import Plan
from mesh_attention.planners.choice import default_layout
from mesh_attention.problem import Direction, Problem
from mesh_attention.simulation.simulate import MANY_RANKS, simulate
from mesh_attention.topology import Topology
from mesh_attention.tuning.bounds import plan_on
from mesh_attention.tuning.search import MOST_TRANSFERS
from mesh_attention.units import Progress, format_nbytes, format_time
from mesh_attention_lab.bounds import lower_bounds
from mesh_attention_lab.cli import options as opt
from mesh_attention_lab.cli.files import problem_to_json
from mesh_attention_lab.cli.serving_tables import cache_words, layers_words
from mesh_attention_lab.cli.terminal import (
    cluster_words,
    plain_console,
    print_fact,
    print_first,
    print_trials,
    problem_words,
    progress,
    time_words,
)
from mesh_attention_lab.comparison import PlanTrial, grouped, sampled_ranks, usual_ring_plan
from mesh_attention_lab.drawing.trace import joined, write_trace


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
            write_trace(options.trace, joined(forecasts[0].timelines.values()))
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


def _forecast(
    plans: Mapping[Direction, Plan], topology: Topology, spans_of: Sequence[int], report: Progress
) -> PlanTrial:
    timelines = {d: simulate(plan, topology, spans_of=spans_of, on_progress=report) for d, plan in plans.items()}
    name = "; ".join(dict.fromkeys(f"{plan.method} {plan.assignment}" for plan in plans.values()))
    return PlanTrial.of(name, plans, timelines)


def _problems(trial: PlanTrial) -> dict[Direction, Problem]:
    return {direction: plan.problem for direction, plan in trial.plans.items()}


def _as_json(forecasts: Sequence[PlanTrial], topology: Topology) -> dict[str, Any]:
    plan = next(iter(forecasts[0].plans.values()))
    bound_s, bound_nbytes = lower_bounds(_problems(forecasts[0]), topology.device)
    return {
        "problem": problem_to_json(plan.problem),
        "cluster": asdict(topology),
        "layout": plan.layout.name,
        "is_exact": _is_exact(forecasts),
        "bound_s": bound_s,
        "bound_nbytes": bound_nbytes,
        "forecasts": [
            {
                "method": next(iter(trial.plans.values())).method,
                "time_s": trial.time_s,
                "passes": {
                    d: {
                        "tile": str(plan.assignment.tile),
                        "ulysses": plan.assignment.ulysses_degree,
                        "digest": plan.digest,
                    }
                    | asdict(trial.forecasts[d])
                    | {"overlap": trial.timelines[d].overlap, "utilisation": trial.timelines[d].utilisation}
                    for d, plan in trial.plans.items()
                },
            }
            for trial in forecasts
        ],
    }


def _is_exact(forecasts: Sequence[PlanTrial]) -> bool:
    return all(timeline.is_exact for trial in forecasts for timeline in trial.timelines.values())


# For people


def _print(what: str, forecasts: Sequence[PlanTrial], topology: Topology, *, layers: int) -> None:
    console, this = plain_console(), forecasts[0]
    plan, bounds = next(iter(this.plans.values())), lower_bounds(_problems(this), topology.device)
    is_turn = plan.layout == TypicalTurn()
    times_s = {direction: timeline.time_s for direction, timeline in this.timelines.items()}
    print_first(
        console,
        plan=what,
        time=time_words(times_s, bounds[0], layers_words(this.time_s, layers) if is_turn else ""),
        memory=f"{format_nbytes(this.peak_nbytes)} per rank, for the buffers of a call",
    )
    console.print(f"{_passes_words(this)}; {problem_words(plan.problem, plan.layout.name)}", style="bold")
    console.print(f"on {cluster_words(topology)}")
    console.print()
    if is_turn:
        print_fact(console, "cache", cache_words(plan.problem, layers))
        console.print()
    print_trials(console, forecasts, topology)
    console.print(_caption(forecasts, topology, *bounds), style="dim")


def _passes_words(trial: PlanTrial) -> str:
    """mesh 2x4 forward and backward; a plan that differs from the one before is named too."""
    names = [timeline.name.rpartition(" ") for timeline in trial.timelines.values()]
    befores = ["", *(plan for plan, _, _ in names)]
    pairs = zip(befores, names, strict=False)
    return " and ".join(way if plan == before else f"{plan} {way}" for before, (plan, _, way) in pairs)


def _caption(forecasts: Sequence[PlanTrial], topology: Topology, bound_s: float, bound_nbytes: float) -> str:
    ring = "ring: shards are passed on along the ring, forecast block per call. " if len(forecasts) > 1 else ""
    prices = (
        "Prices are exact: every rank's calls are priced."
        if _is_exact(forecasts)
        else "Prices are sampled: only some ranks' calls are priced."
    )
    if topology.ranks >= MANY_RANKS:
        prices = "The last rank's calls stand for those of all."
    if topology.ranks > MOST_TRANSFERS:
        prices += f" Ring is not simulated on more than {MOST_TRANSFERS:,} ranks."
    return (
        f"{ring}exposed: the time in which the busiest rank does not compute. Bytes are those that an average rank "
        f"sends. Lower bounds: {format_time(bound_s)} of compute, {format_nbytes(bound_nbytes)} received. {prices}"
    )
