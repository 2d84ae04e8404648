"""Rates as bars, side by side in groups, each with the rate that was expected and the line that none can pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mesh_attention.units import three_digits
from mesh_attention_lab.drawing import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT_IN = 4.6
BAR, GROUP_GAP = 0.86, 0.9
"""The part of its place that a bar fills, and the gap between groups, in bars."""
MOST_LEVEL = 14
"""Bars up to which their values stand level."""
ABOVE_GRID: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
"""The background of a value, so that no grid line goes through it."""
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
    figure, axes = canvas.new_axes(height_in=HEIGHT_IN, title=title, below=below)
    axes.set_ylim(0.0, 1.12 * max(value for group in groups for value in _values(group)) or 1.0)
    axes.set_ylabel(unit, fontsize=canvas.TEXT_SIZE, color=canvas.FADED)
    axes.grid(axis="y", color=canvas.GRID, linewidth=0.8)
    names = dict.fromkeys(bar.name for group in groups for bar in group.bars)
    colours = {name: canvas.COLOURS[number % len(canvas.COLOURS)] for number, name in enumerate(names)}
    _draw_groups(axes, groups, colours)
    _explain(axes, colours, line=line, expected=expected)
    return figure


def _values(group: BarGroup) -> list[float]:
    values = [group.line, *(value for bar in group.bars for value in (bar.value, bar.expected))]
    return [value for value in values if value is not None]


def _draw_groups(axes: Axes, groups: Sequence[BarGroup], colours: dict[str, str]) -> None:
    is_level = sum(len(group.bars) for group in groups) <= MOST_LEVEL
    left, middles = GROUP_GAP / 2, []
    for group in groups:
        right = left + len(group.bars)
        middles.append((left + right) / 2)
        for number, bar in enumerate(group.bars):
            _draw_bar(axes, bar, at=left + number + 0.5, colour=colours[bar.name], is_level=is_level)
        if group.line is not None:
            axes.hlines(group.line, left - 0.15, right + 0.15, zorder=3, **LINE_LOOK)
        left = right + GROUP_GAP
    axes.set_xlim(0, left - GROUP_GAP / 2)
    axes.set_xticks(middles, [group.name for group in groups], parse_math=False, color=canvas.INK)


def _draw_bar(axes: Axes, bar: Bar, *, at: float, colour: str, is_level: bool) -> None:
    """A bar with its mark, and its value above both."""
    axes.bar(at, bar.value, width=BAR, color=colour, zorder=2)
    if bar.expected is not None:
        axes.plot([at], [bar.expected], zorder=4, clip_on=False, **EXPECTED_LOOK)
    axes.annotate(
        three_digits(bar.value),
        (at, max(bar.value, bar.expected or 0.0)),
        xytext=(0, 8),
        textcoords="offset points",
        ha="center",
        va="bottom",
        rotation=0 if is_level else 90,
        fontsize=canvas.SMALL_SIZE,
        color=canvas.INK,
        bbox=ABOVE_GRID,
        zorder=5,
    )


def _explain(axes: Axes, colours: dict[str, str], *, line: str, expected: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [*(Patch(color=colour) for colour in colours.values()), Line2D([], [], **LINE_LOOK)]
    canvas.explain(axes, [*handles, Line2D([], [], **EXPECTED_LOOK)], [*colours, line, expected])
