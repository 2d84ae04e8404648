"""`mesh-attention plan`: make a plan, show it, and set it beside what the other planners make of the same problem."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import typer
from rich.console import Console

from mesh_attention.cli import options as opt
from mesh_attention.cli.comparison import Comparison, compare
from mesh_attention.cli.files import check_output, write_plan_file
from mesh_attention.cli.matrix import draw_matrix
from mesh_attention.cli.progress import Report, progress, unroll
from mesh_attention.cli.sizes import count, parse_whole
from mesh_attention.cli.tables import StepRow, comparison_caption, comparison_table, step_table
from mesh_attention.cli.words import mask_words, size_words, tile_words
from mesh_attention.plan.buffers import held_nbytes
from mesh_attention.plan.codec import plan_to_json
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import transfers
from mesh_attention.plan.text import format_step
from mesh_attention.planning.choice import Method
from mesh_attention.planning.registry import make_plan


def plan_command(
    ranks: opt.Ranks,
    seq: opt.Seq,
    heads: opt.Heads,
    head_dim: opt.HeadDim,
    seq_kv: opt.SeqKv = None,
    kv_heads: opt.KvHeads = None,
    head_dim_v: opt.HeadDimV = None,
    batch: opt.Batch = "1",
    dtype: opt.Dtype = "bfloat16",
    causal: opt.Causal = False,
    window: opt.Window = None,
    documents: opt.Documents = None,
    method: opt.MethodName = "mesh",
    tile: opt.TileText = "auto",
    ulysses_degree: opt.UlyssesDegree = None,
    inner: opt.InnerText = None,
    layout: opt.LayoutName = None,
    backward: opt.Backward = False,
    route: opt.RouteName = None,
    partials: opt.PartialsName = None,
    blocks_per_call: opt.BlocksPerCall = None,
    keep: opt.KeepText = None,
    rank: opt.Rank = "0",
    all_steps: opt.AllSteps = False,
    save: opt.Save = None,
    json_output: opt.JsonOutput = False,
) -> None:
    """Make a plan, show it, and set it beside the other planners'."""
    check_output("--save", save, example="plan.json")
    problem = opt.problem_from(
        ranks=ranks,
        seq=(seq, seq_kv),
        heads=(heads, kv_heads),
        head_dim=(head_dim, head_dim_v),
        batch=batch,
        dtype=dtype,
        mask=opt.mask_from(is_causal=causal, window_text=window, documents_text=documents),
    )
    grouping = opt.whole_from("--blocks-per-call", blocks_per_call)
    with progress("planning") as report:
        plan = make_plan(
            problem,
            method=cast("Method", method),  # any other is refused by make_plan, with the list of those there are
            tile=opt.tile_from(tile),
            layout=opt.layout_from(layout),
            direction="backward" if backward else "forward",
            ulysses_degree=opt.whole_from("--ulysses-degree", ulysses_degree),
            inner=opt.inner_from(inner),
            route=opt.route_from("--route", route),
            partials=opt.route_from("--partials", partials),
            blocks_per_call=grouping,
            keep=opt.keep_from(keep),
        )
        answer = _work_out(plan, parse_whole("--rank", rank, least=0), grouping, report)
        saved = _save(plan, save, report)
    if json_output:
        typer.echo(json.dumps(_as_json(answer)))
    else:
        _print(answer, saved, all_steps=all_steps)


@dataclass(frozen=True, slots=True)
class Answer:
    """What is printed, for people or for machines."""

    plan: Plan
    rank: int
    steps: tuple[StepRow, ...]
    comparison: Comparison


def _work_out(plan: Plan, rank: int, blocks_per_call: int | None, report: Report) -> Answer:
    steps = _step_rows(plan, rank)  # first: it refuses a rank that is not there
    return Answer(plan, rank, steps, compare(plan, blocks_per_call=blocks_per_call, report=report))


def _step_rows(plan: Plan, rank: int) -> tuple[StepRow, ...]:
    steps = plan.program(rank).steps
    rows = []
    for index, (step, held) in enumerate(zip(steps, held_nbytes(steps, plan.matrix), strict=True)):
        sends, recvs = transfers(step)
        items = [send.item for send in sends] + [recv.item for recv in recvs]
        moved = sum(plan.matrix.nbytes(item).total for item in items)
        rows.append(StepRow(index=index, step=format_step(step), moved_nbytes=moved, held_nbytes=held))
    return tuple(rows)


def _save(plan: Plan, path: Path | None, report: Report) -> str | None:
    """Writes the plan with every step stated; says what was written."""
    if path is None:
        return None
    unrolled = unroll(plan, report)
    report(f"writing {path.name}", 1.0)
    write_plan_file(path, unrolled)
    steps = sum(len(program.steps) for program in unrolled.programs or ())
    return f"saved {path}: {count(steps, 'step')} of {count(plan.problem.ranks, 'rank')}"


def _as_json(answer: Answer) -> dict[str, object]:
    return {
        "plan": plan_to_json(answer.plan),
        "digest": answer.plan.digest,
        "program": {"rank": answer.rank, "steps": [asdict(row) for row in answer.steps]},
        "comparison": asdict(answer.comparison),
    }


def _print(answer: Answer, saved: str | None, *, all_steps: bool) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(_headline(answer.plan), style="bold")
    console.print()
    console.print(draw_matrix(answer.plan, width=console.width))
    console.print(f"\nsteps of rank {answer.rank}", style="bold")
    console.print(step_table(answer.steps, all_steps=all_steps))
    console.print("\nbeside the other planners", style="bold")
    console.print(comparison_table(answer.comparison, width=console.width))
    console.print(comparison_caption(answer.comparison, ranks=answer.plan.problem.ranks), style="dim")
    if saved is not None:
        console.print(f"\n{saved}")


def _headline(plan: Plan) -> str:
    problem = plan.problem
    return (
        f"{plan.method} {tile_words(plan.assignment)} {plan.direction} over {count(problem.ranks, 'rank')}, "
        f"{mask_words(problem)}, {plan.layout.name}; {size_words(problem)}; digest {plan.digest[:12]}"
    )
