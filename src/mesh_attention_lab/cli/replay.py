"""`mesh-attention replay`: one device plays one rank of a plan at real sizes, methods in turn, next to one kernel.

Torch is imported when the command runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
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
from mesh_attention_lab.cli import terminal as term
from mesh_attention_lab.cli.files import checked_plan, problem_to_json
from mesh_attention_lab.decode_simulator import kv_nbytes
from mesh_attention_lab.drawing.charts import Rates, rate_chart, save_chart
from mesh_attention_lab.replay.result import BEST, Part, Replayed, ReplayRow, decoded_parts, facts, rows_of, tuned_parts

if TYPE_CHECKING:
    from mesh_attention_lab.replay.device import Environment


def parse_methods(text: str) -> tuple[str, ...]:
    """Method names, in upper or lower case; + may be left out, or written as a hyphen."""
    known = {_key(name): name for name in (*FAMILIES, BEST)}
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if _key(part) not in known:
            raise UsageError(f" {part!r}: expected some of {', '.join(known.values())}")
    return tuple(dict.fromkeys(known[_key(part)] for part in parts))


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


REPLAY = "Replay"
"""A panel of the help."""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(opt.DecodeOptions):
    ranks: opt.Ranks
    methods: Annotated[
        Any,  # tuple[str, ...], which typer would read as an option of several values
        opt.option(f"Some of {', '.join(FAMILIES)}, as tuned, and {BEST} of all.", "NAME,…", parse_methods, opt.PLAN),
    ] = "ring,mesh,best"
    plan: Annotated[
        list[Path] | None, opt.option("A plan file to replay as well; may be repeated.", "FILE", panel=opt.PLAN)
    ] = None
    backward: opt.BothPasses = False
    rank: Annotated[
        int | None, opt.whole_number("The rank to play; the middle one, or the first of --decode.", REPLAY, least=0)
    ] = None
    rounds: Annotated[int, opt.whole_number("How often each method runs.", REPLAY)] = 5
    device: Annotated[
        str | None, opt.option("cpu, cuda or cuda:1; if left out, a GPU if there is one.", "NAME", panel=REPLAY)
    ] = None
    cluster: Annotated[
        str | None, opt.option("Forecast for this cluster; else this machine is measured.", "CLUSTER", panel=REPLAY)
    ] = None
    no_graphs: Annotated[bool, opt.flag("--no-graphs", "Queue every step, without CUDA graphs.", REPLAY)] = False
    chart: opt.ChartFile = None
    json: opt.AsJson = False


def replay_command(options: ReplayOptions) -> None:
    """Play one rank of a plan on this device, at real sizes, and compare it with one kernel and with ring.

    There are no other ranks: transfers are copies from and to the host's memory.

    Exit code 0: done. 1: a plan file breaks a rule. 2: invalid input, or the plans do not fit into memory.
    """
    if options.decode:
        options.refuse_with("--decode", "methods", "plan", "backward", "layout", "chart")  # its program is fixed
    elif not options.methods and not options.plan:
        raise UsageError("nothing to replay: give --methods, or a --plan")
    with term.progress("starting") as report:
        played = _play(options, report)
        if options.chart is not None:
            report(f"drawing {options.chart.name}", 1.0)
            title = f"One rank of {played.problem.ranks:,}, replayed on {played.environment.device}"
            words = term.problem_words(played.problem, played.layout)
            save_chart(rate_chart(rates_of(played.replayed), title=title, below=words), options.chart)
    if options.json:
        typer.echo(json.dumps(as_json(played) | {"chart": options.chart and str(options.chart)}))
        return
    print_replay(played)
    if options.chart is not None:
        typer.echo(f"\nwrote {options.chart}")


def _play(options: ReplayOptions, report: Progress) -> Played:
    from mesh_attention_lab.replay import device as on
    from mesh_attention_lab.replay.cache import FilledCache
    from mesh_attention_lab.replay.replay import replay

    problem = options.decoded(options.ranks) if options.decode else options.problem(options.ranks)
    device = on.find_device(options.device)
    rank = 0 if options.decode else problem.ranks // 2  # the first has the largest slice of a step
    rank = rank if options.rank is None else options.rank
    if rank >= problem.ranks:
        raise UsageError(f"--rank {rank}: expected a rank from 0 to {problem.ranks - 1}")
    directions = ("forward",) if options.decode else options.passes(both=options.backward)
    layout = None if options.decode else options.planned_layout
    parts = [_part_of(file, problem, directions, report) for file in dict.fromkeys(options.plan or ())]
    if options.cluster is None:
        topology = on.measure_cluster(problem, device=device, report=report)
    else:
        topology = cluster_named(options.cluster).with_ranks(problem.ranks)
    is_captured = device.type == "cuda" and not options.no_graphs
    environment = on.environment_of(problem, device)
    cache, read_gb_per_s = None, None
    if options.decode:
        report("filling the cache", 0.0)
        cache, read_gb_per_s = FilledCache(problem, device=device), on.measure_read(device)
        is_captured = is_captured and cache.is_capturable
        environment = replace(environment, kernel=cache.kernel.name, merging=cache.kernel.name)
        parts = decoded_parts(problem, queries=options.queries)
    else:
        if options.methods:
            settings: dict[str, Any] = {"directions": directions, "layout": layout, "on_progress": report}
            parts = [*tuned_parts(problem, topology, options.methods, **settings), *parts]
        on.check_memory(parts, rank=rank, device=device, is_captured=is_captured)
    return Played(
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
    details = [f"{plan.method} {plan.assignment}"]
    details += [f"{name} ring" for name in ("route", "partials") if getattr(plan.schedule, name) == "ring"]
    details += [f"keep {'+'.join(plan.schedule.keep)}"] if plan.schedule.keep else []
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
    console, replayed = term.plain_console(), played.replayed
    console.print(
        f"replay of rank {replayed.rank} of {played.problem.ranks:,} on {played.environment.device}: {played.what}; "
        f"{term.problem_words(played.problem, played.layout)}",
        style="bold",
    )
    console.print(_setting_words(played))
    console.print(WHAT_IT_IS if played.read_gb_per_s is None else f"{WHAT_IT_IS} {ONE_COPY}")
    console.print()
    rows = rows_of(replayed)
    term.print_table(console, _columns(rows))
    console.print(_kernel_words(played))
    console.print(_caption(played, rows), style="dim")


def _setting_words(played: Played) -> str:
    on = played.environment
    versions = ", ".join(f"{name} {number}" for name, number in on.versions.items())
    queued = "from CUDA graphs" if played.is_captured else "step by step"
    words = f"kernel {on.kernel}, merging {on.merging}, {count(played.rounds, 'round')} {queued}; {versions}"
    if not played.is_measured:
        return f"{words}; plans and forecasts for {term.cluster_words(played.topology)}"
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


def _columns(rows: Sequence[ReplayRow]) -> list[term.Column]:
    peak = term.Column.of_amounts("peak", [row.peak_nbytes or 0 for row in rows], BYTES, digits=3)
    peaks = [text if row.peak_nbytes else term.NO_NUMBER for row, text in zip(rows, peak.cells, strict=True)]
    names = [f"{row.method} {term.SHORT[row.what]}" + (f"\n  {row.plan}" if row.plan else "") for row in rows]
    return [
        term.Column(header="method, pass\n  plan", cells=names, is_text=True, least_width=NAME_WIDTH),
        term.Column.of_amounts("time", [1e9 * row.time_s for row in rows], TIMES),
        term.Column(header="TFLOP/s", cells=[three_digits(row.tflops) for row in rows]),
        term.Column(header="% of\nkernel", cells=[f"{100 * row.share:.1f}" for row in rows]),
        term.Column(header="×\nring", cells=[term.times(row.times_ring) for row in rows]),
        term.Column.of_amounts("exposed", [1e9 * row.exposed_s for row in rows], TIMES),
        replace(peak, cells=peaks),
        term.Column(header="error\n%", cells=[f"{100 * row.forecast_error:+.1f}" for row in rows]),
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
        **asdict(played.environment),
        "problem": problem_to_json(played.problem),
        "layout": played.layout,
        "cluster": asdict(played.topology),
        "is_measured": played.is_measured,
        "is_captured": played.is_captured,
        "read_gb_per_s": played.read_gb_per_s,
        "rank": played.replayed.rank,
        "rounds": played.rounds,
        "rows": [facts(row) for row in rows_of(played.replayed)],
        "one_kernel": [facts(timed) for timed in played.replayed.kernel],
    }


def rates_of(replayed: Replayed) -> list[Rates]:
    """Bars of each pass, and of both."""
    rows, groups = rows_of(replayed), []
    for what in dict.fromkeys(row.what for row in rows):
        of_pass = [row for row in rows if row.what == what]
        bars = {row.method: (row.tflops, row.flops / row.forecast_s / 1e12) for row in of_pass}
        groups.append(Rates(name=what, one_kernel=median(row.tflops / row.share for row in of_pass), bars=bars))
    return groups
