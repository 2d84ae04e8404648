"""`mesh-attention replay`: one device plays one rank of a plan at real sizes, methods in turn, next to one kernel.

Torch is imported when the command runs.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh_attention.clusters import cluster_named
from mesh_attention.errors import UsageError
from mesh_attention.planners.choice import FAMILIES
from mesh_attention.problem import Direction, Problem
from mesh_attention.topology import Topology
from mesh_attention.units import BYTES, TIMES, Progress, count, format_nbytes, format_time, three_digits
from mesh_attention_lab.cli import options as opt
from mesh_attention_lab.cli.files import checked_plan, problem_to_json
from mesh_attention_lab.cli.terminal import (
    NO_NUMBER,
    SHORT,
    Column,
    cluster_words,
    plain_console,
    print_table,
    problem_words,
    progress,
    times,
)
from mesh_attention_lab.decode_simulator import kv_nbytes
from mesh_attention_lab.drawing.charts import Bar, BarGroup, rate_chart, save_chart
from mesh_attention_lab.replay.result import (
    BEST,
    Part,
    Replayed,
    ReplayRow,
    decoded_parts,
    kernel_as_json,
    row_as_json,
    rows_of,
    tuned_parts,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mesh_attention_lab.replay.device import Environment


def parse_methods(text: str) -> tuple[str, ...]:
    """Method names, in upper or lower case; + may be left out, or written as a hyphen."""
    known = (*FAMILIES, BEST)
    spellings = {_key(name): name for name in known}
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if _key(part) not in spellings:
            near = get_close_matches(_key(part), spellings, n=1)
            hint = f"did you mean {spellings[near[0]]}?" if near else f"expected some of {', '.join(known)}"
            raise UsageError(f" {part!r}: {hint}")
    return tuple(dict.fromkeys(spellings[_key(part)] for part in parts))


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


REPLAY = "Replay"
"""A panel of the help."""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(opt.DecodeOptions):
    ranks: opt.Ranks
    methods: Annotated[
        Any,  # tuple[str, ...], which typer would read as an option of several values
        opt.option(
            f"Some of {', '.join(FAMILIES)} (ulysses-mesh will do), as tuned, and {BEST}, the tuner's choice.",
            "NAME,…",
            parse_methods,
            opt.PLAN,
        ),
    ] = "ring,mesh,best"
    plan: Annotated[
        list[Path] | None,
        opt.option("A plan file for this problem to replay as well; may be repeated.", "FILE", panel=opt.PLAN),
    ] = None
    backward: opt.BothPasses = False
    rank: Annotated[
        int | None,
        opt.whole_number("The rank to play; the middle one, or with --decode the first, if left out.", REPLAY, least=0),
    ] = None
    rounds: Annotated[int, opt.whole_number("How often each method runs.", REPLAY)] = 5
    device: Annotated[
        str | None, opt.option("cpu, cuda or cuda:1; if left out, a GPU if there is one.", "NAME", panel=REPLAY)
    ] = None
    cluster: Annotated[
        str | None,
        opt.option(
            "Plan and forecast for this cluster (h200, FILE.toml); if left out, this device and its link are measured.",
            "CLUSTER",
            panel=REPLAY,
        ),
    ] = None
    no_graphs: Annotated[bool, opt.flag("--no-graphs", "Queue every step, without CUDA graphs.", REPLAY)] = False
    chart: opt.ChartFile = None
    json: opt.AsJson = False


def replay_command(options: ReplayOptions) -> None:
    """Play one rank of a plan on this device, at real sizes, and compare it with one kernel and with ring.

    There are no other ranks: transfers are copies from and to the host's memory.

    Exit code 0: done. 1: a plan file breaks a rule. 2: invalid input, or a plan does not fit into memory.
    """
    command = shlex.join(["mesh-attention", *options.context.obj])
    if options.decode:
        options.refuse_with("--decode", "methods", "plan", "backward", "layout", "chart")  # its program is fixed
    elif not options.methods and not options.plan:
        raise UsageError("nothing to replay: give --methods, or a --plan")
    with progress("starting") as report:
        played = _play(options, command, report)
        if options.chart is not None:
            report(f"drawing {options.chart.name}", 1.0)
            save_chart(chart_of(played), options.chart)
    if options.json:
        typer.echo(json.dumps(as_json(played) | {"chart": None if options.chart is None else str(options.chart)}))
        return
    print_replay(played)
    if options.chart is not None:
        typer.echo(f"\nwrote {options.chart}")


def _play(options: ReplayOptions, command: str, report: Progress) -> Played:
    from mesh_attention_lab.replay.cache import FilledCache
    from mesh_attention_lab.replay.device import (
        check_memory,
        environment_of,
        find_device,
        measure_cluster,
        measure_read,
    )
    from mesh_attention_lab.replay.replay import replay

    problem = options.decoded(options.ranks) if options.decode else options.problem(options.ranks)
    device = find_device(options.device)
    rank = 0 if options.decode else problem.ranks // 2  # the first has the largest slice of a step
    rank = rank if options.rank is None else opt.check_rank(options.rank, problem.ranks)
    directions = ("forward",) if options.decode else options.passes(both=options.backward)
    layout = None if options.decode else options.planned_layout
    parts = [_part_of(file, problem, directions, report) for file in dict.fromkeys(options.plan or ())]
    if options.cluster is None:
        topology = measure_cluster(problem, device=device, report=report)
    else:
        topology = cluster_named(options.cluster).with_ranks(problem.ranks)
    is_captured = device.type == "cuda" and not options.no_graphs
    environment = environment_of(problem, device)
    cache, read_gb_per_s = None, None
    if options.decode:
        report("filling the cache", 0.0)
        cache, read_gb_per_s = FilledCache(problem, device=device), measure_read(device)
        is_captured = is_captured and cache.is_capturable
        environment = replace(environment, kernel=cache.kernel.name, merging=cache.kernel.name)
        parts = decoded_parts(problem, queries=options.queries)
    elif options.methods:
        tuned = tuned_parts(
            problem, topology, options.methods, directions=directions, layout=layout, on_progress=report
        )
        parts = [*tuned, *parts]
    if cache is None:
        check_memory(parts, rank=rank, device=device, is_captured=is_captured)
    return Played(
        command=command,
        problem=problem,
        layout=next(iter(parts[0].plans.values())).layout.name,
        topology=topology,
        is_measured=options.cluster is None,
        is_captured=is_captured,
        rounds=options.rounds,
        environment=environment,
        read_gb_per_s=read_gb_per_s,
        replayed=replay(
            parts,
            topology,
            rank=rank,
            device=device,
            rounds=options.rounds,
            cuda_graphs=is_captured,
            cache=cache,
            on_progress=report,
        ),
    )


def _part_of(file: Path, problem: Problem, directions: Sequence[Direction], report: Progress) -> Part:
    plan = checked_plan(file, report)
    for field in fields(Problem):
        there, here = getattr(plan.problem, field.name), getattr(problem, field.name)
        if there != here:
            raise UsageError(f"--plan {file} is for another problem: its {field.name} is {there}, expected {here}")
    if plan.direction not in directions:
        raise UsageError(f"--plan {file} is a plan of the {plan.direction} pass; add --backward to play it")
    schedule = plan.schedule
    details = [f"{plan.method} {plan.assignment}"]
    details += [f"{name} ring" for name in ("route", "partials") if getattr(schedule, name) == "ring"]
    details += [f"keep {'+'.join(schedule.keep)}"] if schedule.keep else []
    return Part(name=str(file), choices={plan.direction: ", ".join(details)}, plans={plan.direction: plan})


NAME_WIDTH = 22
"""Plans are wrapped to this width where there is little room."""
WHAT_IT_IS = (
    "A replay: kernels, merges and memory are real, and every transfer is a copy of its size between the device and "
    "its host. Left out: other ranks being late, and contention in the network. A GPU rests before every run; one "
    "that is always busy computes about a tenth slower, by any method."
)
ONE_COPY = (
    "Times are of one layer, and an exchange is one copy each way: the latency of many peers is left out. % of kernel: "
    "relative to attending alone."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What was played, how, and what was measured. The topology was measured here, unless --cluster says otherwise.

    `read_gb_per_s` is the rate of a large read on the device, of a decoded step, which reads keys and values.
    """

    command: str
    problem: Problem
    layout: str
    topology: Topology
    is_measured: bool
    is_captured: bool
    rounds: int
    environment: Environment
    read_gb_per_s: float | None
    replayed: Replayed

    @property
    def what(self) -> str:
        directions = " and ".join(timed.direction for timed in self.replayed.kernel)
        return directions if self.read_gb_per_s is None else "decode"


# For people


def print_replay(played: Played) -> None:
    console, replayed = plain_console(), played.replayed
    console.print(
        f"replay of rank {replayed.rank} of {played.problem.ranks:,} on {played.environment.device}: {played.what}; "
        f"{problem_words(played.problem, played.layout)}",
        style="bold",
    )
    console.print(_setting_words(played))
    console.print(WHAT_IT_IS if played.read_gb_per_s is None else f"{WHAT_IT_IS} {ONE_COPY}")
    console.print()
    rows = rows_of(replayed)
    print_table(console, _columns(rows))
    console.print(_kernel_words(played))
    console.print(_caption(played, rows), style="dim")


def _setting_words(played: Played) -> str:
    on = played.environment
    versions = ", ".join(f"{name} {number}" for name, number in on.versions.items())
    queued = "from CUDA graphs" if played.is_captured else "step by step"
    words = f"kernel {on.kernel}, merging {on.merging}, {count(played.rounds, 'round')} {queued}; {versions}"
    if not played.is_measured:
        return f"{words}; plans and forecasts for {cluster_words(played.topology)}"
    link = played.topology.between
    return f"{words}; link {link.gb_per_s:g} GB/s each way at once, {link.latency_us:g} µs"


def _kernel_words(played: Played) -> str:
    first, *_ = played.replayed.kernel
    if played.read_gb_per_s is None:
        rates = " and ".join(
            f"{three_digits(timed.tflops)} TFLOP/s {timed.direction}" for timed in played.replayed.kernel
        )
        return f"one kernel with as much work, {first.words}: {rates}"
    nbytes = kv_nbytes(played.problem)
    gb_per_s = nbytes / first.time_s / 1e9
    return (
        f"the kernel alone reads {format_nbytes(nbytes)} of keys and values in {format_time(first.time_s)}: "
        f"{gb_per_s / 1e3:.3g} TB/s, {gb_per_s / played.read_gb_per_s:.1%} of what this device reads"
    )


def _columns(rows: Sequence[ReplayRow]) -> list[Column]:
    peak = Column.of_amounts("peak", [row.peak_nbytes or 0 for row in rows], BYTES, digits=3)
    peaks = [text if row.peak_nbytes else NO_NUMBER for row, text in zip(rows, peak.cells, strict=True)]
    names = [f"{row.method} {SHORT[row.what]}" + (f"\n  {row.plan}" if row.plan else "") for row in rows]
    return [
        Column(header="method, pass\n  plan", cells=names, is_text=True, least_width=NAME_WIDTH),
        Column.of_amounts("time", [1e9 * row.time_s for row in rows], TIMES),
        Column(header="TFLOP/s", cells=[three_digits(row.tflops) for row in rows]),
        Column(header="% of\nkernel", cells=[f"{100 * row.share:.1f}" for row in rows]),
        Column(header="×\nring", cells=[times(row.times_ring) for row in rows]),
        Column.of_amounts("exposed", [1e9 * row.exposed_s for row in rows], TIMES),
        replace(peak, cells=peaks),
        Column(header="error\n%", cells=[f"{100 * row.forecast_error:+.1f}" for row in rows]),
    ]


def _caption(played: Played, rows: Sequence[ReplayRow]) -> str:
    words = (
        f"Times are medians of {count(played.rounds, 'round')}, up to ± {100 * max(row.spread for row in rows):.1f} %. "
        "× ring: speed relative to ring. exposed: the time that transfers add. peak: measured memory, without the "
        "inputs. error: of the forecast."
    )
    return (
        words
        if played.is_measured
        else f"{words} Forecasts are for the cluster's links; the replay uses this machine's."
    )


# For machines, and as a chart


def as_json(played: Played) -> dict[str, Any]:
    return {
        "command": played.command,
        **asdict(played.environment),
        "problem": problem_to_json(played.problem),
        "layout": played.layout,
        "cluster": asdict(played.topology),
        "is_measured": played.is_measured,
        "is_captured": played.is_captured,
        "read_gb_per_s": played.read_gb_per_s,
        "rank": played.replayed.rank,
        "rounds": played.rounds,
        "rows": [row_as_json(row) for row in rows_of(played.replayed)],
        "one_kernel": [kernel_as_json(timed) for timed in played.replayed.kernel],
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
