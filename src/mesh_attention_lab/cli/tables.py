"""Tables as wide as the terminal, and problems and clusters in words. Nothing is worked out here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

from rich import box
from rich.console import Console
from rich.table import Table

from mesh_attention.plan.assignment import Assignment
from mesh_attention.plan.layout import Turn
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.units import count, format_size

NO_NUMBER = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Cells below a header. Numbers are never wrapped; text is, down to `least_width` if it has one.

    If there is not room for all columns, those with `drop` are left out, the highest first.
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
    console: Console,
    columns: Sequence[Column],
    *,
    bold: Sequence[bool] = (),
    gaps: tuple[int, ...] = (2,),
    gap_after: int = 0,
) -> str:
    """Prints the columns that fit, with a gap after `gap_after` rows; returns a sentence about the others, if any."""
    console.print(table_of(columns, bold=bold, width=console.width, gaps=gaps, gap_after=gap_after))
    kept, _ = fitting(columns, width=console.width, gaps=gaps)
    dropped = ", ".join(" ".join(column.header.split()) for column in columns if column not in kept)
    return f"No room for {dropped}: use a wider terminal, or --json." if dropped else ""


def fitting(columns: Sequence[Column], *, width: int, gaps: tuple[int, ...]) -> tuple[list[Column], int]:
    """The columns with the first gap at which all fit; if none does, those that fit with the last gap."""
    gap = next((gap for gap in gaps if _narrow_width(columns, gap) <= width), gaps[-1])
    kept = list(columns)
    while _narrow_width(kept, gap) > width and any(column.drop for column in kept):
        kept.remove(max(kept, key=lambda column: column.drop))
    return kept, gap


def table_of(
    columns: Sequence[Column],
    *,
    bold: Sequence[bool] = (),
    width: int,
    gaps: tuple[int, ...] = (3, 2, 1),
    gap_after: int = 0,
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
        table.add_row(*wrapped, style="bold" if is_bold else None, end_section=len(table.rows) + 1 == gap_after)
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


# Facts: a label, and a text beside it


LABEL_WIDTH = 11


def print_fact(console: Console, label: str, text: str, *, style: str | None = None) -> None:
    """A line with its label; longer texts go on below each other. Code that has several lines keeps them."""
    room = max(20, console.width - LABEL_WIDTH)
    lines = text.split("\n") if "\n" in text else wrap(text, room, break_on_hyphens=False)
    for number, line in enumerate(lines):
        console.print(f"{label if not number else '':{LABEL_WIDTH}}{line}", style=style, soft_wrap=True)


def print_first(console: Console, **facts: str) -> None:
    """The lines that a person wants first, by their labels, and an empty one."""
    for label, text in facts.items():
        print_fact(console, label, text, style="bold")
    console.print()


def times(ratio: float | None) -> str:
    if ratio is None:
        return NO_NUMBER
    return f"{ratio:.2f}" if ratio >= 0.01 or not ratio else f"{ratio:.1g}"


# Words


LONGEST_MASK = 40
"""Characters of a mask in a headline; one of documents may have thousands."""


def mask_words(problem: Problem) -> str:
    mask = str(problem.mask)
    return mask if len(mask) <= LONGEST_MASK else mask[:LONGEST_MASK] + "…"


def problem_words(problem: Problem, layout: str) -> str:
    """Everything about a problem on a layout. Turns are all masked alike."""
    if layout == Turn.name:
        return f"{new_words(problem)}, {head_words(problem)}"
    return f"{size_words(problem)}, {mask_words(problem)}, {layout}"


def new_words(problem: Problem) -> str:
    """New and cached tokens of each sequence."""
    sequences = f"{count(problem.batch, 'sequence')}, each " if problem.batch > 1 else ""
    new = f"{format_size(problem.seq_q)} new token" + ("" if problem.seq_q == 1 else "s")
    cached = problem.seq_kv - problem.seq_q
    return f"{sequences}{new} on {format_size(cached)} cached" if cached else f"{sequences}{new}"


def size_words(problem: Problem) -> str:
    """Lengths, heads and dtype."""
    return f"{token_words(problem)}, {head_words(problem)}"


def token_words(problem: Problem) -> str:
    tokens = f"{problem.batch} x " if problem.batch > 1 else ""
    tokens += format_size(problem.seq_q)
    if problem.seq_kv != problem.seq_q:
        tokens += f" on {format_size(problem.seq_kv)}"
    return f"{tokens} tokens"


def head_words(problem: Problem) -> str:
    heads = count(problem.heads, "head") + (f" ({problem.kv_heads} KV)" if problem.kv_heads != problem.heads else "")
    size = f"{problem.head_dim_qk}"
    if problem.head_dim_v != problem.head_dim_qk:
        size += f" and {problem.head_dim_v}"
    return f"{heads} of {size}, {problem.dtype}"


def tile_reason(assignment: Assignment) -> str:
    """The reason why a tile moves fewer bytes than ring."""
    tile, others = assignment.tile, assignment.ulysses * assignment.places - 1
    shards = [(tile.rows - 1, "query shard"), (tile.cols - 1, "KV shard")]
    received = " and ".join(count(number, noun) for number, noun in shards if number)
    returned = f" and returns {count(tile.rows - 1, 'partial result')}" if tile.rows > 1 else ""
    traded = f", once {assignment.ulysses} ranks have traded heads for tokens," if assignment.ulysses > 1 else ""
    return (
        f"with ring, a rank receives the K and V of all {others} others; with a {tile} tile{traded} it receives "
        f"{received or 'no shards'}{returned}."
    )


def cluster_words(topology: Topology) -> str:
    """Ranks, nodes and rates."""
    ranks, device = count(topology.ranks, "rank"), topology.device
    rates = f"{device.forward.tflops:g} and {device.backward.tflops:g} TFLOP/s per rank forward and backward"
    if topology.nodes == 1:
        return f"{topology.name}: {ranks} in one node, {topology.inside.gb_per_s:g} GB/s per rank; {rates}"
    return (
        f"{topology.name}: {ranks} in {topology.nodes:,} nodes of {topology.ranks_per_node}, "
        f"{topology.inside.gb_per_s:g} GB/s per rank inside a node, {topology.between.gb_per_s:g} GB/s per NIC "
        f"between nodes ({count(topology.nics_per_node, 'NIC')} per node); {rates}"
    )


def cluster_name(topology: Topology) -> str:
    """The name of a cluster with its number of ranks, as --cluster takes it."""
    return f"{topology.name.removesuffix('x')}x{topology.ranks}"
