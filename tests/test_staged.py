"""Gloo with staging, on host memory: everything but the copies to and from a device, with real processes."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attending import CASES, both_passes, planners, wholes_of, widened
from pool import shared_pool
from run_ranks import RankError, RankPool

from mesh_attention.api import MeshAttention
from mesh_attention.comm.base import Parcel
from mesh_attention.comm.staged import CudaStage, HostStage, StagedComm
from mesh_attention.comm.torch_dist import START_AGAIN, TorchComm, comm_for
from mesh_attention.errors import ProblemError, TransportError


def bytes_of(number: int, size: int = 64) -> torch.Tensor:
    return torch.full((size,), number, dtype=torch.uint8)


# Copies that take their time, as those behind compute on a device do


class LateStage(HostStage):
    """Copies out only once all is posted, the first ones slowest."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_posted = threading.Event()
        self.were_posted: list[bool] = []

    def copy_out(self, chunk: torch.Tensor, queued: None) -> tuple[torch.Tensor, Callable[[], None]]:
        host, seconds = self.landing(chunk).fill_(255), self.seconds
        self.seconds /= 2

        def copy() -> None:
            self.were_posted.append(self.is_posted.wait(20))
            time.sleep(seconds)
            host.copy_(chunk)

        return host, copy


def send_late(group: Any) -> tuple[list[int], list[bool]]:
    """What arrived in eight turns whose copies take a while, and whether all were posted when they were copied."""
    comm, stage = StagedComm(group), LateStage(0.1)
    comm._stages[torch.device("cpu")] = stage
    landings = [bytes_of(0) for _ in range(8)]
    works = [
        comm.post([Parcel([bytes_of(number + 1)], 1 - comm.rank, "kv")], [Parcel([landing], 1 - comm.rank, "kv")])
        for number, landing in enumerate(landings)
    ]
    assert not any(work.is_done() for work in works)
    stage.is_posted.set()
    for work in works:
        work.wait()
        assert work.is_done()
    return [int(landing.unique()) for landing in landings], stage.were_posted


def test_posting_waits_for_no_copy_and_sends_wait_for_theirs() -> None:
    for arrived, were_posted in shared_pool().run(2, send_late):
        assert arrived == list(range(1, 9))
        assert were_posted == [True] * 8


class Told:
    """Stands in for torch.cuda, its streams and events, and chunks: writes down what each is told, and where."""

    def __init__(self, name: str, log: list[str], place: list[str]) -> None:
        self.name, self.log, self.place = name, log, place

    def __repr__(self) -> str:
        return self.name

    def __getattr__(self, verb: str) -> Callable[..., Told]:
        def tell(*others: object, **options: object) -> Told:
            where = f"{self.place[-1]}: " if verb == "copy_" else ""
            self.log.append(f"{where}{self.name}.{verb}({', '.join(map(str, (*others, *options)))})")
            return Told(f"event of {self.name}", self.log, self.place)

        return tell

    @contextmanager
    def stream(self, chosen: Told) -> Iterator[None]:
        self.place.append(chosen.name)
        yield
        self.place.pop()


def test_a_device_copies_on_streams_of_its_own_behind_what_was_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    place = ["compute"]
    cuda, out, back, copied, compute, chunk, host = (
        Told(name, log, place) for name in ("cuda", "out", "back", "copied", "compute", "chunk", "host")
    )
    streams = iter((out, back))
    monkeypatch.setattr(torch.cuda, "stream", cuda.stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(streams))
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: copied)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(CudaStage, "landing", lambda stage, chunk: host)
    stage: Any = CudaStage(torch.device("cuda:0"))
    queued = stage.mark()
    stage.copy_out(chunk, queued)[1]()
    stage.copy_in(host, chunk, queued)
    stage.settle()
    assert log == [
        "compute.record_event()",
        "out.wait_event(event of compute)",
        "out: host.copy_(chunk, non_blocking)",
        "copied.record(out)",
        "copied.synchronize()",
        "back.wait_event(event of compute)",
        "back: chunk.copy_(host, non_blocking)",
        "compute.wait_stream(back)",
    ]


# The same results


def bits_of(group: Any, transport: type, options: dict[str, Any]) -> list[torch.Tensor]:
    call = replace(widened(CASES["causal"], options), dtype="bfloat16")
    return both_passes(MeshAttention(transport(group), **options), wholes_of(call)[:4], causal=True, seq_len=call.seq_q)


def test_a_training_step_has_the_bits_it_has_without_staging() -> None:
    """In bfloat16, in which another order of merging would give other bits: so two runs give the same as well."""
    pool = shared_pool()
    for options in planners(4).values():
        staged, direct = (pool.run(4, bits_of, transport, options) for transport in (StagedComm, TorchComm))
        for ours, theirs in zip(staged, direct, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# Errors


def tell(call: Callable[[], Any]) -> str:
    start = time.monotonic()
    try:
        call()
    except TransportError as error:
        return f"{error}" if time.monotonic() - start < 30 else f"late: {error}"
    return "nothing was raised"


def lose_a_peer(group: Any) -> None:
    """Rank 2 leaves; rank 0 tells what each of its works says then, by raising it."""
    comm = StagedComm(group)
    hello = [
        comm.post([Parcel([bytes_of(1)], peer, "q")], [Parcel([bytes_of(0)], peer, "q")])
        for peer in {0, 1, 2} - {comm.rank}
    ]
    for work in hello:
        work.wait()
    if comm.rank == 2:
        os._exit(7)
    if comm.rank == 0:
        first = comm.post([], [Parcel([bytes_of(0)], 2, "kv")])
        second = comm.post([], [Parcel([bytes_of(0)], 1, "o")])
        told = [tell(first.wait), tell(second.wait), tell(first.wait)]
        told.append(tell(lambda: comm.post([Parcel([bytes_of(0)], 1, "o")], [])))
        hello[0].wait()  # over long ago
        raise RuntimeError(json.dumps(told))


def test_a_peer_that_died_is_named_by_everything_that_was_under_way() -> None:
    with RankPool(3, group_timeout_s=60.0) as pool, pytest.raises(RankError) as caught:
        pool.run(3, lose_a_peer)
    errors = {rank: (name, message) for rank, name, message in caught.value.errors}
    assert errors.keys() == {0, 2}
    told = json.loads(errors[0][1])
    assert len(told) == 4
    assert all(message.startswith("kv from rank 2: ") for message in told)


class BrokenStage(HostStage):
    def __init__(self) -> None:
        self.is_posted = threading.Event()

    def copy_out(self, chunk: torch.Tensor, queued: None) -> tuple[torch.Tensor, Callable[[], None]]:
        def copy() -> None:
            self.is_posted.wait(20)
            raise RuntimeError("the device is gone")

        return chunk.clone(), copy


def break_the_thread(group: Any) -> list[str]:
    comm, stage = StagedComm(group), BrokenStage()
    comm._stages[torch.device("cpu")] = stage
    sends = [comm.post([Parcel([bytes_of(0)], 1 - comm.rank, kind)], []) for kind in ("kv", "o")]
    stage.is_posted.set()
    told = [tell(send.wait) for send in sends]
    assert not any(send.is_done() for send in sends)
    return told


def test_what_goes_wrong_in_the_thread_is_raised_by_whoever_waits() -> None:
    for rank, told in enumerate(shared_pool().run(2, break_the_thread)):
        assert told == [f"kv to rank {1 - rank}: the device is gone; {START_AGAIN}"] * 2


# The thread, and what it holds


def leave_nothing(group: Any) -> dict[str, bool]:
    """Without the garbage collector: what is left to it may outlive the process group."""
    gc.collect()
    gc.disable()
    try:
        comm = StagedComm(group)
        before = set(threading.enumerate())
        comm.post([], []).wait()
        lazily = set(threading.enumerate()) == before
        peer = 1 - comm.rank
        chunk = bytes_of(1)
        work = comm.post([Parcel([chunk], peer, "kv")], [Parcel([bytes_of(0)], peer, "kv")])
        departure = weakref.ref(work.departures[0])
        work.wait()
        for _ in range(100):  # until the thread has turned to the next one, and waits for it
            if departure() is not None:
                time.sleep(0.1)
        (thread,) = set(threading.enumerate()) - before
        idle = departure() is None and thread.is_alive()
        gone = [weakref.ref(comm), weakref.ref(work), weakref.ref(chunk)]
        del comm, work, chunk
        freed = all(reference() is None for reference in gone)
        thread.join(5)
        return {"started lazily": lazily, "idle": idle, "freed": freed, "ended": not thread.is_alive()}
    finally:
        gc.enable()


def test_the_thread_ends_with_its_comm_and_keeps_nothing_alive() -> None:
    for answers in shared_pool().run(2, leave_nothing):
        assert answers == {"started lazily": True, "idle": True, "freed": True, "ended": True}


def fail_and_let_go(group: Any) -> bool:
    gc.collect()
    gc.disable()
    try:
        comm = StagedComm(group)
        comm._stages[torch.device("cpu")] = stage = BrokenStage()
        stage.is_posted.set()
        work = comm.post([Parcel([bytes_of(1)], 1 - comm.rank, "kv")], [])
        for _ in range(2):
            assert "the device is gone" in tell(work.wait)
        gone = weakref.ref(comm), weakref.ref(work)
        del comm, work
        return all(reference() is None for reference in gone)
    finally:
        gc.enable()


def test_an_error_keeps_nothing_alive() -> None:
    assert all(shared_pool().run(2, fail_and_let_go))


# Choosing


def choose(group: Any, config: str | None, make: Callable[[Any], Any]) -> str:
    if config is not None:
        dist.get_backend_config, kept = lambda group: config, dist.get_backend_config
    try:
        return type(make(group)).__name__
    except ProblemError as error:
        return str(error)
    finally:
        if config is not None:
            dist.get_backend_config = kept


@pytest.mark.parametrize(
    ("config", "device", "chosen"),
    [
        (None, "cpu", "TorchComm"),
        (None, "cuda:0", "StagedComm"),
        ("cpu:gloo", "cuda:0", "StagedComm"),
        ("cpu:gloo,cuda:nccl", "cuda:0", "TorchComm"),
        ("cpu:gloo,cuda:nccl", "cpu", "TorchComm"),
        ("cuda:nccl", "cuda:0", "TorchComm"),
    ],
)
def test_the_transport_is_chosen_by_the_groups_backend_for_the_device(
    config: str | None, device: str, chosen: str
) -> None:
    made = partial(comm_for, device=torch.device(device))
    assert shared_pool().run(1, choose, config, made) == [chosen]


def test_staging_without_gloo_is_refused() -> None:
    (message,) = shared_pool().run(1, choose, "cuda:nccl", StagedComm)
    assert message.startswith("StagedComm needs a group with Gloo for the CPU, such as cpu:gloo,cuda:nccl")


def meet(group: Any, devices: list[str]) -> list[str]:
    """Where ranks meet that share two texts and think themselves on these devices."""
    calls: list[str] = []
    kept = dist.all_reduce
    dist.all_reduce = lambda tensor, group: calls.append(str(tensor.device))
    try:
        comm = TorchComm(group, torch.device(devices[dist.get_rank(group)]))
        for text in "ab":
            assert comm.share(text).result() == [text] * comm.size
    finally:
        dist.all_reduce = kept
    return calls


def test_ranks_meet_on_their_device_once_if_all_are_on_one() -> None:
    pool = shared_pool()
    assert pool.run(2, meet, ["meta", "meta"]) == [["meta"]] * 2
    assert pool.run(2, meet, ["meta", "cpu"]) == [[]] * 2
    assert pool.run(2, meet, ["cpu", "cpu"]) == [[]] * 2
