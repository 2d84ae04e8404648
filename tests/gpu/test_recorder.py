"""What a pass tells on a GPU: moments of its stream, every step of it, and whether a rank gave up."""

from __future__ import annotations

import torch

from mesh_attention import LocalGroup, MeshAttention
from mesh_attention.plan.format import format_step
from mesh_attention.plan.steps import Attend
from mesh_attention.session.poison import Poison
from mesh_attention_lab.recording import record


def test_steps_are_timed_on_the_device() -> None:
    attention = MeshAttention(LocalGroup(4), tile=(2, 2))
    q, k, v = (torch.randn(1, 4096, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 4, 4))
    shards = [[shard.requires_grad_() for shard in attention.shard(tensor)] for tensor in (q, k, v)]
    with record(attention) as recording:
        out = attention(*shards, causal=True)
        torch.autograd.grad([o.sum() for o in out], [shard for tensor in shards for shard in tensor])
    passes = recording.passes()
    assert [one.plan.direction for one in passes] == ["forward", "backward"]
    for one in passes:
        for rank in range(4):
            spans = [span for span in one.timeline.spans if (span.rank, span.lane) == (rank, "compute")]
            attended = [span.name for span in spans if span.name.startswith("attend ")]
            steps = one.plan.program(rank).steps
            assert attended == [format_step(step) for step in steps if isinstance(step, Attend)]
        assert all(0 <= span.start_s < span.stop_s <= one.timeline.time_s for span in one.timeline.spans)


def test_results_are_poisoned_once_a_rank_gave_up_also_in_a_graph() -> None:
    alarm, same = Poison(torch.device("cuda", 0)), torch.tensor([5, -5], device="cuda")
    results = [torch.ones(3000, device="cuda", dtype=torch.bfloat16), torch.ones(7, device="cuda")]
    alarm.check(same, results, counts=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        alarm.check(same, results, counts=True)
    graph.replay()
    torch.cuda.synchronize()
    assert all(bool(result.isfinite().all()) for result in results)
    assert alarm.passes_over() == 2
    alarm.give_up()
    graph.replay()
    torch.cuda.synchronize()
    assert all(bool(result.isnan().all()) for result in results)
    assert alarm.passes_over() == 3
    assert alarm.verdict() is None


def test_a_launch_that_waits_for_the_device_does_not_hold_up_giving_up() -> None:
    alarm = Poison(torch.device("cuda", 0))
    torch.cuda._sleep(2_000_000_000)
    alarm.give_up()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
