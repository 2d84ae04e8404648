"""`mesh-attention reproduce`: the published figures of the papers beside ours."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mesh_attention import __version__
from mesh_attention.cli.progress import progress
from mesh_attention.cli.tables import Column, table_of
from mesh_attention.cli.words import cluster_words
from mesh_attention.papers.figures import SCALING_TILES, Figure, Paper, how
from mesh_attention.papers.fit import PASSES, Fit, fit, residuals
from mesh_attention.papers.reproduce import Reproduction, Row, reproduce
from mesh_attention.papers.scaling import CONTENDERS

WHAT_WIDTH = 28
"""What figures are wrapped to where there is little room."""
SHORT: dict[Paper, str] = {"Mesh-Attention": "Mesh", "ATTENTION2D": "2D", "derived": "derived"}
CAPTION = (
    "Mesh: Mesh-Attention, arXiv 2512.20968. 2D: ATTENTION2D, arXiv 2503.15758. derived: follows from their formulas. "
    "Deviation: relative; for figures in %, in points; for GPUs, how much longer the published number takes than the "
    "best here. N: tokens, d: heads × head size, unit: N·d / GPUs; volumes are what a rank receives."
)


def reproduce_command(
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    refit: Annotated[
        bool, typer.Option("--refit", help="Fit the cluster of the Mesh-Attention paper anew; takes minutes.")
    ] = False,
) -> None:
    """Show every published figure of Mesh-Attention and ATTENTION2D beside ours: volumes, times, speedups.

    Volumes are counted in plans. Times are simulated, on a cluster that is fitted once to all published times together.
    """
    with progress("reproducing") as report:
        fits = fit(on_progress=report) if refit else ()
        found = reproduce(on_progress=report)
    if json_output:
        typer.echo(json.dumps(_as_json(found, fits)))
    else:
        _print(found, fits)


def _as_json(found: Reproduction, fits: Sequence[Fit]) -> dict[str, Any]:
    answer = {
        "versions": {"mesh-attention": __version__, "python": platform.python_version()},
        "figures": [_row_json(row) for row in found.rows],
        "cluster": asdict(found.cluster),
        "passes": list(PASSES),
        "rms": _own_fit(found).rms,
        "times_s": {c: {n: s.time_s for n, s in found.scaling.strong(c).items()} for c in CONTENDERS},
    }
    if fits:
        answer["fits"] = [asdict(each) | {"rms": each.rms} for each in fits]
    return answer


def _row_json(row: Row) -> dict[str, Any]:
    figure = row.figure
    return {
        "figure": figure.what,
        "paper": figure.paper,
        "unit": figure.unit,
        "published": figure.published,
        "ours": row.ours,
        "deviation": row.deviation,
        "deviation_in": {"%": "points", "GPUs": "time"}.get(figure.unit, "published"),
        "how": how(figure.ours),
        "is_explained": figure.is_explained,
        "remark": figure.note,
    }


def _own_fit(found: Reproduction) -> Fit:
    return Fit(cluster=found.cluster, passes=PASSES, residuals=residuals(found.scaling))


# For people


def _print(found: Reproduction, fits: Sequence[Fit]) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    notes = list(dict.fromkeys(_remark(row.figure) for row in found.rows if row.figure.note))
    console.print(_table(found.rows, notes, width=console.width))
    console.print(CAPTION, style="dim")
    console.print("\nremarks", style="bold")
    for number, note in enumerate(notes, 1):
        console.print(f"{number} {note}")
    console.print("\nthe cluster that the Mesh-Attention paper does not name", style="bold")
    console.print(f"Fitted once to its ten times and ratios together, rms of the log ratios {_own_fit(found).rms:.3f}.")
    ways = "both directions at once" if found.cluster.full_duplex else "one direction at a time"
    console.print(f"{cluster_words(found.cluster.with_ranks(max(SCALING_TILES)))}; a link carries {ways}.")
    console.print(
        f"Times are taken to be of {' and '.join(PASSES)}; forward alone fits nearly as well. Other numbers of NICs "
        "and links that carry both directions fit worse; --refit shows how much. Simulated, 1M tokens, in s:"
    )
    console.print(_times_table(found, width=console.width))
    if fits:
        console.print("\nfitted anew", style="bold")
        console.print(_fits_table(fits, width=console.width))


def _table(rows: Sequence[Row], notes: Sequence[str], *, width: int) -> Table:
    figures = [row.figure for row in rows]
    columns = [
        Column(header="figure", cells=[f.what for f in figures], is_text=True, least_width=WHAT_WIDTH),
        Column(header="paper", cells=[SHORT[f.paper] for f in figures], is_text=True),
        Column(header="published", cells=[_number(f, f.published) for f in figures]),
        Column(header="ours", cells=[_number(row.figure, row.ours) for row in rows]),
        Column(header="deviation", cells=list(map(_deviation, rows))),
        Column(header="remark", cells=[str(notes.index(_remark(f)) + 1) if f.note else "" for f in figures]),
    ]
    return table_of(columns, bold=[False] * len(rows), width=width)


def _remark(figure: Figure) -> str:
    return figure.note if figure.is_explained else f"Not explained. {figure.note}"


def _number(figure: Figure, value: float) -> str:
    digits = {"N·d": 3, "%": 1, "GPUs": 0, "tiles": 0, "units": 1, "s": 1}.get(figure.unit, 2)
    return f"{value:.{digits}f} {figure.unit}"


def _deviation(row: Row) -> str:
    if row.figure.unit == "%":
        return f"{row.deviation:+.1f} points"
    if row.figure.unit == "GPUs":
        return f"{row.deviation:+.1%} time"
    return f"{row.deviation:+.1%}"


def _times_table(found: Reproduction, *, width: int) -> Table:
    columns = [Column(header="GPUs", cells=list(CONTENDERS), is_text=True)]
    for ranks in SCALING_TILES:
        times = [found.scaling.strong(contender)[ranks].time_s for contender in CONTENDERS]
        columns.append(Column(header=str(ranks), cells=[f"{time_s:.1f}" for time_s in times]))
    return table_of(columns, bold=[False] * len(CONTENDERS), width=width)


def _fits_table(fits: Sequence[Fit], *, width: int) -> Table:
    clusters = [each.cluster for each in fits]
    columns = [
        Column(header="rms", cells=[f"{each.rms:.3f}" for each in fits]),
        Column(
            header="passes", cells=["both" if len(each.passes) > 1 else each.passes[0] for each in fits], is_text=True
        ),
        Column(header="NICs\na node", cells=[str(cluster.nics_per_node) for cluster in clusters]),
        Column(header="duplex", cells=["yes" if cluster.full_duplex else "no" for cluster in clusters], is_text=True),
        Column(header="TFLOP/s", cells=[f"{cluster.device.forward.tflops:.0f}" for cluster in clusters]),
        Column(header="GB/s\ninside", cells=[f"{cluster.inside.gb_per_s:.2f}" for cluster in clusters]),
        Column(header="GB/s\nbetween", cells=[f"{cluster.between.gb_per_s:.2f}" for cluster in clusters]),
    ]
    return table_of(columns, bold=[index == 0 for index in range(len(fits))], width=width)
