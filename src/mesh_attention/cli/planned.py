"""Plans as commands get them: from options in the order that suits a cluster, or from a file that is checked first."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from mesh_attention.cli.files import read_plan_file
from mesh_attention.cli.progress import Report, unroll
from mesh_attention.cli.sizes import count
from mesh_attention.errors import PlanError, UsageError
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import Direction
from mesh_attention.planning.choice import Choice
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning import traffic
from mesh_attention.verification.check import check


def plan_on(problem: Problem, topology: Topology, direction: Direction, options: dict[str, Any]) -> Plan:
    """As the tuner plans: in the order that suits the cluster's links; a call is one block unless stated."""
    choice = Choice.of(**options)
    if choice.blocks_per_call is None and not choice.is_collective:
        choice = replace(choice, blocks_per_call=1)
    return traffic.plan_on(topology, problem, choice, direction)


def ring_like(plan: Plan, topology: Topology) -> Plan:
    """Ring-Attention as it is usually run, with the plan's layout and what it keeps."""
    options = {"method": "ring", "layout": plan.layout, "route": "ring", "partials": "ring"}
    options |= {"blocks_per_call": None, "keep": plan.schedule.keep}
    return plan_on(plan.problem, topology, plan.direction, options)


def required(option: str, text: str | None) -> str:
    if text is None:
        raise UsageError(f"Missing option '{option}'; give the problem, or a plan file instead")
    return text


def refuse_more(context: typer.Context, file: Path, *, allowed: Collection[str]) -> None:
    """A plan file says what the problem is and how it is planned; only `allowed` parameters go with it."""
    surplus = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in allowed and _is_given(context, parameter.name)
    ]
    if surplus:
        raise UsageError(f"{', '.join(surplus)} came beside {file}, which says that; leave it out")


def _is_given(context: typer.Context, name: str | None) -> bool:
    source = context.get_parameter_source(name or "")
    return source is not None and source.name == "COMMANDLINE"


def checked_plan(file: Path, topology: Topology, report: Report) -> Plan:
    """The plan in a file, which must be for as many ranks as the cluster has, and break no rule."""
    plan = read_plan_file(file)
    if plan.problem.ranks != topology.ranks:
        raise UsageError(
            f"{file} is for {count(plan.problem.ranks, 'rank')}, and the cluster has {topology.ranks:,}; "
            f"give --ranks {plan.problem.ranks} for as many of its machines"
        )
    breaches = check(unroll(plan, report), on_progress=report)
    if breaches:
        raise PlanError(
            f"{file} has {count(len(breaches), 'breach')} of the rules, the first: {breaches[0].message}; "
            f"'mesh-attention verify {file}' shows all"
        )
    return plan


@contextmanager
def plan_errors() -> Iterator[None]:
    """A plan file that breaks a rule is exit code 1, as in `verify`."""
    try:
        yield
    except PlanError as error:
        typer.echo(f"mesh-attention: error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from error
