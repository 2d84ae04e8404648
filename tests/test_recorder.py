"""Recordings say what happened: every step and every transfer of the plan, once, where and when it was."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attending import planners
from delaying import Delaying
from pool import shared_pool

from mesh_attention.api import MeshAttention
from mesh_attention.arguments import CallOptions
from mesh_attention.clusters import cluster_named
from mesh_attention.comm.local import LocalGroup
from mesh_attention.comm.torch_dist import TorchComm
from mesh_attention.errors import TransportError, UsageError
from mesh_attention.plan.format import format_end, format_step
from mesh_attention.plan.plan import Plan, rank_costs
from mesh_attention.plan.program import stops
from mesh_attention.plan.steps import Attend, Collective, Exchange, Free, transfers
from mesh_attention.simulation.simulate import simulate
from mesh_attention.timeline import Span, Timeline
from mesh_attention_lab import recording as recording_module
from mesh_attention_lab.recording import RecordedPass, Recording, record
from mesh_attention_lab.testing.wrappers import Failing

RANKS, TOKENS = 4, 96
NAMES = (
    *("ring, routed", "pass-q", "mesh, routed", "mesh, grouped", "attention2d", "mesh, kept", "attention2d, kept"),
    *("ulysses x mesh", "ulysses x mesh, kept", "ulysses x mesh, waves", "mesh, waves"),
)
METHODS = [planners(RANKS)[name] for name in NAMES]
IDS = [" ".join(f"{value}" for value in options.values()) for options in METHODS]


def whole_inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, TOKENS, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]


def run_both(attention: MeshAttention, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients of all ranks of a local group."""
    q, k, v = ([shard.requires_grad_() for shard in attention.shard(tensor)] for tensor in inputs)
    out = attention(q, k, v, causal=True)
    return [*out, *torch.autograd.grad([(o * o).sum() for o in out], [*q, *k, *v])]


def recorded_locally(options: dict[str, Any]) -> tuple[RecordedPass, ...]:
    attention = MeshAttention(LocalGroup(RANKS), **options)
    with record(attention) as recording:
        run_both(attention, whole_inputs())
    return recording.passes()


def lane(timeline: Timeline, rank: int, *lanes: str) -> list[Span]:
    return [span for span in timeline.spans if span.rank == rank and span.lane in lanes]


def waiting_names(plan: Plan, rank: int) -> set[str]:
    """The stops at which a rank may have to wait. Sends of what is kept are waited for at the end."""
    steps = plan.program(rank).steps
    found = {
        format_step(steps[stop.span.start])
        for stop in stops(steps)
        if stop.arrivals or stop.departures or isinstance(steps[stop.span.start], Collective | Exchange)
    }
    return found | {format_step(steps[-1])}


def check_spans(plan: Plan, timeline: Timeline) -> None:
    """Everything that must hold for a recording of a plan, for any times."""
    for rank in range(RANKS):
        steps = plan.program(rank).steps
        attended = [span.name for span in lane(timeline, rank, "compute") if span.name.startswith("attend ")]
        assert attended == [format_step(step) for step in steps if isinstance(step, Attend)]
        assert {span.name for span in lane(timeline, rank, "wait")} <= waiting_names(plan, rank)
        names = {format_step(steps[stop.span.start]) for stop in stops(steps)}
        frees = {format_step(step) for step in steps if isinstance(step, Free)}
        assert not frees & {span.name for span in lane(timeline, rank, "compute")}, "freeing is no work"
        assert {span.name for span in lane(timeline, rank, "compute", "wait")} <= names
        assert all(span.name == format_step(steps[span.step]) for span in lane(timeline, rank, "compute", "wait"))
        for side, moved in enumerate(("send", "recv")):
            ends = [(at, end) for at, step in enumerate(steps) for end in transfers(step)[side]]
            assert Counter(span[4:] for span in lane(timeline, rank, moved)) == Counter(
                (format_end(end), plan.matrix.nbytes(end.item).total, at) for at, end in ends
            )
        check_cover(plan, timeline, rank)
    sent = sum(rank_costs(plan, rank).sent_nbytes for rank in range(RANKS))
    assert timeline.sent_nbytes == {"inside": sent, "between": 0}


def check_cover(plan: Plan, timeline: Timeline, rank: int) -> None:
    """Compute and waiting follow each other from the rank's first step to its last; only freeing is left out."""
    times, busy = timeline.ranks[rank], lane(timeline, rank, "compute", "wait")
    assert times.rank == rank
    assert busy[0].start_s >= 0
    steps = plan.program(rank).steps
    walked = [steps[stop.span.start] for stop in stops(steps)]
    names, at = [format_step(first) for first in walked], 0
    for before, after in pairwise(busy):
        start = at = names.index(before.name, at)
        at = names.index(after.name, at)
        assert not before.lane == after.lane == "wait" or before.name != after.name, "one wait in two spans"
        gap_s = after.start_s - before.stop_s
        assert gap_s >= -1e-9
        assert gap_s <= 1e-9 or any(isinstance(first, Free) for first in walked[start : at + 1])
    assert times.compute_s == pytest.approx(sum(s.stop_s - s.start_s for s in lane(timeline, rank, "compute")))
    assert max(span.stop_s for span in busy) <= times.stop_s + 1e-9
    assert times.stop_s <= timeline.time_s
    for span in lane(timeline, rank, "send", "recv"):
        assert 0 <= span.start_s <= span.stop_s <= times.stop_s + 1e-9


# In one process


@pytest.mark.parametrize("options", METHODS, ids=IDS)
def test_every_step_and_every_byte_of_the_plan_is_seen_under_the_simulators_names(options: dict[str, Any]) -> None:
    passes = recorded_locally(options)
    assert [one.plan.direction for one in passes] == ["forward", "backward"]
    for one in passes:
        check_spans(one.plan, one.timeline)
        assert one.timeline.flops == sum(rank_costs(one.plan, rank).flops for rank in range(RANKS))
        check_names(one.timeline, simulate(one.plan, cluster_named("h100x4"), spans_of=range(RANKS)))


def check_names(recorded: Timeline, forecast: Timeline) -> None:
    assert recorded.name == forecast.name
    for rank in range(RANKS):
        for kind in ("send", "recv"):
            ours, theirs = (Counter(span.name for span in lane(one, rank, kind)) for one in (recorded, forecast))
            assert ours == theirs
        computed = {span.name for span in lane(forecast, rank, "compute")}
        assert computed <= {span.name for span in lane(recorded, rank, "compute")}


def test_recording_changes_no_bit_and_is_over_with_its_block() -> None:
    attention = MeshAttention(LocalGroup(RANKS), tile=(2, 2))
    plain = run_both(attention, whole_inputs())
    with record(attention) as recording:
        noted = run_both(attention, whole_inputs())
    after = run_both(attention, whole_inputs())
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(plain, noted, after, strict=True))
    assert len(recording.passes()) == 2
    assert "engine" not in vars(attention)


def test_backward_of_a_recorded_call_is_recorded_whenever_it_runs() -> None:
    attention = MeshAttention(LocalGroup(RANKS), tile=(2, 2))
    q, k, v = ([shard.requires_grad_() for shard in attention.shard(tensor)] for tensor in whole_inputs())
    with record(attention) as recording:
        out = attention(q, k, v, causal=True)
    assert [one.plan.direction for one in recording.passes()] == ["forward"]
    torch.autograd.grad([o.sum() for o in out], [*q, *k, *v])
    assert [one.plan.direction for one in recording.passes()] == ["forward", "backward"]


def test_calls_of_several_kinds_are_recorded_in_order() -> None:
    attention = MeshAttention(LocalGroup(RANKS), tile=(2, 2))
    q, k, v = (attention.shard(tensor) for tensor in whole_inputs())
    with record(attention) as recording:
        for is_causal in (True, False, True):
            attention(q, k, v, causal=is_causal)
    passes = recording.passes()
    assert [str(one.plan.problem.mask) for one in passes] == ["causal", "full", "causal"]
    for one in passes:
        check_spans(one.plan, one.timeline)


def test_recordings_may_be_nested() -> None:
    attention = MeshAttention(LocalGroup(RANKS), tile=(2, 2))
    with record(attention) as outer:
        run_both(attention, whole_inputs())
        with record(attention) as inner:
            run_both(attention, whole_inputs())
    assert len(inner.passes()) == 2
    assert len(outer.passes()) == 4


def test_a_pass_that_fails_is_told_as_ever_and_is_not_among_the_passes() -> None:
    group = LocalGroup(RANKS)
    is_broken = [False]
    comms = [Failing(group.comm(rank), lambda parcel: is_broken[0] and parcel.label == "o") for rank in range(RANKS)]
    attention = MeshAttention(comms, tile=(2, 2))
    q, k, v = (attention.shard(tensor) for tensor in whole_inputs())
    with record(attention) as recording:
        attention(q, k, v, causal=True)
        is_broken[0] = True
        with pytest.raises(TransportError, match="could not be posted: made to fail: o with rank"):
            attention(q, k, v, causal=True)
        is_broken[0] = False
        attention(q, k, v, causal=True)
    assert len(recording.passes()) == 2


def test_ranks_without_tokens_are_recorded_too() -> None:
    attention = MeshAttention(LocalGroup(RANKS), method="ring", layout="contiguous")
    q, k, v = (attention.shard(tensor[:, :2]) for tensor in whole_inputs())
    with record(attention) as recording:
        attention(q, k, v, seq_len=2)
    (one,) = recording.passes()
    assert [times.rank for times in one.timeline.ranks] == list(range(RANKS))
    assert {span.rank for span in one.timeline.spans} == {0, 1}


def test_passes_as_cuda_graphs_are_refused() -> None:
    attention = MeshAttention(LocalGroup(2))
    tensors = [list(rank) for rank in zip(*(attention.shard(tensor) for tensor in whole_inputs()), strict=True)]
    engine = attention.calls.engine(tensors, CallOptions())
    with pytest.raises(UsageError, match=r"record\(\) cannot look into CUDA graphs; use a Mesh"):
        Recording(attention.calls.session).observed(replace(engine, captured=object()), tensors[0][0].device)  # type: ignore[arg-type]


# Processes


def recorded_here(group: Any, options: dict[str, Any], delay_s: float, clock_s: float) -> list[RecordedPass]:
    """One of several processes; its clock may be off by this many seconds per rank, as on another machine."""
    comm = TorchComm(group)
    attention = MeshAttention(Delaying(comm, delay_s) if delay_s else comm, **options)
    q, k, v = (attention.shard(tensor).requires_grad_() for tensor in whole_inputs())
    saved = recording_module.time, recording_module._machine
    if clock_s:
        wrong = SimpleNamespace(perf_counter=lambda: time.perf_counter() + clock_s * comm.rank)
        recording_module.time = wrong  # type: ignore[assignment]
        recording_module._machine = lambda: f"machine {comm.rank // 2}"
    try:
        with record(attention) as recording:
            out = attention(q, k, v, causal=True, seq_len=TOKENS)
            torch.autograd.grad((out * out).sum(), (q, k, v))
        return list(recording.passes())
    finally:
        recording_module.time, recording_module._machine = saved  # type: ignore[assignment]


@pytest.mark.parametrize(
    "options", [METHODS[0], METHODS[3], METHODS[4], METHODS[7]], ids=[IDS[i] for i in (0, 3, 4, 7)]
)
def test_processes_tell_each_other_all_of_it(options: dict[str, Any]) -> None:
    first, *others = shared_pool().run(RANKS, recorded_here, options, 0.0, 0.0)
    assert all(other == first for other in others)
    for one in first:
        check_spans(one.plan, one.timeline)


def test_a_slow_network_is_seen_as_waiting_and_as_transfers_that_last() -> None:
    delay_s = 0.05
    passes = shared_pool().run(RANKS, recorded_here, {"method": "ring"}, delay_s, 0.0)[0]
    for one in passes:
        for span in one.timeline.spans:
            if span.lane in ("send", "recv"):
                assert span.stop_s - span.start_s >= delay_s
        assert all(times.stop_s - times.compute_s >= delay_s for times in one.timeline.ranks)
        assert one.timeline.time_s >= delay_s


def test_clocks_of_several_machines_are_set_by_a_meeting() -> None:
    passes = shared_pool().run(RANKS, recorded_here, {"tile": (2, 2)}, 0.0, 1000.0)[0]
    for one in passes:
        assert 0 < one.timeline.time_s < 100
        # Q groups are ranks 0, 1 and 2, 3; KV groups go from one machine to the other.
        kinds = {"inside": ("q", "do", "o", "dq"), "between": ("kv", "dkv")}
        for link_class, members in kinds.items():
            sent = [rank_costs(one.plan, rank).sent for rank in range(RANKS)]
            due = sum(nbytes.total for costs in sent for kind, nbytes in costs.items() if kind in members)
            assert one.timeline.sent_nbytes[link_class] == due  # type: ignore[index]


def differing_here(group: Any) -> str:
    comm = TorchComm(group)
    attention = MeshAttention(comm)
    q, k, v = (attention.shard(tensor) for tensor in whole_inputs())
    with record(attention) as recording:
        attention(q, k, v, seq_len=TOKENS)
    if comm.rank:
        recording.notes[0].clear()
    try:
        recording.passes()
    except UsageError as error:
        return str(error)
    return "nothing was said"


def test_ranks_that_recorded_different_calls_are_told_so() -> None:
    for said in shared_pool().run(2, differing_here):
        assert said == "ranks recorded [0, 1] passes; record the same calls on every rank"


def failing_here(group: Any) -> str:
    """A peer that sends nothing: the thread that waits hears of it, and so must the rank."""
    comm = TorchComm(group)

    class Broken:
        def is_done(self) -> bool:
            return False

        def wait(self) -> None:
            raise RuntimeError("the peer is gone")

    class Cut:
        rank, size, is_capturable = comm.rank, comm.size, False

        def post(self, sends: Any, recvs: Any) -> Any:
            return Broken()

        def share(self, text: str) -> Any:
            return comm.share(text)

    attention = MeshAttention(Cut())
    q, k, v = (attention.shard(tensor) for tensor in whole_inputs())
    with record(attention):
        try:
            attention(q, k, v, seq_len=TOKENS)
        except TransportError as error:
            return str(error)
    return "nothing was said"


def test_what_the_waiting_thread_hears_the_rank_is_told() -> None:
    for said in shared_pool().run(2, failing_here):
        assert re.search(r"rank \d, step \d+ .*: waited for .*: the peer is gone", said)
