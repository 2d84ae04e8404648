"""`mesh-attention plan`: make a plan, show it, and compare it with others. `mesh-attention verify`: prove one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import gcd
from pathlib import Path
from textwrap import shorten
from typing import Annotated

import typer
from rich.text import Text

from mesh_attention.plan.assignment import Assignment, Tile
from mesh_attention.plan.buffer_sizes import held_nbytes
from mesh_attention.plan.format import format_step
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import transfers
from mesh_attention.planners.make import make_plan
from mesh_attention.tuning.search import MOST_TRANSFERS
from mesh_attention.units import BYTES, count, format_nbytes
from mesh_attention.verification.rules import RULES, check, format_breaches
from mesh_attention_lab.cli import options as opt
from mesh_attention_lab.cli import terminal as term
from mesh_attention_lab.cli.files import problem_to_json, read_plan
from mesh_attention_lab.comparison import Comparison, Row, compare, grouped
from mesh_attention_lab.drawing import writing

WHOLE_PROGRAM = 40
"""Programs up to this many steps are shown whole."""
FIRST_STEPS, LAST_STEPS = 20, 10
LONGEST_STEP = 160
"""Characters of a step that are shown; collectives of large groups have thousands."""
LEAST_STEP = 20
"""Steps are wrapped to this width where there is little room."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(opt.ChoiceOptions):
    ranks: opt.Ranks
    backward: Annotated[
        bool, opt.flag("--backward", "Plan the backward pass instead of the forward one.", opt.PLAN)
    ] = False
    rank: Annotated[int, opt.whole_number("The rank whose steps are shown.", opt.OUTPUT, least=0)] = 0
    all_steps: Annotated[bool, opt.flag("--all-steps", "Show all its steps, however many.", opt.OUTPUT)] = False
    save: Annotated[Path | None, opt.file("Write every rank's steps to a plan file, as text.", "plan.txt")] = None
    json: opt.AsJson = False


def plan_command(options: PlanOptions) -> None:
    """Make a plan, show it, and compare it with the plans of the other methods."""
    problem = options.problem(options.ranks)
    with term.progress("planners") as report:
        direction = options.passes(both=options.backward)[-1]
        choice = grouped(options.choice, problem, direction)
        plan = make_plan(problem, choice, direction=direction)
        steps = _step_rows(plan, options.rank)  # first: it refuses a rank that does not exist
        comparison = compare(plan, choice, report=report)
        saved = "" if options.save is None else _save(plan, options.save)
    if options.json:
        program = {"rank": options.rank, "steps": list(map(asdict, steps))}
        answer = {"plan": str(plan), "digest": plan.digest, "problem": problem_to_json(problem), "program": program}
        typer.echo(json.dumps(answer | {"comparison": asdict(comparison)}))
        return
    console = term.plain_console()
    this = next(row for row in comparison.rows if row.is_this_plan)
    term.print_first(
        console,
        write=f'MeshAttention(group, choice="{term.choice_words(choice)}")',
        time="depends on the cluster: see mesh-attention simulate, or tune",
        moves=f"{format_nbytes(this.received_nbytes)} to a rank{_of_ring(this)}",
        memory=f"{format_nbytes(this.peak_nbytes)} per rank, for the buffers of a call",
    )
    console.print(_headline(plan), style="bold")
    console.print()
    console.print(draw_matrix(plan, width=console.width))
    console.print(f"\nsteps of rank {options.rank}", style="bold")
    term.print_table(console, _step_columns(steps, all_steps=options.all_steps))
    console.print("\ncompared with the other methods", style="bold")
    bold = [row.is_this_plan for row in comparison.rows]
    term.print_table(console, _comparison_columns(comparison), bold=bold)
    console.print(_comparison_caption(comparison, ranks=options.ranks), style="dim")
    if this.against_ring is not None and this.against_ring < 1:
        console.print(f"Fewer bytes than ring: {term.tile_reason(plan.assignment)}")
    if saved:
        console.print(f"\n{saved}")


def _of_ring(row: Row) -> str:
    return (
        "" if row.against_ring is None or row.method == "ring" else f", {term.times(row.against_ring)} of ring's bytes"
    )


def _save(plan: Plan, path: Path) -> str:
    """Write the plan with every step stated."""
    unrolled = plan.unrolled()
    with writing(path):
        path.write_text(str(unrolled), encoding="utf-8")
    return f"saved {path}: {count(_steps(unrolled), 'step')} of {count(plan.problem.ranks, 'rank')}"


def _steps(unrolled: Plan) -> int:
    return sum(len(program.steps) for program in unrolled.all_programs())


def _headline(plan: Plan) -> str:
    problem = plan.problem
    return (
        f"{plan.method} {plan.assignment} {plan.direction} over {count(problem.ranks, 'rank')}, "
        f"{term.mask_words(problem)}, {plan.layout.name}; {term.size_words(problem)}; digest {plan.digest[:12]}"
    )


# The matrix: who computes what


MOST_SHARDS = 32
PALETTE = (26, 166, 28, 163, 30, 160, 134, 100, 33, 168, 64, 243)
"""Terminal colours (of 256) that are readable on black and on white."""


def draw_matrix(plan: Plan, *, width: int) -> Text:
    """One line for each query shard that fits, and a caption."""
    places = plan.assignment.places
    digits = len(str(places - 1))
    most = (width - digits - 2) // (digits + 1)
    stride = _stride(places, plan.assignment.tile.rows, most=max(1, min(MOST_SHARDS, most)))
    shown = range(0, places, stride)
    header = " " * (digits + 2) + "".join(f" {col:{digits}}" for col in shown)
    border = " " * (digits + 1) + "┌" + "─" * (len(shown) * (digits + 1))
    lines = [Text(header, style="dim"), Text(border, style="dim"), *(_line(plan, row, shown, digits) for row in shown)]
    has_empty = any("·" in line.plain for line in lines)
    return Text("\n").join([*lines, Text(_caption(plan, stride, has_empty), style="dim")])


def _line(plan: Plan, row: int, shown: range, digits: int) -> Text:
    line = Text(f"{row:{digits}} │", style="dim")
    for col in shown:
        if not plan.matrix.is_live(row, col):
            line.append(f" {'·':>{digits}}")
            continue
        owner = plan.assignment.owner(row, col)
        grid_row, grid_col = plan.assignment.coordinates(owner)
        # Five down and one across: neighbours in the picture are apart in the palette.
        colour = PALETTE[(5 * grid_row + grid_col) % len(PALETTE)]
        line.append(f" {owner:{digits}}", style=f"not dim color({colour})")
    return line


def _stride(places: int, rows: int, *, most: int) -> int:
    """Show every stride-th shard; a factor in common with the tile's rows would hide columns of the grid."""
    stride = -(-places // most)
    while stride > 1 and gcd(stride, rows) > 1:
        stride += 1
    return stride


def _caption(plan: Plan, stride: int, has_empty: bool) -> str:
    ulysses = plan.assignment.ulysses_degree
    who = "the rank" if ulysses == 1 else f"the place ({ulysses} ranks, each with a slice of the heads)"
    caption = f"query shards down, KV shards across; in each block, {who} that computes it"
    if has_empty:
        caption += "; · nothing to compute"
    if stride > 1:
        caption += f"; of {plan.assignment.places} shards, one in {stride} is shown"
    return caption


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


def _step_columns(steps: Sequence[StepRow], *, all_steps: bool) -> list[term.Column]:
    rows = [
        (
            str(row.index),
            row.step if all_steps else shorten(row.step, LONGEST_STEP, placeholder=" … (--all-steps shows the rest)"),
            format_nbytes(row.moved_nbytes) if row.moved_nbytes else "",
            format_nbytes(row.held_nbytes),
        )
        for row in steps
    ]
    if not all_steps and len(rows) > WHOLE_PROGRAM:
        left_out = ("…", f"{len(rows) - FIRST_STEPS - LAST_STEPS:,} steps left out; --all-steps shows them", "", "")
        rows[FIRST_STEPS:-LAST_STEPS] = [left_out]
    numbers, texts, moved, held = zip(*rows or [("", "nothing to do", "", "")], strict=True)
    return [
        term.Column(header="", cells=numbers),
        term.Column(header="step", cells=texts, is_text=True, least_width=LEAST_STEP),
        term.Column(header="moved", cells=moved),
        term.Column(header="held", cells=held),
    ]


# Comparison


def _comparison_columns(comparison: Comparison) -> list[term.Column]:
    rows = comparison.rows
    names = [f"{'>' if row.is_this_plan else ' '} {row.method}" for row in rows]
    return [
        term.Column(header="method", cells=names, is_text=True),
        term.Column(header="tile", cells=[_tile(row) for row in rows], is_text=True),
        term.Column.of_amounts("received", [row.received_nbytes for row in rows], BYTES),
        term.Column(header="×\nring", cells=[term.times(row.against_ring) for row in rows]),
        term.Column(header="×\nbound", cells=[term.times(row.against_bound) for row in rows]),
        term.Column(header="imbalance", cells=[f"{row.imbalance:.1%}" for row in rows]),
        term.Column.of_amounts("peak", [row.peak_nbytes for row in rows], BYTES),
        term.Column(header="kernel\ncalls", cells=[f"{row.kernel_calls:,}" for row in rows]),
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
        f"> marks this plan; the others have its layout, direction and options, but no --inner. Each number is that of "
        f"the worst of {of_whom}. Tile: query shards x KV shards, after the Ulysses degree if any. × bound: relative "
        f"to the least that an average rank can receive.{no_ring}"
    )


# verify


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A plan file.", show_default=False)]
    json: Annotated[bool, opt.flag("--json", "Print one JSON object and nothing else.")] = False


def verify_command(options: VerifyOptions) -> None:
    """Prove that a plan is right, or show every rule it breaks.

    Exit code 0: the plan is right. 1: it breaks a rule. 2: the file is not a plan.
    """
    with term.progress(f"reading {options.file.name}") as report:
        plan = read_plan(options.file)
        unrolled = plan.unrolled()
        breaches = check(unrolled, on_progress=report)
    facts = {"ranks": plan.problem.ranks, "steps": _steps(unrolled), "rules": list(RULES), "digest": plan.digest}
    if options.json:
        typer.echo(json.dumps({"ok": not breaches, "breaches": list(map(asdict, breaches)), **facts}))
    elif breaches:
        typer.echo(format_breaches(plan, breaches))
    else:
        ranks, steps = count(plan.problem.ranks, "rank"), count(_steps(unrolled), "step")
        typer.echo(f"plan is right: {ranks}, {steps}, {len(RULES)} rules kept")
    if breaches:
        raise typer.Exit(1)
