"""`mesh-attention demo`: run attention over processes on this machine, and compare each method with one process.

The processes use Gloo over the loopback interface; `demo_worker` is what each of them does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import typer

from mesh_attention.errors import UsageError
from mesh_attention.masks import causal
from mesh_attention.plan.assignment import Tile, tiles_of
from mesh_attention.planning.choice import Choice
from mesh_attention.problem import Problem
from mesh_attention.units import BYTES, count, format_nbytes, format_together, parse_size, parse_whole
from mesh_attention_lab.cli.command import group, option
from mesh_attention_lab.cli.demo_report import LOOK_AT, write_report
from mesh_attention_lab.cli.demo_worker import TIMED_RUNS, Counts, Measured, Seen, work
from mesh_attention_lab.cli.files import make_folder, progress
from mesh_attention_lab.cli.tables import Column, mask_words, plain_console, print_table, size_words, tile_reason
from mesh_attention_lab.launch import run_processes

MOST_RANKS, MOST_TOKENS = 64, 65536
LARGEST_ERROR = 1e-4
"""Relative, float32 against float64; a right result stays below 1e-5, a lost or doubled block is above 1e-2."""
ULYSSES_DEGREE = 2
REPORT = "mesh-attention-report"


@group
class DemoOptions:
    ranks: int = option("--ranks", "Number of processes that share the work.", "N", parse_whole, 8)
    seq: int = option("--seq", "Tokens of the whole sequence: 4096, 4k (k is 1024).", "SIZE", parse_size, "4k")
    report: Path | None = option(
        "--report", "Where to write the report: a page and a trace.", "FOLDER", default=None, show_default=REPORT
    )
    no_report: bool = option("--no-report", "Record and write nothing.", default=False)
    json: bool = option("--json", "Print one JSON object and nothing else.", default=False)


def demo_command(given: DemoOptions) -> None:
    """Attend over processes on this machine with each method, and compare with attention in one process.

    One more pass of each method is recorded, and a report with its timeline is written to a folder.

    Exit code 0: all are right. 1: a result or a count is wrong, or a process failed.
    """
    problem = _problem(given.ranks, given.seq)
    methods = _methods(problem)
    if given.report is not None:
        if given.no_report:
            raise UsageError(f"--report {given.report} cannot be combined with --no-report; leave one of them out")
        make_folder("--report", given.report)
    is_recorded = not given.no_report and problem.ranks > 1
    with progress(f"starting on {count(problem.ranks, 'rank')}") as report:
        by_rank = run_processes(work, problem, methods, is_recorded, ranks=problem.ranks, report=report)
    by_method = zip(*(seen.methods for seen in by_rank), strict=True)
    rows = [_row(name, methods[name], seen) for name, seen in zip(methods, by_method, strict=True)]
    is_right = all(row.is_right for row in rows)
    if not given.json:
        _print(problem, rows)
    page: Path | None = None
    reason: str | None = "--no-report was given" if given.no_report else "one rank has nothing to show; use two or more"
    if is_recorded:
        page, reason = _report(given.report or Path(REPORT), problem, methods, by_rank[0], best=_best(rows).method)
    if given.json:
        told = {"ok": is_right, **_facts(problem), "methods": [asdict(row) for row in rows]}
        typer.echo(json.dumps(told | {"report": None if page is None else str(page), "no_report": reason}))
    elif page is not None:
        typer.echo(f"\nreport: {page}\n{LOOK_AT}")
    elif not given.no_report:
        typer.echo(f"\nno report was written: {reason}", err=True)
    if not given.json:
        plain_console().print(f"\n{_verdict(methods, rows)}", style="bold")
    if not is_right:
        raise typer.Exit(1)


def _report(
    folder: Path, problem: Problem, methods: Iterable[str], first: Seen, *, best: str
) -> tuple[Path | None, str | None]:
    """The page, or the reason why it was not written: the results are right without it."""
    try:
        with progress("drawing") as report:
            return write_report(folder, problem, methods, first, best=best, report=report), None
    except UsageError as error:
        return None, str(error)


# What is run


def _problem(ranks: int, seq: int) -> Problem:
    for name, number, most in (("--ranks", ranks, MOST_RANKS), ("--seq", seq, MOST_TOKENS)):
        if number > most:
            raise UsageError(f"{name} {number}: expected at most {most}, because all of it runs on this machine")
    return Problem.self_attention(
        seq=seq, heads=8, kv_heads=4, head_dim=64, ranks=ranks, dtype="float32", mask=causal()
    )


def _methods(problem: Problem) -> dict[str, Choice]:
    """Ring, attention2d, mesh, and ulysses × mesh where its degree divides the ranks."""
    tile = _squarest(problem.ranks)
    found = {
        "ring": Choice(method="ring"),
        "attention2d": Choice(method="attention2d", tile=tile),
        "mesh": Choice(method="mesh", tile=tile),
    }
    if problem.ranks % ULYSSES_DEGREE == 0:
        tile = _squarest(problem.ranks // ULYSSES_DEGREE)
        found["ulysses × mesh"] = Choice(tile=tile, ulysses_degree=ULYSSES_DEGREE)
    # Refuses here what the processes would refuse.
    return {name: choice.resolved(problem, "forward") for name, choice in found.items()}


def _squarest(places: int) -> Tile:
    return max((tile for tile in tiles_of(places) if tile.rows <= tile.cols), key=lambda tile: tile.rows)


# What is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Counts):
    """Each number is that of the worst rank."""

    method: str
    tile: str
    time_s: float

    @property
    def is_right(self) -> bool:
        return self.is_as_planned and max(self.forward_error, self.gradient_error) <= LARGEST_ERROR


def _row(method: str, choice: Choice, seen: Sequence[Measured]) -> Row:
    worst: dict[str, Any] = {field.name: max(getattr(rank, field.name) for rank in seen) for field in fields(Counts)}
    return Row(
        method=method,
        tile=str(choice.assignment),
        **worst | {"is_as_planned": all(rank.is_as_planned for rank in seen)},
        time_s=median(max(run) for run in zip(*(rank.times_s for rank in seen), strict=True)),
    )


def _facts(problem: Problem) -> dict[str, Any]:
    names = {"ranks": "ranks", "seq": "seq_q", "heads": "heads", "kv_heads": "kv_heads", "head_dim": "head_dim_qk"}
    facts = {key: getattr(problem, name) for key, name in names.items()}
    return facts | {"dtype": problem.dtype, "mask": str(problem.mask), "cores": os.cpu_count()}


def _print(problem: Problem, rows: Sequence[Row]) -> None:
    console = plain_console()
    console.print(
        f"attention forward and backward, {mask_words(problem)}, {size_words(problem)}; "
        f"{problem.ranks} processes on {os.cpu_count()} cores",
        style="bold",
    )
    print_table(console, _columns(rows), gaps=(3, 2, 1))
    if problem.ranks % ULYSSES_DEGREE:
        console.print(f"ulysses × mesh is left out: {ULYSSES_DEGREE} does not divide {problem.ranks} ranks")
    console.print(
        "Errors: largest difference from attention in one process in float64, relative to its largest value. Received, "
        "messages sent and peak of buffers are those of the worst rank. As planned: bytes of each kind, messages and "
        f"peaks are exactly the plan's on every rank. Time: the slowest rank, median of {TIMED_RUNS} runs; the "
        "processes share the cores, so it says little about GPUs.",
        style="dim",
    )
    for row in rows:
        if not row.is_right:
            console.print(f"{row.method} {row.tile} is wrong: see its errors and its counts above", style="bold red")


def _columns(rows: Sequence[Row]) -> list[Column]:
    received_unit, received = format_together([row.received_nbytes for row in rows], BYTES, below=10_000)
    peak_unit, peaks = format_together([row.peak_nbytes for row in rows], BYTES, below=10_000)
    return [
        Column(header="method", cells=[row.method for row in rows], is_text=True),
        Column(header="tile", cells=[row.tile for row in rows], is_text=True),
        Column(header="error\nforward", cells=[f"{row.forward_error:.0e}" for row in rows]),
        Column(header="error\ngradients", cells=[f"{row.gradient_error:.0e}" for row in rows]),
        Column(header=f"received\n{received_unit}", cells=received),
        Column(header="messages", cells=[f"{row.messages:,}" for row in rows]),
        Column(header=f"peak\n{peak_unit}", cells=peaks),
        Column(header="as\nplanned", cells=["yes" if row.is_as_planned else "NO" for row in rows]),
        Column(header="time\ns", cells=[f"{row.time_s:.2f}" for row in rows]),
    ]


def _best(rows: Sequence[Row]) -> Row:
    return min(rows, key=lambda row: row.received_nbytes)


def _verdict(methods: Mapping[str, Choice], rows: Sequence[Row]) -> str:
    """The method that moved the fewest bytes, and the reason."""
    ring, best = rows[0], _best(rows)
    if best.received_nbytes >= ring.received_nbytes:
        return "No method moved fewer bytes than ring: no tile on these ranks has several rows and several columns."
    share = best.received_nbytes / ring.received_nbytes
    return (
        f"{best.method} {best.tile} wins with {format_nbytes(best.received_nbytes)} received by a rank, {share:.2f} of "
        f"ring's: {tile_reason(methods[best.method].assignment)}"
    )
