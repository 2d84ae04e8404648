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
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh_attention.clusters import cluster_named
from mesh_attention.errors import UsageError
from mesh_attention.planning.choice import FAMILIES
from mesh_attention.problem import Direction, Problem
from mesh_attention.topology import Topology
from mesh_attention.units import BYTES, TIMES, Report, count, format_together, three_digits
from mesh_attention_lab.cli import options as opt
from mesh_attention_lab.cli.files import checked_plan, progress
from mesh_attention_lab.cli.replay_decoding import DecodingPlayed, decoding_as_json, print_decoding
from mesh_attention_lab.cli.terminal import (
    NO_NUMBER,
    Column,
    cluster_words,
    plain_console,
    print_table,
    problem_words,
    times,
)
from mesh_attention_lab.decoding import decode_plans
from mesh_attention_lab.drawing.canvas import save_chart
from mesh_attention_lab.drawing.rates import Bar, BarGroup, rate_chart
from mesh_attention_lab.replay.result import (
    BEST,
    Part,
    Replayed,
    ReplayRow,
    kernel_as_json,
    row_as_json,
    rows_of,
    tuned_parts,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mesh_attention_lab.replay.device import Environment


def parse_methods(name: str, text: str) -> tuple[str, ...]:
    """Method names, in upper or lower case; + may be left out, or written as a hyphen."""
    spellings = {_key(known): known for known in (*FAMILIES, BEST)}
    methods = []
    for part in filter(None, map(str.strip, text.split(","))):
        key = _key(part)
        if key not in spellings:
            near = get_close_matches(key, spellings, n=1)
            hint = f"did you mean {spellings[near[0]]}?" if near else f"expected some of {', '.join((*FAMILIES, BEST))}"
            raise UsageError(f"{name} {part!r}: {hint}")
        methods.append(spellings[key])
    return tuple(dict.fromkeys(methods))


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


OfReplay = partial(typer.Option, rich_help_panel="Replay")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    methods: Annotated[
        Any,  # tuple[str, ...], which typer would read as an option of several values
        opt.OfPlan(
            "--methods",
            help=f"Some of {', '.join(FAMILIES)} (ulysses-mesh will do), as tuned, and {BEST}, the tuner's choice.",
            metavar="NAME,…",
            parser=opt.parsed("--methods", parse_methods),
        ),
    ] = "ring,mesh,best"
    plan: Annotated[
        list[Path] | None,
        opt.OfPlan("--plan", help="A plan file for this problem to replay as well; may be repeated.", metavar="FILE"),
    ] = None
    backward: opt.BothPasses = False
    layout: opt.LayoutOption = None
    rank: Annotated[
        int | None,
        opt.whole_number(
            "--rank", "The rank to play; the middle one, or with --decode the first, if left out.", OfReplay, least=0
        ),
    ] = None
    rounds: Annotated[int, opt.whole_number("--rounds", "How often each method runs.", OfReplay)] = 5
    device: Annotated[
        str | None,
        OfReplay("--device", help="cpu, cuda or cuda:1; if left out, a GPU if there is one.", metavar="NAME"),
    ] = None
    cluster: Annotated[
        str | None,
        OfReplay(
            "--cluster",
            help="Plan and forecast for this cluster (h200, FILE.toml); if left out, this device and its link are "
            "measured.",
            metavar="CLUSTER",
        ),
    ] = None
    no_graphs: Annotated[bool, OfReplay("--no-graphs", help="Queue every step, without CUDA graphs.")] = False
    chart: opt.ChartFile = None
    json: opt.AsJson = False


def replay_command(
    context: typer.Context,
    ranks: opt.Ranks,
    problem_options: opt.ProblemOptions,
    decode_options: opt.DecodeOptions,
    options: ReplayOptions,
) -> None:
    """Play one rank of a plan on this device, at real sizes, and compare it with one kernel and with ring.

    There are no other ranks: transfers are copies from and to the host's memory.

    Exit code 0: done. 1: a plan file breaks a rule. 2: invalid input, or a plan does not fit into memory.
    """
    command = shlex.join(["mesh-attention", *context.obj])
    if decode_options.decode:
        opt.refuse_with("--decode", dict.fromkeys(opt.options_given(context, *OF_PLANS), True))
        _replay_decoding(problem_options.decoded(ranks), decode_options, options, command)
        return
    if not options.methods and not options.plan:
        raise UsageError("nothing to replay: give --methods, or a --plan")
    with progress("starting") as report:
        played = _play(problem_options, ranks, options, command, report)
        if options.chart is not None:
            report(f"drawing {options.chart.name}", 1.0)
            save_chart(chart_of(played), options.chart)
    if options.json:
        typer.echo(json.dumps(as_json(played) | {"chart": None if options.chart is None else str(options.chart)}))
        return
    print_replay(played)
    if options.chart is not None:
        typer.echo(f"\nwrote {options.chart}")


OF_PLANS = ("methods", "plan", "backward", "layout", "chart")
"""Options that a decoded step, whose program is fixed, has no use for."""


def _replay_decoding(problem: Problem, decode_options: opt.DecodeOptions, options: ReplayOptions, command: str) -> None:
    from mesh_attention_lab.replay.decoding import replay_decoding
    from mesh_attention_lab.replay.device import environment_with, find_device

    device = find_device(options.device)
    rank = opt.check_rank(options.rank or 0, problem.ranks)  # the first has the largest slice
    plans = decode_plans(problem, decode_options.queries)
    with progress("starting") as report:
        decoding = replay_decoding(
            problem,
            plans,
            rank=rank,
            device=device,
            rounds=options.rounds,
            cuda_graphs=not options.no_graphs,
            topology=None if options.cluster is None else cluster_named(options.cluster).with_ranks(problem.ranks),
            on_progress=report,
        )
    played = DecodingPlayed(
        command=command,
        problem=problem,
        is_measured=options.cluster is None,
        environment=environment_with(device, kernel=decoding.kernel, merging=decoding.kernel),
        decoding=decoding,
    )
    if options.json:
        typer.echo(json.dumps(decoding_as_json(played)))
    else:
        print_decoding(played)


def _play(
    problem_options: opt.ProblemOptions, ranks: int, options: ReplayOptions, command: str, report: Report
) -> Played:
    from mesh_attention_lab.replay.actor import BaselineKernel
    from mesh_attention_lab.replay.device import check_memory, environment_of, find_device, measure_cluster
    from mesh_attention_lab.replay.replay import replay

    problem, directions = problem_options.problem(ranks), problem_options.passes(both=options.backward)
    layout = problem_options.layout(options.layout)
    device = find_device(options.device)
    rank = problem.ranks // 2 if options.rank is None else opt.check_rank(options.rank, problem.ranks)
    from_files = [_part_of(file, problem, directions, report) for file in options.plan or ()]
    if options.cluster is None:
        topology = measure_cluster(problem, device=device, report=report)
    else:
        topology = cluster_named(options.cluster).with_ranks(problem.ranks)
    parts: list[Part] = []
    if options.methods:
        parts = tuned_parts(
            problem,
            topology,
            options.methods,
            directions=directions,
            layout=layout,
            on_progress=report,
        )
    parts += from_files
    is_cuda = device.type == "cuda"
    is_captured = is_cuda and not options.no_graphs
    check_memory(parts, rank=rank, device=device, is_captured=is_captured)
    kernel = BaselineKernel(problem, device=device)
    return Played(
        command=command,
        problem=problem,
        layout=next(iter(parts[0].plans.values())).layout.name,
        topology=topology,
        is_measured=options.cluster is None,
        is_captured=is_captured,
        is_cuda=is_cuda,
        rounds=options.rounds,
        environment=environment_of(problem, device),
        kernel_tokens=(kernel.tokens, kernel.kv_tokens),
        kernel_words=kernel.words,
        replayed=replay(
            parts,
            topology,
            rank=rank,
            device=device,
            rounds=options.rounds,
            cuda_graphs=is_captured,
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
    schedule = plan.schedule
    details = [f"{plan.method} {plan.assignment}"]
    details += [f"{name} ring" for name in ("route", "partials") if getattr(schedule, name) == "ring"]
    details += [f"keep {'+'.join(schedule.keep)}"] if schedule.keep else []
    return Part(name=str(file), description=", ".join(details), plans={plan.direction: plan})


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
    """A replay, and its settings. The topology was measured here, unless --cluster says otherwise."""

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
    directions = " and ".join(timed.direction for timed in replayed.kernel)
    console.print(
        f"replay of rank {replayed.rank} of {played.problem.ranks:,} on {played.environment.device}: {directions}; "
        f"{problem_words(played.problem, played.layout)}",
        style="bold",
    )
    console.print(_setting_words(played))
    console.print(WHAT_IT_IS)
    console.print()
    rows = rows_of(replayed)
    lines: list[ReplayRow | str] = []
    for row, before in zip(rows, (None, *rows), strict=False):
        lines += [row] if before is not None and before.method == row.method else [row.method, row]
    left_out = print_table(
        console, replay_columns(lines, is_cuda=played.is_cuda), bold=[isinstance(line, str) for line in lines]
    )
    rates = " and ".join(f"{three_digits(timed.tflops)} TFLOP/s {timed.direction}" for timed in replayed.kernel)
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


def replay_columns(lines: Sequence[ReplayRow | str], *, is_cuda: bool) -> list[Column]:
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
    table = [Column(header="method\n  pass, plan", cells=names, is_text=True, least_width=NAME_WIDTH)]
    for header, cells, drop in columns:
        rest = iter(cells)
        spread = ["" if isinstance(line, str) else next(rest) for line in lines]
        table.append(Column(header=header, cells=spread, drop=drop))
    return table


def _percent(value: float | None) -> str:
    return NO_NUMBER if value is None else f"{100 * value:+.1f}"


def _caption(played: Played, rows: Sequence[ReplayRow], left_out: str) -> str:
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
            kernel_as_json(timed) | dict(zip(("tokens", "kv_tokens"), played.kernel_tokens, strict=True))
            for timed in played.replayed.kernel
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
        of_pass = [row for row in rows if row.what == what]
        bars = tuple(Bar(name=row.method, value=row.tflops, expected=row.forecast_tflops) for row in of_pass)
        name = "forward and backward" if what == "both" else what
        groups.append(BarGroup(name=name, line=median(row.tflops / row.share for row in of_pass), bars=bars))
    return groups
