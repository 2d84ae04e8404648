"""The assignment matrix in colour: query shards down, KV shards across, and who computes each block."""

from __future__ import annotations

from math import gcd

from rich.text import Text

from mesh_attention.plan.plan import Plan

MOST_SHARDS = 32
PALETTE = (26, 166, 28, 163, 30, 160, 134, 100, 33, 168, 64, 243)
"""Terminal colours, of the 256, that stand out from black and from white alike."""


def draw_matrix(plan: Plan, *, width: int) -> Text:
    """A line for each query shard, as many as fit, and how to read them."""
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
    """Every stride-th shard is shown. A factor in common with the tile's rows would hide columns of the grid."""
    stride = -(-places // most)
    while stride > 1 and gcd(stride, rows) > 1:
        stride += 1
    return stride


def _caption(plan: Plan, stride: int, has_empty: bool) -> str:
    ulysses = plan.assignment.ulysses
    who = "the rank" if ulysses == 1 else f"the place ({ulysses} ranks, each with a slice of the heads)"
    caption = f"query shards down, KV shards across; in each block, {who} that computes it"
    if has_empty:
        caption += "; · nothing to compute"
    if stride > 1:
        caption += f"; of {plan.assignment.places} shards, every {_ordinal(stride)} is shown"
    return caption


def _ordinal(number: int) -> str:
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
