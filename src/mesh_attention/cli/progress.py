"""A progress bar on stderr that leaves nothing behind; none where stderr is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import Program

Report = Callable[[str, float], None]
"""Called with the current activity and the fraction done."""


@contextmanager
def progress(doing: str) -> Iterator[Report]:
    """A bar that pulses until the first fraction is reported."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(doing, total=None)

        def report(doing: str, fraction: float) -> None:
            bar.update(task, total=1.0, completed=fraction, description=doing)

        yield report


def unroll(plan: Plan, report: Report) -> Plan:
    """`Plan.unrolled`, with progress."""
    if plan.programs is not None:
        return plan
    programs: list[Program] = []
    for program in plan.all_programs():
        report("building programs", program.rank / plan.problem.ranks)
        programs.append(program)
    return plan.with_programs(tuple(programs))
