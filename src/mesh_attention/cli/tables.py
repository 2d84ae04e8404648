"""Steps and comparisons as tables for people. Numbers come in, tables go out; nothing is worked out here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten

from rich import box
from rich.table import Table

from mesh_attention.cli.comparison import Comparison
from mesh_attention.cli.sizes import BYTES, FLOPS, format_nbytes, format_together

WHOLE_PROGRAM = 40
"""Programs up to this many steps are shown whole."""
FIRST_STEPS, LAST_STEPS = 20, 10
LONGEST_STEP = 160
"""Characters of a step that are shown; collectives of large groups have thousands."""


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
    columns: dict[str, list[str]] = {
        "method": [f"{'>' if row.is_this_plan else ' '} {row.method}" for row in rows],
        "tile": [f"{row.ulysses}·{row.tile}" if row.ulysses > 1 else row.tile for row in rows],
        f"sent\n{moved_unit}": moved_texts[: len(rows)],
        f"received\n{moved_unit}": moved_texts[len(rows) :],
        "×\nring": ["–" if row.against_ring is None else f"{row.against_ring:.2f}" for row in rows],
        flops_unit: flops,
        "imbalance": [f"{row.imbalance:.1%}" for row in rows],
        f"peak\n{peak_unit}": peaks,
        "kernel\ncalls": [f"{row.kernel_calls:,}" for row in rows],
        "messages": [f"{row.messages:,}" for row in rows],
    }
    # Ten columns just fit into 80 characters.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1 if width >= 100 else 0))
    for header in columns:
        table.add_column(header, justify="left" if header in ("method", "tile") else "right", no_wrap=True)
    for row, cells in zip(rows, zip(*columns.values(), strict=True), strict=True):
        table.add_row(*cells, style="bold" if row.is_this_plan else None)
    return table


def comparison_caption(comparison: Comparison, *, ranks: int) -> str:
    counted = len(comparison.counted_ranks)
    of_whom = "all ranks" if counted == ranks else f"{counted} of the {ranks:,} ranks, evenly spread"
    return (
        f"> is this plan. Each number is the worst of {of_whom}. Tile: query shards x KV shards, after the Ulysses "
        "degree if any. × ring: bytes received against ring's. All have this plan's layout, direction and options."
    )
