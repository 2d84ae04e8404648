"""What `mesh-attention replay` measured: a table for people, JSON for machines, and the chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mesh_attention.cli.replay_device import Surroundings
from mesh_attention.cli.replay_rows import Row, bar_groups, kernel_as_json, row_as_json, rows_of
from mesh_attention.cli.tables import Column, fitting, table_of
from mesh_attention.cli.words import cluster_words, mask_words, size_words
from mesh_attention.drawing.rates import rate_chart
from mesh_attention.problem import Problem
from mesh_attention.replay.result import Replayed
from mesh_attention.topology import Topology
from mesh_attention.units import BYTES, TIMES, count, format_together, three_digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME_WIDTH = 22
"""What plans are wrapped to where there is little room."""
NO_NUMBER = "–"
GAPS = (2,)
SHORT = {"forward": "fwd", "backward": "bwd", "both": "both"}
WHAT_IT_IS = (
    "A replay: kernels, merges and memory are real, and every transfer is a copy of its size between the device and "
    "its host. Left out: other ranks being late, and contention in the network. A GPU rests before every run; one "
    "that is always busy computes about a tenth slower, by any method."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A replay, what was asked, and what it ran on. The topology was measured here, unless a cluster was given."""

    command: str
    problem: Problem
    layout: str
    topology: Topology
    is_measured: bool
    is_recorded: bool
    is_cuda: bool
    rounds: int
    around: Surroundings
    kernel_tokens: int
    replayed: Replayed


def print_replay(played: Played) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(_headline(played), style="bold")
    console.print(_setting_words(played))
    console.print(WHAT_IT_IS)
    console.print()
    lines = _lines(rows_of(played.replayed))
    columns = replay_columns(lines, is_cuda=played.is_cuda)
    bold = [isinstance(line, str) for line in lines]
    console.print(table_of(columns, bold=bold, width=console.width, gaps=GAPS))
    kept, _ = fitting(columns, width=console.width, gaps=GAPS)
    console.print(_kernel_words(played))
    console.print(_caption(played, [column for column in columns if column not in kept]), style="dim")


def _headline(played: Played) -> str:
    passes = " and ".join(one.direction for one in played.replayed.kernel)
    what = f"{passes}; {size_words(played.problem)}, {mask_words(played.problem)}, {played.layout}"
    return f"replay of rank {played.replayed.rank} of {played.problem.ranks:,} on {played.around.device}: {what}"


def _setting_words(played: Played) -> str:
    around = played.around
    versions = ", ".join(f"{name} {number}" for name, number in around.versions.items())
    queued = "from CUDA graphs" if played.is_recorded else "step by step"
    words = f"kernel {around.kernel}, merging {around.merging}, {count(played.rounds, 'round')} {queued}; {versions}"
    if not played.is_measured:
        return f"{words}; plans and forecasts for {cluster_words(played.topology)}"
    link = played.topology.between
    return f"{words}; link {link.gb_per_s:g} GB/s each way at once, {link.latency_us:g} µs"


# The table


Line = Row | str
"""A row, or the name of the method that the rows after it are of."""


def _lines(rows: Sequence[Row]) -> list[Line]:
    lines: list[Line] = []
    for row, before in zip(rows, (None, *rows), strict=False):
        if before is None or before.method != row.method:
            lines.append(row.method)
        lines.append(row)
    return lines


def replay_columns(lines: Sequence[Line], *, is_cuda: bool) -> list[Column]:
    rows = [line for line in lines if not isinstance(line, str)]
    seconds = [s for row in rows for s in (row.time_s, row.exposed_s, row.host_s if is_cuda else 0.0, row.forecast_s)]
    unit, texts = format_together([round(s * 1e9) for s in seconds], TIMES, below=10_000)
    times, exposed, host, forecasts = texts[::4], texts[1::4], texts[2::4], texts[3::4]
    peak_unit, peaks = format_together([row.peak_nbytes or 0 for row in rows], BYTES, below=10_000, digits=3)
    names = [line if isinstance(line, str) else f"  {SHORT[line.what]} {line.plan}".rstrip() for line in lines]
    columns = [
        Column(header=f"time\n{unit}", cells=times),
        Column(header="±\n%", cells=[f"{100 * row.spread:.1f}" for row in rows], drop=4),
        Column(header="TFLOP/s", cells=[three_digits(row.tflops) for row in rows]),
        Column(header="% of one\nkernel", cells=[f"{100 * row.share:.1f}" for row in rows]),
        Column(header="×\nring", cells=[_number(row.times_ring, ".2f") for row in rows]),
        Column(header=f"exposed\n{unit}", cells=exposed),
        Column(
            header=f"host\n{unit}", cells=[_host(*one, is_cuda=is_cuda) for one in zip(rows, host, strict=True)], drop=3
        ),
        Column(
            header=f"peak\n{peak_unit}",
            cells=[p if row.peak_nbytes else NO_NUMBER for row, p in zip(rows, peaks, strict=True)],
            drop=2,
        ),
        Column(header="plan\n%", cells=[_percent(row.memory_error) for row in rows], drop=1),
        Column(header=f"forecast\n{unit}", cells=forecasts, drop=5),
        Column(header="error\n%", cells=[_percent(row.forecast_error) for row in rows]),
    ]
    first = Column(header="method\n  pass, plan", cells=names, is_text=True, least_width=NAME_WIDTH)
    return [first, *(_below_names(column, lines) for column in columns)]


def _below_names(column: Column, lines: Sequence[Line]) -> Column:
    """With no cell where a method's name stands."""
    cells = iter(column.cells)
    spread = ["" if isinstance(line, str) else next(cells) for line in lines]
    return Column(header=column.header, cells=spread, drop=column.drop)


def _host(row: Row, text: str, *, is_cuda: bool) -> str:
    """Marked where the host would be slower than the device."""
    if not is_cuda:
        return NO_NUMBER
    return f"{text}!" if row.host_s > row.time_s else text


def _number(value: float | None, form: str) -> str:
    return NO_NUMBER if value is None else format(value, form)


def _percent(value: float | None) -> str:
    return NO_NUMBER if value is None else f"{100 * value:+.1f}"


def _kernel_words(played: Played) -> str:
    rates = " and ".join(f"{three_digits(one.tflops)} TFLOP/s {one.direction}" for one in played.replayed.kernel)
    return f"one kernel on as much work, a call of {played.kernel_tokens:,} tokens: {rates}"


def _caption(played: Played, dropped: Sequence[Column]) -> str:
    words = [
        f"Times are medians of {count(played.rounds, 'round')}, ± half their range. × ring: how many times as fast as "
        "ring. exposed: what transfers add to the pass without them. host: what queueing it step by step takes. peak: "
        "memory besides the inputs, and by how much the plan states more or less. error: of the simulator's forecast."
    ]
    if played.is_cuda and any(row.host_s > row.time_s for row in rows_of(played.replayed)):
        words.append("!: without CUDA graphs the host would be the limit.")
    if not played.is_measured:
        words.append("Forecasts are for the cluster's links; the replay has this machine's.")
    if dropped:
        names = ", ".join(" ".join(column.header.split()) for column in dropped)
        words.append(f"No room for {names}: a wider terminal and --json have them.")
    return " ".join(words)


# For machines, and as a picture


def as_json(played: Played) -> dict[str, Any]:
    problem = asdict(played.problem) | {"mask": str(played.problem.mask)}
    return {
        "command": played.command,
        **asdict(played.around),
        "problem": problem,
        "layout": played.layout,
        "cluster": asdict(played.topology),
        "is_measured": played.is_measured,
        "is_recorded": played.is_recorded,
        "rank": played.replayed.rank,
        "rounds": played.rounds,
        "rows": [row_as_json(row) for row in rows_of(played.replayed)],
        "one_kernel": [kernel_as_json(one) | {"tokens": played.kernel_tokens} for one in played.replayed.kernel],
    }


def chart_of(played: Played) -> Figure:
    return rate_chart(
        bar_groups(played.replayed),
        unit="TFLOP/s",
        expected="forecast",
        line="one kernel",
        title=f"One rank of {played.problem.ranks:,}, replayed on {played.around.device}",
        below=f"{size_words(played.problem)}, {mask_words(played.problem)}, {played.layout}",
    )
