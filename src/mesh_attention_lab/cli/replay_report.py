"""The result of `mesh-attention replay`: a table for people, JSON for machines, and a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.units import BYTES, TIMES, count, format_together, three_digits
from mesh_attention_lab.cli.tables import (
    NO_NUMBER,
    Column,
    cluster_words,
    plain_console,
    print_table,
    problem_words,
    times,
)
from mesh_attention_lab.drawing.rates import Bar, BarGroup, rate_chart
from mesh_attention_lab.replay.result import Replayed, Row, kernel_as_json, row_as_json, rows_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mesh_attention_lab.replay.device import Environment

NAME_WIDTH = 22
"""Plans are wrapped to this width where there is little room."""
SHORT = {"forward": "fwd", "backward": "bwd", "both": "both"}
WHAT_IT_IS = (
    "A replay: kernels, merges and memory are real, and every transfer is a copy of its size between the device and "
    "its host. Left out: other ranks being late, and contention in the network. A GPU rests before every run; one "
    "that is always busy computes about a tenth slower, by any method."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A replay, and its settings. The topology was measured here, unless a cluster was given."""

    command: str
    problem: Problem
    layout: str
    topology: Topology
    is_measured: bool
    is_captured: bool
    is_cuda: bool
    rounds: int
    environment: Environment
    kernel_tokens: tuple[int, int]
    kernel_words: str
    replayed: Replayed


# For people


def print_replay(played: Played) -> None:
    console, replayed = plain_console(), played.replayed
    directions = " and ".join(one.direction for one in replayed.kernel)
    console.print(
        f"replay of rank {replayed.rank} of {played.problem.ranks:,} on {played.environment.device}: {directions}; "
        f"{problem_words(played.problem, played.layout)}",
        style="bold",
    )
    console.print(_setting_words(played))
    console.print(WHAT_IT_IS)
    console.print()
    rows = rows_of(replayed)
    lines: list[Row | str] = []
    for row, before in zip(rows, (None, *rows), strict=False):
        lines += [row] if before is not None and before.method == row.method else [row.method, row]
    left_out = print_table(
        console, replay_columns(lines, is_cuda=played.is_cuda), bold=[isinstance(line, str) for line in lines]
    )
    rates = " and ".join(f"{three_digits(one.tflops)} TFLOP/s {one.direction}" for one in replayed.kernel)
    console.print(f"one kernel with as much work, {played.kernel_words}: {rates}")
    console.print(_caption(played, rows, left_out), style="dim")


def _setting_words(played: Played) -> str:
    on = played.environment
    versions = ", ".join(f"{name} {number}" for name, number in on.versions.items())
    queued = "from CUDA graphs" if played.is_captured else "step by step"
    words = f"kernel {on.kernel}, merging {on.merging}, {count(played.rounds, 'round')} {queued}; {versions}"
    if not played.is_measured:
        return f"{words}; plans and forecasts for {cluster_words(played.topology)}"
    link = played.topology.between
    return f"{words}; link {link.gb_per_s:g} GB/s each way at once, {link.latency_us:g} µs"


def replay_columns(lines: Sequence[Row | str], *, is_cuda: bool) -> list[Column]:
    """A line is a row, or the name of the method of the rows that follow."""
    rows = [line for line in lines if not isinstance(line, str)]
    seconds = [s for row in rows for s in (row.time_s, row.exposed_s, row.host_s if is_cuda else 0.0, row.forecast_s)]
    unit, texts = format_together([round(s * 1e9) for s in seconds], TIMES, below=10_000)
    peak_unit, peaks = format_together([row.peak_nbytes or 0 for row in rows], BYTES, below=10_000, digits=3)
    # A host that is slower than the device is marked.
    hosts = [f"{text}!" if row.host_s > row.time_s else text for row, text in zip(rows, texts[2::4], strict=True)]
    peaks = [peak if row.peak_nbytes else NO_NUMBER for row, peak in zip(rows, peaks, strict=True)]
    names = [line if isinstance(line, str) else f"  {SHORT[line.what]} {line.plan}".rstrip() for line in lines]
    columns: list[tuple[str, list[str], int]] = [
        (f"time\n{unit}", texts[::4], 0),
        ("±\n%", [f"{100 * row.spread:.1f}" for row in rows], 4),
        ("TFLOP/s", [three_digits(row.tflops) for row in rows], 0),
        ("% of one\nkernel", [f"{100 * row.share:.1f}" for row in rows], 0),
        ("×\nring", [times(row.times_ring) for row in rows], 0),
        (f"exposed\n{unit}", texts[1::4], 0),
        (f"host\n{unit}", hosts if is_cuda else [NO_NUMBER] * len(rows), 3),
        (f"peak\n{peak_unit}", peaks, 2),
        ("plan\n%", [_percent(row.memory_error) for row in rows], 1),
        (f"forecast\n{unit}", texts[3::4], 5),
        ("error\n%", [_percent(row.forecast_error) for row in rows], 0),
    ]
    found = [Column(header="method\n  pass, plan", cells=names, is_text=True, least_width=NAME_WIDTH)]
    for header, cells, drop in columns:
        rest = iter(cells)
        spread = ["" if isinstance(line, str) else next(rest) for line in lines]
        found.append(Column(header=header, cells=spread, drop=drop))
    return found


def _percent(value: float | None) -> str:
    return NO_NUMBER if value is None else f"{100 * value:+.1f}"


def _caption(played: Played, rows: Sequence[Row], left_out: str) -> str:
    words = [
        f"Times are medians of {count(played.rounds, 'round')}, ± half their range. × ring: speed relative to ring. "
        "exposed: the time that transfers add. host: the time to queue the pass step by step. peak: measured "
        "memory, without the inputs. plan: error of the plan's own memory figure. error: error of the simulator's "
        "forecast."
    ]
    if played.is_cuda and any(row.host_s > row.time_s for row in rows):
        words.append("!: without CUDA graphs the host would be the limit.")
    if not played.is_measured:
        words.append("Forecasts are for the cluster's links; the replay uses this machine's.")
    return " ".join([*words, left_out]).rstrip()


# For machines, and as a chart


def as_json(played: Played) -> dict[str, Any]:
    return {
        "command": played.command,
        **asdict(played.environment),
        "problem": asdict(played.problem) | {"mask": str(played.problem.mask)},
        "layout": played.layout,
        "cluster": asdict(played.topology),
        "is_measured": played.is_measured,
        "is_recorded": played.is_captured,
        "rank": played.replayed.rank,
        "rounds": played.rounds,
        "rows": [row_as_json(row) for row in rows_of(played.replayed)],
        "one_kernel": [
            kernel_as_json(one) | dict(zip(("tokens", "kv_tokens"), played.kernel_tokens, strict=True))
            for one in played.replayed.kernel
        ],
    }


def chart_of(played: Played) -> Figure:
    return rate_chart(
        bar_groups(played.replayed),
        unit="TFLOP/s",
        expected="forecast",
        line="one kernel",
        title=f"One rank of {played.problem.ranks:,}, replayed on {played.environment.device}",
        below=problem_words(played.problem, played.layout),
    )


def bar_groups(replayed: Replayed) -> list[BarGroup]:
    """One for each pass, and one for both."""
    rows, groups = rows_of(replayed), []
    for what in dict.fromkeys(row.what for row in rows):
        found = [row for row in rows if row.what == what]
        bars = tuple(Bar(name=row.method, value=row.tflops, expected=row.forecast_tflops) for row in found)
        name = "forward and backward" if what == "both" else what
        groups.append(BarGroup(name=name, line=median(row.tflops / row.share for row in found), bars=bars))
    return groups
