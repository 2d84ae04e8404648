"""Write a planner: a function from a problem to a plan. Its plans can be proved and run like any other.

This one fetches every K and V first, then attends in one call.

python examples/05_a_custom_planner.py
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import Plan, Problem, Tile, Zigzag, causal, verify
from mesh_attention.api import MeshAttention
from mesh_attention.comm.local import LocalGroup
from mesh_attention.plan.assignment import Assignment
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.schedule import Fetch, Meet, Return, Schedule
from mesh_attention.plan.steps import Direction

RANKS, SEQ, HEADS, HEAD_DIM = 4, 200, 4, 16


def fetch_first(problem: Problem, *, direction: Direction, layout: Layout) -> Plan:
    # The tile: the rank's own query shard × all key/value shards. Column y is the shard of the rank y places before.
    columns = range(problem.ranks)
    fetches = [Fetch("kv", column) for column in columns[1:]]
    attend = Meet((0,), tuple(columns))
    if direction == "forward":
        returns = [Return("o", 0)]
    else:  # gradients of fetched keys and values go home; column 0, the rank's own, collects them and ends last
        returns = [Return("dq", 0), *(Return("dkv", column) for column in reversed(columns))]
    return Plan(
        method="fetch-first",
        direction=direction,
        problem=problem,
        layout=layout,
        assignment=Assignment(Tile(1, problem.ranks)),
        schedule=Schedule(moves=(*fetches, attend, *returns)),
    )


problem = Problem.self_attention(
    seq_len=SEQ, heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM, ranks=RANKS, mask=causal()
)
for direction in ("forward", "backward"):
    verify(fetch_first(problem, direction=direction, layout=Zigzag()))
print("both plans are right")

torch.manual_seed(0)
q, k, v = (torch.randn(1, SEQ, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
attention = MeshAttention(LocalGroup(RANKS), planner=fetch_first)
ours = attention.unshard(attention(*(attention.shard(tensor) for tensor in (q, k, v)), causal=True))
bhsd = (tensor.transpose(1, 2) for tensor in (q, k, v))
theirs = scaled_dot_product_attention(*bhsd, is_causal=True).transpose(1, 2)

gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (ours, theirs)]
for a, b in zip((ours, *gradients[0]), (theirs, *gradients[1]), strict=True):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
print("they give the same results as torch's attention, forward and backward")
