"""Charts with matplotlib, imported when one is drawn: `time_chart` (lines) and `rate_chart` (bars)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from math import floor, inf, log10
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from mesh_attention.errors import UsageError
from mesh_attention.units import format_size, three_digits
from mesh_attention_lab.drawing import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FADED = "#222222", "#555555"
COLOURS = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222", "#882255", "#332288", "#999933"
"""Colours of methods, which colour-blind readers can tell apart."""
TITLE_WIDTH, LONGEST_LABEL = 74, 28
"""Letters of a line of the title, and of a label of the legend."""
EXPOSED = "exposed communication"
DASHED: Any = {"linewidth": 1.3, "linestyle": (0, (4, 2)), "markerfacecolor": "white"}
MOST_LEVEL_TILES, MOST_LEVEL_BARS = 10, 14
"""Up to which their texts are level."""
FORMATS = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}
"""And what would tell the file of one run from that of another."""


@contextmanager
def look() -> Iterator[None]:
    """Of everything that is drawn within. Refuses where matplotlib is missing."""
    try:
        from matplotlib import rc_context
    except ModuleNotFoundError as error:
        hint = "pip install 'mesh-attention[charts]'"
        raise UsageError(f"charts need matplotlib, but {error.name} is not installed; {hint}") from error
    with rc_context(fname=Path(__file__).with_name("charts.mplstyle")):
        yield


def save_chart(figure: Figure, path: Path | str) -> None:
    """Write PNG, SVG or PDF, depending on the file name. The same chart gives the same bytes."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise UsageError(f"{path}: expected a file name that ends in {' or '.join(FORMATS)}")
    with writing(path), look():
        figure.savefig(path, format=suffix[1:], dpi=200, metadata={FORMATS[suffix]: None})


def _new_axes(title: str) -> tuple[Figure, Axes]:
    """A sheet with a title at the top left, and axes that fill the rest of it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.6), dpi=100, layout="constrained")
    figure.suptitle(fill(title, TITLE_WIDTH), x=0.015, ha="left", color=INK)
    return figure, figure.add_subplot()


def _explain(axes: Axes, entries: dict[str, Any]) -> None:
    """A legend beside the axes."""
    labels = [name if len(name) <= LONGEST_LABEL else name[: LONGEST_LABEL - 1] + "…" for name in entries]
    axes.legend([*entries.values()], labels, loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.3)


# Times of methods


ChartAxis = Literal["ranks", "seq", "tile"]


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """A method at one number of ranks or tokens, or with one tile; `x` is that number, or the tile's text."""

    method: str
    x: float | str
    time_s: float
    exposed_s: float


def time_chart(points: Iterable[ChartPoint], *, x: ChartAxis, title: str = "") -> Figure:
    """Time (solid) and exposed communication (dashed) of several methods, which are named as their lines end.

    Numbers stand on a log2 axis, tiles side by side in the order in which they come first.
    """
    points = tuple(points)
    if not points:
        raise UsageError("no points given; expected at least one to draw")
    tiles = list(dict.fromkeys(str(point.x) for point in points)) if x == "tile" else []
    with look():
        from matplotlib.lines import Line2D
        from matplotlib.ticker import LogLocator

        figure, axes = _new_axes(title)
        kinds: Any = {"time": {}, EXPOSED: DASHED}
        entries = {name: Line2D([], [], color=FADED, marker="o", **style) for name, style in kinds.items()}
        ends: dict[str, float] = {}
        for number, method in enumerate(dict.fromkeys(point.method for point in points)):
            own = [(tiles.index(str(p.x)) if tiles else float(p.x), p) for p in points if p.method == method]
            places, line = zip(*sorted(own, key=lambda at: at[0]), strict=True)
            style: Any = {"color": COLOURS[number % len(COLOURS)], "marker": "os^DvPX"[number % 7], "clip_on": False}
            axes.plot(places, [p.exposed_s for p in line], label=f"{method}: {EXPOSED}", zorder=2.5, **style | DASHED)
            (entries[method],) = axes.plot(places, [p.time_s for p in line], label=f"{method}: time", zorder=3, **style)
            ends[method] = line[-1].time_s
        _set_times(axes, points)
        if tiles:
            axes.set_xticks(range(len(tiles)), tiles, rotation=45 if len(tiles) > MOST_LEVEL_TILES else 0)
        else:
            axes.set_xscale("log", base=2)
            axes.minorticks_off()
            axes.xaxis.set_major_locator(LogLocator(base=2, numticks=12))
            axes.xaxis.set_major_formatter(lambda at, _: format_size(at) if x == "seq" else f"{at:g}")
        axes.set_xlabel("sequence length, tokens" if x == "seq" else x)
        _explain(axes, dict(sorted(entries.items(), key=lambda entry: -ends.get(entry[0], inf))))
    return figure


def _set_times(axes: Axes, points: Sequence[ChartPoint]) -> None:
    """A linear axis if times are within a factor of 10, otherwise a log axis above the shortest, linear below."""
    from matplotlib.ticker import EngFormatter, MaxNLocator, SymmetricalLogLocator

    shortest, slowest = (pick(point.time_s for point in points) for pick in (min, max))
    longest = max(slowest, *(point.exposed_s for point in points))
    if shortest <= 0 or slowest <= 10 * shortest:
        axes.set_ylim(0.0, 1.05 * longest or 1e-6)
        axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    else:
        low = 10.0 ** floor(log10(shortest))
        axes.set_yscale("symlog", linthresh=low)
        axes.set_ylim(0.0, 1.3 * longest)
        subs = (1.0, 2.0, 5.0) if longest < 100 * low else (1.0,)
        above = 1.001 * low  # the locator rounds log(1000) / log(10) down to 2
        axes.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=above, subs=subs))
    axes.yaxis.set_major_formatter(EngFormatter(unit="s"))
    axes.set_ylabel("time")


# Rates as bars


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bars under one name, which may have several lines: of each method, what it computes and what was forecast."""

    name: str
    one_kernel: float
    bars: Mapping[str, tuple[float, float]]


def rate_chart(groups: Sequence[Rates], *, title: str = "", below: str = "") -> Figure:
    """TFLOP/s as bars from 0, marks where they were forecast, and lines across at the rate of one kernel."""
    with look():
        figure, axes = _new_axes(title)
        axes.set_title(below)
        axes.set_ylabel("TFLOP/s")
        methods = list(dict.fromkeys(method for group in groups for method in group.bars))
        value: Any = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": 8}
        value |= {"rotation": 0 if len(methods) * len(groups) <= MOST_LEVEL_BARS else 90, "color": INK}
        value |= {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.0}}  # hides the grid
        entries: dict[str, Any] = dict.fromkeys((*methods, "one kernel", "forecast"))
        span, last = len(methods) + 0.9, len(methods) - 1
        for left, group in zip(count(0.0, span), groups, strict=False):
            for number, method in enumerate(methods):
                if method in group.bars:
                    at, (rate, forecast) = left + number, group.bars[method]
                    entries[method] = axes.bar(at, rate, 0.86, color=COLOURS[number % len(COLOURS)], zorder=2)
                    (entries["forecast"],) = axes.plot([at], [forecast], "D", color="white", mec=INK, zorder=4)
                    axes.annotate(three_digits(rate), (at, max(rate, forecast)), zorder=5, **value)
            across = left - 0.65, left + last + 0.65
            entries["one kernel"] = axes.hlines(group.one_kernel, *across, color=INK, zorder=3)
        axes.margins(y=0.12)
        axes.set_ylim(bottom=0.0)
        axes.set_xticks([span * n + last / 2 for n in range(len(groups))], [g.name for g in groups], color=INK)
        _explain(axes, entries)
    return figure
