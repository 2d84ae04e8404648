"""`mesh-attention demo`: run attention over processes on this machine, each method beside single-process attention.

The processes are started by torchrun's elastic launcher and speak Gloo over the loopback interface; what each of them
does is in `demo_worker`. Torch is imported when the command runs.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from mesh_attention.cli.demo_report import LOOK_AT, Ran, has_charts, write_report
from mesh_attention.cli.demo_worker import TIMED_RUNS, Contender, Measured, Seen, work
from mesh_attention.cli.pictures import make_folder
from mesh_attention.cli.progress import Report, progress
from mesh_attention.cli.sizes import BYTES, count, format_size, format_together, parse_size, parse_whole
from mesh_attention.errors import MeshAttentionError, UsageError
from mesh_attention.masks import causal
from mesh_attention.plan.assignment import Tile, tiles_of
from mesh_attention.planning.registry import make_plan
from mesh_attention.problem import Problem

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
MOST_RANKS, MOST_TOKENS = 64, 65536
LARGEST_ERROR = 1e-4
"""Relative, float32 against float64; what is right stays below 1e-5, and a lost or doubled block is above 1e-2."""
ULYSSES_DEGREE = 2
POLL_S = 0.2
REPORT, NOT_WANTED = "mesh-attention-report", "--no-report came"

Ranks = Annotated[str, typer.Option("--ranks", help="How many processes share the work.", metavar="N")]
Seq = Annotated[str, typer.Option("--seq", help="Tokens of the whole sequence: 4096, 4k (k is 1024).", metavar="SIZE")]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--report", help="Where the report goes: a page, pictures, a trace.", metavar="FOLDER", show_default=REPORT
    ),
]
NoReport = Annotated[bool, typer.Option("--no-report", help="Record and write nothing.")]


def demo_command(
    ranks: Ranks = "8",
    seq: Seq = "4k",
    folder: Folder = None,
    no_report: NoReport = False,
    json_output: JsonOutput = False,
) -> None:
    """Attend over processes on this machine with each method, and compare with single-process attention.

    One more pass of each is recorded, and a report of what happened when is left in a folder.

    Exit code 0: all are right. 1: a result or a count is not what it should be, or a process failed.
    """
    problem = _problem(parse_whole("--ranks", ranks), parse_size("--seq", seq))
    contenders = _contenders(problem)
    if folder is not None:
        if no_report:
            raise UsageError(f"--report {folder} came beside --no-report; leave one of them out")
        make_folder("--report", folder)
    is_recorded = not no_report and problem.ranks > 1
    try:
        with progress(f"starting on {count(problem.ranks, 'rank')}") as report:
            by_rank = run_processes(work, problem, contenders, is_recorded, ranks=problem.ranks, report=report)
    except WorkerError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    by_method = list(zip(*(seen.methods for seen in by_rank), strict=True))
    rows = [_row(contender, seen) for contender, seen in zip(contenders, by_method, strict=True)]
    is_right = all(row.is_right for row in rows)
    if not json_output:
        _print(problem, rows)
    page: Path | None = None
    reason: str | None = NOT_WANTED if no_report else "one rank has nothing to show; take two or more"
    if is_recorded:
        page, reason = _report(folder or Path(REPORT), problem, contenders, by_rank[0], rows)
    if json_output:
        told = {"ok": is_right, **_facts(problem), "methods": [asdict(row) for row in rows]}
        typer.echo(json.dumps(told | {"report": None if page is None else str(page), "no_report": reason}))
    else:
        _tell_report(page, reason)
    if not is_right:
        raise typer.Exit(1)


def _report(
    folder: Path, problem: Problem, contenders: Sequence[Contender], first: Seen, rows: Sequence[Row]
) -> tuple[Path | None, str | None]:
    """The page, or why there is none: a folder that cannot be written does not make the results above wrong."""
    assert first.calibration is not None  # recorded
    ran = [
        Ran(contender=contender, passes=seen.passes, time_s=row.time_s)
        for contender, seen, row in zip(contenders, first.methods, rows, strict=True)
    ]
    try:
        with progress("drawing") as report:
            return write_report(folder, problem, ran, first.calibration, report=report), None
    except UsageError as error:
        return None, str(error)


def _tell_report(page: Path | None, reason: str | None) -> None:
    if page is not None:
        typer.echo(f"\nreport: {page}\n{LOOK_AT}")
        if not has_charts():
            typer.echo("Its pictures are left out: pip install 'mesh-attention[charts]' for them.")
    elif reason != NOT_WANTED:
        typer.echo(f"\nno report was written: {reason}", err=True)


# What is run


def _problem(ranks: int, seq: int) -> Problem:
    for option, number, most in (("--ranks", ranks, MOST_RANKS), ("--seq", seq, MOST_TOKENS)):
        if number > most:
            raise UsageError(f"{option} {number}: expected at most {most}, because all of it runs on this machine")
    return Problem.self_attention(
        seq=seq, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, ranks=ranks, dtype="float32", mask=causal()
    )


def _contenders(problem: Problem) -> list[Contender]:
    """Ring, attention2d, mesh, and ulysses × mesh where its degree divides the ranks."""
    ranks = problem.ranks
    ring, tile = Tile(1, ranks), _squarest(ranks)
    found = [
        Contender(name="ring", tile=f"{ring}", options={"method": "ring"}),
        Contender(name="attention2d", tile=f"{tile}", options={"method": "attention2d", "tile": tile}),
        Contender(name="mesh", tile=f"{tile}", options={"method": "mesh", "tile": tile}),
    ]
    if ranks % ULYSSES_DEGREE == 0:
        tile = _squarest(ranks // ULYSSES_DEGREE)
        options = {"method": "mesh", "tile": tile, "ulysses_degree": ULYSSES_DEGREE}
        found.append(Contender(name="ulysses × mesh", tile=f"{ULYSSES_DEGREE}·{tile}", options=options))
    for contender in found:
        make_plan(problem, **contender.options)  # refuses here what the workers would refuse, before any is started
    return found


def _squarest(places: int) -> Tile:
    return max((tile for tile in tiles_of(places) if tile.rows <= tile.cols), key=lambda tile: tile.rows)


# Processes


class WorkerError(MeshAttentionError):
    """A process failed; the message names its rank and shows its traceback."""


def run_processes(function: Callable[..., Any], *arguments: Any, ranks: int, report: Report) -> list[Any]:
    """What ``function(*arguments, progress_file)`` returns on each rank; `report` is told what is written to the file.

    The function must be importable by name. A line of the file is a fraction, a space and what is being done.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # a failure is shown below, once
    can_fork = "forkserver" in multiprocessing.get_all_start_methods()
    if can_fork:  # the processes are forked from one that has imported torch
        multiprocessing.set_forkserver_preload(["torch.distributed", function.__module__])
    with tempfile.TemporaryDirectory(prefix="mesh-attention-demo-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=Path(folder).name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            start_method="forkserver" if can_fork else "spawn",
            # Gloo greets on stdout, which belongs to the table or to JSON.
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=Std.ALL),
        )
        progress_file = Path(folder) / "progress"
        with _followed(progress_file, report):
            try:
                results = elastic_launch(config, function)(*arguments, progress_file)
            except ChildFailedError as error:
                rank, failure = error.get_first_failure()
                raise WorkerError(f"rank {rank} failed: {_traceback(failure.message)}") from error
            except SignalException as error:
                raise KeyboardInterrupt from error
    return [results[rank] for rank in range(ranks)]


def _traceback(message: str | dict[str, Any]) -> str:
    """Torch gives a dictionary if the process could still write one, and otherwise a line."""
    return message if isinstance(message, str) else str(message["extraInfo"]["py_callstack"]).rstrip()


@contextmanager
def _followed(path: Path, report: Report) -> Iterator[None]:
    """Reports the last line of a growing file, again and again, until the block ends."""
    is_over = threading.Event()

    def follow() -> None:
        while not is_over.wait(POLL_S):
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
            if lines and lines[-1].endswith("\n"):
                fraction, _, doing = lines[-1].strip().partition(" ")
                report(doing, float(fraction))

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        is_over.set()
        follower.join()


# What is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A method, forward and backward together: the worst rank for each number by itself."""

    method: str
    tile: str
    forward_error: float
    gradient_error: float
    sent_nbytes: int
    received_nbytes: int
    messages: int
    peak_nbytes: int
    is_as_planned: bool
    time_s: float

    @property
    def is_right(self) -> bool:
        return self.is_as_planned and max(self.forward_error, self.gradient_error) <= LARGEST_ERROR


def _row(contender: Contender, seen: Sequence[Measured]) -> Row:
    return Row(
        method=contender.name,
        tile=contender.tile,
        forward_error=max(rank.forward_error for rank in seen),
        gradient_error=max(rank.gradient_error for rank in seen),
        sent_nbytes=max(rank.sent_nbytes for rank in seen),
        received_nbytes=max(rank.received_nbytes for rank in seen),
        messages=max(rank.messages for rank in seen),
        peak_nbytes=max(rank.peak_nbytes for rank in seen),
        is_as_planned=all(rank.is_as_planned for rank in seen),
        time_s=median(max(run) for run in zip(*(rank.times_s for rank in seen), strict=True)),
    )


def _facts(problem: Problem) -> dict[str, Any]:
    return {
        "ranks": problem.ranks,
        "seq": problem.seq_q,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "head_dim": problem.head_dim_qk,
        "dtype": problem.dtype,
        "mask": str(problem.mask),
        "cores": os.cpu_count(),
    }


def _print(problem: Problem, rows: Sequence[Row]) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(
        f"attention forward and backward, {problem.mask}, {format_size(problem.seq_q)} tokens, {HEADS} heads "
        f"({KV_HEADS} KV) of {HEAD_DIM}, {problem.dtype}; {problem.ranks} processes on {os.cpu_count()} cores",
        style="bold",
    )
    console.print(_table(rows, width=console.width))
    if len(rows) < 4:
        console.print(f"ulysses × mesh is left out: {ULYSSES_DEGREE} does not divide {problem.ranks} ranks")
    console.print(
        "Errors: largest difference from single-process attention in float64, relative to its largest value. Received, "
        "messages sent and peak of buffers: the worst rank. As planned: bytes of each kind, messages and peaks are "
        f"exactly the plan's on every rank. Time: the slowest rank, median of {TIMED_RUNS} runs; the processes share "
        "the cores, so it says little about GPUs.",
        style="dim",
    )
    for row in rows:
        if not row.is_right:
            console.print(f"{row.method} {row.tile} is wrong: see its errors and its counts above", style="bold red")


def _table(rows: Sequence[Row], *, width: int) -> Table:
    received_unit, received = format_together([row.received_nbytes for row in rows], BYTES, below=10_000)
    peak_unit, peaks = format_together([row.peak_nbytes for row in rows], BYTES, below=10_000)
    columns = {
        "method": [row.method for row in rows],
        "tile": [row.tile for row in rows],
        "error\nforward": [f"{row.forward_error:.0e}" for row in rows],
        "error\ngradients": [f"{row.gradient_error:.0e}" for row in rows],
        f"received\n{received_unit}": received,
        "messages": [f"{row.messages:,}" for row in rows],
        f"peak\n{peak_unit}": peaks,
        "as\nplanned": ["yes" if row.is_as_planned else "NO" for row in rows],
        "time\ns": [f"{row.time_s:.2f}" for row in rows],
    }
    # Nine columns just fit into 80 characters.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1 if width >= 100 else 0))
    for header in columns:
        table.add_column(header, justify="left" if header in ("method", "tile") else "right", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table
