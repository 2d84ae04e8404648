"""`mesh-attention verify FILE`: prove a plan, or show every rule it breaks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer

from mesh_attention.cli.command import argument, group, option
from mesh_attention.cli.files import read_plan_file
from mesh_attention.cli.progress import progress, unroll
from mesh_attention.units import count
from mesh_attention.verification.check import check, format_breaches
from mesh_attention.verification.rules import RULES


@group
class VerifyOptions:
    file: Path = argument("FILE", "A plan, text or JSON.")
    json: bool = option("--json", "Print one JSON object and nothing else.", default=False)


def verify_command(given: VerifyOptions) -> None:
    """Prove that a plan is right, or show every rule it breaks.

    Exit code 0: the plan is right. 1: it breaks a rule. 2: the file is not a plan.
    """
    with progress(f"reading {given.file.name}") as report:
        plan = read_plan_file(given.file)
        unrolled = unroll(plan, report)
        breaches = check(unrolled, on_progress=report)
    ranks, steps = plan.problem.ranks, sum(len(program.steps) for program in unrolled.programs or ())
    if given.json:
        found = [asdict(breach) for breach in breaches]
        answer = {"ok": not found, "breaches": found, "ranks": ranks, "steps": steps, "rules": list(RULES)}
        typer.echo(json.dumps(answer | {"digest": plan.digest}))
    elif breaches:
        typer.echo(format_breaches(plan, breaches))
    else:
        typer.echo(f"plan is right: {count(ranks, 'rank')}, {count(steps, 'step')}, {len(RULES)} rules kept")
    if breaches:
        raise typer.Exit(1)
