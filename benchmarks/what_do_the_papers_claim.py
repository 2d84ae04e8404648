"""What do the papers claim, and what do we get? Prints every figure of Mesh-Attention and ATTENTION2D next to ours.

    python benchmarks/what_do_the_papers_claim.py           # seconds
    python benchmarks/what_do_the_papers_claim.py --refit   # and fit the Mesh-Attention paper's cluster again (minutes)

Volumes are counted in plans. Times are simulated on a cluster that is fitted once to all published times together.
Prints a table and a JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from papers.figures import SCALING_TILES, Figure, Paper, how
from papers.fit import PASSES, Fit, fit, residuals
from papers.reproduce import Reproduction, Row, reproduce
from papers.scaling import CONTENDERS
from rich import box
from rich.console import Console
from rich.table import Table
from run_facts import start_result

from mesh_attention_lab.cli.terminal import cluster_words, progress

SHORT: dict[Paper, str] = {"Mesh-Attention": "Mesh", "ATTENTION2D": "2D", "derived": "derived"}
CAPTION = (
    "Mesh: Mesh-Attention, arXiv 2512.20968. 2D: ATTENTION2D, arXiv 2503.15758. derived: follows from their formulas. "
    "Deviation: relative; for figures in %, in points; for GPUs, how much longer the published number takes than the "
    "best here. N: tokens, d: heads × head size, unit: N·d / GPUs; volumes are what a rank receives."
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--refit", action="store_true", help="fit the Mesh-Attention paper's cluster again (minutes)")
    given = parser.parse_args(argv)
    facts = start_result("what_do_the_papers_claim")
    with progress("reproducing") as report:
        fits = fit(on_progress=report) if given.refit else ()
        found = reproduce(on_progress=report)
    _print(found, fits)
    print(json.dumps(facts | _as_json(found, fits)))
    return 0


def _as_json(found: Reproduction, fits: Sequence[Fit]) -> dict[str, Any]:
    answer = {
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
    console.print(_figures_table(found.rows, notes))
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
    console.print(_times_table(found))
    if fits:
        console.print("\nfitted again", style="bold")
        console.print(_fits_table(fits))


def _figures_table(rows: Sequence[Row], notes: Sequence[str]) -> Table:
    table = _table("paper", "published", "ours", "deviation", "remark", first="figure")
    for row in rows:
        figure = row.figure
        numbers = (_number(figure, figure.published), _number(figure, row.ours), _deviation(row))
        remark = str(notes.index(_remark(figure)) + 1) if figure.note else ""
        table.add_row(figure.what, SHORT[figure.paper], *numbers, remark)
    return table


def _table(*numbers: str, first: str) -> Table:
    """A table in which only the first column wraps on a narrow terminal."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first)
    for header in numbers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


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


def _times_table(found: Reproduction) -> Table:
    table = _table(*map(str, SCALING_TILES), first="GPUs")
    for contender in CONTENDERS:
        times = found.scaling.strong(contender)
        table.add_row(contender, *(f"{times[ranks].time_s:.1f}" for ranks in SCALING_TILES))
    return table


def _fits_table(fits: Sequence[Fit]) -> Table:
    table = _table("rms", "NICs\na node", "duplex", "TFLOP/s", "GB/s\ninside", "GB/s\nbetween", first="passes")
    for each in fits:
        cluster = each.cluster
        table.add_row(
            "both" if len(each.passes) > 1 else each.passes[0],
            f"{each.rms:.3f}",
            str(cluster.nics_per_node),
            "yes" if cluster.full_duplex else "no",
            f"{cluster.device.forward.tflops:.0f}",
            f"{cluster.inside.gb_per_s:.2f}",
            f"{cluster.between.gb_per_s:.2f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
