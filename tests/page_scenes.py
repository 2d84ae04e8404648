"""Scenes for the tests of the explorer: every method and mask on few ranks, forecast on a described cluster."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from mesh_attention import Problem, causal, cluster_named, make_plan, window
from mesh_attention.masks import Mask
from mesh_attention.plan.steps import DIRECTIONS, Direction
from mesh_attention.simulation.simulate import simulate
from mesh_attention.timeline import Timeline
from mesh_attention_lab.drawing.page import Scene


def scene(
    ranks: int,
    method: str,
    *,
    name: str | None = None,
    mask: Mask | None = None,
    seq: int = 4099,
    shown: Collection[int] | None = None,
    is_measured: bool = False,
    directions: tuple[Direction, ...] = DIRECTIONS,
    **choices: Any,
) -> Scene:
    """Uneven shards, four heads to a KV head, and, unless told otherwise, a causal mask and spans of every rank."""
    problem = Problem.self_attention(
        seq_len=seq, heads=8, kv_heads=4, head_dim=64, ranks=ranks, mask=causal() if mask is None else mask
    )
    cluster = cluster_named("h100x16").with_ranks(ranks)
    plans = {way: make_plan(problem, method=method, direction=way, **choices) for way in directions}  # type: ignore[arg-type]
    spans_of = range(ranks) if shown is None else shown
    forecasts = {way: simulate(plan, cluster, spans_of=spans_of) for way, plan in plans.items()}
    measured = {way: slower(timeline) for way, timeline in forecasts.items()} if is_measured else {}
    return Scene(method=name or method, plans=plans, forecasts=forecasts, measured=measured)


def slower(timeline: Timeline) -> Timeline:
    """The same in one and a half times the time: stands for a measurement where only the drawing of it is tested."""
    spans = tuple(s._replace(start_s=1.5 * s.start_s, stop_s=1.5 * s.stop_s) for s in timeline.spans)
    ranks = tuple(
        replace(r, **{name: 1.5 * getattr(r, name) for name in ("stop_s", "compute_s", "link_s")})
        for r in timeline.ranks
    )
    return replace(timeline, spans=spans, ranks=ranks)


def unpacked(text: str) -> Any:
    """The data of a page, from the text of its element."""
    return json.loads(zlib.decompress(b64decode(text)))


def all_kinds() -> list[Scene]:
    return [
        scene(6, "ring", is_measured=True),
        scene(6, "mesh", tile=(2, 3), is_measured=True),
        scene(6, "mesh", tile=(3, 2), route="ring", partials="ring"),
        scene(6, "attention2d", tile=(2, 3)),
        scene(6, "mesh", name="mesh, window", tile=(2, 3), mask=window(700, 0)),
        scene(8, "mesh", tile=(2, 4), seq=4096),
        scene(8, "ring", seq=4096),
        scene(8, "mesh", name="ulysses+mesh", tile=(2, 2), ulysses_degree=2, seq=4096),
        scene(8, "attention2d", name="ulysses+attention2d", tile=(2, 1), ulysses_degree=4, seq=4096),
        scene(8, "mesh", name="mesh, kept", tile=(2, 4), keep=("kv",), seq=4096),
        scene(8, "mesh", name="mesh, neighbours", tile=(4, 2), inner=(2, 2), blocks_per_call=4, seq=4096),
        scene(3, "pass-q", shown=(1,)),
    ]
