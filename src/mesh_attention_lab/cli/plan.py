"""`mesh-attention plan`: make a plan, show it, and compare it with others. `mesh-attention verify`: prove one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from mesh_attention.plan.assignment import Assignment, Tile
from mesh_attention.plan.buffers import held_nbytes
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import transfers
from mesh_attention.plan.text import format_step
from mesh_attention.planning.registry import make_plan
from mesh_attention.tuning.search import MOST_TRANSFERS
from mesh_attention.units import BYTES, FLOPS, Report, count, format_nbytes, format_together
from mesh_attention.verification.rules import RULES, check, format_breaches
from mesh_attention_lab.cli import options as opt
from mesh_attention_lab.cli.files import (
    output_file,
    problem_to_json,
    progress,
    read_plan,
    unroll,
    write_plan,
)
from mesh_attention_lab.cli.terminal import (
    Column,
    choice_words,
    draw_matrix,
    mask_words,
    plain_console,
    print_first,
    print_table,
    size_words,
    tile_reason,
    times,
)
from mesh_attention_lab.comparison import Comparison, Row, compare, grouped

WHOLE_PROGRAM = 40
"""Programs up to this many steps are shown whole."""
FIRST_STEPS, LAST_STEPS = 20, 10
LONGEST_STEP = 160
"""Characters of a step that are shown; collectives of large groups have thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    backward: Annotated[bool, opt.OfPlan("--backward", help="Plan the backward pass instead of the forward one.")] = (
        False
    )
    rank: Annotated[int, opt.whole_number("--rank", "The rank whose steps are shown.", opt.OfOutput, least=0)] = 0
    all_steps: Annotated[bool, opt.OfOutput("--all-steps", help="Show all its steps, however many.")] = False
    save: Annotated[
        Path | None,
        opt.OfOutput(
            "--save",
            help="Write every rank's steps to a plan file, as text.",
            metavar="FILE",
            parser=opt.parsed("--save", partial(output_file, example="plan.txt")),
        ),
    ] = None
    json: opt.AsJson = False


def plan_command(
    ranks: opt.Ranks, problem_options: opt.ProblemOptions, choice_options: opt.ChoiceOptions, options: PlanOptions
) -> None:
    """Make a plan, show it, and compare it with the plans of the other methods."""
    problem = problem_options.problem(ranks)
    with progress("planning") as report:
        direction = problem_options.passes(both=options.backward)[-1]
        choice = grouped(problem_options.choice(choice_options.choice), problem, direction)
        plan = make_plan(problem, choice, direction=direction)
        steps = _step_rows(plan, options.rank)  # first: it refuses a rank that does not exist
        comparison = compare(plan, choice, report=report)
        saved = "" if options.save is None else _save(plan, options.save, report)
    if options.json:
        program = {"rank": options.rank, "steps": [asdict(row) for row in steps]}
        answer = {"plan": str(plan), "digest": plan.digest, "problem": problem_to_json(problem), "program": program}
        typer.echo(json.dumps(answer | {"comparison": asdict(comparison)}))
        return
    console = plain_console()
    this = next(row for row in comparison.rows if row.is_this_plan)
    print_first(
        console,
        write=f'MeshAttention(group, choice="{choice_words(choice)}")',
        time="depends on the cluster: see mesh-attention simulate, or tune",
        moves=f"{format_nbytes(this.received_nbytes)} to a rank{_of_ring(this)}",
        memory=f"{format_nbytes(this.peak_nbytes)} per rank, for the buffers of a call",
    )
    console.print(_headline(plan), style="bold")
    console.print()
    console.print(draw_matrix(plan, width=console.width))
    console.print(f"\nsteps of rank {options.rank}", style="bold")
    console.print(_step_table(steps, all_steps=options.all_steps))
    console.print("\ncompared with the other methods", style="bold")
    bold = [row.is_this_plan for row in comparison.rows]
    print_table(console, _comparison_columns(comparison), bold=bold)
    console.print(_comparison_caption(comparison, ranks=ranks), style="dim")
    console.print(_verdict(plan, comparison))
    if saved:
        console.print(f"\n{saved}")


def _of_ring(row: Row) -> str:
    return "" if row.against_ring is None or row.method == "ring" else f", {times(row.against_ring)} of ring's bytes"


def _save(plan: Plan, path: Path, report: Report) -> str:
    """Write the plan with every step stated."""
    unrolled = unroll(plan, report)
    report(f"writing {path.name}", 1.0)
    write_plan(path, unrolled)
    steps = sum(len(program.steps) for program in unrolled.programs or ())
    return f"saved {path}: {count(steps, 'step')} of {count(plan.problem.ranks, 'rank')}"


def _headline(plan: Plan) -> str:
    problem = plan.problem
    return (
        f"{plan.method} {plan.assignment} {plan.direction} over {count(problem.ranks, 'rank')}, "
        f"{mask_words(problem)}, {plan.layout.name}; {size_words(problem)}; digest {plan.digest[:12]}"
    )


# Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step of a program: its text, the bytes it sends and receives, the bytes held meanwhile."""

    index: int
    step: str
    moved_nbytes: int
    held_nbytes: int


def _step_rows(plan: Plan, rank: int) -> list[StepRow]:
    steps = plan.program(rank).steps
    rows = []
    for index, (step, held) in enumerate(zip(steps, held_nbytes(steps, plan.matrix), strict=True)):
        sends, recvs = transfers(step)
        items = [send.item for send in sends] + [recv.item for recv in recvs]
        moved = sum(plan.matrix.nbytes(item).total for item in items)
        rows.append(StepRow(index=index, step=format_step(step), moved_nbytes=moved, held_nbytes=held))
    return rows


def _step_table(steps: Sequence[StepRow], *, all_steps: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", justify="right", style="dim")
    table.add_column("step", ratio=1, overflow="fold")
    table.add_column("moved", justify="right", no_wrap=True)
    table.add_column("held", justify="right", no_wrap=True)
    left_out = 0 if all_steps or len(steps) <= WHOLE_PROGRAM else len(steps) - FIRST_STEPS - LAST_STEPS
    shown = steps if not left_out else (*steps[:FIRST_STEPS], *steps[-LAST_STEPS:])
    for position, row in enumerate(shown):
        if left_out and position == FIRST_STEPS:
            table.add_row("…", f"{left_out:,} steps left out; --all-steps shows them", "", "", style="dim")
        text = row.step if all_steps else shorten(row.step, LONGEST_STEP, placeholder=" … (--all-steps shows the rest)")
        moved = format_nbytes(row.moved_nbytes) if row.moved_nbytes else ""
        table.add_row(str(row.index), text, moved, format_nbytes(row.held_nbytes))
    if not steps:
        table.add_row("", "nothing to do", "", "")
    return table


# Comparison


def _comparison_columns(comparison: Comparison) -> list[Column]:
    rows = comparison.rows
    moved = [row.sent_nbytes for row in rows] + [row.received_nbytes for row in rows]
    moved_unit, moved_texts = format_together(moved, BYTES, below=10_000)
    flops_unit, flops = format_together([row.flops for row in rows], FLOPS, below=100)
    peak_unit, peaks = format_together([row.peak_nbytes for row in rows], BYTES, below=10_000)
    names = [f"{'>' if row.is_this_plan else ' '} {row.method}" for row in rows]
    return [
        Column(header="method", cells=names, is_text=True),
        Column(header="tile", cells=[_tile(row) for row in rows], is_text=True),
        Column(header=f"sent\n{moved_unit}", cells=moved_texts[: len(rows)], drop=1),
        Column(header=f"received\n{moved_unit}", cells=moved_texts[len(rows) :]),
        Column(header="×\nring", cells=[times(row.against_ring) for row in rows]),
        Column(header="×\nbound", cells=[times(row.against_bound) for row in rows]),
        Column(header=flops_unit, cells=flops),
        Column(header="imbalance", cells=[f"{row.imbalance:.1%}" for row in rows]),
        Column(header=f"peak\n{peak_unit}", cells=peaks),
        Column(header="kernel\ncalls", cells=[f"{row.kernel_calls:,}" for row in rows]),
        Column(header="messages", cells=[f"{row.messages:,}" for row in rows], drop=2),
    ]


def _tile(row: Row) -> str:
    return str(Assignment(Tile.parse(row.tile), row.ulysses))


def _comparison_caption(comparison: Comparison, *, ranks: int) -> str:
    counted = len(comparison.counted_ranks)
    of_whom = "all ranks" if counted == ranks else f"{counted} of the {ranks:,} ranks, evenly spread"
    no_ring = (
        f" Ring and pass-q are not planned on more than {MOST_TRANSFERS:,} ranks." if ranks > MOST_TRANSFERS else ""
    )
    return (
        f"> marks this plan. Each number is that of the worst of {of_whom}. Tile: query shards x KV shards, after the "
        "Ulysses degree if any. × ring: bytes received, relative to ring. × bound: relative to the least that an "
        "average rank can receive with any assignment, even one that splits heads. All plans have the layout, "
        f"direction and options of this one, except --inner.{no_ring}"
    )


def _verdict(plan: Plan, comparison: Comparison) -> str:
    """A comparison of this plan with ring, with the reason, and the plan that receives the least."""
    this = next(row for row in comparison.rows if row.is_this_plan)
    least = min(comparison.rows, key=lambda row: row.received_nbytes)
    if this.against_ring is None or least.against_ring is None:
        return "A single rank receives nothing."
    words = []
    if this.against_ring < 1:
        words.append(f"This plan receives {times(this.against_ring)} of ring's bytes: {tile_reason(plan.assignment)}")
    if least.received_nbytes < this.received_nbytes:
        words.append(f"{least.method} {_tile(least)} receives the least: {times(least.against_ring)} of ring's bytes.")
    return " ".join(words) or "No other method receives fewer bytes here."


# verify


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A plan file.", show_default=False)]
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False


def verify_command(options: VerifyOptions) -> None:
    """Prove that a plan is right, or show every rule it breaks.

    Exit code 0: the plan is right. 1: it breaks a rule. 2: the file is not a plan.
    """
    with progress(f"reading {options.file.name}") as report:
        plan = read_plan(options.file)
        unrolled = unroll(plan, report)
        breaches = check(unrolled, on_progress=report)
    ranks, steps = plan.problem.ranks, sum(len(program.steps) for program in unrolled.programs or ())
    if options.json:
        answer = {
            "ok": not breaches,
            "breaches": list(map(asdict, breaches)),
            "ranks": ranks,
            "steps": steps,
            "rules": list(RULES),
        }
        typer.echo(json.dumps(answer | {"digest": plan.digest}))
    elif breaches:
        typer.echo(format_breaches(plan, breaches))
    else:
        typer.echo(f"plan is right: {count(ranks, 'rank')}, {count(steps, 'step')}, {len(RULES)} rules kept")
    if breaches:
        raise typer.Exit(1)
