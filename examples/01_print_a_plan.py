"""Print a plan: how much a rank receives, and the steps of one rank. Does not need torch.

python examples/01_print_a_plan.py
"""

from mesh_attention import Problem, causal, make_plan, rank_costs, verify

problem = Problem.self_attention(seq_len=131072, heads=32, kv_heads=8, head_dim=128, ranks=16, mask=causal())

for method, tile in (("ring", None), ("mesh", (2, 8)), ("mesh", (4, 4))):
    plan = make_plan(problem, method=method, tile=tile)
    received_mib = max(rank_costs(plan, rank).received_nbytes for rank in range(problem.ranks)) / 2**20
    print(f"{plan.method} {plan.assignment.tile}: a rank receives at most {received_mib:.0f} MiB")

plan = make_plan(problem, method="mesh", tile=(2, 8))
verify(plan)  # raises, with the step table and the row marked, if any rule is broken
print()
print(plan.program(0))
