"""The time of a step on a device: kernel calls by shape and mask, everything else by the memory it touches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from typing_extensions import assert_never

from mesh_attention.masks import BlockKind, Mask, Segment
from mesh_attention.plan import steps
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.calls import KernelCall
from mesh_attention.plan.steps import Direction, Item, Step, running
from mesh_attention.topology import Device, filled


class Prices:
    """Seconds on the compute lane for the steps of one plan."""

    def __init__(self, device: Device, matrix: BlockMatrix, direction: Direction) -> None:
        self.device, self.matrix, self.direction = device, matrix, direction
        problem, shares = matrix.problem, matrix.assignment.head_shares
        self.heads = problem.batch * problem.heads // shares
        self.rate = device.forward if direction == "forward" else device.backward
        self.flops_per_pair = problem.flops(direction, pairs=1) // shares
        # A partial is read once; the sum it is added to is read and written.
        moved = 2 * problem.accumulator_itemsize + problem.itemsize
        kv_heads = problem.batch * problem.kv_heads // shares
        qk, v = problem.head_dim_qk, problem.head_dim_v
        self.row_nbytes = moved * self.heads * (v if direction == "forward" else qk)
        self.col_nbytes = 0 if direction == "forward" else moved * kv_heads * (qk + v)

    def step(self, step: Step, calls: Sequence[KernelCall] = ()) -> float:
        match step:
            case steps.Attend():
                return sum(map(self.call, calls))
            case steps.Merge(partial):
                return self._touch(2 * self._nbytes(running(partial)) + self._nbytes(partial))
            case steps.Pack(_, after):
                return self._touch(2 * self._nbytes(after))
            case steps.Finish(item):
                return self._touch(self._nbytes(running(item)) + self._nbytes(item))
            case steps.Clear(item):
                return self._touch(self._nbytes(item))
            case steps.Exchange(before, after) if before.form == "home":
                return self._touch(2 * self._nbytes(after))  # staged, or copied as its own piece
            case steps.Unpack(before):
                return self._touch(2 * self._nbytes(before))
            case steps.Recv() | steps.Send() | steps.Collective() | steps.Exchange() | steps.Free():
                return 0.0
            case _:
                assert_never(step)

    def call(self, call: KernelCall) -> float:
        """A kernel call, and adding its results to the running sums."""
        q, kv = _tokens(call.q), _tokens(call.kv)
        is_full = call.kind is BlockKind.FULL
        problem = self.matrix.problem
        pairs = q * kv if is_full else _pairs(problem.mask, call.q, call.kv, problem.seq_q, problem.seq_kv)
        touched = q * self.row_nbytes + kv * self.col_nbytes
        return self.kernel(q, kv, pairs=pairs, is_full=is_full) + self._touch(touched)

    def kernel(self, q: int, kv: int, *, pairs: int, is_full: bool) -> float:
        """The kernel alone. Forward spreads runs of queries over the device, backward runs of keys."""
        along = q if self.direction == "forward" else kv
        share = (1.0 if is_full else self.rate.masked) * filled(self.device.width, heads=self.heads, tokens=along)
        tflops = self.rate.tflops * share
        return self.rate.call_us * 1e-6 + pairs * self.flops_per_pair / (tflops * 1e12)

    def _touch(self, nbytes: int) -> float:
        return self.device.launch_us * 1e-6 + nbytes / (self.device.memory_gb_per_s * 1e9)

    def _nbytes(self, item: Item) -> int:
        return self.matrix.nbytes(item).total


def _tokens(segments: Sequence[Segment]) -> int:
    return sum(map(len, segments))


@lru_cache(maxsize=65536)
def _pairs(mask: Mask, q: tuple[Segment, ...], kv: tuple[Segment, ...], seq_q: int, seq_kv: int) -> int:
    return sum(mask.pairs(a, b, seq_q=seq_q, seq_kv=seq_kv) for a in q for b in kv)
