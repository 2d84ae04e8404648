"""The plan: problem, layout, assignment and schedule together. Plain immutable data, the same on every rank.

A plan has one text, which `parse_plan` reads back: people read it, files hold it, and ranks compare its hash.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from typing_extensions import assert_never

from mesh_attention.errors import ParseError, ScheduleError
from mesh_attention.plan.assignment import Assignment, Tile, check_assignment
from mesh_attention.plan.blocks import BlockMatrix, block_matrix
from mesh_attention.plan.layout import Layout, parse_layout
from mesh_attention.plan.lowering import lower, lowered_steps
from mesh_attention.plan.program import Program
from mesh_attention.plan.schedule import Fetch, GroupMove, Meet, Return, Schedule
from mesh_attention.plan.steps import AXIS_OF, DIRECTIONS, INPUTS, OUTPUTS, Direction, Step, is_step
from mesh_attention.plan.text import format_move, parse_mask, parse_move, parse_step
from mesh_attention.problem import Problem
from mesh_attention.units import brief

HEADER = "mesh-attention plan 2"
"""The first line of a plan's text: the format and its version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the plans of both passes of a call must suit. If it `may_keep`, forward may hold more for backward than its
    results."""

    problem: Problem
    layout: Layout
    on_gpu: bool
    needs_gradient: bool
    may_keep: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that every rank does in one pass of one attention call.

    Programs are derived from the schedule, one rank at a time. A plan that no schedule describes, or that you edit step
    by step, carries all its `programs` and an empty schedule.
    """

    method: str
    direction: Direction
    problem: Problem
    layout: Layout
    assignment: Assignment
    schedule: Schedule
    programs: tuple[Program, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or self.method.splitlines() != [self.method]:
            raise ScheduleError(f"method {brief(self.method)}: expected one line of text")
        if self.direction not in DIRECTIONS:
            raise ScheduleError(f"direction {self.direction!r}: expected {' or '.join(DIRECTIONS)}")
        check_assignment(self.assignment, self.problem)
        if self.programs is None:
            _check_moves(self.schedule, self.direction, self.assignment)
            return
        if self.schedule.moves:
            raise ScheduleError("this plan has both moves and programs, which could disagree; expected one of them")
        _check_steps(self.programs)
        if [program.rank for program in self.programs] != list(range(self.problem.ranks)):
            raise ScheduleError(
                f"programs are of ranks {[program.rank for program in self.programs]}; "
                f"expected one for each of the {self.problem.ranks} ranks, in order"
            )

    @property
    def matrix(self) -> BlockMatrix:
        return block_matrix(self.problem, self.layout, self.assignment)

    def program(self, rank: int) -> Program:
        """The steps of one rank, without building any other rank's."""
        if type(rank) is not int or not 0 <= rank < self.problem.ranks:
            raise ScheduleError(f"rank {rank!r}: the plan has ranks 0 to {self.problem.ranks - 1}")
        if self.programs is not None:
            return self.programs[rank]
        return lower(self.matrix, self.schedule, self.direction, rank=rank)

    def steps(self, rank: int) -> tuple[Step, ...]:
        """Those of `program`, without counting the bytes that they hold."""
        if self.programs is not None:
            return self.programs[rank].steps
        return lowered_steps(self.matrix, self.schedule, self.direction, rank=rank)

    def all_programs(self) -> Iterator[Program]:
        return map(self.program, range(self.problem.ranks))

    def unrolled(self) -> Plan:
        """The same plan with every rank's steps written out, for a file or for editing."""
        return self.with_programs(tuple(self.all_programs()))

    def with_programs(self, programs: tuple[Program, ...]) -> Plan:
        """This plan with other steps."""
        return replace(self, schedule=replace(self.schedule, moves=()), programs=programs)

    @property
    def digest(self) -> str:
        """Hash that ranks compare before they start: equal for equal plans, different for different ones."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    def __str__(self) -> str:
        """The whole plan. Equal plans have equal text."""
        problem = " ".join(f"{f.name}={getattr(self.problem, f.name)}" for f in fields(Problem) if f.name != "mask")
        lines = [
            HEADER,
            f"method {self.method}",
            f"direction {self.direction}",
            f"problem {problem}",
            f"mask {self.problem.mask}",
            f"layout {self.layout.text}",
            f"tile {self.assignment.tile}",
            f"ulysses {self.assignment.ulysses_degree}",
            f"route {self.schedule.route}",
            f"partials {self.schedule.partials}",
            f"keep {','.join(self.schedule.keep) or 'nothing'}",
        ]
        if self.assignment.inner is not None:
            lines.append(f"inner {self.assignment.inner}")
        if self.assignment.waves > 1:
            lines.append(f"waves {self.assignment.waves} of {self.assignment.cut}")
        if self.programs is None:
            lines += ["moves", *(f"  {format_move(move)}" for move in self.schedule.moves)]
        lines += map(str, self.programs or ())
        return "\n".join(lines) + "\n"

    def __repr__(self) -> str:
        what = f"{self.method} {self.assignment} {self.direction}, {self.layout.name}, {self.problem.mask}"
        return f"<Plan {what}, {self.digest[:12]}>"


def _check_steps(programs: tuple[Program, ...]) -> None:
    """Check that programs are made of steps; verification checks the rest."""
    if not isinstance(programs, tuple) or not all(
        isinstance(p, Program) and type(p.rank) is type(p.peak_nbytes) is int and type(p.steps) is tuple
        for p in programs
    ):
        raise ScheduleError("programs: expected a tuple of programs, each with a rank, a tuple of steps and a peak")
    for program in programs:
        for index, step in enumerate(program.steps):
            if not is_step(step):
                raise ScheduleError(f"rank {program.rank}, step {index}: {step!r} is not a step")


def _check_moves(schedule: Schedule, direction: Direction, assignment: Assignment) -> None:
    """Check that moves are of this direction's kinds and inside the tile; verification checks the rest."""
    inputs, outputs = INPUTS[direction], OUTPUTS[direction]
    sizes = {"row": assignment.tile.rows, "col": assignment.tile.cols}
    for move in schedule.moves:
        match move:
            case _ if not 0 <= move.wave < assignment.waves:
                fits = False
            case Meet(rows, cols):
                fits = all(0 <= row < sizes["row"] for row in rows) and all(0 <= col < sizes["col"] for col in cols)
            case Fetch(kind, offset):
                fits = kind in inputs and 0 < offset < sizes[AXIS_OF[kind]]
            case Return(kind, offset):
                fits = kind in outputs and 0 <= offset < sizes[AXIS_OF[kind]]
            case GroupMove(op, kind):
                kinds = {"gather": inputs, "reduce": outputs, "unpack": outputs}
                fits = kind in kinds.get(op, inputs + outputs)
            case _:
                assert_never(move)
        if not fits:
            raise ScheduleError(
                f"{move} does not fit a {direction} plan of {assignment.tile} tiles: inputs are {', '.join(inputs)}, "
                f"results {', '.join(outputs)}, offsets 0 to {sizes['row'] - 1} (rows) and {sizes['col'] - 1} "
                f"(columns), waves 0 to {assignment.waves - 1}"
            )


# Reading a plan

_REQUIRED = ("method", "direction", "problem", "layout", "tile", "ulysses", "route", "partials", "keep")
_OPTIONAL = ("mask", "inner", "waves", "moves", "programs")


def parse_plan(text: str) -> Plan:
    """A plan from its text, such as the contents of a plan file; the inverse of ``str(plan)``."""
    entries = _entries(text)
    missing = [key for key in _REQUIRED if key not in entries]
    unknown = [key for key in entries if key not in (*_REQUIRED, *_OPTIONAL)]
    if missing or unknown:
        raise ParseError(
            f"missing fields: {', '.join(missing) or 'none'}; unknown fields: {', '.join(unknown)[:200] or 'none'}; "
            "save the plan again"
        )
    if ("moves" in entries) == ("programs" in entries):
        which = "both moves and programs" if "moves" in entries else "neither moves nor programs"
        raise ParseError(f"plan has {which}; expected one of the two; save the plan again")
    waves, _, cut = entries.get("waves", "1 of heads").partition(" of ")
    keep = entries["keep"]
    return Plan(
        method=entries["method"],
        direction=entries["direction"],
        problem=_problem(entries["problem"], mask=entries.get("mask", "full")),
        layout=parse_layout(entries["layout"]),
        assignment=Assignment(
            Tile.parse(entries["tile"]),
            _whole("ulysses", entries["ulysses"]),
            Tile.parse(entries["inner"]) if "inner" in entries else None,
            _whole("waves", waves),
            cut,
        ),
        schedule=Schedule(
            moves=tuple(map(parse_move, entries.get("moves", ()))),
            route=entries["route"],
            partials=entries["partials"],
            keep=() if keep == "nothing" else tuple(keep.split(",")),
        ),
        programs=tuple(map(_program, entries["programs"])) if "programs" in entries else None,
    )


def _entries(text: str) -> dict[str, Any]:
    """The lines of a plan's text by their first word. `moves` is a list of lines, `programs` one of lists of lines."""
    lines = text.splitlines()
    if not lines or lines[0].strip() != HEADER:
        raise ParseError(f"first line {(lines or [''])[0][:60]!r}: expected {HEADER!r}")
    entries: dict[str, Any] = {}
    section: list[str] | None = None  # the moves or the program that indented lines belong to
    for number, line in enumerate(lines[1:], start=2):
        key, _, value = line.partition(" ")
        if line.startswith("  "):
            if section is None:
                raise ParseError(f"line {number}: {brief(line.strip())} is outside 'moves' and 'program'")
            section.append(line.strip())
        elif key == "program":
            section = [value]
            entries.setdefault("programs", []).append(section)
        elif line.strip():
            if key in entries or key == "programs":
                raise ParseError(f"line {number}: a second {brief(key)}; expected each key once")
            if line == "moves":
                section = entries[key] = []
            else:
                entries[key] = value
    return entries


def _problem(text: str, *, mask: str) -> Problem:
    values: dict[str, Any] = {}
    for name, _, value in (field.partition("=") for field in text.split()):
        if name in values:
            raise ParseError(f"problem has {brief(name)} twice; expected each field once")
        values[name] = value if name == "dtype" else _whole(name, value)
    names = {field.name for field in fields(Problem)} - {"mask"}
    if set(values) != names:
        raise ParseError(f"problem {brief(text)}: expected the fields {', '.join(sorted(names))}")
    return Problem(**values, mask=parse_mask(mask))


def _program(lines: list[str]) -> Program:
    head = re.fullmatch(r"(\d{1,18}) peak (\d{1,18})", lines[0])
    if head is None:
        raise ParseError(f"program {brief(lines[0])}: expected a rank and its peak, such as 'program 0 peak 1024'")
    return Program(rank=int(head[1]), steps=tuple(map(parse_step, lines[1:])), peak_nbytes=int(head[2]))


def _whole(name: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise ParseError(f"{name}={brief(text)}: expected a whole number of at most 18 digits")
    return int(text)
