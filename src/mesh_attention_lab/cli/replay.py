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
from mesh_attention.units import BYTES, TIMES, Progress, count, three_digits
from mesh_attention_lab.cli import options as opt
from mesh_attention_lab.cli.files import checked_plan, problem_to_json
from mesh_attention_lab.cli.serving import played_as_json, print_played_decoding
from mesh_attention_lab.cli.terminal import (
    NO_NUMBER,
    Column,
    cluster_words,
    plain_console,
    print_table,
    problem_words,
    progress,
    times,
)
from mesh_attention_lab.decoding import decode_forecasts
from mesh_attention_lab.drawing.charts import Bar, BarGroup, rate_chart, save_chart
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
    import torch
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
        _replay_decoding(options, command)
        return
    if not options.methods and not options.plan:
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


def _replay_decoding(options: ReplayOptions, command: str) -> None:
    from mesh_attention_lab.replay.decoding import replay_decoding
    from mesh_attention_lab.replay.device import environment_of, find_device

    problem, device = options.decoded(options.ranks), find_device(options.device)
    rank = opt.check_rank(options.rank or 0, problem.ranks)  # the first has the largest slice
    with progress("starting") as report:
        topology = _topology(options, problem, device, report)
        played = replay_decoding(
            problem,
            decode_forecasts(problem, topology, queries=options.queries),
            rank=rank,
            device=device,
            rounds=options.rounds,
            cuda_graphs=not options.no_graphs,
            report=report,
        )
    environment = replace(environment_of(problem, device), kernel=played.kernel, merging=played.kernel)
    setting = Setting(
        command=command,
        problem=problem,
        topology=topology,
        is_measured=options.cluster is None,
        is_captured=played.is_captured,
        rounds=options.rounds,
        environment=environment,
    )
    if options.json:
        typer.echo(json.dumps(setting_as_json(setting) | played_as_json(played)))
    else:
        print_played_decoding(problem, played, device=environment.device, setting=setting_words(setting))


def _topology(options: ReplayOptions, problem: Problem, device: torch.device, report: Progress) -> Topology:
    from mesh_attention_lab.replay.device import measure_cluster

    if options.cluster is None:
        return measure_cluster(problem, device=device, report=report)
    return cluster_named(options.cluster).with_ranks(problem.ranks)


def _play(options: ReplayOptions, command: str, report: Progress) -> Played:
    from mesh_attention_lab.replay.actor import BaselineKernel
    from mesh_attention_lab.replay.device import check_memory, environment_of, find_device
    from mesh_attention_lab.replay.replay import replay

    problem, directions = options.problem(options.ranks), options.passes(both=options.backward)
    layout, device = options.planned_layout, find_device(options.device)
    rank = problem.ranks // 2 if options.rank is None else opt.check_rank(options.rank, problem.ranks)
    parts = [_part_of(file, problem, directions, report) for file in dict.fromkeys(options.plan or ())]
    topology = _topology(options, problem, device, report)
    if options.methods:
        tuned = tuned_parts(
            problem, topology, options.methods, directions=directions, layout=layout, on_progress=report
        )
        parts = [*tuned, *parts]
    is_captured = device.type == "cuda" and not options.no_graphs
    check_memory(parts, rank=rank, device=device, is_captured=is_captured)
    kernel = BaselineKernel(problem, device=device)
    return Played(
        command=command,
        problem=problem,
        layout=next(iter(parts[0].plans.values())).layout.name,
        topology=topology,
        is_measured=options.cluster is None,
        is_captured=is_captured,
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
SHORT = {"forward": "fwd", "backward": "bwd", "both": "both"}
WHAT_IT_IS = (
    "A replay: kernels, merges and memory are real, and every transfer is a copy of its size between the device and "
    "its host. Left out: other ranks being late, and contention in the network. A GPU rests before every run; one "
    "that is always busy computes about a tenth slower, by any method."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is played, and how. The topology was measured here, unless --cluster says otherwise."""

    command: str
    problem: Problem
    topology: Topology
    is_measured: bool
    is_captured: bool
    rounds: int
    environment: Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Played(Setting):
    layout: str
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
    console.print(setting_words(played))
    console.print(WHAT_IT_IS)
    console.print()
    rows = rows_of(replayed)
    print_table(console, _columns(rows))
    rates = " and ".join(f"{three_digits(timed.tflops)} TFLOP/s {timed.direction}" for timed in replayed.kernel)
    console.print(f"one kernel with as much work, {played.kernel_words}: {rates}")
    console.print(_caption(played, rows), style="dim")


def setting_words(setting: Setting) -> str:
    on = setting.environment
    versions = ", ".join(f"{name} {number}" for name, number in on.versions.items())
    queued = "from CUDA graphs" if setting.is_captured else "step by step"
    words = f"kernel {on.kernel}, merging {on.merging}, {count(setting.rounds, 'round')} {queued}; {versions}"
    if not setting.is_measured:
        return f"{words}; plans and forecasts for {cluster_words(setting.topology)}"
    link = setting.topology.between
    return f"{words}; link {link.gb_per_s:g} GB/s each way at once, {link.latency_us:g} µs"


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


def setting_as_json(setting: Setting) -> dict[str, Any]:
    return {
        "command": setting.command,
        **asdict(setting.environment),
        "problem": problem_to_json(setting.problem),
        "cluster": asdict(setting.topology),
        "is_measured": setting.is_measured,
        "is_captured": setting.is_captured,
        "rounds": setting.rounds,
    }


def as_json(played: Played) -> dict[str, Any]:
    return setting_as_json(played) | {
        "layout": played.layout,
        "rank": played.replayed.rank,
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
