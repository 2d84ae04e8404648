"""Plans of decoded steps, executed over a past that is spread over the ranks in any way: equal to one process's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_cases import dense
from strategies import step_shapes
from torch import Tensor

from mesh_attention import LocalGroup, cluster_named
from mesh_attention.arguments import Softmax
from mesh_attention.comm.base import drive_together
from mesh_attention.errors import UsageError
from mesh_attention.execution.buffers import Buffer
from mesh_attention.execution.compiled import compile_program
from mesh_attention.execution.executor import Executor
from mesh_attention.kernels.decode import Blocks, TorchDecode
from mesh_attention.plan.format import format_step
from mesh_attention.plan.steps import Combine, Decode, Item
from mesh_attention.planners.over_cache import COMBININGS, QUERIES, StepShape, plan_decode
from mesh_attention.serving.step_runner import LayerCache, StepState
from mesh_attention_lab.decode_simulator import simulate_decode
from mesh_attention_lab.drawing.page import Scene
from mesh_attention_lab.drawing.trace import to_perfetto

CPU = torch.device("cpu")


@dataclass
class Chat:
    """The tokens of one sequence, cached and new, and the rank that keeps each."""

    q: Tensor
    k: Tensor
    v: Tensor
    keeper: list[int]

    def held(self, rank: int) -> list[int]:
        return [position for position, keeper in enumerate(self.keeper) if keeper == rank]

    @property
    def past(self) -> int:
        return len(self.keeper) - self.q.shape[0]


def drawn_sequences(shape: StepShape, pasts: Sequence[int], rng: Random) -> list[Chat]:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    keepers = [rank for rank in range(shape.ranks) if rng.random() < 0.6] or [0]

    def tensor(tokens: int, heads: int, dim: int) -> Tensor:
        return torch.randn((tokens, heads, dim), generator=generator, dtype=torch.float64)

    return [
        Chat(
            tensor(new, shape.heads, shape.head_dim_qk),
            tensor(past + new, shape.kv_heads, shape.head_dim_qk),
            tensor(past + new, shape.kv_heads, shape.head_dim_v),
            [rng.choice(keepers) for _ in range(past + new)],
        )
        for new, past in zip(shape.new_tokens, pasts, strict=True)
    ]


def layer_cache(
    shape: StepShape, sequences: Sequence[Chat], rank: int, size: int, window: int | None, rng: Random
) -> LayerCache:
    """What one rank holds of the past, in blocks in any order; NaN wherever nothing was stored."""
    tables, first, stop, slots = [], [], [], []
    blocks = iter(rng.sample(range(999), 999))
    k = torch.full((1000, size, shape.kv_heads, shape.head_dim_qk), torch.nan, dtype=torch.float64)
    v = torch.full((1000, size, shape.kv_heads, shape.head_dim_v), torch.nan, dtype=torch.float64)
    for sequence in sequences:
        held = sequence.held(rank)
        table = [next(blocks) for _ in range(-(-len(held) // size))]
        slot_of = {position: table[at // size] * size + at % size for at, position in enumerate(held)}
        for position, slot in slot_of.items():
            if position < sequence.past:
                k.flatten(0, 1)[slot], v.flatten(0, 1)[slot] = sequence.k[position], sequence.v[position]
        new = range(sequence.past, len(sequence.keeper))
        slots += [slot_of.get(position, 999 * size) for position in new]
        stops = [sum(other <= position for other in held) for position in new]
        firsts = [0 if window is None else sum(other < position - window for other in held) for position in new]
        tables += [table] * (len(new) if shape.is_ragged else 1)
        first += [[each] for each in firsts] if shape.is_ragged else [firsts]
        stop += [[each] for each in stops] if shape.is_ragged else [stops]
    state = StepState.empty(shape.grid, max(map(len, tables)), CPU)
    state.update(tables, first, stop, slots)
    scale = shape.head_dim_qk**-0.5
    return LayerCache(Blocks(k, v), state, TorchDecode(), Softmax(scale=scale), shape.grid)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_plan_of_a_step_is_right_over_every_cover_of_the_past(data: st.DataObject) -> None:
    shape = data.draw(step_shapes(dtypes=("float64",)))
    queries, combining = data.draw(st.sampled_from(QUERIES)), data.draw(st.sampled_from(COMBININGS))
    pasts = data.draw(st.lists(st.integers(0, 30), min_size=len(shape.new_tokens), max_size=len(shape.new_tokens)))
    size, window = data.draw(st.sampled_from((1, 3, 8))), data.draw(st.sampled_from((None, 0, 4)))
    rng = data.draw(st.randoms(use_true_random=False))
    sequences = drawn_sequences(shape, pasts, rng)
    caches = [layer_cache(shape, sequences, rank, size, window, rng) for rank in range(shape.ranks)]
    whole = {
        "q": torch.cat([sequence.q for sequence in sequences]),
        "k": torch.cat([sequence.k[sequence.past :] for sequence in sequences]),
        "v": torch.cat([sequence.v[sequence.past :] for sequence in sequences]),
    }
    due = [dense(sequence.q, sequence.k, sequence.v, window=window, softcap=0.0) for sequence in sequences]
    out, lse = torch.cat([o for o, _ in due]), torch.cat([each.T for _, each in due])

    plan, group = plan_decode(shape, queries=queries, combining=combining), LocalGroup(shape.ranks)
    runs = [range(shape.tokens)] * shape.ranks if plan.matrix.is_replicated else shape.runs
    compiled = [compile_program(plan, rank) for rank in range(shape.ranks)]
    pools: list[dict[tuple[Item, ...], Buffer]] = [{} for _ in compiled]
    for pool_of in ([None] * shape.ranks, pools, pools):  # alone, and as a step and the next one like it
        executors = [
            Executor(
                compiled=compiled[rank],
                comm=group.comm(rank),
                inputs={"q": {name: x[run.start : run.stop].transpose(0, 1)[None] for name, x in whole.items()}},
                device=CPU,
                cache=caches[rank],
                pool=pool_of[rank],
            )
            for rank, run in enumerate(runs)
        ]
        drive_together([executor.run() for executor in executors])
        for executor, run in zip(executors, runs, strict=True):
            assert executor.meter.peak == executor.compiled.peak_nbytes
            if executor.result is None:
                assert not run
                continue
            result = executor.result.by_token(None)
            ours, due_out = result["o"].reshape(-1, shape.heads, shape.head_dim_v), out[run.start : run.stop]
            torch.testing.assert_close(ours, due_out, rtol=0, atol=1e-12)
            torch.testing.assert_close(
                result["lse"].reshape(-1, shape.heads), lse[run.start : run.stop], rtol=0, atol=1e-12
            )


@pytest.mark.parametrize("how", [{}, {"combining": "reduce_scatter"}, {"queries": "sharded"}], ids=str)
def test_a_forecast_of_a_step_has_a_trace_and_no_explorer_page(
    how: dict[str, Any],
) -> None:
    sizes = {"ranks": 4, "heads": 4, "kv_heads": 2, "head_dim_qk": 8, "head_dim_v": 8}
    plan = plan_decode(StepShape(new_tokens=(1, 3, 2), dtype="bfloat16", **sizes), **how)
    cluster = replace(cluster_named("h100x8"), ranks=4)
    timeline = simulate_decode(plan, cluster, spans_of=range(4), attend_s=1e-5)
    names = {event["name"] for event in to_perfetto(timeline)["traceEvents"]}
    assert {format_step(step) for step in plan.steps(0) if isinstance(step, Decode | Combine)} <= names
    with pytest.raises(UsageError, match="over a cache cannot be shown on the explorer page"):
        Scene(method="decode", plans={"forward": plan}, forecasts={"forward": timeline})
