"""Plans from text, and to and from JSON. The two forms hold the same fields; both say which version they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from mesh_attention.errors import ParseError
from mesh_attention.plan.assignment import Assignment, Tile
from mesh_attention.plan.layout import layout_named
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.schedule import ROUTES, Route, Schedule
from mesh_attention.plan.steps import Direction, Program
from mesh_attention.plan.text import HEADER, format_move, format_step, parse_mask, parse_move, parse_step
from mesh_attention.problem import Problem

JSON_FORMAT = "mesh-attention plan"
JSON_VERSION = 1


def parse_plan(text: str) -> Plan:
    """The plan a text form stands for; the opposite of ``str(plan)``."""
    lines = text.splitlines()
    if not lines or lines[0].strip() != HEADER:
        raise ParseError(f"first line {(lines or [''])[0][:60]!r}: expected {HEADER!r}")
    entries: dict[str, str] = {}
    moves: list[str] | None = None
    programs: list[dict[str, Any]] = []
    section: list[str] | None = None
    for number, line in enumerate(lines[1:], start=2):
        if line.startswith("  "):
            if section is None:
                raise ParseError(f"line {number}: {line.strip()!r} stands outside 'moves' and 'program'")
            section.append(line.strip())
        elif line == "moves":
            section = moves = []
        elif found := re.fullmatch(r"program (\d+) peak (\d+)", line):
            section = []
            programs.append({"rank": int(found[1]), "peak_nbytes": int(found[2]), "steps": section})
        elif line.strip():
            key, _, entries[key] = line.partition(" ")
    pairs = (pair.partition("=") for pair in entries.pop("problem", "").split())
    problem: dict[str, Any] = {key: value if key == "dtype" else _whole(key, value) for key, _, value in pairs}
    problem["mask"] = entries.pop("mask", "full")
    if "ulysses" in entries:
        entries = {**entries, "ulysses": _whole("ulysses", entries["ulysses"])}  # type: ignore[dict-item]
    return _build(entries | {"problem": problem, "moves": moves, "programs": programs or None})


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """A JSON object; the opposite of `plan_from_json`."""
    problem: dict[str, Any] = {f.name: getattr(plan.problem, f.name) for f in fields(plan.problem)}
    problem["mask"] = str(plan.problem.mask)
    written: dict[str, Any] = {
        "format": JSON_FORMAT,
        "version": JSON_VERSION,
        "method": plan.method,
        "direction": plan.direction,
        "problem": problem,
        "layout": plan.layout.name,
        "tile": str(plan.assignment.tile),
        "ulysses": plan.assignment.ulysses,
        "route": plan.schedule.route,
        "partials": plan.schedule.partials,
    }
    if plan.programs is None:
        return written | {"moves": [format_move(move) for move in plan.schedule.moves]}
    return written | {
        "programs": [
            {"rank": p.rank, "peak_nbytes": p.peak_nbytes, "steps": [format_step(step) for step in p.steps]}
            for p in plan.programs
        ]
    }


def plan_from_json(written: dict[str, Any]) -> Plan:
    if written.get("format") != JSON_FORMAT:
        raise ParseError(f"format {written.get('format')!r}: expected {JSON_FORMAT!r}")
    if written.get("version") != JSON_VERSION:
        raise ParseError(
            f"plan version {written.get('version')!r}: this library reads version {JSON_VERSION}; write the plan anew"
        )
    return _build({key: value for key, value in written.items() if key not in ("format", "version")})


def read_plan(text: str) -> Plan:
    """A plan from the contents of a file, text or JSON."""
    if not text.lstrip().startswith("{"):
        return parse_plan(text)
    try:
        written = json.loads(text)
    except json.JSONDecodeError as error:
        raise ParseError(f"not JSON: {error}; expected a plan written by 'mesh-attention plan --save'") from error
    return plan_from_json(written)


_REQUIRED = ("method", "direction", "problem", "layout", "tile", "ulysses", "route", "partials")


def _build(entries: dict[str, Any]) -> Plan:
    """A plan from its fields, texts not parsed yet."""
    missing = [key for key in _REQUIRED if key not in entries]
    unknown = [key for key in entries if key not in (*_REQUIRED, "moves", "programs")]
    if missing or unknown:
        raise ParseError(f"plan lacks {missing or 'nothing'} and has unknown {unknown or 'nothing'}")
    moves, programs = entries.get("moves"), entries.get("programs")
    if (moves is None) == (programs is None):
        raise ParseError("a plan holds either moves or programs, and one of them; write the plan anew")
    schedule = Schedule(
        moves=tuple(parse_move(move) for move in moves or ()),
        route=_route("route", entries["route"]),
        partials=_route("partials", entries["partials"]),
    )
    return Plan(
        method=str(entries["method"]),
        direction=_direction(entries["direction"]),
        problem=_problem(entries["problem"]),
        layout=layout_named(entries["layout"]),
        assignment=Assignment(Tile.parse(entries["tile"]), _whole("ulysses", entries["ulysses"])),
        schedule=schedule,
        programs=None if programs is None else tuple(_programs(programs)),
    )


def _programs(programs: Iterable[dict[str, Any]]) -> Iterable[Program]:
    for program in programs:
        yield Program(
            rank=_whole("rank", program.get("rank")),
            steps=tuple(parse_step(step) for step in program.get("steps", ())),
            peak_nbytes=_whole("peak_nbytes", program.get("peak_nbytes")),
        )


def _problem(entries: dict[str, Any]) -> Problem:
    names = {f.name for f in fields(Problem)}
    if set(entries) != names:
        raise ParseError(f"problem has {sorted(entries)}: expected {sorted(names)}")
    return Problem(**{**entries, "mask": parse_mask(entries["mask"])})


def _whole(name: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    raise ParseError(f"{name}={value!r}: expected a whole number")


def _route(name: str, value: object) -> Route:
    for route in ROUTES:
        if route == value:
            return route
    raise ParseError(f"{name} {value!r}: expected one of {', '.join(ROUTES)}")


def _direction(value: object) -> Direction:
    if value == "forward" or value == "backward":
        return value
    raise ParseError(f"direction {value!r}: expected forward or backward")
