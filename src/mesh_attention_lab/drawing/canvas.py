"""The sheet that every chart is drawn on, and its axes: white, measured in inches, in one style.

Axes are values first: where they begin and end, and their ticks. Times are in seconds; ticks say the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log2, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from typing_extensions import assert_never

from mesh_attention.errors import UsageError, writing
from mesh_attention.units import SECONDS, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Tick = tuple[float, str]
"""Value of a tick, in the unit of the data, and its label."""

_LOG_STEPS = tuple(step * 10**power for power in range(5) for step in (1, 2, 5))
_MOST_LOG_TICKS = 10
LOG_FROM = 10.0
"""Times that differ by more than this factor are drawn on a log axis."""
SHOWN_BELOW = 100.0
"""On a log axis, exposed communication this many times shorter than the shortest time is drawn as 0."""
MOST_TEXTS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """`symlog` is log above `linear_below` and linear from there to 0."""

    kind: Literal["linear", "log2", "log", "symlog"]
    low: float
    high: float
    ticks: Sequence[Tick]
    label: str
    linear_below: float = 0.0

    @property
    def tick_texts(self) -> list[str]:
        return [text for _, text in self.ticks]


def time_scale(times_s: Sequence[float], exposed_s: Sequence[float]) -> Scale:
    """A linear scale from 0 if times are similar, otherwise a log scale, with 0 below it if a time is 0."""
    shortest, largest = min(times_s), max(*times_s, *exposed_s)
    if not shortest or max(times_s) <= LOG_FROM * shortest:
        high = 1.05 * largest or 1e-6
        unit, ticks = linear_ticks(high)
        return Scale(kind="linear", low=0.0, high=high, ticks=ticks, label=f"time, {unit}")
    seen = [seconds for seconds in exposed_s if seconds > shortest / SHOWN_BELOW]
    low, high = min([shortest, *seen]) / 1.3, largest * 1.3
    ticks = log_ticks(low, high)
    if len(seen) == len(exposed_s):
        return Scale(kind="log", low=low, high=high, ticks=ticks, label="time")
    return Scale(kind="symlog", low=0.0, high=high, ticks=[(0.0, "0"), *ticks], label="time", linear_below=low)


def number_scale(numbers: Sequence[float], *, label: str, write: Callable[[float], str]) -> Scale:
    """A log2 scale with ticks at the numbers themselves."""
    first, last = min(numbers), max(numbers)
    pad = 2 ** (0.04 * log2(last / first) or 1.0)
    ticks = [(at, write(at)) for at in spaced(numbers)]
    return Scale(kind="log2", low=first / pad, high=last * pad, ticks=ticks, label=label)


def text_scale(texts: Sequence[str], *, label: str) -> Scale:
    """Texts side by side, from 0 on; if there are many, only some have a tick."""
    ticks = [(float(place), text) for place, text in enumerate(texts)]
    shown = ticks[:: ceil(len(ticks) / MOST_TEXTS)]
    return Scale(kind="linear", low=-0.25, high=len(texts) - 0.75, ticks=shown, label=label)


# Ticks


def linear_ticks(stop_s: float, *, most: int = 8) -> tuple[str, list[Tick]]:
    """The unit, and round numbers of it from 0 to `stop_s`."""
    unit, scale = time_unit(stop_s)
    return unit, [(at * scale, text) for at, text in round_ticks(stop_s / scale, most=most)]


def round_ticks(stop: float, *, most: int = 8) -> list[Tick]:
    """Round numbers from 0 to `stop`."""
    step = _round_up(stop / most)
    decimals = max(0, -floor(log10(step)))
    return [(i * step, f"{i * step:,.{decimals}f}") for i in range(floor(stop / step + 1e-9) + 1)]


def log_ticks(start_s: float, stop_s: float) -> list[Tick]:
    """Round times, each with its own unit; powers of ten only where there would be many."""
    ticks = {
        (step * scale, step): f"{step} {unit}"
        for (unit, scale), (_, following) in zip(SECONDS, (*SECONDS[1:], ("", 1e9)), strict=True)
        for step in _LOG_STEPS
        if step * scale < following / 1.5 and start_s <= step * scale <= stop_s
    }
    if len(ticks) > _MOST_LOG_TICKS:
        ticks = {key: text for key, text in ticks.items() if str(key[1]).startswith("1")}
    return [(seconds, text) for (seconds, _), text in ticks.items()]


def spaced(values: Sequence[float], *, most: int = 12) -> list[float]:
    """The values that a log axis has room for; the largest is always included."""
    ordered = sorted(set(values), reverse=True)
    gap = log2(ordered[0] / ordered[-1]) / most
    kept = ordered[:1]
    for value in ordered[1:]:
        if log2(kept[-1] / value) >= gap:
            kept.append(value)
    return kept[::-1]


def _round_up(value: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** floor(log10(value))
    return power * next(step for step in (1, 2, 5, 10) if step >= value / power - 1e-9)


INK, FADED, GRID = "#222222", "#555555", "#e2e2e2"
TITLE_SIZE, TEXT_SIZE, SMALL_SIZE = 12.0, 10.0, 8.0
WIDTH_IN, EDGE_IN = 8.0, 0.16
LONGEST_TITLE, LONGEST_LABEL = 110, 28
COLOURS = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222", "#882255", "#332288", "#999933"
"""Colours of methods, which colour-blind readers can tell apart."""
FORMATS: dict[str, dict[str, None]] = {  # and what would tell one run's file from another's
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
DPI = 200
"""Twice what a page of 800 pixels shows."""


class Margins(NamedTuple):
    """Inches between the edges of the sheet and the axes."""

    left: float
    right: float
    top: float
    bottom: float


def new_axes(*, height_in: float, margins: Margins) -> tuple[Figure, Axes]:
    """Axes at a fixed place, so that a length in inches is known before anything is drawn."""
    figure = new_figure(height_in=height_in)
    width = WIDTH_IN - margins.left - margins.right
    height = height_in - margins.top - margins.bottom
    place = (margins.left / WIDTH_IN, margins.bottom / height_in, width / WIDTH_IN, height / height_in)
    axes = figure.add_axes(place, facecolor="white")
    axes.tick_params(labelsize=TEXT_SIZE, length=0, pad=7, colors=FADED, which="both")
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(FADED)
    return figure, axes


def set_scale(axes: Axes, which: Literal["x", "y"], scale: Scale, *, is_slanted: bool = False) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    set_kind = axes.set_xscale if which == "x" else axes.set_yscale
    set_limits = axes.set_xlim if which == "x" else axes.set_ylim
    match scale.kind:
        case "log2":
            set_kind("log", base=2)
        case "symlog":
            set_kind("symlog", linthresh=scale.linear_below, linscale=0.4)
        case "linear" | "log":
            set_kind(scale.kind)
        case _:
            assert_never(scale.kind)
    slant: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if is_slanted else {}
    axis.set_ticks([], minor=True)
    axis.set_ticks([at for at, _ in scale.ticks], labels=scale.tick_texts, parse_math=False, **slant)
    set_limits(scale.low, scale.high)
    axis.set_label_text(scale.label, fontsize=TEXT_SIZE, color=FADED)


def new_figure(*, height_in: float) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UsageError(
            f"charts need matplotlib, but {error.name} is not installed; pip install 'mesh-attention[charts]'"
        ) from error
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def text_width_in(texts: Iterable[str], *, size: float, weight: str = "normal") -> float:
    """Width of the widest text, never 0."""
    figure = new_figure(height_in=1.0)
    drawn = [figure.text(0, 0, text, fontsize=size, weight=weight, parse_math=False) for text in texts]
    return max(1.0, *(text.get_window_extent().width for text in drawn)) / figure.dpi


def shorten(words: str, *, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


def write_titles(figure: Figure, title: str, below: str = "") -> None:
    """Write the titles at the top left of the sheet; a long title is smaller, a very long one is cut."""
    height_in = figure.get_size_inches()[1]
    title = shorten(title, most=LONGEST_TITLE)
    room_in = WIDTH_IN - 2 * EDGE_IN
    size = min(TITLE_SIZE, TITLE_SIZE * room_in / text_width_in([title], size=TITLE_SIZE, weight="bold"))
    look: dict[str, Any] = {"x": EDGE_IN / WIDTH_IN, "va": "top", "parse_math": False}
    figure.text(y=1 - 0.12 / height_in, s=title, fontsize=size, weight="bold", color=INK, **look)
    figure.text(y=1 - 0.4 / height_in, s=below, fontsize=TEXT_SIZE, color=FADED, **look)


def darker(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) * 3 // 4 for i in (1, 3, 5))
    return f"#{red:02x}{green:02x}{blue:02x}"


def save_chart(figure: Figure, path: Path | str) -> None:
    """Write PNG, SVG or PDF, depending on the file name. The same chart gives the same bytes."""
    from matplotlib import rc_context

    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise UsageError(f"{path}: expected a file name that ends in {' or '.join(FORMATS)}")
    with writing(path), rc_context({"svg.hashsalt": "mesh-attention"}):
        figure.savefig(path, format=suffix[1:], dpi=DPI, metadata=FORMATS[suffix])


def explain(axes: Axes, handles: Sequence[Any], *, columns: int, handle_length: float) -> None:
    """A legend above the axes."""
    axes.legend(
        handles=list(handles),
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=columns,
        frameon=False,
        fontsize=TEXT_SIZE,
        labelcolor=FADED,
        borderaxespad=0.3,
        borderpad=0.2,
        handlelength=handle_length,
        columnspacing=1.6,
    )
