"""The page as one HTML text that asks for nothing else: `Scene`, `page`, and the data of every pass for the scripts."""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from html import escape
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from mesh_attention.errors import UsageError
from mesh_attention.masks import BlockKind, Segment
from mesh_attention.plan.assignment import Axis
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.format import format_step
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Plan, RankCosts, rank_costs
from mesh_attention.plan.steps import AXIS_OF, INPUTS, OUTPUTS, Item
from mesh_attention.problem import DIRECTIONS, Direction, Problem
from mesh_attention.timeline import Timeline
from mesh_attention.units import format_size
from mesh_attention_lab.drawing import writing
from mesh_attention_lab.drawing.trace import Track, rank_tracks


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One choice of ranks, method and tile.

    `forecasts` are simulated, of every pass that has a plan, with spans of the ranks whose timeline is to be shown;
    `measured` are the same passes as they really ran, where they did.
    """

    method: str
    plans: Mapping[Direction, Plan]
    forecasts: Mapping[Direction, Timeline]
    measured: Mapping[Direction, Timeline] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(plan.matrix.is_over_cache for plan in self.plans.values()):
            raise UsageError(
                "a plan over a cache cannot be shown on the explorer page, which draws known keys; print the plan, or "
                "write its forecast with drawing.trace"
            )

    @property
    def ranks(self) -> int:
        return next(iter(self.plans.values())).problem.ranks

    @property
    def directions(self) -> tuple[Direction, ...]:
        return tuple(direction for direction in DIRECTIONS if direction in self.plans)

    @property
    def tile(self) -> str:
        """The tile as the page shows it; both tiles if the passes differ."""
        tiles = dict.fromkeys(str(self.plans[direction].assignment) for direction in self.directions)
        return " / ".join(tiles)


SCRIPTS = ("text", "state", "program", "matrix", "steps", "timeline", "compare", "words", "main")
"""Scripts in the order they are joined; each may use the ones before it."""
_SLOT = re.compile(r"\{\{(\w+)\}\}")


def page(scenes: Sequence[Scene], *, title: str, notes: Sequence[str] = ()) -> str:
    """The whole page, which opens on the first scene; the same scenes give the same text."""
    style = _file("page.css")
    script = "(async () => {\n'use strict';\n" + "\n".join(_file(f"{name}.js") for name in SCRIPTS) + "})();\n"
    slots = {
        "policy": escape(_policy(style, script)),
        "title": escape(title),
        "notes": "".join(f"<li>{escape(note)}</li>" for note in notes),
        "style": style,
        "data": _packed(page_data(scenes)),
        "script": script,
    }
    return _SLOT.sub(lambda slot: slots[slot[1]], _file("template.html"))


def write_page(path: Path | str, scenes: Sequence[Scene], *, title: str, notes: Sequence[str] = ()) -> None:
    text = page(scenes, title=title, notes=notes)
    with writing(Path(path)):
        Path(path).write_text(text, encoding="utf-8", newline="\n")


def _file(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _packed(data: Any) -> str:
    """Compressed JSON in base64; programs and spans repeat themselves so much that the page is a tenth as large."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return b64encode(zlib.compress(text.encode(), 9)).decode()


def _policy(style: str, script: str) -> str:
    """A content security policy that allows this style and this script, and nothing else."""
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()


# Data for the scripts


def page_data(scenes: Sequence[Scene]) -> dict[str, Any]:
    """Plain numbers and texts for the scripts to draw. Tables that several scenes share are written once."""
    problems: dict[Problem, int] = {}
    grids: dict[tuple[Problem, Layout, int], int] = {}
    patterns: list[list[list[str]]] = []
    drawn = []
    for scene in scenes:
        problem = next(iter(scene.plans.values())).problem
        passes = {}
        for direction in scene.directions:
            plan = scene.plans[direction]
            data = pass_data(plan, scene.forecasts[direction], scene.measured.get(direction))
            grid = (problem, plan.layout, plan.assignment.ulysses_degree)  # all that patterns depend on
            if grid not in grids:
                grids[grid] = len(patterns)
                patterns.append(block_patterns(plan))
            passes[direction] = {**data, "grid": grids[grid]}
        drawn.append(
            {
                "ranks": scene.ranks,
                "method": scene.method,
                "tile": scene.tile,
                "problem": problems.setdefault(problem, len(problems)),
                "passes": passes,
            }
        )
    return {"problems": [_problem(p) for p in problems], "grids": patterns, "scenes": drawn}


def _problem(problem: Problem) -> dict[str, Any]:
    seq_q, seq_kv = (format_size(tokens) for tokens in (problem.seq_q, problem.seq_kv))
    tokens = f"{seq_q} tokens" if problem.seq_q == problem.seq_kv else f"{seq_q} query and {seq_kv} key tokens"
    heads = f"{problem.heads} heads" + ("" if problem.heads == problem.kv_heads else f" ({problem.kv_heads} KV heads)")
    sizes = {problem.head_dim_qk: None, problem.head_dim_v: None}
    parts = [tokens, f"{heads} of {' and '.join(map(str, sizes))}", problem.dtype, f"{_cut(str(problem.mask))} mask"]
    if problem.batch > 1:
        parts.insert(0, f"batch of {problem.batch}")
    return {"text": ", ".join(parts), "heads": problem.heads, "kv_heads": problem.kv_heads}


def _cut(text: str, *, most: int = 48) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


# One pass


Data = dict[str, Any]
EMPTY, FULL, LOWER, UPPER, PART = "01234"
"""The part of a pair of segments that the mask leaves: none, all, the lower left or upper right triangle, or other."""
FINEST = 4
"""Blocks of shards with at most this many segments are drawn segment by segment."""


def pass_data(plan: Plan, forecast: Timeline, measured: Timeline | None) -> Data:
    plan = plan.unrolled()  # so that each program is worked out once
    return {
        "tile": [plan.assignment.tile.rows, plan.assignment.tile.cols],
        "ulysses": plan.assignment.ulysses_degree,
        "waves": plan.assignment.waves,
        "layout": plan.layout.name,
        "keep": list(plan.schedule.keep),
        "rows": _peers(plan, "row"),
        "cols": _peers(plan, "col"),
        "programs": [[format_step(step) for step in program.steps] for program in plan.programs or ()],
        "sizes": _sizes(plan),
        "costs": _costs([rank_costs(plan, rank) for rank in range(plan.problem.ranks)]),
        "forecast": _timeline(forecast),
        "measured": None if measured is None else _timeline(measured),
    }


def _peers(plan: Plan, axis: Axis) -> list[list[int]]:
    """For each place, the members of its group by offset, itself first."""
    assignment = plan.assignment
    sizes = range(assignment.size(axis))
    return [[assignment.peer(axis, place, offset) for offset in sizes] for place in range(assignment.places)]


def _sizes(plan: Plan) -> Data:
    """Bytes of a shard of each kind as it travels between places."""
    places = range(plan.assignment.places)
    kinds = INPUTS[plan.direction] + OUTPUTS[plan.direction]
    return {kind: [plan.matrix.nbytes(Item(kind, place)).total for place in places] for kind in kinds}


def _costs(costs: Sequence[RankCosts]) -> Data:
    """By rank: the bytes received of each kind, and the most memory in use."""
    kinds = [kind for kind in AXIS_OF if any(kind in cost.received for cost in costs)]
    return {
        "received": {
            kind: [cost.received[kind].total if kind in cost.received else 0 for cost in costs] for kind in kinds
        },
        "peak": [cost.peak_nbytes for cost in costs],
    }


def _timeline(timeline: Timeline) -> Data:
    """Times in seconds. A span is its start, its stop, the index of its step if it has one, and its name."""
    by_rank = rank_tracks(timeline) if timeline.spans else {}
    return {
        **{name: _short(getattr(timeline, name)) for name in ("time_s", "compute_s", "exposed_s", "utilisation")},
        "is_exact": timeline.is_exact,
        "stop": [_short(times.stop_s) for times in timeline.ranks],
        "compute": [_short(times.compute_s) for times in timeline.ranks],
        "spans": {
            str(rank): {lane: _spans(tracks) for lane, tracks in lanes.items()} for rank, lanes in by_rank.items()
        },
    }


def _spans(tracks: Sequence[Track]) -> list[tuple[float, float, int | None, str]]:
    spans = sorted(chain(*tracks), key=lambda span: (span.start_s, span.stop_s))
    return [(_short(span.start_s), _short(span.stop_s), span.step, span.name) for span in spans]


def _short(value: float) -> float:
    """Six digits: finer than any screen."""
    return float(f"{value:.6g}")


# Blocks


def block_patterns(plan: Plan) -> list[list[str]]:
    """Row by row, what the mask leaves of each block: rows of pairs of segments, joined by "/"."""
    matrix, places = plan.matrix, range(plan.assignment.places)
    rows = [matrix.segments("row", place) for place in places]
    cols = [matrix.segments("col", place) for place in places]
    if max(map(len, rows + cols)) <= FINEST:
        return [[_pattern(plan.problem, row, col) for col in cols] for row in rows]
    names = {BlockKind.EMPTY: EMPTY, BlockKind.FULL: FULL, BlockKind.PARTIAL: PART}
    return [[names[block_kind(matrix, row, col)] for col in places] for row in places]


def block_kind(matrix: BlockMatrix, row: int, col: int) -> BlockKind:
    """What the mask leaves of a block."""
    pairs = matrix.pairs(row, col)
    area = sum(map(len, matrix.segments("row", row))) * sum(map(len, matrix.segments("col", col)))
    return BlockKind.EMPTY if not pairs else BlockKind.FULL if pairs == area else BlockKind.PARTIAL


def _pattern(problem: Problem, row: tuple[Segment, ...], col: tuple[Segment, ...]) -> str:
    pattern = "/".join("".join(_pair(problem, q, kv) for kv in col) for q in row)
    return (
        pattern[0] if pattern and set(pattern) <= {pattern[0], "/"} and pattern[0] in EMPTY + FULL else pattern or EMPTY
    )


def _pair(problem: Problem, q: Segment, kv: Segment) -> str:
    lengths = {"seq_q": problem.seq_q, "seq_kv": problem.seq_kv}
    kind = problem.mask.kind(q, kv, **lengths)
    if kind is not BlockKind.PARTIAL:
        return FULL if kind is BlockKind.FULL else EMPTY
    lower = problem.mask.pairs(q[-1:], kv[:1], **lengths) > 0
    upper = problem.mask.pairs(q[:1], kv[-1:], **lengths) > 0
    return PART if lower == upper else LOWER if lower else UPPER
