"""Rates as bars, side by side in groups, each with the rate that was expected and the line that none can pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from typing import TYPE_CHECKING, Any

from mesh_attention.errors import UsageError
from mesh_attention_lab.drawing import canvas
from mesh_attention_lab.drawing.canvas import Scale, round_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAR, GROUP_GAP = 0.86, 0.9
"""The part of its place that a bar fills, and the gap between groups, in bars."""
LABEL_GAP_IN, MARK_IN = 0.06, 0.05
"""Between a label and what is near it, and half the height of a mark."""
ABOVE_GRID: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
"""The background of a label, so that no grid line goes through it."""
HEIGHT_IN, LEGEND_ROW_IN, LEGEND_ENTRY_IN = 3.2, 0.22, 0.55
LINE_LOOK: dict[str, Any] = {"color": canvas.INK, "linewidth": 1.8}
EXPECTED_LOOK: dict[str, Any] = {"marker": "D", "color": "white", "markeredgecolor": canvas.INK, "linestyle": "none"}
EXPECTED_LOOK |= {"markersize": 5.5, "markeredgewidth": 1.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    name: str
    value: float
    expected: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BarGroup:
    """Bars under one name, which may have several lines; `line` is drawn across them."""

    name: str
    bars: tuple[Bar, ...]
    line: float | None = None


def rate_chart(
    groups: Sequence[BarGroup], *, unit: str, expected: str, line: str, title: str = "", below: str = ""
) -> Figure:
    """Bars from 0, in `unit`. `expected` and `line` say what the marks and the lines across are."""
    _check(groups)
    names = list(dict.fromkeys(bar.name for group in groups for bar in group.bars))
    colours = {name: canvas.COLOURS[number % len(canvas.COLOURS)] for number, name in enumerate(names)}
    values = [value for group in groups for value in _values(group)]
    high = 1.12 * max(values) or 1.0
    up = Scale(kind="linear", low=0.0, high=high, ticks=round_ticks(high), label=unit)
    entries = [*(canvas.shorten(name, most=canvas.LONGEST_LABEL) for name in names), line, expected]
    columns = _legend_columns(entries)
    legend_in = LEGEND_ROW_IN * ceil(len(entries) / columns) + 0.1
    lines = max(group.name.count("\n") + 1 for group in groups)
    margins = canvas.Margins(
        left=canvas.EDGE_IN + 0.35 + canvas.text_width_in(up.tick_texts, size=canvas.TEXT_SIZE),
        right=0.25,
        top=legend_in + (0.7 if below else 0.45 if title else 0.1),
        bottom=0.2 + 0.19 * lines,
    )
    figure, axes = canvas.new_axes(height_in=HEIGHT_IN + margins.top + margins.bottom, margins=margins)
    canvas.set_scale(axes, "y", up)
    axes.grid(axis="y", color=canvas.GRID, linewidth=0.8)
    _draw_groups(axes, groups, colours, room_in=canvas.WIDTH_IN - margins.left - margins.right)
    _explain(axes, entries, list(colours.values()), columns=columns)
    canvas.write_titles(figure, title, below)
    return figure


def _check(groups: Sequence[BarGroup]) -> None:
    if not groups or not all(group.bars for group in groups):
        raise UsageError("no bars given; expected groups of at least one to draw")
    for group in groups:
        if not all(value >= 0 and isfinite(value) for value in _values(group)):
            raise UsageError(f"{group}: expected rates, 0 or above")


def _values(group: BarGroup) -> list[float]:
    values = [group.line, *(value for bar in group.bars for value in (bar.value, bar.expected))]
    return [value for value in values if value is not None]


def _draw_groups(axes: Axes, groups: Sequence[BarGroup], colours: dict[str, str], *, room_in: float) -> None:
    total = sum(len(group.bars) for group in groups) + GROUP_GAP * len(groups)
    axes.set_xlim(0, total)
    left, middles = GROUP_GAP / 2, []
    for group in groups:
        right = left + len(group.bars)
        middles.append((left + right) / 2)
        for number, bar in enumerate(group.bars):
            _draw_bar(axes, bar, at=left + number + 0.5, colour=colours[bar.name], width_in=BAR * room_in / total)
        if group.line is not None:
            axes.hlines(group.line, left - 0.15, right + 0.15, zorder=3, **LINE_LOOK)
        left = right + GROUP_GAP
    axes.set_xticks(middles, [group.name for group in groups], parse_math=False, color=canvas.INK)


def _draw_bar(axes: Axes, bar: Bar, *, at: float, colour: str, width_in: float) -> None:
    axes.bar(at, bar.value, width=BAR, color=colour, zorder=2)
    if bar.expected is not None:
        axes.plot([at], [bar.expected], zorder=4, clip_on=False, **EXPECTED_LOOK)
    text = f"{bar.value:,.0f}" if bar.value >= 100 else f"{bar.value:.3g}"
    text_in = canvas.text_width_in([text], size=canvas.SMALL_SIZE)
    is_upright = text_in + 0.04 > width_in
    foot_in = _label_foot(axes, bar, tall_in=text_in if is_upright else canvas.SMALL_SIZE / 72)
    axes.annotate(
        text,
        (at, 0),
        xytext=(0, 72 * foot_in),
        textcoords="offset points",
        ha="center",
        va="bottom",
        rotation=90 if is_upright else 0,
        fontsize=canvas.SMALL_SIZE,
        color=canvas.INK,
        bbox=ABOVE_GRID,
        zorder=5,
    )


def _label_foot(axes: Axes, bar: Bar, *, tall_in: float) -> float:
    """Inches above the axis: above the bar, and above its mark if that is in the way."""
    scale = HEIGHT_IN / axes.get_ylim()[1]
    top_in, mark_in = scale * bar.value, -1.0 if bar.expected is None else scale * bar.expected
    is_in_the_way = top_in - MARK_IN < mark_in < top_in + tall_in + MARK_IN + 2 * LABEL_GAP_IN
    return (mark_in + MARK_IN if is_in_the_way else top_in) + LABEL_GAP_IN


def _legend_columns(entries: Sequence[str]) -> int:
    """One column for each entry if they fit side by side, otherwise as many as fit."""
    widths = [canvas.text_width_in([entry], size=canvas.TEXT_SIZE) + LEGEND_ENTRY_IN for entry in entries]
    return len(entries) if sum(widths) < canvas.WIDTH_IN - 0.7 else max(1, int((canvas.WIDTH_IN - 0.7) / max(widths)))


def _explain(axes: Axes, entries: Sequence[str], colours: Sequence[str], *, columns: int) -> None:
    """The last two entries are the line's and the marks'."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    *names, line, expected = entries
    handles: list[Any] = [Patch(color=colour, label=name) for name, colour in zip(names, colours, strict=True)]
    handles += [Line2D([], [], label=line, **LINE_LOOK), Line2D([], [], label=expected, **EXPECTED_LOOK)]
    canvas.explain(axes, handles, columns=columns, handle_length=1.4)
