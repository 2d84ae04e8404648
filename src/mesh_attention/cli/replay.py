"""`mesh-attention replay`: one device plays one rank of a plan at real sizes, methods in turn, beside one kernel.

Torch is imported when the command runs.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh_attention.cli import options as opt
from mesh_attention.cli.files import check_chart, read_plan_file
from mesh_attention.cli.passes import passes
from mesh_attention.cli.progress import Report, progress, unroll
from mesh_attention.cli.replay_device import check_memory, device_from, surroundings_of
from mesh_attention.cli.replay_report import Played, as_json, chart_of, print_replay
from mesh_attention.drawing.charts import save_chart
from mesh_attention.errors import UsageError
from mesh_attention.plan.layout import layout_named
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import Direction
from mesh_attention.planning.choice import FAMILIES
from mesh_attention.problem import Problem
from mesh_attention.replay.parts import BEST, Part, tuned_parts
from mesh_attention.topology import Topology
from mesh_attention.units import count, parse_whole
from mesh_attention.verification.check import check

if TYPE_CHECKING:
    import torch

Methods = Annotated[
    str,
    typer.Option(
        "--methods",
        help=f"Some of {', '.join(FAMILIES)} (ulysses-mesh will do), each as the tuner has it, and {BEST}, its choice.",
        metavar="NAME,…",
        rich_help_panel="Plan",
    ),
]
PlanFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--plan",
        help="A plan file for this problem, replayed beside; may be repeated.",
        metavar="FILE",
        rich_help_panel="Plan",
    ),
]
RankPlayed = Annotated[
    str | None,
    typer.Option(
        "--rank", help="The rank that is played; the middle one if left out.", metavar="N", rich_help_panel="Replay"
    ),
]
Rounds = Annotated[
    str, typer.Option("--rounds", help="How often all of them take turns.", metavar="N", rich_help_panel="Replay")
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device", help="cpu, cuda, cuda:1; a GPU if there is one.", metavar="NAME", rich_help_panel="Replay"
    ),
]
SceneCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="Plan and forecast for this one (h200, FILE.toml); if left out, for this device and link, measured first.",
        metavar="CLUSTER",
        rich_help_panel="Replay",
    ),
]
NoGraphs = Annotated[
    bool,
    typer.Option("--no-graphs", help="Queue every step, as without CUDA graphs.", rich_help_panel="Replay"),
]


def replay_command(
    context: typer.Context,
    ranks: opt.Ranks,
    seq: opt.Seq,
    heads: opt.Heads,
    head_dim: opt.HeadDim = "128",
    seq_kv: opt.SeqKv = None,
    kv_heads: opt.KvHeads = None,
    head_dim_v: opt.HeadDimV = None,
    batch: opt.Batch = "1",
    dtype: opt.Dtype = "bfloat16",
    causal: opt.Causal = False,
    window: opt.Window = None,
    documents: opt.Documents = None,
    methods: Methods = "ring,mesh,best",
    plan: PlanFiles = None,
    backward: opt.BothPasses = False,
    layout: opt.LayoutName = None,
    rank: RankPlayed = None,
    rounds: Rounds = "5",
    device: DeviceName = None,
    cluster: SceneCluster = None,
    no_graphs: NoGraphs = False,
    chart: opt.Chart = None,
    json_output: opt.JsonOutput = False,
) -> None:
    """Play one rank of a plan on this device, at real sizes, and compare it with one kernel and with ring.

    Other ranks are not there: what would come from them and go to them is copied from and to the host.

    Exit code 0: done. 2: it cannot be done, as when a plan does not fit into the memory.
    """
    check_chart(chart)
    problem = opt.problem_from(
        ranks=ranks,
        seq=(seq, seq_kv),
        heads=(heads, kv_heads),
        head_dim=(head_dim, head_dim_v),
        batch=batch,
        dtype=dtype,
        mask=opt.mask_from(is_causal=causal, window_text=window, documents_text=documents),
    )
    asked = Asked(
        problem=problem,
        directions=passes(both=backward),
        methods=methods_from(methods),
        files=tuple(plan or ()),
        layout=None if layout is None else layout_named(layout).name,
        rank=rank_from(rank, problem.ranks),
        rounds=parse_whole("--rounds", rounds),
        topology=None if cluster is None else opt.cluster_from(cluster, ranks),
        is_recorded=not no_graphs,
        command=command_line(context),
    )
    if not asked.methods and not asked.files:
        raise UsageError("nothing to replay: give --methods, or a --plan")
    with progress("starting") as report:
        played = play(asked, device_from(device), report)
        if chart is not None:
            report(f"drawing {chart.name}", 1.0)
            save_chart(chart_of(played), chart)
    if json_output:
        typer.echo(json.dumps(as_json(played) | {"chart": None if chart is None else str(chart)}))
        return
    print_replay(played)
    if chart is not None:
        typer.echo(f"\nwrote {chart}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to replay, and how. Without a topology, this device's is measured."""

    problem: Problem
    directions: tuple[Direction, ...]
    methods: tuple[str, ...]
    files: tuple[Path, ...]
    layout: str | None
    rank: int
    rounds: int
    topology: Topology | None
    is_recorded: bool
    command: str


def play(asked: Asked, device: torch.device, report: Report) -> Played:
    from mesh_attention.replay.actor import OneKernel
    from mesh_attention.replay.device import measure_device
    from mesh_attention.replay.replay import replay

    of_files = [_part_of(file, asked, report) for file in asked.files]
    topology = asked.topology or measure_device(asked.problem, device=device, report=report)
    parts = [*_tuned(asked, topology, report), *of_files]
    is_recorded = asked.is_recorded and device.type == "cuda"
    check_memory(parts, rank=asked.rank, device=device, is_recorded=is_recorded)
    return Played(
        command=asked.command,
        problem=asked.problem,
        layout=next(iter(parts[0].plans.values())).layout.name,
        topology=topology,
        is_measured=asked.topology is None,
        is_recorded=is_recorded,
        is_cuda=device.type == "cuda",
        rounds=asked.rounds,
        around=surroundings_of(asked.problem, device),
        kernel_tokens=OneKernel(asked.problem, device=device).tokens,
        replayed=replay(
            parts,
            topology,
            rank=asked.rank,
            device=device,
            rounds=asked.rounds,
            cuda_graphs=is_recorded,
            on_progress=report,
        ),
    )


def _tuned(asked: Asked, topology: Topology, report: Report) -> list[Part]:
    if not asked.methods:
        return []
    return tuned_parts(
        asked.problem,
        topology,
        asked.methods,
        directions=asked.directions,
        layout=asked.layout,
        on_progress=report,
    )


# Plan files


def _part_of(file: Path, asked: Asked, report: Report) -> Part:
    plan = read_plan_file(file)
    if plan.problem != asked.problem:
        raise UsageError(f"--plan {file} is for another problem: {_difference(plan.problem, asked.problem)}")
    if plan.direction not in asked.directions:
        raise UsageError(f"--plan {file} is of the {plan.direction} pass; give --backward to play it")
    breaches = check(unroll(plan, report), on_progress=report)
    if breaches:
        raise UsageError(
            f"--plan {file} has {count(len(breaches), 'breach')} of the rules, the first: {breaches[0].message}; "
            f"'mesh-attention verify {file}' shows all"
        )
    return Part(name=str(file), description=_plan_words(plan), plans={plan.direction: plan})


def _difference(there: Problem, asked: Problem) -> str:
    """The first field that differs."""
    for name in Problem.__dataclass_fields__:
        found, wanted = getattr(there, name), getattr(asked, name)
        if found != wanted:
            return f"its {name} is {found}, and {wanted} was asked for"
    raise AssertionError("the problems are the same")


def _plan_words(plan: Plan) -> str:
    schedule = plan.schedule
    routes = schedule.route if schedule.route == schedule.partials else f"{schedule.route}/{schedule.partials}"
    return f"{plan.method} {plan.assignment} {routes}"


# What was asked


def methods_from(text: str) -> tuple[str, ...]:
    """Names of methods; × may be left out, or written as x or a hyphen."""
    spellings = {_key(name, times=times): name for name in (*FAMILIES, BEST) for times in ("", "x")}
    found = []
    for given in filter(None, (part.strip() for part in text.split(","))):
        key = _key(given, times="")
        if key not in spellings:
            near = get_close_matches(key, spellings, n=1)
            hint = f"did you mean {spellings[near[0]]}?" if near else f"expected some of {', '.join((*FAMILIES, BEST))}"
            raise UsageError(f"--methods {given!r}: {hint}")
        found.append(spellings[key])
    return tuple(dict.fromkeys(found))


def _key(name: str, *, times: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("×", times))


def rank_from(text: str | None, ranks: int) -> int:
    if text is None:
        return ranks // 2
    rank = parse_whole("--rank", text, least=0)
    if rank >= ranks:
        raise UsageError(f"--rank {rank}: {count(ranks, 'rank')} are numbered 0 to {ranks - 1}")
    return rank


def command_line(context: typer.Context) -> str:
    """As it could be typed again."""
    words = ["mesh-attention", context.info_name or "replay"]
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is None or source.name != "COMMANDLINE":
            continue
        value: Any = context.params[parameter.name or ""]
        for one in value if isinstance(value, list | tuple) else [value]:
            words += [parameter.opts[0]] if one is True else [parameter.opts[0], str(one)]
    return shlex.join(words)
