"""Memory that a pass takes on a device: its buffers, and the outputs and scratch of the running kernel call.

A program states only the buffers. A call's output, its gradients and a fused kernel's scratch live until they are added
to the sums; they are counted for the fast CUDA kernels. Kernels that write out the scores take more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.buffers import held_nbytes
from mesh_attention.plan.calls import KernelCall
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import Attend, Direction, Step


def peak_nbytes(plan: Plan, rank: int, steps: Sequence[Step], calls: Mapping[int, Sequence[KernelCall]]) -> int:
    """The most bytes that one rank holds at once. `calls` are the program's, by step."""
    matrix = plan.matrix
    kept, has_kept = matrix.kept(plan.schedule.keep, rank), plan.direction == "backward"
    held = held_nbytes(steps, matrix, kept=kept, has_kept=has_kept)
    for index, of_step in calls.items():
        needed = [scratch_nbytes(call, matrix, plan.direction) for call in of_step]
        if _is_at_home(steps[index]):
            needed = [total - _copied_nbytes(call, matrix) for total, call in zip(needed, of_step, strict=True)]
        held[index] += max(needed, default=0)
    return max(held, default=0)


def _is_at_home(step: Step) -> bool:
    """True if an attend reads dO from the caller's tensors, where it is contiguous already."""
    return isinstance(step, Attend) and any(item.form == "home" for item in step.grads)


def _copied_nbytes(call: KernelCall, matrix: BlockMatrix) -> int:
    """Bytes of a contiguous copy of dO."""
    problem = matrix.problem
    heads = problem.heads // matrix.assignment.ulysses
    return problem.batch * sum(map(len, call.q)) * heads * problem.head_dim_v * problem.itemsize


def scratch_nbytes(call: KernelCall, matrix: BlockMatrix, direction: Direction) -> int:
    """Bytes of one call: its results, and the scratch of the fast CUDA kernels.

    Forward: output and LSE. Backward: the gradients, dQ in float32, contiguous dO and LSE, an output that stands in for
    O, and where queries share KV heads, the gradients of K and V for every query head.
    """
    problem, ulysses = matrix.problem, matrix.assignment.ulysses
    narrow, wide = problem.itemsize, problem.accumulator_itemsize
    qk, v = problem.head_dim_qk, problem.head_dim_v
    heads, kv_heads = problem.heads // ulysses, problem.kv_heads // ulysses
    q, kv = (problem.batch * sum(map(len, segments)) for segments in (call.q, call.kv))
    outputs = q * heads * (v * narrow + wide)
    if direction == "forward":
        return outputs
    spread_heads = heads if heads > kv_heads else 0
    gradients = q * heads * qk * (narrow + wide) + kv * (kv_heads + spread_heads) * (qk + v) * narrow
    return outputs + gradients + _copied_nbytes(call, matrix)
