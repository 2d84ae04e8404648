"""Steps and comparisons as tables for people. Numbers come in, tables go out; nothing is worked out here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten, wrap

from rich import box
from rich.table import Table

from mesh_attention.cli.comparison import Comparison
from mesh_attention.units import BYTES, FLOPS, format_nbytes, format_together

WHOLE_PROGRAM = 40
"""Programs up to this many steps are shown whole."""
FIRST_STEPS, LAST_STEPS = 20, 10
LONGEST_STEP = 160
"""Characters of a step that are shown; collectives of large groups have thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Cells below a header. Numbers are never wrapped; words are, if they have a `least_width` to be wrapped to.

    Where there is no room for all columns, those with `drop` go, the highest first.
    """

    header: str
    cells: Sequence[str]
    is_text: bool = False
    least_width: int | None = None
    drop: int = 0

    @property
    def whole_width(self) -> int:
        return max(len(line) for cell in (self.header, *self.cells) for line in cell.split("\n"))

    @property
    def narrow_width(self) -> int:
        return self.whole_width if self.least_width is None else min(self.least_width, self.whole_width)


def fitting(columns: Sequence[Column], *, width: int, gaps: tuple[int, ...]) -> tuple[list[Column], int]:
    """With the first gap between columns with which all fit; if none is, with the last, and the columns that do fit."""
    gap = next((gap for gap in gaps if _narrow_width(columns, gap) <= width), gaps[-1])
    kept = list(columns)
    while _narrow_width(kept, gap) > width and any(column.drop for column in kept):
        kept.remove(max(kept, key=lambda column: column.drop))
    return kept, gap


def table_of(
    columns: Sequence[Column], *, bold: Sequence[bool], width: int, gaps: tuple[int, ...] = (3, 2, 1)
) -> Table:
    kept, gap = fitting(columns, width=width, gaps=gaps)
    widths = _shared_widths(kept, room=max(0, width - _narrow_width(kept, gap)))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, gap - 1, 0, 0))
    for column in kept:
        table.add_column(column.header, justify="left" if column.is_text else "right", no_wrap=True)
    for is_bold, cells in zip(bold, zip(*(column.cells for column in kept), strict=True), strict=True):
        wrapped = [
            cell if column.least_width is None else _wrapped(cell, column_width)
            for cell, column, column_width in zip(cells, kept, widths, strict=True)
        ]
        table.add_row(*wrapped, style="bold" if is_bold else None)
    return table


def _narrow_width(columns: Sequence[Column], gap: int) -> int:
    return sum(column.narrow_width + gap for column in columns) - gap


def _shared_widths(columns: Sequence[Column], *, room: int) -> list[int]:
    """The room that is left goes to the columns that were to be wrapped, by what each lacks."""
    lacks = [column.whole_width - column.narrow_width for column in columns]
    share = min(1.0, room / sum(lacks)) if any(lacks) else 0.0
    return [column.narrow_width + int(share * lack) for column, lack in zip(columns, lacks, strict=True)]


def _wrapped(cell: str, width: int) -> str:
    """What follows an indented line is indented further."""
    lines: list[str] = []
    for line in cell.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()))
        lines += wrap(line, width, subsequent_indent=indent * 2, break_on_hyphens=False) or [""]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step of a program: its text, the bytes it sends and receives, the bytes held meanwhile."""

    index: int
    step: str
    moved_nbytes: int
    held_nbytes: int


def step_table(steps: Sequence[StepRow], *, all_steps: bool) -> Table:
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


def comparison_table(comparison: Comparison, *, width: int) -> Table:
    rows = comparison.rows
    moved = [row.sent_nbytes for row in rows] + [row.received_nbytes for row in rows]
    moved_unit, moved_texts = format_together(moved, BYTES, below=10_000)
    flops_unit, flops = format_together([row.flops for row in rows], FLOPS, below=100)
    peak_unit, peaks = format_together([row.peak_nbytes for row in rows], BYTES, below=10_000)
    columns = [
        Column(
            header="method", cells=[f"{'>' if row.is_this_plan else ' '} {row.method}" for row in rows], is_text=True
        ),
        Column(
            header="tile",
            cells=[f"{row.ulysses}·{row.tile}" if row.ulysses > 1 else row.tile for row in rows],
            is_text=True,
        ),
        Column(header=f"sent\n{moved_unit}", cells=moved_texts[: len(rows)], drop=1),
        Column(header=f"received\n{moved_unit}", cells=moved_texts[len(rows) :]),
        Column(header="×\nring", cells=[_ratio(row.against_ring) for row in rows]),
        Column(header="×\nbound", cells=[_ratio(row.against_bound) for row in rows]),
        Column(header=flops_unit, cells=flops),
        Column(header="imbalance", cells=[f"{row.imbalance:.1%}" for row in rows]),
        Column(header=f"peak\n{peak_unit}", cells=peaks),
        Column(header="kernel\ncalls", cells=[f"{row.kernel_calls:,}" for row in rows]),
        Column(header="messages", cells=[f"{row.messages:,}" for row in rows], drop=2),
    ]
    return table_of(columns, bold=[row.is_this_plan for row in rows], width=width)


def _ratio(times: float | None) -> str:
    return "–" if times is None else f"{times:.2f}"


def comparison_caption(comparison: Comparison, *, ranks: int) -> str:
    counted = len(comparison.counted_ranks)
    of_whom = "all ranks" if counted == ranks else f"{counted} of the {ranks:,} ranks, evenly spread"
    return (
        f"> is this plan. Each number is the worst of {of_whom}. Tile: query shards x KV shards, after the Ulysses "
        "degree if any. × ring: bytes received against ring's. × bound: against the least that an average rank can "
        "receive, with any assignment, even one that splits heads. All have this plan's layout, direction and options, "
        "but for --inner."
    )
