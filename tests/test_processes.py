"""The production path with real processes over Gloo; one pool of workers for all of it."""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attending import CASES, counts_of, planners, relative_error, truth_of, wholes_of, widened, wrong_of
from delaying import Delaying
from pool import said, shared_pool
from run_ranks import RankError, RankPool
from serving_cases import cache_of
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention import TransportError, make_plan
from mesh_attention.api import MeshAttention, mesh_attention
from mesh_attention.comm.staged import StagedComm
from mesh_attention.comm.torch_dist import TorchComm
from mesh_attention.context_parallel import context_parallel
from mesh_attention.planners.costs import Costs
from mesh_attention.serving import ShardedCache
from mesh_attention.session.agreement import Statement
from mesh_attention_lab.testing.wrappers import Counting


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
@pytest.mark.parametrize(("turn", "name"), list(enumerate(CASES)), ids=CASES)
def test_every_feature_is_exact(pool: RankPool, turn: int, name: str, ranks: int) -> None:
    """Every planner meets every number of ranks and every feature, over the cases."""
    options = list(planners(ranks).values())
    for wrong in pool.run(ranks, wrong_of, options[(turn + ranks) % len(options)], CASES[name]):
        assert not wrong


def wrong_when_slow(group: Any) -> list[str]:
    return wrong_of(Delaying(TorchComm(group), 0.01), {"tile": (2, 2)}, CASES["causal"])


def test_a_slow_network_changes_nothing(pool: RankPool) -> None:
    for wrong in pool.run(4, wrong_when_slow):
        assert not wrong


def count_on_a_rank(group: Any, options: dict[str, Any]) -> tuple[Any, int]:
    comm = Counting(TorchComm(group))
    return counts_of(MeshAttention(comm, **options), widened(CASES["batch"], options)), comm.pass_ids


@pytest.mark.parametrize("ranks", [4, 6])
def test_bytes_on_the_wire_and_bytes_held_are_the_plans(pool: RankPool, ranks: int) -> None:
    for options in planners(ranks).values():
        for counts, pass_ids in pool.run(ranks, count_on_a_rank, options):
            assert all(counted == planned for counted, planned in counts)
            assert 0 < pass_ids < 2 * ranks  # in each pass, once to each rank that this one sends to


def use_the_function(group: Any) -> bool:
    call, size = CASES["causal"], dist.get_world_size(group)
    attention = MeshAttention(group)
    q, k, v = (attention.shard(t) for t in wholes_of(call)[:3])
    due = attention.shard(truth_of(call).out[0])
    settings: list[dict[str, Any]] = [{"tile": (1, size)}, {"planner": make_plan}, {"costs": Costs(kv=3.0)}]
    given = [mesh_attention(q, k, v, group=group, seq_len=call.seq_q, causal=True, **setting) for setting in settings]
    return all(relative_error(ours, due) <= 1e-12 for ours in given)


def exchange_meanwhile(group: Any, transport: Callable[[Any], Any]) -> None:
    """The caller's own messages are under way during a call and during `unshard`, which gathers as many bytes."""
    rank, tokens = dist.get_rank(group), 4
    attention, other = MeshAttention(transport(group)), 1 - rank
    q, k, v = (torch.full((1, tokens, 1, 8), float(rank)) for _ in range(3))
    due = attention.unshard(attention(q, k, v))
    for tag in range(3):
        own, theirs = torch.full((tokens * 8,), 9.0 + rank), torch.zeros(tokens * 8)
        receiving = dist.irecv(theirs, group_src=other, group=group, tag=tag)
        assert torch.equal(attention.unshard(attention(q, k, v)), due)
        sending = dist.isend(own, group_dst=other, group=group, tag=tag)
        assert receiving is not None
        assert sending is not None
        receiving.wait()
        sending.wait()
        assert torch.equal(theirs, torch.full((tokens * 8,), 9.0 + other))


@pytest.mark.parametrize("transport", [TorchComm, StagedComm])
def test_the_callers_own_messages_on_the_group_do_not_meet_ours(pool: RankPool, transport: Any) -> None:
    pool.run(2, exchange_meanwhile, transport)


def test_the_function_is_the_class(pool: RankPool) -> None:
    assert all(pool.run(4, use_the_function))


def die_in_the_middle(group: Any) -> None:
    """Rank 2 leaves when its second receive is posted; the others must not wait for ever."""
    import os

    from mesh_attention_lab.testing.wrappers import Failing

    comm = TorchComm(group)
    seen: list[str] = []

    def leave(parcel: Any) -> bool:
        seen.append(parcel.label)
        if comm.rank == 2 and len(seen) == 3:
            os._exit(7)
        return False

    attention = MeshAttention(Failing(comm, when=leave), method="ring", route="ring")
    q, k, v = (torch.randn(1, 8, 2, 4) for _ in range(3))
    attention(q, k, v)


def test_when_a_rank_dies_the_others_name_the_step_and_the_rank() -> None:
    with RankPool(3, group_timeout_s=20.0) as pool, pytest.raises(RankError) as caught:
        pool.run(3, die_in_the_middle)
    errors = {rank: (name, message) for rank, name, message in caught.value.errors}
    assert errors[2][0] == "ProcessDied"
    name, message = errors[0]
    assert name == "TransportError"
    assert message.startswith(
        "rank 2 does not answer: its process has ended or stopped. Rank 0 waits in forward pass 1, "
    )
    assert "step 0 'recv kv2 from 2'" in message
    assert message.endswith("; read the logs of the other ranks, and start the job again")
    assert "pair.cc" not in message  # the place in Gloo's sources


def test_a_pool_whose_ranks_cannot_start_says_why() -> None:
    with pytest.raises(RankError) as caught:
        RankPool(2, backend="nonsense")
    assert [rank for rank, _, _ in caught.value.errors] == [0, 1]
    assert "nonsense" in str(caught.value)


def test_a_pool_has_the_groups_and_the_environment_it_was_asked_for() -> None:
    with RankPool(3, sizes=(2, 3), environment={"MESH_ATTENTION_TRIED": "yes"}) as pool:
        assert pool.run(2, size_and_variable, "MESH_ATTENTION_TRIED") == [(2, "yes")] * 2
        with pytest.raises(RankError, match="KeyError: 1"):
            pool.run(1, size_and_variable, "MESH_ATTENTION_TRIED")


def fail_a_call(group: Any, is_caught: bool) -> None:
    with nullcontext() if not is_caught else suppress(KeyError), MeshAttention(group).session.call():
        raise KeyError


@pytest.mark.parametrize("is_caught", [True, False])
def test_a_shared_pool_whose_group_failed_is_replaced(is_caught: bool) -> None:
    before = shared_pool()
    assert shared_pool() is before
    with nullcontext() if is_caught else pytest.raises(RankError):
        before.run(2, fail_a_call, is_caught)
    assert shared_pool() is not before
    assert shared_pool().run(2, size_and_variable, "HOME") == [(2, os.environ.get("HOME"))] * 2


def size_and_variable(group: Any, name: str) -> tuple[int, str | None]:
    return dist.get_world_size(group), os.environ.get(name)


# Groups that cannot be used: of the process that this one was forked from, and destroyed ones


class Used:
    """An attention of a group and what was made with it, in all ways to talk to the other ranks."""

    def __init__(self, group: Any) -> None:
        self.group, self.attention = group, MeshAttention(group)
        self.x = torch.randn(1, 6, 4, 4, generator=torch.Generator().manual_seed(0))
        self.due = self.attention(self.x, self.x, self.x)
        self.out = self.attention(*[self.x.clone().requires_grad_()] * 3)
        self.caches = [cache_of(self.attention, dtype=torch.float32) for _ in range(2)]
        for cache in self.caches:
            cache.new()
            self.turn(cache)
            self.step(cache)

    def turn(self, cache: ShardedCache) -> None:
        turn = cache.prefill({0: 8})
        turn.attend(0, *map(turn.shard, self._new(8)))

    def step(self, cache: ShardedCache) -> None:
        cache.decode({0: 1}).attend(0, *self._new(1))

    def _new(self, tokens: int) -> list[torch.Tensor]:
        return [torch.randn(1, tokens, *sizes) for sizes in ((4, 4), (2, 4), (2, 3))]

    def trials(self) -> dict[str, Callable[[], object]]:
        x = self.x
        return {
            "known call": lambda: self.attention(x, x, x),
            "new call": lambda: self.attention(x, x, x, causal=True),
            "backward": lambda: self.out.sum().backward(),
            "unshard": lambda: self.attention.unshard(x),
            "turn": lambda: self.turn(self.caches[0]),
            "step": lambda: self.step(self.caches[1]),
            "agreement": lambda: self.attention.session.agree(Statement(must_match={"operation": "nothing"})),
            "new attention": lambda: MeshAttention(self.group, layout="striped")(x, x, x),
            "function": lambda: mesh_attention(x, x, x, group=self.group),
            "transport": lambda: MeshAttention(TorchComm(self.group))(x, x, x),
        }


def said_by_a_fork(call: Callable[[], object]) -> str:
    """What a call says in a child of this process, within two seconds."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, said(call).encode())
        os._exit(0)
    os.close(writer)
    has_answered = select.select([reader], [], [], 2.0)[0]
    answer = os.read(reader, 4000).decode() if has_answered else "nothing for two seconds"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    return answer


def use_in_forks(group: Any) -> dict[str, str]:
    used, answers = Used(group), {}
    trials = used.trials() | {"refused call": lambda: used.attention(used.x, used.x, used.x, casual=True)}
    for name, trial in trials.items():
        if dist.get_rank(group) == 0:
            answers[name] = said_by_a_fork(trial)
        assert torch.equal(used.attention(used.x, used.x, used.x), used.due)
    return answers


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_may_not_talk_on_the_group_of_its_parent(pool: RankPool, ranks: int) -> None:
    answers = pool.run(ranks, use_in_forks)[0]
    assert answers.pop("refused call").startswith("UsageError: unknown argument 'casual'")
    for name, answer in answers.items():
        is_alone = ranks == 1 and answer == "nothing was raised"  # nothing is sent
        assert is_alone or answer.startswith("UsageError: the group belongs to the process that this one"), name


def use_destroyed(group: Any, is_mesh: bool) -> dict[str, str]:
    new = dist.new_group([0, 1])  # all processes take part in this
    if dist.get_rank() > 1:
        return {}
    used = Used(new)
    if is_mesh:
        used.group = DeviceMesh.from_group(new, "cpu")
    dist.barrier(new)
    dist.destroy_process_group(new)
    return {name: said(trial) for name, trial in used.trials().items()}


@pytest.mark.parametrize("is_mesh", [False, True])
def test_a_destroyed_group_that_is_still_referred_to_is_refused(pool: RankPool, is_mesh: bool) -> None:
    for answers in pool.run(8, use_destroyed, is_mesh, timeout_s=30.0)[:2]:
        for name, answer in answers.items():
            assert answer.endswith("the process group was destroyed; create a new one, and a MeshAttention on it"), name
            assert answer.count("destroyed") == 1, name


# What a destroyed group leaves behind


def _watchdogs() -> int:
    return sum(thread.name == "mesh-attention watchdog" for thread in threading.enumerate())


def held_resources(group: Any, rounds: int) -> list[tuple[int, int]]:
    """Descriptors and threads of this process after each round of: create a group, use it in every way, destroy it."""
    counts: list[tuple[int, int]] = []
    for _ in range(rounds):
        new = dist.new_group([0, 1])  # all processes take part in this
        if dist.get_rank() > 1:
            continue
        before = _watchdogs()
        x = torch.randn(1, 2, 6, 4, requires_grad=True)
        held = MeshAttention(new, tensor_format="bhsd")
        held(x, x, x).sum().backward()
        mesh_attention(x, x, x, group=new, causal=True).sum().backward()
        mesh = DeviceMesh.from_group(new, "cpu", mesh_dim_names=("cp",))
        with context_parallel(mesh):
            torch.nn.functional.scaled_dot_product_attention(x, x, x).sum().backward()
        dist.destroy_process_group(new)
        del new, mesh
        gc.collect()
        end = time.monotonic() + 30.0
        while _watchdogs() > before and time.monotonic() < end:
            time.sleep(0.05)  # that of a destroyed group ends a moment later
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
        with pytest.raises(TransportError, match="the process group was destroyed; create a new one"):
            held(x[:1], x[:1], x[:1])
    return counts


@pytest.mark.skipif(sys.platform != "linux", reason="counts the entries of /proc/self")
def test_a_destroyed_group_leaves_no_descriptors_and_threads(pool: RankPool) -> None:
    for counts in pool.run(8, held_resources, 5)[:2]:
        assert all(last <= second for last, second in zip(counts[-1], counts[1], strict=True)), counts
