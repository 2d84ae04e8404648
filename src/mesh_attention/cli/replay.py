"""`mesh-attention replay`: one device plays one rank of a plan at real sizes, methods in turn, next to one kernel.

Torch is imported when the command runs.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import typer

from mesh_attention.cli.command import group, option
from mesh_attention.cli.files import checked_plan
from mesh_attention.cli.options import (
    ProblemOptions,
    RanksOption,
    both_passes_option,
    chart_option,
    check_rank,
    json_option,
    layout_option,
    of_plan,
    passes,
    read_rank,
)
from mesh_attention.cli.progress import Report, progress
from mesh_attention.cli.tables import NO_NUMBER, Column, plain_console, print_table, times
from mesh_attention.cli.words import cluster_words, mask_words, size_words
from mesh_attention.clusters import find_cluster
from mesh_attention.drawing.canvas import save_chart
from mesh_attention.drawing.rates import Bar, BarGroup, rate_chart
from mesh_attention.errors import UsageError
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.steps import Direction
from mesh_attention.planning.choice import FAMILIES, Choice
from mesh_attention.problem import Problem
from mesh_attention.replay.parts import BEST, Part, tuned_parts
from mesh_attention.replay.result import Replayed
from mesh_attention.replay.rows import Row, kernel_as_json, row_as_json, rows_of
from mesh_attention.topology import Topology
from mesh_attention.units import BYTES, TIMES, count, format_together, parse_whole, three_digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mesh_attention.replay.device import Surroundings

NAME_WIDTH = 22
"""Plans are wrapped to this width where there is little room."""
SHORT = {"forward": "fwd", "backward": "bwd", "both": "both"}
WHAT_IT_IS = (
    "A replay: kernels, merges and memory are real, and every transfer is a copy of its size between the device and "
    "its host. Left out: other ranks being late, and contention in the network. A GPU rests before every run; one "
    "that is always busy computes about a tenth slower, by any method."
)


def read_methods(name: str, text: str) -> tuple[str, ...]:
    """Method names; × may be left out, or written as x or a hyphen."""
    spellings = {_key(known, times=x): known for known in (*FAMILIES, BEST) for x in ("", "x")}
    found = []
    for given in filter(None, (part.strip() for part in text.split(","))):
        key = _key(given, times="")
        if key not in spellings:
            near = get_close_matches(key, spellings, n=1)
            hint = f"did you mean {spellings[near[0]]}?" if near else f"expected some of {', '.join((*FAMILIES, BEST))}"
            raise UsageError(f"{name} {given!r}: {hint}")
        found.append(spellings[key])
    return tuple(dict.fromkeys(found))


def _key(name: str, *, times: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("×", times))


_of_replay = partial(option, panel="Replay")


@group
class ReplayOptions:
    methods: tuple[str, ...] = of_plan(
        "--methods",
        f"Some of {', '.join(FAMILIES)} (ulysses-mesh will do), each as tuned, and {BEST}, the tuner's choice.",
        "NAME,…",
        read_methods,
        "ring,mesh,best",
    )
    plan: list[Path] | None = of_plan(
        "--plan", "A plan file for this problem to replay as well; may be repeated.", "FILE", default=None
    )
    backward: bool = both_passes_option()
    layout: Layout | None = layout_option()
    rank: int | None = _of_replay("--rank", "The rank to play; the middle one if left out.", "N", read_rank, None)
    rounds: int = _of_replay("--rounds", "How often each method runs.", "N", parse_whole, 5)
    device: str | None = _of_replay(
        "--device", "cpu, cuda, cuda:1; a GPU if there is one and it is left out.", "NAME", default=None
    )
    cluster: str | None = _of_replay(
        "--cluster",
        "Plan and forecast for this cluster (h200, FILE.toml); if left out, this device and its link are measured.",
        "CLUSTER",
        default=None,
    )
    no_graphs: bool = _of_replay("--no-graphs", "Queue every step, without CUDA graphs.", default=False)
    chart: Path | None = chart_option()
    json: bool = json_option()


def replay_command(context: typer.Context, over: RanksOption, problem: ProblemOptions, given: ReplayOptions) -> None:
    """Play one rank of a plan on this device, at real sizes, and compare it with one kernel and with ring.

    There are no other ranks: transfers are copies from and to the host's memory.

    Exit code 0: done. 1: a plan file breaks a rule. 2: it cannot be done, as when a plan does not fit into the memory.
    """
    if not given.methods and not given.plan:
        raise UsageError("nothing to replay: give --methods, or a --plan")
    with progress("starting") as report:
        played = _play(problem.problem(over.ranks), given, shlex.join(["mesh-attention", *context.obj]), report)
        if given.chart is not None:
            report(f"drawing {given.chart.name}", 1.0)
            save_chart(_chart_of(played), given.chart)
    if given.json:
        typer.echo(json.dumps(_as_json(played) | {"chart": None if given.chart is None else str(given.chart)}))
        return
    _print(played)
    if given.chart is not None:
        typer.echo(f"\nwrote {given.chart}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A replay, and its settings. The topology was measured here, unless a cluster was given."""

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


def _play(problem: Problem, given: ReplayOptions, command: str, report: Report) -> Played:
    from mesh_attention.replay.actor import OneKernel
    from mesh_attention.replay.device import check_memory, find_device, surroundings_of
    from mesh_attention.replay.replay import replay
    from mesh_attention.replay.scene import measure_scene

    directions, device = passes(both=given.backward), find_device(given.device)
    rank = problem.ranks // 2 if given.rank is None else check_rank(given.rank, problem.ranks)
    from_files = [_part_of(file, problem, directions, report) for file in given.plan or ()]
    if given.cluster is None:
        topology = measure_scene(problem, device=device, report=report)
    else:
        topology = find_cluster(given.cluster).with_ranks(problem.ranks)
    parts: list[Part] = []
    if given.methods:
        layout = None if given.layout is None else given.layout.name
        parts = tuned_parts(problem, topology, given.methods, directions=directions, layout=layout, on_progress=report)
    parts += from_files
    is_cuda = device.type == "cuda"
    is_recorded = is_cuda and not given.no_graphs
    check_memory(parts, rank=rank, device=device, is_recorded=is_recorded)
    return Played(
        command=command,
        problem=problem,
        layout=next(iter(parts[0].plans.values())).layout.name,
        topology=topology,
        is_measured=given.cluster is None,
        is_recorded=is_recorded,
        is_cuda=is_cuda,
        rounds=given.rounds,
        around=surroundings_of(problem, device),
        kernel_tokens=OneKernel(problem, device=device).tokens,
        replayed=replay(
            parts,
            topology,
            rank=rank,
            device=device,
            rounds=given.rounds,
            cuda_graphs=is_recorded,
            on_progress=report,
        ),
    )


def _part_of(file: Path, problem: Problem, directions: Sequence[Direction], report: Report) -> Part:
    plan = checked_plan(file, report)
    for name in Problem.__dataclass_fields__:
        there, here = getattr(plan.problem, name), getattr(problem, name)
        if there != here:
            raise UsageError(f"--plan {file} is for another problem: its {name} is {there}, expected {here}")
    if plan.direction not in directions:
        raise UsageError(f"--plan {file} is a plan of the {plan.direction} pass; add --backward to play it")
    grid, schedule = plan.assignment, plan.schedule
    choice = Choice(
        method=plan.method,  # type: ignore[arg-type]
        tile=grid.tile,
        ulysses_degree=grid.ulysses,
        inner=grid.inner,
        route=schedule.route,
        partials=schedule.partials,
        keep=schedule.keep,
    )
    return Part(name=str(file), description=str(choice), plans={plan.direction: plan})


# For people


def _print(played: Played) -> None:
    console, replayed = plain_console(), played.replayed
    directions = " and ".join(one.direction for one in replayed.kernel)
    console.print(
        f"replay of rank {replayed.rank} of {played.problem.ranks:,} on {played.around.device}: {directions}; "
        f"{size_words(played.problem)}, {mask_words(played.problem)}, {played.layout}",
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
    console.print(f"one kernel with as much work, a call of {played.kernel_tokens:,} tokens: {rates}")
    console.print(_caption(played, rows, left_out), style="dim")


def _setting_words(played: Played) -> str:
    around = played.around
    versions = ", ".join(f"{name} {number}" for name, number in around.versions.items())
    queued = "from CUDA graphs" if played.is_recorded else "step by step"
    words = f"kernel {around.kernel}, merging {around.merging}, {count(played.rounds, 'round')} {queued}; {versions}"
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
        "exposed: the time that transfers add. host: the time to queue the pass step by step. peak: memory without the "
        "inputs; plan: error of the memory that the plan states. error: of the simulator's forecast."
    ]
    if played.is_cuda and any(row.host_s > row.time_s for row in rows):
        words.append("!: without CUDA graphs the host would be the limit.")
    if not played.is_measured:
        words.append("Forecasts are for the cluster's links; the replay uses this machine's.")
    return " ".join([*words, left_out]).rstrip()


# For machines, and as a chart


def _as_json(played: Played) -> dict[str, Any]:
    return {
        "command": played.command,
        **asdict(played.around),
        "problem": asdict(played.problem) | {"mask": str(played.problem.mask)},
        "layout": played.layout,
        "cluster": asdict(played.topology),
        "is_measured": played.is_measured,
        "is_recorded": played.is_recorded,
        "rank": played.replayed.rank,
        "rounds": played.rounds,
        "rows": [row_as_json(row) for row in rows_of(played.replayed)],
        "one_kernel": [kernel_as_json(one) | {"tokens": played.kernel_tokens} for one in played.replayed.kernel],
    }


def _chart_of(played: Played) -> Figure:
    return rate_chart(
        bar_groups(played.replayed),
        unit="TFLOP/s",
        expected="forecast",
        line="one kernel",
        title=f"One rank of {played.problem.ranks:,}, replayed on {played.around.device}",
        below=f"{size_words(played.problem)}, {mask_words(played.problem)}, {played.layout}",
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
