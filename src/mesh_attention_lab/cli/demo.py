"""`mesh-attention demo`: run attention over processes on this machine, and compare each method with one process.

The processes use Gloo over the loopback interface; `demo_worker` is what each of them does. The report is a page and a
trace of what ran, next to its forecast.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from typer import Option

from mesh_attention.clusters import PRESETS
from mesh_attention.errors import TopologyError, UsageError
from mesh_attention.machine.fit import Measurement, fit_topology
from mesh_attention.masks import causal
from mesh_attention.plan.assignment import Tile, tiles_of
from mesh_attention.planning.choice import Choice
from mesh_attention.problem import DIRECTIONS, Problem
from mesh_attention.topology import Topology
from mesh_attention.units import BYTES, Report, count, format_nbytes, format_time, format_together, parse_size
from mesh_attention_lab.cli.demo_worker import TIMED_RUNS, Measured, MethodCounts, RankResults, work
from mesh_attention_lab.cli.files import make_folder, progress
from mesh_attention_lab.cli.options import parsed, whole_number
from mesh_attention_lab.cli.terminal import (
    Column,
    cluster_words,
    mask_words,
    plain_console,
    print_table,
    size_words,
    tile_reason,
)
from mesh_attention_lab.drawing.page import Scene
from mesh_attention_lab.launch import run_processes
from mesh_attention_lab.scenes import rival_scenes, scene_of, write_explorer

MOST_RANKS, MOST_TOKENS = 64, 65536
LARGEST_ERROR = 1e-4
"""Relative, float32 against float64; a right result stays below 1e-5, a lost or doubled block is above 1e-2."""
ULYSSES_DEGREE = 2
REPORT = "mesh-attention-report"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    ranks: Annotated[int, whole_number("--ranks", "Number of processes that share the work.", Option)] = 8
    seq: Annotated[
        int,
        Option(
            "--seq",
            help="Tokens of the whole sequence: 4096, 4k (k is 1024).",
            metavar="SIZE",
            parser=parsed("--seq", parse_size),
        ),
    ] = 4096
    report: Annotated[
        Path | None,
        Option(
            "--report",
            help="Where to write the report: a page and a trace.",
            metavar="FOLDER",
            show_default="mesh-attention-report",
        ),
    ] = None
    no_report: Annotated[bool, Option("--no-report", help="Record and write nothing.")] = False
    json: Annotated[bool, Option("--json", help="Print one JSON object and nothing else.")] = False


def demo_command(options: DemoOptions) -> None:
    """Attend over processes on this machine with each method, and compare with attention in one process.

    One more pass of each method is recorded, and a report with its timeline is written to a folder.

    Exit code 0: all are right. 1: a result or a count is wrong, or a process failed.
    """
    problem = _problem(options.ranks, options.seq)
    methods = _methods(problem)
    if options.report is not None:
        if options.no_report:
            raise UsageError(f"--report {options.report} cannot be combined with --no-report; leave one of them out")
        make_folder("--report", options.report)
    is_recorded = not options.no_report and problem.ranks > 1
    with progress(f"starting on {count(problem.ranks, 'rank')}") as report:
        by_rank = run_processes(work, problem, methods, is_recorded, ranks=problem.ranks, report=report)
    by_method = zip(*(seen.methods for seen in by_rank), strict=True)
    rows = [_row(name, methods[name], seen) for name, seen in zip(methods, by_method, strict=True)]
    is_right = all(row.is_right for row in rows)
    if not options.json:
        _print(problem, rows)
    page: Path | None = None
    reason: str | None = (
        "--no-report was given" if options.no_report else "one rank has nothing to show; use two or more"
    )
    if is_recorded:
        page, reason = _report(options.report or Path(REPORT), problem, methods, by_rank[0], best=_best(rows).method)
    if options.json:
        told = {"ok": is_right, **_facts(problem), "methods": [asdict(row) for row in rows]}
        typer.echo(json.dumps(told | {"report": None if page is None else str(page), "no_report": reason}))
    elif page is not None:
        typer.echo(f"\nreport: {page}\n{LOOK_AT}")
    elif not options.no_report:
        typer.echo(f"\nno report was written: {reason}", err=True)
    if not options.json:
        plain_console().print(f"\n{_verdict(methods, rows)}", style="bold")
    if not is_right:
        raise typer.Exit(1)


def _report(
    folder: Path, problem: Problem, methods: Iterable[str], first: RankResults, *, best: str
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
        seq_len=seq, heads=8, kv_heads=4, head_dim=64, ranks=ranks, dtype="float32", mask=causal()
    )


def _methods(problem: Problem) -> dict[str, Choice]:
    """Ring, attention2d, mesh, and ulysses × mesh where its degree divides the ranks."""
    tile = _squarest(problem.ranks)
    choices = {
        "ring": Choice(method="ring"),
        "attention2d": Choice(method="attention2d", tile=tile),
        "mesh": Choice(method="mesh", tile=tile),
    }
    if problem.ranks % ULYSSES_DEGREE == 0:
        tile = _squarest(problem.ranks // ULYSSES_DEGREE)
        choices["ulysses × mesh"] = Choice(tile=tile, ulysses_degree=ULYSSES_DEGREE)
    # Refuses here what the processes would refuse.
    return {name: choice.resolved(problem, "forward") for name, choice in choices.items()}


def _squarest(places: int) -> Tile:
    return max((tile for tile in tiles_of(places) if tile.rows <= tile.cols), key=lambda tile: tile.rows)


# What is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRow(MethodCounts):
    """Each number is that of the worst rank."""

    method: str
    tile: str
    time_s: float

    @property
    def is_right(self) -> bool:
        return self.is_as_planned and max(self.forward_error, self.gradient_error) <= LARGEST_ERROR


def _row(method: str, choice: Choice, seen: Sequence[Measured]) -> MethodRow:
    worst: dict[str, Any] = {
        field.name: max(getattr(rank, field.name) for rank in seen) for field in fields(MethodCounts)
    }
    return MethodRow(
        method=method,
        tile=str(choice.assignment),
        **worst | {"is_as_planned": all(rank.is_as_planned for rank in seen)},
        time_s=median(max(run) for run in zip(*(rank.times_s for rank in seen), strict=True)),
    )


def _facts(problem: Problem) -> dict[str, Any]:
    names = {"ranks": "ranks", "seq": "seq_q", "heads": "heads", "kv_heads": "kv_heads", "head_dim": "head_dim_qk"}
    facts = {key: getattr(problem, name) for key, name in names.items()}
    return facts | {"dtype": problem.dtype, "mask": str(problem.mask), "cores": os.cpu_count()}


def _print(problem: Problem, rows: Sequence[MethodRow]) -> None:
    console = plain_console()
    console.print(
        f"attention forward and backward, {mask_words(problem)}, {size_words(problem)}; "
        f"{problem.ranks} processes on {os.cpu_count()} cores",
        style="bold",
    )
    print_table(console, _columns(rows))
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


def _columns(rows: Sequence[MethodRow]) -> list[Column]:
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


def _best(rows: Sequence[MethodRow]) -> MethodRow:
    return min(rows, key=lambda row: row.received_nbytes)


def _verdict(methods: Mapping[str, Choice], rows: Sequence[MethodRow]) -> str:
    """The method that moved the fewest bytes, and the reason."""
    ring, best = rows[0], _best(rows)
    if best.received_nbytes >= ring.received_nbytes:
        return "No method moved fewer bytes than ring: no tile on these ranks has several rows and several columns."
    share = best.received_nbytes / ring.received_nbytes
    return (
        f"{best.method} {best.tile} wins with {format_nbytes(best.received_nbytes)} received by a rank, {share:.2f} of "
        f"ring's: {tile_reason(methods[best.method].assignment)}"
    )


PAGE = "report.html"
LOOK_AT = (
    "Choose a method there: the matrix shows who computes what, the timeline what each rank did when, as forecast and "
    "as measured."
)
FORECAST_CLUSTER, FORECAST_RANKS = "h100", (16, 64)
FORECAST_TOKENS = 131072


def write_report(
    folder: Path, problem: Problem, methods: Iterable[str], seen: RankResults, *, best: str, report: Report
) -> Path:
    """Write the page, which is returned, and a trace next to it. `seen` are the results of rank 0, with recordings. The
    page opens on the `best` method."""
    make_folder("--report", folder)
    assert seen.calibration is not None  # passes were recorded
    here, is_fitted = machine_at_hand(seen.calibration, ranks=problem.ranks)
    measured = [_measured_scene(*passes, here, report) for passes in zip(methods, seen.methods, strict=True)]
    opening = next(scene for scene in measured if scene.method == best)
    page = folder / PAGE
    write_explorer(
        page,
        [*measured, *forecast_scenes(report)],
        traced=measured,
        title="Attention spread over ranks: who computes what, and when",
        notes=_notes(problem, here, is_fitted=is_fitted),
        opening=opening,
        lead=f"Shown first: {best} {opening.tile}, which the demo recommends: a rank receives the fewest bytes.",
    )
    return page


def machine_at_hand(calibration: Measurement, *, ranks: int) -> tuple[Topology, bool]:
    """The calibrated machine, or the `laptop` preset if its times are inconsistent, as on a busy machine."""
    try:
        here = fit_topology(calibration, name="here", ranks=ranks, ranks_per_node=ranks, unmeasured=None)
    except TopologyError:
        return PRESETS["laptop"].with_ranks(ranks), False
    return here, True


def _measured_scene(method: str, measured: Measured, here: Topology, report: Report) -> Scene:
    plans = {plan.direction: plan for plan, _ in measured.passes}
    timelines = {plan.direction: timeline for plan, timeline in measured.passes}
    return scene_of(plans, here, report=report, measured=timelines, method=method)


def forecast_problem(ranks: int) -> Problem:
    return Problem.self_attention(
        seq_len=FORECAST_TOKENS, heads=32, kv_heads=8, head_dim=128, ranks=ranks, mask=causal()
    )


def forecast_scenes(report: Report) -> list[Scene]:
    scenes: list[Scene] = []
    for ranks in FORECAST_RANKS:
        topology = PRESETS[FORECAST_CLUSTER].with_ranks(ranks)
        problem = forecast_problem(ranks)
        scenes += rival_scenes(problem, topology, layout=None, directions=DIRECTIONS, report=report, tiles=1)
    return scenes


def _notes(problem: Problem, here: Topology, *, is_fitted: bool) -> list[str]:
    rates = f"{1e3 * here.device.forward.tflops:.3g} and {1e3 * here.device.backward.tflops:.3g} GFLOP/s per rank"
    source = (
        "as calibrated by the same processes right after they ran"
        if is_fitted
        else "by the laptop preset, because the measured times are inconsistent; run it again when the machine is idle"
    )
    larger = forecast_problem(FORECAST_RANKS[-1])
    return [
        f"Scenes of {problem.ranks} ranks were measured: {size_words(problem)}, {mask_words(problem)}, in "
        f"{problem.ranks} processes on {os.cpu_count()} cores, with Gloo on the loopback interface. Each pass was "
        "recorded once, after the timed runs.",
        f"Their forecasts are for this machine {source}: {rates} forward and backward with all ranks at work, "
        f"{here.inside.gb_per_s:.3g} GB/s and {format_time(here.inside.latency_us * 1e-6)} per message. Ranks that "
        "share cores take turns, which a forecast does not include.",
        f"Scenes of {' and '.join(map(str, FORECAST_RANKS))} ranks are forecasts: {size_words(larger)}, "
        f"{mask_words(larger)}, on {cluster_words(PRESETS[FORECAST_CLUSTER].with_ranks(larger.ranks))}.",
    ]
