"""Kernel calls cover just what the mask lets through, and no pair twice."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from hypothesis import given, settings
from strategies import plans

from mesh_attention import Plan, Problem, causal, make_plan, rank_costs
from mesh_attention.masks import BlockKind
from mesh_attention.plan.kernel_calls import kernel_calls
from mesh_attention.plan.steps import Attend
from mesh_attention_lab.testing.kernel_conformance import is_unmasked


@given(plans(max_ranks=8))
@settings(max_examples=150)
def test_calls_cover_each_attended_pair_once(plan: Plan) -> None:
    program = plan.program(plan.problem.ranks // 2)
    seq = {"seq_q": plan.problem.seq_q, "seq_kv": plan.problem.seq_kv}
    for index, calls in kernel_calls(program.steps, plan.matrix).items():
        attend = program.steps[index]
        assert isinstance(attend, Attend)
        covered = Counter((x, y) for call in calls for x in chain(*call.q) for y in chain(*call.kv))
        assert max(covered.values()) == 1
        wanted = sum(plan.matrix.pairs(row.shard, col.shard, row.part) for row in attend.rows for col in attend.cols)
        assert sum(plan.problem.mask.pairs(q, kv, **seq) for c in calls for q in c.q for kv in c.kv) == wanted
        for call in calls:
            if call.is_plain_causal:
                q, kv = list(chain(*call.q)), list(chain(*call.kv))
                seen = [[is_unmasked(plan.problem.mask, x, y, *seq.values()) for y in kv] for x in q]
                assert seen == [[j <= i for j in range(len(kv))] for i in range(len(q))]
        unmasked = [call for call in calls if call.kind is BlockKind.FULL]
        for call in unmasked:
            assert all(plan.problem.mask.kind(q, kv, **seq) is BlockKind.FULL for q in call.q for kv in call.kv)


def test_a_zigzag_tile_is_a_handful_of_calls() -> None:
    problem = Problem.self_attention(seq_len=1 << 20, heads=32, head_dim=128, ranks=256, mask=causal())
    assert rank_costs(make_plan(problem, method="attention2d", tile=(16, 16)), 100).kernel_calls <= 6
    grouped = rank_costs(make_plan(problem, tile=(16, 16), blocks_per_call=8), 100)
    assert grouped.kernel_calls <= 80
    assert rank_costs(make_plan(problem, tile=(16, 16)), 100).kernel_calls == 256


def test_the_own_block_of_a_zigzag_shard_is_one_call() -> None:
    problem = Problem.self_attention(seq_len=4096, heads=1, head_dim=8, ranks=1, mask=causal())
    assert rank_costs(make_plan(problem), 0).kernel_calls == 1
