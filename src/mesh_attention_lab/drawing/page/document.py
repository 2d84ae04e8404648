"""The HTML document: scenes, template, style and scripts in one text that asks for nothing else."""

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
from pathlib import Path
from typing import Any

from mesh_attention.errors import writing
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Plan
from mesh_attention.problem import DIRECTIONS, Direction, Problem
from mesh_attention.timeline import Timeline
from mesh_attention.units import format_size
from mesh_attention_lab.drawing.page.passes import block_patterns, pass_data


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


def page(
    scenes: Sequence[Scene], *, title: str, notes: Sequence[str] = (), opening: Scene | None = None, lead: str = ""
) -> str:
    """The whole page; the same scenes give the same text. It opens on `opening`, or else on the first scene, and `lead`
    says why."""
    style = _file("page.css")
    script = "(async () => {\n'use strict';\n" + "\n".join(_file(f"{name}.js") for name in SCRIPTS) + "})();\n"
    slots = {
        "policy": escape(_policy(style, script)),
        "title": escape(title),
        "lead": escape(lead),
        "notes": "".join(f"<li>{escape(note)}</li>" for note in notes),
        "style": style,
        "data": _packed(page_data(scenes, opening)),
        "script": script,
    }
    return _SLOT.sub(lambda slot: slots[slot[1]], _file("template.html"))


def write_page(
    path: Path | str,
    scenes: Sequence[Scene],
    *,
    title: str,
    notes: Sequence[str] = (),
    opening: Scene | None = None,
    lead: str = "",
) -> None:
    text = page(scenes, title=title, notes=notes, opening=opening, lead=lead)
    with writing(Path(path)):
        Path(path).write_text(text, encoding="utf-8", newline="\n")


def page_data(scenes: Sequence[Scene], opening: Scene | None = None) -> dict[str, Any]:
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
    opens = 0 if opening is None else scenes.index(opening)
    return {"problems": [_problem(p) for p in problems], "grids": patterns, "scenes": drawn, "opens": opens}


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
