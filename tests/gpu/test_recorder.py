"""Recordings on a GPU: moments are those of its stream, and every step is seen."""

from __future__ import annotations

import torch

from mesh_attention import LocalGroup, MeshAttention
from mesh_attention.plan.format import format_step
from mesh_attention.plan.steps import Attend
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
