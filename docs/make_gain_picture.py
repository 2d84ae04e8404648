"""Draws docs/gain.svg: traffic and time against ranks, of other methods and of what the tuner chooses.

Run it to update the picture.
The figures are those of benchmarks/results/how_much_does_it_gain.txt.
"""

from __future__ import annotations

import json
from math import log2, log10
from pathlib import Path
from typing import Any, NamedTuple

RESULT = Path(__file__).parent.parent / "benchmarks" / "results" / "how_much_does_it_gain.txt"
PICTURE = Path(__file__).with_name("gain.svg")
WIDTH, HEIGHT, SIDE, TALL, LEFT, TOP, GAP = 850, 350, 260, 200, 62, 76, 150
RING, USP, OURS, BEST = "#c2410c", "#047857", "#1d4ed8", "#737373"


class Line(NamedTuple):
    name: str
    colour: str
    values: list[float]
    look: str = ""


class Panel(NamedTuple):
    title: str
    low: float
    high: float
    lines: list[Line]


def picture() -> str:
    result = json.loads(RESULT.read_text().strip().splitlines()[-1])
    ranks, columns = [row["ranks"] for row in result["rows"]], _columns(result["rows"])
    best = Line("kernels alone", BEST, columns["best_ms"], 'stroke-dasharray="5 4"')
    traffic = Panel(
        "What a rank sends, GB (counted)",
        0.1,
        100,
        _methods(columns, "gb"),
    )
    time = Panel(
        "Time, ms (forecast)",
        10,
        10_000,
        [best, *_methods(columns, "ms")],
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT - 42, 22, f"Attention over {result['title']}, forward and backward", size=14),
        *_panel(traffic, ranks, left=LEFT),
        *_panel(time, ranks, left=LEFT + SIDE + GAP),
        _text(LEFT - 42, HEIGHT - 8, _where_ring_is_chosen(result["rows"])),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _methods(columns: dict[str, list[float]], unit: str) -> list[Line]:
    return [
        Line("ring", RING, columns[f"ring_{unit}"]),
        Line("USP", USP, columns[f"usp_{unit}"]),
        Line("mesh-attention", OURS, columns[f"chosen_{unit}"]),
    ]


def _where_ring_is_chosen(rows: list[dict[str, Any]]) -> str:
    most = max((row["ranks"] for row in rows if row["chosen"].startswith("ring")), default=0)
    return f"Up to {most} ranks, transfers hide behind compute, and mesh-attention chooses ring itself." if most else ""


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _panel(panel: Panel, ranks: list[int], *, left: int) -> list[str]:
    def x(rank: float) -> float:
        return left + SIDE * log2(rank / ranks[0]) / log2(ranks[-1] / ranks[0])

    def y(value: float) -> float:
        return TOP + TALL * (1 - log10(value / panel.low) / log10(panel.high / panel.low))

    parts = [_text(left - 42, TOP - 20, panel.title, size=13)]
    tick = panel.low
    while tick <= panel.high * 1.001:
        parts.append(f'<path d="M{left} {y(tick):.1f}H{left + SIDE}" stroke="#e5e5e5"/>')
        parts.append(_text(left - 8, y(tick) + 4, f"{tick:,g}", anchor="end"))
        tick *= 10
    parts += [_text(x(rank), TOP + TALL + 18, str(rank), anchor="middle") for rank in ranks]
    parts.append(_text(left + SIDE / 2, TOP + TALL + 38, "ranks", anchor="middle"))
    for line in panel.lines:
        corners = " ".join(f"{x(rank):.1f},{y(value):.1f}" for rank, value in zip(ranks, line.values, strict=True))
        parts.append(
            f'<polyline points="{corners}" fill="none" stroke="{line.colour}" stroke-width="2.5" {line.look}/>'
        )
    for line, down in zip(panel.lines, _room([y(line.values[-1]) for line in panel.lines]), strict=True):
        parts.append(_text(left + SIDE + 8, down + 4, line.name, colour=line.colour))
    return parts


def _room(wanted: list[float], *, least: float = 15) -> list[float]:
    """Places of labels, near those wanted and not on top of each other."""
    placed: dict[int, float] = {}
    for number in sorted(range(len(wanted)), key=lambda n: wanted[n]):
        placed[number] = max([wanted[number], *(other + least for other in placed.values())])
    return [placed[number] for number in range(len(wanted))]


def _text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", colour: str = "#222222") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}">{words}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture())
