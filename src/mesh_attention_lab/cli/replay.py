"""`mesh-attention replay`: one device plays one rank of a plan at real sizes, methods in turn, next to one kernel.

Torch is imported when the command runs.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import typer

from mesh_attention.clusters import find_cluster
from mesh_attention.errors import UsageError
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.steps import Direction
from mesh_attention.planning.choice import FAMILIES
from mesh_attention.problem import Problem
from mesh_attention.tuning.decoding import CANDIDATES, decode_plan
from mesh_attention.units import parse_whole
from mesh_attention_lab.cli import options as opt
from mesh_attention_lab.cli.command import group, option, options_given
from mesh_attention_lab.cli.files import Report, checked_plan, progress
from mesh_attention_lab.cli.replay_decoding_report import DecodingPlayed, decoding_as_json, print_decoding
from mesh_attention_lab.cli.replay_report import Played, as_json, chart_of, print_replay
from mesh_attention_lab.drawing.canvas import save_chart
from mesh_attention_lab.replay.parts import BEST, Part, tuned_parts


def read_methods(name: str, text: str) -> tuple[str, ...]:
    """Method names, in upper or lower case; + may be left out, or written as a hyphen."""
    spellings = {_key(known): known for known in (*FAMILIES, BEST)}
    found = []
    for given in filter(None, (part.strip() for part in text.split(","))):
        key = _key(given)
        if key not in spellings:
            near = get_close_matches(key, spellings, n=1)
            hint = f"did you mean {spellings[near[0]]}?" if near else f"expected some of {', '.join((*FAMILIES, BEST))}"
            raise UsageError(f"{name} {given!r}: {hint}")
        found.append(spellings[key])
    return tuple(dict.fromkeys(found))


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_of_replay = partial(option, panel="Replay")


@group
class ReplayOptions:
    methods: tuple[str, ...] = opt.of_plan(
        "--methods",
        f"Some of {', '.join(FAMILIES)} (ulysses-mesh will do), each as tuned, and {BEST}, the tuner's choice.",
        "NAME,…",
        read_methods,
        "ring,mesh,best",
    )
    plan: list[Path] | None = opt.of_plan(
        "--plan", "A plan file for this problem to replay as well; may be repeated.", "FILE", default=None
    )
    backward: bool = opt.both_passes_option()
    layout: Layout | None = opt.layout_option()
    rank: int | None = _of_replay(
        "--rank", "The rank to play; the middle one, or with --decode the first, if left out.", "N", opt.read_rank, None
    )
    rounds: int = _of_replay("--rounds", "How often each method runs.", "N", parse_whole, 5)
    device: str | None = _of_replay(
        "--device", "cpu, cuda or cuda:1; if left out, a GPU if there is one.", "NAME", default=None
    )
    cluster: str | None = _of_replay(
        "--cluster",
        "Plan and forecast for this cluster (h200, FILE.toml); if left out, this device and its link are measured.",
        "CLUSTER",
        default=None,
    )
    no_graphs: bool = _of_replay("--no-graphs", "Queue every step, without CUDA graphs.", default=False)
    chart: Path | None = opt.chart_option()
    json: bool = opt.json_option()


def replay_command(
    context: typer.Context,
    over: opt.RanksOption,
    problem: opt.ProblemOptions,
    step: opt.DecodeOptions,
    given: ReplayOptions,
) -> None:
    """Play one rank of a plan on this device, at real sizes, and compare it with one kernel and with ring.

    There are no other ranks: transfers are copies from and to the host's memory.

    Exit code 0: done. 1: a plan file breaks a rule. 2: invalid input, or a plan does not fit into memory.
    """
    command = shlex.join(["mesh-attention", *context.obj])
    if step.check():
        stated = {name: name in OF_PLANS for name in options_given(context, ReplayOptions)}
        opt.refuse_with("--decode", stated)
        _replay_decoding(problem.decoded(over.ranks), step, given, command)
        return
    if not given.methods and not given.plan:
        raise UsageError("nothing to replay: give --methods, or a --plan")
    with progress("starting") as report:
        played = _play(problem, over.ranks, given, command, report)
        if given.chart is not None:
            report(f"drawing {given.chart.name}", 1.0)
            save_chart(chart_of(played), given.chart)
    if given.json:
        typer.echo(json.dumps(as_json(played) | {"chart": None if given.chart is None else str(given.chart)}))
        return
    print_replay(played)
    if given.chart is not None:
        typer.echo(f"\nwrote {given.chart}")


OF_PLANS = ("--methods", "--plan", "--backward", "--layout", "--chart")
"""Options that a decoded step, whose program is fixed, has no use for."""


def _replay_decoding(problem: Problem, step: opt.DecodeOptions, given: ReplayOptions, command: str) -> None:
    from mesh_attention_lab.replay.decoding import replay_decoding
    from mesh_attention_lab.replay.device import environment_with, find_device

    device = find_device(given.device)
    rank = opt.check_rank(given.rank or 0, problem.ranks)  # the first has the largest slice
    plans = [decode_plan(problem, *candidate) for candidate in CANDIDATES if step.way in (None, candidate[0])]
    with progress("starting") as report:
        decoding = replay_decoding(
            problem,
            plans,
            rank=rank,
            device=device,
            rounds=given.rounds,
            cuda_graphs=not given.no_graphs,
            topology=None if given.cluster is None else find_cluster(given.cluster).with_ranks(problem.ranks),
            on_progress=report,
        )
    played = DecodingPlayed(
        command=command,
        problem=problem,
        is_measured=given.cluster is None,
        environment=environment_with(device, kernel=decoding.kernel, merging=decoding.kernel),
        decoding=decoding,
    )
    if given.json:
        typer.echo(json.dumps(decoding_as_json(played)))
    else:
        print_decoding(played)


def _play(asked: opt.ProblemOptions, ranks: int, given: ReplayOptions, command: str, report: Report) -> Played:
    from mesh_attention_lab.replay.actor import BaselineKernel
    from mesh_attention_lab.replay.cluster import measure_cluster
    from mesh_attention_lab.replay.device import check_memory, environment_of, find_device
    from mesh_attention_lab.replay.replay import replay

    problem, directions, wanted = asked.problem(ranks), asked.passes(both=given.backward), asked.layout(given.layout)
    device = find_device(given.device)
    rank = problem.ranks // 2 if given.rank is None else opt.check_rank(given.rank, problem.ranks)
    from_files = [_part_of(file, problem, directions, report) for file in given.plan or ()]
    if given.cluster is None:
        topology = measure_cluster(problem, device=device, report=report)
    else:
        topology = find_cluster(given.cluster).with_ranks(problem.ranks)
    parts: list[Part] = []
    if given.methods:
        layout = None if wanted is None else wanted.name
        parts = tuned_parts(problem, topology, given.methods, directions=directions, layout=layout, on_progress=report)
    parts += from_files
    is_cuda = device.type == "cuda"
    is_captured = is_cuda and not given.no_graphs
    check_memory(parts, rank=rank, device=device, is_captured=is_captured)
    kernel = BaselineKernel(problem, device=device)
    return Played(
        command=command,
        problem=problem,
        layout=next(iter(parts[0].plans.values())).layout.name,
        topology=topology,
        is_measured=given.cluster is None,
        is_captured=is_captured,
        is_cuda=is_cuda,
        rounds=given.rounds,
        environment=environment_of(problem, device),
        kernel_tokens=(kernel.tokens, kernel.kv_tokens),
        kernel_words=kernel.words,
        replayed=replay(
            parts,
            topology,
            rank=rank,
            device=device,
            rounds=given.rounds,
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
