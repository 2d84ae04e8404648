"""Tables as wide as the terminal: columns that lack room are wrapped or left out. Nothing is worked out here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

from rich import box
from rich.console import Console
from rich.table import Table

NO_NUMBER = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Cells below a header. Numbers are never wrapped; text is, down to `least_width` if it has one.

    Where there is no room for all columns, those with `drop` are left out, the highest first.
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


def plain_console() -> Console:
    """Prints text as it is: brackets, colons and numbers are not interpreted."""
    return Console(highlight=False, markup=False, emoji=False)


def print_table(
    console: Console, columns: Sequence[Column], *, bold: Sequence[bool] = (), gaps: tuple[int, ...] = (2,)
) -> str:
    """Prints the columns that fit; returns a sentence about those that do not, if any."""
    console.print(table_of(columns, bold=bold, width=console.width, gaps=gaps))
    kept, _ = fitting(columns, width=console.width, gaps=gaps)
    dropped = ", ".join(" ".join(column.header.split()) for column in columns if column not in kept)
    return f"No room for {dropped}: use a wider terminal, or --json." if dropped else ""


def fitting(columns: Sequence[Column], *, width: int, gaps: tuple[int, ...]) -> tuple[list[Column], int]:
    """All columns with the first gap with which they fit; if none is, those that fit with the last gap."""
    gap = next((gap for gap in gaps if _narrow_width(columns, gap) <= width), gaps[-1])
    kept = list(columns)
    while _narrow_width(kept, gap) > width and any(column.drop for column in kept):
        kept.remove(max(kept, key=lambda column: column.drop))
    return kept, gap


def table_of(
    columns: Sequence[Column], *, bold: Sequence[bool] = (), width: int, gaps: tuple[int, ...] = (3, 2, 1)
) -> Table:
    kept, gap = fitting(columns, width=width, gaps=gaps)
    widths = _shared_widths(kept, room=max(0, width - _narrow_width(kept, gap)))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, gap - 1, 0, 0))
    for column in kept:
        table.add_column(column.header, justify="left" if column.is_text else "right", no_wrap=True)
    rows = list(zip(*(column.cells for column in kept), strict=True))
    for is_bold, cells in zip(bold or [False] * len(rows), rows, strict=True):
        wrapped = [
            cell if column.least_width is None else _wrapped(cell, column_width)
            for cell, column, column_width in zip(cells, kept, widths, strict=True)
        ]
        table.add_row(*wrapped, style="bold" if is_bold else None)
    return table


def _narrow_width(columns: Sequence[Column], gap: int) -> int:
    return sum(column.narrow_width + gap for column in columns) - gap


def _shared_widths(columns: Sequence[Column], *, room: int) -> list[int]:
    """The remaining room goes to the columns that lack some, in proportion."""
    lacks = [column.whole_width - column.narrow_width for column in columns]
    share = min(1.0, room / sum(lacks)) if any(lacks) else 0.0
    return [column.narrow_width + int(share * lack) for column, lack in zip(columns, lacks, strict=True)]


def _wrapped(cell: str, width: int) -> str:
    """Continuation lines of an indented line are indented further."""
    lines: list[str] = []
    for line in cell.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()))
        lines += wrap(line, width, subsequent_indent=indent * 2, break_on_hyphens=False) or [""]
    return "\n".join(lines)


def times(ratio: float | None) -> str:
    return NO_NUMBER if ratio is None else f"{ratio:.2f}"
