"""Plans from text, and to and from JSON. Both forms have the same fields and state their version."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

from mesh_attention.errors import ParseError
from mesh_attention.plan.assignment import CUTS, Assignment, Cut, Tile
from mesh_attention.plan.layout import parse_layout
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import Program
from mesh_attention.plan.schedule import KEEPABLE, Schedule
from mesh_attention.plan.steps import DIRECTIONS, Direction, Keep
from mesh_attention.plan.text import HEADER, format_move, format_step, parse_mask, parse_move, parse_step
from mesh_attention.problem import Problem
from mesh_attention.units import brief

JSON_FORMAT = "mesh-attention plan"
JSON_VERSION = 2


def parse_plan(text: str) -> Plan:
    """A plan from its text; the inverse of ``str(plan)``."""
    lines = text.splitlines()
    if not lines or lines[0].strip() != HEADER:
        raise ParseError(f"first line {(lines or [''])[0][:60]!r}: expected {HEADER!r}")
    entries: dict[str, Any] = {}
    moves: list[str] | None = None
    programs: list[dict[str, Any]] = []
    section: list[str] | None = None
    for number, line in enumerate(lines[1:], start=2):
        if line.startswith("  "):
            if section is None:
                raise ParseError(f"line {number}: {brief(line.strip())} is outside 'moves' and 'program'")
            section.append(line.strip())
        elif line == "moves" and moves is None:
            section = moves = []
        elif found := re.fullmatch(r"program (\d{1,18}) peak (\d{1,18})", line):
            section = []
            programs.append({"rank": int(found[1]), "peak_nbytes": int(found[2]), "steps": section})
        elif line.strip():
            key, _, value = line.partition(" ")
            if key in entries or key == "moves":
                raise ParseError(f"line {number}: a second {brief(key)}; expected each key once")
            entries[key] = value
    problem: dict[str, Any] = {}
    for key, _, value in (pair.partition("=") for pair in entries.pop("problem", "").split()):
        if key in problem:
            raise ParseError(f"problem has {brief(key)} twice; expected each field once")
        problem[key] = value if key == "dtype" else _whole(key, value)
    problem["mask"] = entries.pop("mask", "full")
    return _build(entries | {"problem": problem, "moves": moves, "programs": programs or None})


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """A JSON object; the inverse of `plan_from_json`."""
    problem: dict[str, Any] = {f.name: getattr(plan.problem, f.name) for f in fields(plan.problem)}
    problem["mask"] = str(plan.problem.mask)
    written: dict[str, Any] = {
        "format": JSON_FORMAT,
        "version": JSON_VERSION,
        "method": plan.method,
        "direction": plan.direction,
        "problem": problem,
        "layout": plan.layout.text,
        "tile": str(plan.assignment.tile),
        "ulysses": plan.assignment.ulysses,
        "route": plan.schedule.route,
        "partials": plan.schedule.partials,
        "keep": ",".join(plan.schedule.keep) or "nothing",
    }
    if plan.assignment.inner is not None:
        written["inner"] = str(plan.assignment.inner)
    if plan.assignment.waves > 1:
        written["waves"] = f"{plan.assignment.waves} of {plan.assignment.cut}"
    if plan.programs is None:
        return written | {"moves": [format_move(move) for move in plan.schedule.moves]}
    return written | {
        "programs": [
            {"rank": p.rank, "peak_nbytes": p.peak_nbytes, "steps": [format_step(step) for step in p.steps]}
            for p in plan.programs
        ]
    }


def plan_from_json(written: object) -> Plan:
    if not isinstance(written, dict):
        raise ParseError(f"plan {brief(written)}: expected a JSON object")
    if written.get("format") != JSON_FORMAT:
        raise ParseError(f"format {brief(written.get('format'))}: expected {JSON_FORMAT!r}")
    if type(written.get("version")) is not int or written["version"] != JSON_VERSION:
        raise ParseError(
            f"plan version {brief(written.get('version'))}: this library reads version {JSON_VERSION}; "
            "save the plan again"
        )
    return _build({key: value for key, value in written.items() if key not in ("format", "version")})


def read_plan(text: str) -> Plan:
    """A plan from the contents of a file, text or JSON."""
    if not text.lstrip().startswith("{"):
        return parse_plan(text)
    return plan_from_json(read_json(text))


def read_json(text: str) -> object:
    """JSON, strictly: each key once, and no NaN or Infinity."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise ParseError("not JSON: brackets are nested too deep") from None
    except ParseError:
        raise
    except ValueError as error:  # also numbers of thousands of digits
        raise ParseError(f"not JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ParseError(f"not JSON: a second {brief(twice)} in an object; expected each key once")
    return made


def _no_constant(name: str) -> None:
    raise ParseError(f"not JSON: {name} is not a number")


_REQUIRED = ("method", "direction", "problem", "layout", "tile", "ulysses", "route", "partials", "keep")


def _build(entries: dict[str, Any]) -> Plan:
    """A plan from its fields, as texts."""
    missing = [key for key in _REQUIRED if key not in entries]
    unknown = [key for key in entries if key not in (*_REQUIRED, "inner", "waves", "moves", "programs")]
    if missing or unknown:
        raise ParseError(
            f"missing fields: {', '.join(missing) or 'none'}; unknown fields: {', '.join(unknown)[:200] or 'none'}; "
            "save the plan again"
        )
    moves, programs = entries.get("moves"), entries.get("programs")
    if (moves is None) == (programs is None):
        found = "neither moves nor programs" if moves is None else "both moves and programs"
        raise ParseError(f"plan has {found}; expected one of the two; save the plan again")
    schedule = Schedule(
        moves=tuple(parse_move(move) for move in _texts("moves", moves or [])),
        route=entries["route"],
        partials=entries["partials"],
        keep=_keep(entries["keep"]),
    )
    return Plan(
        method=_text("method", entries["method"]),
        direction=_direction(entries["direction"]),
        problem=_problem(entries["problem"]),
        layout=parse_layout(_text("layout", entries["layout"])),
        assignment=Assignment(
            Tile.parse(_text("tile", entries["tile"])),
            _whole("ulysses", entries["ulysses"]),
            Tile.parse(_text("inner", entries["inner"])) if "inner" in entries else None,
            *_waves(_text("waves", entries.get("waves", "1 of heads"))),
        ),
        schedule=schedule,
        programs=None if programs is None else _programs(programs),
    )


def _programs(programs: object) -> tuple[Program, ...]:
    fields_of_program = {"rank", "peak_nbytes", "steps"}
    if not isinstance(programs, list) or not all(isinstance(p, dict) and set(p) == fields_of_program for p in programs):
        raise ParseError(f"programs {brief(programs)}: expected a list of objects with rank, peak_nbytes and steps")
    return tuple(
        Program(
            rank=_whole("rank", program.get("rank")),
            steps=tuple(parse_step(step) for step in _texts("steps", program.get("steps"))),
            peak_nbytes=_whole("peak_nbytes", program.get("peak_nbytes")),
        )
        for program in programs
    )


def _problem(entries: object) -> Problem:
    names = {f.name for f in fields(Problem)}
    if not isinstance(entries, dict) or set(entries) != names:
        raise ParseError(f"problem {brief(entries)}: expected the fields {', '.join(sorted(names))}")
    return Problem(**{**entries, "mask": parse_mask(_text("mask", entries["mask"]))})


def _waves(text: str) -> tuple[int, Cut]:
    waves, _, cut = text.partition(" of ")
    for known in CUTS:
        if cut == known:
            return _whole("waves", waves), known
    raise ParseError(f"waves {brief(text)}: expected such as '4 of heads' or '2 of rows'")


def _keep(value: object) -> tuple[Keep, ...]:
    for keep in KEEPABLE:
        if value == (",".join(keep) or "nothing"):
            return keep
    raise ParseError(f"keep {brief(value)}: expected nothing, or some of own, q and kv, in this order, such as q,kv")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ParseError(f"{name} {brief(value)}: expected text")
    return value


def _texts(name: str, value: object) -> list[str]:
    if not isinstance(value, list):
        raise ParseError(f"{name} {brief(value)}: expected a list of texts")
    return [_text(name, entry) for entry in value]


def _whole(name: str, value: object) -> int:
    if type(value) is int and abs(value) < 10**18:
        return value
    if isinstance(value, str) and value.isdecimal() and len(value) < 19:
        return int(value)
    raise ParseError(f"{name}={brief(value)}: expected a whole number of at most 18 digits")


def _direction(value: object) -> Direction:
    for direction in DIRECTIONS:
        if direction == value:
            return direction
    raise ParseError(f"direction {brief(value)}: expected {' or '.join(DIRECTIONS)}")
