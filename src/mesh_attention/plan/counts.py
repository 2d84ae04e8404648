"""What a plan takes, counted from its steps: bytes, FLOPs, memory, calls and messages. Exact, without a machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mesh_attention.plan.blocks import BlockMatrix, Bytes
from mesh_attention.plan.kernel_calls import kernel_calls
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import Program
from mesh_attention.plan.steps import Attend, Item, Kind, transfers


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


def flops_by_rank(plan: Plan) -> list[int]:
    return [program_flops(plan, program) for program in plan.all_programs()]


def imbalance(flops: Iterable[int]) -> float:
    """The extra work of the busiest rank relative to the average: 0 is even, 1 means twice as much."""
    flops = list(flops)
    mean = sum(flops) / max(1, len(flops))
    return max(flops) / mean - 1 if mean else 0.0


ALL_RANKS = 64
MANY_RANKS = 2048
"""From here on, the program of one rank takes up to seconds to build, and few are."""


def _by_kind(items: Iterable[Item], matrix: BlockMatrix) -> dict[Kind, Bytes]:
    totals: dict[Kind, Bytes] = {}
    for item in items:
        size, total = matrix.nbytes(item), totals.get(item.kind, Bytes(0, 0))
        totals[item.kind] = Bytes(total.payload + size.payload, total.statistics + size.statistics)
    return totals
