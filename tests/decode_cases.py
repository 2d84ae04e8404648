"""Calls of a decode kernel, and what they must give: scores and weights written out for every query, in float64.

Slots that no query sees are NaN, and so is a block that the rest of each table names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from mesh_attention.kernels.decode import Blocks, DecodeKernel, Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sizes of a call. `reaches` has first and stop for each query of each sequence."""

    queries: int
    kv_heads: int
    group: int
    dims: tuple[int, int]
    block_tokens: int
    reaches: tuple[tuple[tuple[int, int], ...], ...]
    scale: float = 0.3
    softcap: float = 0.0
    heads_first: bool = False
    seed: int = 0


class Call(NamedTuple):
    q: Tensor
    blocks: Blocks
    reach: Reach
    scale: float
    softcap: float


@st.composite
def cases(draw: st.DrawFn, *, most_tokens: int = 40, most_block: int = 7) -> Case:
    queries = draw(st.integers(1, 4))
    ends = st.integers(0, most_tokens)
    reach = st.tuples(ends, ends)
    reaches = draw(st.lists(st.tuples(*[reach] * queries), min_size=1, max_size=3))
    return Case(
        queries=queries,
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 5)),
        dims=(draw(st.sampled_from((1, 3, 8, 24))), draw(st.sampled_from((2, 6, 8, 16)))),
        block_tokens=draw(st.one_of(st.integers(1, most_block), st.just(16))),
        reaches=tuple(reaches),
        scale=draw(st.sampled_from((0.3, -0.7, 1.0))),
        softcap=draw(st.sampled_from((0.0, 1.5))),
        heads_first=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def make_call(case: Case, dtype: torch.dtype, device: torch.device) -> Call:
    generator = torch.Generator().manual_seed(case.seed)
    size, sequences = case.block_tokens, len(case.reaches)
    spans = [span_of(reach) for reach in case.reaches]
    needs = [-(-span.stop // size) for span in spans]
    order = torch.randperm(sum(needs) + 1, generator=generator).tolist()
    unread = order.pop()  # stays NaN
    table = torch.full((sequences, max(needs) + 2), unread, dtype=torch.int32)
    k, v = (torch.full((len(order) + 1, size, case.kv_heads, dim), torch.nan) for dim in case.dims)
    for at, span in enumerate(spans):
        for index in range(needs[at]):
            table[at, index] = order.pop()
        for token in span:
            for x in (k, v):
                x[table[at, token // size], token % size] = torch.randn(x.shape[2:], generator=generator)
    if case.heads_first:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    q = torch.randn((sequences, case.queries, case.kv_heads * case.group, case.dims[0]), generator=generator)
    first, stop = torch.tensor(case.reaches, dtype=torch.int32).unbind(-1)
    k, v, q = (x.to(device, dtype) for x in (k, v, q))
    return Call(q, Blocks(k, v), Reach(*(x.to(device) for x in (table, first, stop))), case.scale, case.softcap)


def span_of(reach: tuple[tuple[int, int], ...]) -> range:
    seen = [pair for pair in reach if pair[0] < pair[1]]
    return range(min((low for low, _ in seen), default=0), max((high for _, high in seen), default=0))


def results(call: Call, dim_v: int) -> tuple[Tensor, Tensor]:
    """Where to write: the output in records that end with the LSE, NaN at first."""
    shape = call.q.shape[:-1]
    wide = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    word = wide.itemsize // call.q.itemsize
    records = torch.full((*shape, dim_v + word), torch.nan, dtype=call.q.dtype, device=call.q.device)
    return records[..., :dim_v], records.view(wide)[..., dim_v // word]


def attend(kernel: DecodeKernel, call: Call) -> tuple[Tensor, Tensor]:
    out, lse = results(call, call.blocks.v.shape[-1])
    kernel.attend(call.q, call.blocks, call.reach, scale=call.scale, softcap=call.softcap, out=out, lse=lse)
    return out, lse


def dense(call: Call) -> tuple[Tensor, Tensor]:
    """One query and head at a time, in float64, of the tokens that it sees."""
    q, (k, v), reach = call.q.double(), call.blocks, call.reach
    sequences, queries, heads, _ = q.shape
    group, size = heads // k.shape[2], k.shape[1]
    out, lse = (
        q.new_zeros((sequences, queries, heads, v.shape[-1])),
        q.new_full((sequences, queries, heads), -torch.inf),
    )
    for s in range(sequences):
        for t in range(queries):
            places = [(int(reach.table[s, i // size]), i % size) for i in range(reach.first[s, t], reach.stop[s, t])]
            for h in range(heads if places else 0):
                keys, values = (torch.stack([x[at][h // group].double() for at in places]) for x in (k, v))
                scores = keys @ q[s, t, h] * call.scale
                if call.softcap:
                    scores = call.softcap * torch.tanh(scores / call.softcap)
                lse[s, t, h] = scores.logsumexp(0)
                out[s, t, h] = scores.softmax(0) @ values
    return out, lse
