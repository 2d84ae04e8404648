"""The plan: problem, layout, assignment and schedule together. Plain immutable data, the same on every rank.

Also what each rank's program takes, counted from its steps: bytes, FLOPs, memory, calls and messages.

A plan has one text, which `plan.parse` reads back: people read it, files hold it, and ranks compare its hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain

from typing_extensions import assert_never

from mesh_attention.errors import ScheduleError
from mesh_attention.masks import full
from mesh_attention.plan.assignment import Assignment, Tile, check_assignment
from mesh_attention.plan.blocks import BlockMatrix, Bytes, block_matrix
from mesh_attention.plan.format import format_move
from mesh_attention.plan.kernel_calls import kernel_calls
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.lowering import lower, lowered_steps
from mesh_attention.plan.program import Program
from mesh_attention.plan.schedule import Fetch, GroupMove, Meet, Return, Schedule
from mesh_attention.plan.steps import AXIS_OF, INPUTS, OUTPUTS, Attend, Item, Kind, Step, is_step, transfers
from mesh_attention.problem import DIRECTIONS, Direction, Problem
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
        _check_cache(self)
        if self.programs is None:
            _check_moves(self.schedule, self.direction, self.assignment, self.matrix.is_over_cache)
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


def _check_cache(plan: Plan) -> None:
    """Check that a pass over a cache is one that caches and kernels can do, and that no other pass is like it."""
    problem, matrix = plan.problem, plan.matrix
    if not matrix.is_over_cache:
        if matrix.is_replicated:
            raise ScheduleError(f"layout {plan.layout.text}: only queries over a cache (layout past) are replicated")
        return
    if plan.direction != "forward" or plan.schedule.keep or plan.assignment != Assignment(Tile(problem.ranks, 1)):
        raise ScheduleError(
            f"a {plan.direction} pass over a cache in {plan.assignment} tiles that keeps "
            f"{','.join(plan.schedule.keep) or 'nothing'}: expected forward, {problem.ranks}x1, nothing"
        )
    if problem.batch != 1 or problem.mask != full():
        raise ScheduleError(
            f"a pass over a cache with batch={problem.batch} and mask {problem.mask}: expected batch=1 and a full "
            "mask, because the cache knows which keys each query sees"
        )
    matrix.home_segments("col", 0)  # refuses other lengths than one position for each rank
    start = 0
    for segment in chain.from_iterable(matrix.home_segments("row", rank) for rank in range(problem.ranks)):
        if segment != range(start, start + len(segment)):
            raise ScheduleError(
                f"queries over a cache on layout {plan.layout.text}: expected a run for each rank, in the order of "
                "ranks, because their partials are computed in one piece"
            )
        start += len(segment)


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


def _check_moves(schedule: Schedule, direction: Direction, assignment: Assignment, is_over_cache: bool) -> None:
    """Check that moves are of this direction's kinds and inside the tile; verification checks the rest."""
    inputs, outputs = INPUTS[direction], OUTPUTS[direction]
    sizes = {"row": assignment.tile.rows, "col": assignment.tile.cols}
    for move in schedule.moves:
        match move:
            case _ if not 0 <= move.wave < assignment.waves:
                fits = False
            case GroupMove("combine", kind):
                fits = kind in outputs and is_over_cache
            case Meet(rows, cols):
                fits = all(0 <= row < sizes["row"] for row in rows) and all(0 <= col < sizes["col"] for col in cols)
            case Fetch(kind, offset):
                fits = kind in inputs and 0 < offset < sizes[AXIS_OF[kind]]
            case Return(kind, offset):
                fits = kind in outputs and 0 <= offset < sizes[AXIS_OF[kind]]
            case GroupMove(op, kind):
                gathered = (*inputs, *outputs) if is_over_cache else inputs
                kinds = {"gather": gathered, "reduce": outputs, "unpack": outputs}
                fits = kind in kinds.get(op, inputs + outputs)
            case _:
                assert_never(move)
        if not fits:
            raise ScheduleError(
                f"{move} does not fit a {direction} plan of {assignment.tile} tiles: inputs are {', '.join(inputs)}, "
                f"results {', '.join(outputs)}, offsets 0 to {sizes['row'] - 1} (rows) and {sizes['col'] - 1} "
                f"(columns), waves 0 to {assignment.waves - 1}"
            )


# Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCosts:
    """The costs of one rank's program. Bytes are by kind; a message is one run of tokens that the rank sends."""

    rank: int
    sent: dict[Kind, Bytes]
    received: dict[Kind, Bytes]
    flops: int
    peak_nbytes: int
    kernel_calls: int
    messages: int

    @property
    def sent_nbytes(self) -> int:
        return sum(nbytes.total for nbytes in self.sent.values())

    @property
    def received_nbytes(self) -> int:
        return sum(nbytes.total for nbytes in self.received.values())


def rank_costs(plan: Plan, rank: int) -> RankCosts:
    """The costs of one rank, without building any other rank's program."""
    program, matrix = plan.program(rank), plan.matrix
    ends = [transfers(step) for step in program.steps]
    sent = [send.item for sends, _ in ends for send in sends]
    received = [recv.item for _, recvs in ends for recv in recvs]
    calls = kernel_calls(program.steps, matrix, matrix.kept(plan.schedule.keep, rank))
    return RankCosts(
        rank=rank,
        sent=_by_kind(sent, matrix),
        received=_by_kind(received, matrix),
        flops=program_flops(plan, program),
        peak_nbytes=program.peak_nbytes,
        kernel_calls=sum(map(len, calls.values())),
        messages=sum(map(matrix.runs, sent)),
    )


def program_flops(plan: Plan, program: Program) -> int:
    return sum(
        plan.matrix.flops(row.shard, col.shard, plan.direction, row.part)
        for step in program.steps
        if isinstance(step, Attend)
        for row in step.rows
        for col in step.cols
    )


def _by_kind(items: Iterable[Item], matrix: BlockMatrix) -> dict[Kind, Bytes]:
    totals: dict[Kind, Bytes] = {}
    for item in items:
        size, total = matrix.nbytes(item), totals.get(item.kind, Bytes(0, 0))
        totals[item.kind] = Bytes(total.payload + size.payload, total.statistics + size.statistics)
    return totals
