"""`mesh-attention demo`: run attention over processes on this machine, and compare each method with one process.

The processes use Gloo over the loopback interface; `demo_worker` is what each of them does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mesh_attention.clusters import PRESETS
from mesh_attention.errors import TopologyError, UsageError
from mesh_attention.machine.fit import Measurement, fit_topology
from mesh_attention.masks import causal
from mesh_attention.plan.assignment import Tile, tiles_of
from mesh_attention.planners.choice import Choice
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.units import BYTES, Progress, count, format_nbytes, format_time
from mesh_attention_lab.cli import terminal as term
from mesh_attention_lab.cli.demo_worker import TIMED_RUNS, MethodResult, RankResults, work
from mesh_attention_lab.cli.draw import scene_of
from mesh_attention_lab.cli.files import problem_to_json
from mesh_attention_lab.cli.options import flag, option, tokens, whole_number
from mesh_attention_lab.drawing import writing
from mesh_attention_lab.drawing.page import write_page
from mesh_attention_lab.drawing.trace import joined, write_trace
from mesh_attention_lab.launch import run_processes

MOST_RANKS, MOST_TOKENS = 64, 65536
ULYSSES_DEGREE = 2
REPORT = "mesh-attention-report"


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    ranks: Annotated[int, whole_number("Number of processes that share the work.")] = 8
    seq: Annotated[int, tokens("Tokens of the whole sequence: 4096, 4k (k is 1024).")] = 4096
    report: Annotated[
        Path | None, option("Where to write the report: a page and a trace.", "FOLDER", show_default=REPORT)
    ] = None
    no_report: Annotated[bool, flag("--no-report", "Record and write nothing.")] = False
    json: Annotated[bool, flag("--json", "Print one JSON object and nothing else.")] = False


def demo_command(options: DemoOptions) -> None:
    """Attend over processes on this machine with each method, and compare with attention in one process.

    One more pass of each method is recorded, and a report with its timeline is written to a folder.

    Exit code 0: all are right. 1: a result or a count is wrong, or a process failed.
    """
    problem = _problem(options.ranks, options.seq)
    methods = _methods(problem)
    folder = options.report or Path(REPORT)
    if options.report is not None and options.no_report:
        raise UsageError(f"--report {folder} cannot be combined with --no-report; leave one of them out")
    is_recorded = not options.no_report and problem.ranks > 1  # on one, a call is a single kernel without steps
    if is_recorded:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
    with term.progress(f"running {', '.join(methods)} on {count(problem.ranks, 'rank')}"):
        by_rank = run_processes(work, problem, methods, is_recorded, ranks=problem.ranks)
    rows = [_worst(results) for results in zip(*(of_rank.methods for of_rank in by_rank), strict=True)]
    is_right = all(row.is_right for row in rows)
    if options.json:
        answer = {"ok": is_right, "problem": problem_to_json(problem), "cores": os.cpu_count()}
        answer |= {"methods": list(map(_as_json, rows)), "report": str(folder / PAGE) if is_recorded else None}
        typer.echo(json.dumps(answer))
    else:
        _print(problem, rows)
        term.plain_console().print(f"\n{_verdict(methods, rows)}", style="bold")
    if is_recorded:
        with term.progress("drawing") as report:
            write_report(folder, problem, by_rank[0], best=_best(rows).method, report=report)
        if not options.json:
            typer.echo(f"\nreport: {folder / PAGE}\n{LOOK_AT}")
    if not is_right:
        raise typer.Exit(1)


# What is run


def _problem(ranks: int, seq: int) -> Problem:
    for name, number, most in (("--ranks", ranks, MOST_RANKS), ("--seq", seq, MOST_TOKENS)):
        if number > most:
            raise UsageError(f"{name} {number}: expected at most {most}, because all of it runs on this machine")
    return Problem.self_attention(
        seq_len=seq, heads=8, kv_heads=4, head_dim=64, ranks=ranks, dtype="float32", mask=causal()
    )


def _methods(problem: Problem) -> dict[str, Choice]:
    """Ring, attention2d, mesh, and ulysses+mesh where its degree divides the ranks."""
    tile = _squarest(problem.ranks)
    choices = {
        "ring": Choice(method="ring"),
        "attention2d": Choice(method="attention2d", tile=tile),
        "mesh": Choice(method="mesh", tile=tile),
    }
    if problem.ranks % ULYSSES_DEGREE == 0:
        tile = _squarest(problem.ranks // ULYSSES_DEGREE)
        choices["ulysses+mesh"] = Choice(tile=tile, ulysses_degree=ULYSSES_DEGREE)
    # Refuses here what the processes would refuse.
    return {name: choice.resolved(problem, "forward") for name, choice in choices.items()}


def _squarest(places: int) -> Tile:
    return max((tile for tile in tiles_of(places) if tile.rows <= tile.cols), key=lambda tile: tile.rows)


# What is shown


def _worst(results: Sequence[MethodResult]) -> MethodResult:
    """Each number is that of the worst rank."""
    names = ("forward_error", "gradient_error", "sent_nbytes", "received_nbytes", "messages", "peak_nbytes", "time_s")
    worst: dict[str, Any] = {name: max(getattr(result, name) for result in results) for name in names}
    return replace(results[0], **worst, is_as_planned=all(result.is_as_planned for result in results), passes=())


def _as_json(row: MethodResult) -> dict[str, Any]:
    values = asdict(row)
    del values["passes"]
    return values


def _print(problem: Problem, rows: Sequence[MethodResult]) -> None:
    console = term.plain_console()
    console.print(
        f"attention forward and backward, {term.mask_words(problem)}, {term.size_words(problem)}; "
        f"{problem.ranks} processes on {os.cpu_count()} cores",
        style="bold",
    )
    term.print_table(console, _columns(rows))
    if problem.ranks % ULYSSES_DEGREE:
        console.print(f"ulysses+mesh is left out: {ULYSSES_DEGREE} does not divide {problem.ranks} ranks")
    console.print(
        "Each number is that of the worst rank. Errors: largest difference from attention in one process in float64. "
        "As planned: bytes, messages and peaks are exactly the plan's on every rank. Time: median of "
        f"{TIMED_RUNS} runs; the processes share the cores, so it says little about GPUs.",
        style="dim",
    )
    for row in rows:
        if not row.is_right:
            console.print(f"{row.method} {row.tile} is wrong: see its errors and its counts above", style="bold red")


def _columns(rows: Sequence[MethodResult]) -> list[term.Column]:
    return [
        term.Column(header="method", cells=[row.method for row in rows], is_text=True),
        term.Column(header="tile", cells=[row.tile for row in rows], is_text=True),
        term.Column(header="error\nforward", cells=[f"{row.forward_error:.0e}" for row in rows]),
        term.Column(header="error\ngradients", cells=[f"{row.gradient_error:.0e}" for row in rows]),
        term.Column.of_amounts("received", [row.received_nbytes for row in rows], BYTES),
        term.Column(header="messages", cells=[f"{row.messages:,}" for row in rows]),
        term.Column.of_amounts("peak", [row.peak_nbytes for row in rows], BYTES),
        term.Column(header="as\nplanned", cells=["yes" if row.is_as_planned else "NO" for row in rows]),
        term.Column(header="time\ns", cells=[f"{row.time_s:.2f}" for row in rows]),
    ]


def _best(rows: Sequence[MethodResult]) -> MethodResult:
    return min(rows, key=lambda row: row.received_nbytes)


def _verdict(methods: Mapping[str, Choice], rows: Sequence[MethodResult]) -> str:
    """The method that moved the fewest bytes, and the reason."""
    ring, best = rows[0], _best(rows)
    if best.received_nbytes >= ring.received_nbytes:
        return "No method moved fewer bytes than ring: no tile on these ranks has several rows and several columns."
    share = best.received_nbytes / ring.received_nbytes
    return (
        f"{best.method} {best.tile} wins with {format_nbytes(best.received_nbytes)} received by a rank, {share:.2f} of "
        f"ring's: {term.tile_reason(methods[best.method].assignment)}"
    )


PAGE = "report.html"
LOOK_AT = (
    "Choose a method there: the matrix shows who computes what, the timeline what each rank did when, as forecast and "
    "as measured."
)


def write_report(folder: Path, problem: Problem, seen: RankResults, *, best: str, report: Progress) -> None:
    """Write the page, which opens on the `best` method, and its trace. `seen` are the recordings of rank 0."""
    assert seen.calibration is not None  # passes were recorded
    here, source = _machine_at_hand(seen.calibration, ranks=problem.ranks)
    measured = [
        scene_of(
            {plan.direction: plan for plan, _ in result.passes},
            here,
            report=report,
            measured={plan.direction: timeline for plan, timeline in result.passes},
        )
        for result in seen.methods
    ]
    measured.sort(key=lambda scene: scene.method != best)
    write_trace(folder / "trace.json", joined(measured[0].measured.values()))
    write_page(
        folder / PAGE,
        measured,
        title="Attention spread over ranks: who computes what, and when",
        notes=[
            f"Shown first: {best} {measured[0].tile}, which the demo recommends: a rank receives the fewest bytes.",
            *_notes(problem, here, source),
        ],
    )


def _machine_at_hand(calibration: Measurement, *, ranks: int) -> tuple[Topology, str]:
    """The calibrated machine, or the `laptop` preset if its times are inconsistent, as on a busy machine; and which."""
    try:
        here = fit_topology(calibration, name="here", ranks=ranks, ranks_per_node=ranks, unmeasured=None)
    except TopologyError:
        reason = "because the measured times are inconsistent; run it again when the machine is idle"
        return PRESETS["laptop"].with_ranks(ranks), f"by the laptop preset, {reason}"
    return here, "as calibrated by the same processes right after they ran"


def _notes(problem: Problem, here: Topology, source: str) -> list[str]:
    rates = f"{1e3 * here.device.forward.tflops:.3g} and {1e3 * here.device.backward.tflops:.3g} GFLOP/s per rank"
    return [
        f"All scenes were measured: {term.size_words(problem)}, {term.mask_words(problem)}, in "
        f"{problem.ranks} processes on {os.cpu_count()} cores, with Gloo on the loopback interface. Each pass was "
        "recorded once, after the timed runs.",
        f"Their forecasts are for this machine {source}: {rates} forward and backward with all ranks at work, "
        f"{here.inside.gb_per_s:.3g} GB/s and {format_time(here.inside.latency_us * 1e-6)} per message. Ranks that "
        "share cores take turns, which a forecast does not include.",
        "'mesh-attention draw' makes such a page for other problems, clusters and numbers of ranks.",
    ]
