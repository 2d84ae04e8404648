"""Calls on one group: ranks in different calls, other spellings of a call, calls after a failure, several threads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import strategies
import torch
import torch._dynamo  # as in pool.py: ranks that compile share its import
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from run_ranks import RankPool
from torch import Tensor

from mesh_attention import LocalGroup, MeshAttention
from mesh_attention.comm.torch_dist import TorchComm
from mesh_attention.errors import DisagreementError, MeshAttentionError, TransportError
from mesh_attention.session.session import Session
from mesh_attention_lab.testing.kernel_conformance import is_unmasked
from mesh_attention_lab.testing.wrappers import Counting

TOKENS, HEADS, DIM = 8, 4, 8


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as made:  # all of them take part in making a group
        yield made


@contextmanager
def new_group(of: Any, seconds: float = 30.0) -> Iterator[Any]:
    """A group of its own: a call that fails leaves it failed."""
    dist.barrier(of)  # on a busy machine, ranks import this file at very different times
    ranks = dist.get_process_group_ranks(of)
    made = dist.new_group(ranks, timeout=timedelta(seconds=seconds))
    yield made
    dist.destroy_process_group(made)


def inputs(seed: int, tokens: int = TOKENS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, tokens, HEADS, DIM, generator=generator, dtype=torch.float64) for _ in range(3)]


def outcome(call: Callable[[], object]) -> str:
    """What a call raised, or that it returned a result."""
    try:
        call()
    except MeshAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return "a result"


METHODS: list[dict[str, Any]] = [
    {"method": "ring"},
    {"tile": (2, 2)},
    {"tile": (1, 2), "ulysses_degree": 2},
    {"method": "attention2d", "tile": (2, 2)},
]


def make_different_calls(group: Any, options: dict[str, Any], what: str) -> str:
    """All ranks know both calls; then one rank makes the other one, or makes one call less."""
    is_odd = dist.get_rank(group) == 1
    with new_group(group, 10.0) as made:
        attention = MeshAttention(made, **options)
        q, k, v = (tensor.requires_grad_() for tensor in inputs(dist.get_rank(group)))
        for causal in (True, False):
            attention(q, k, v, causal=causal).sum().backward()
        if what == "mask":
            return outcome(lambda: attention(q, k, v, causal=is_odd))
        if what == "length":
            half = [tensor[:, : TOKENS // 2] for tensor in (q, k, v)]
            attention(*half)
            return outcome(lambda: attention(*(half if is_odd else (q, k, v))))
        if what == "order of backward":
            first, second = (attention(q, k, v, causal=True) for _ in range(2))
            return outcome(lambda: (second if is_odd else first).sum().backward())
        if what == "order of compiled backward":
            compiled = torch.compile(lambda *given: attention(*given, causal=True), backend="aot_eager")
            first, second = (compiled(q, k, v) if is_odd else attention(q, k, v, causal=True) for _ in range(2))
            first.sum().backward(retain_graph=True)
            return outcome(lambda: (first if is_odd else second).sum().backward())
        out = attention(q, k, v)
        if what == "backward":  # one rank goes on to the next call instead
            return outcome(lambda: attention(q, k, v) if is_odd else out.sum().backward())
        if is_odd:
            attention(q.detach(), k.detach(), v.detach()) if what == "other gradient" else None
        return outcome(lambda: attention(q, k, v))


@pytest.mark.parametrize("what", ["mask", "length", "backward", "order of backward"])
@pytest.mark.parametrize("options", METHODS, ids=str)
def test_ranks_in_different_calls_raise(pool: RankPool, options: dict[str, Any], what: str) -> None:
    answers = pool.run(4, make_different_calls, options, what)
    assert not any(answer == "a result" for answer in answers)
    assert "DisagreementError: " in "".join(answers)
    assert "every rank must make the same calls in the same order" in "".join(answers)


def test_compiled_code_knows_which_forward_a_backward_belongs_to(pool: RankPool) -> None:
    answers = pool.run(4, make_different_calls, {"method": "ring"}, "order of compiled backward")
    assert not any(answer == "a result" for answer in answers)
    assert "DisagreementError: " in "".join(answers)


SPELLINGS: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": True, "softmax_scale": DIM**-0.5},
    {"window_size": (-1, 0)},
    {"window_size": (4 * TOKENS, 0)},
    {"causal": True, "seq_len": 4 * TOKENS},
    {"causal": True, "cu_seqlens_q": [0, 4 * TOKENS]},
    {"causal": True, "cu_seqlens_q": [0, 0, 4 * TOKENS, 4 * TOKENS]},
    {"causal": True, "cu_seqlens_q": torch.tensor([0, 4 * TOKENS]), "cu_seqlens_k": (0, 4 * TOKENS)},
]


def spell_differently(group: Any) -> list[Tensor]:
    attention = MeshAttention(group)
    mine = inputs(dist.get_rank(group))
    outs = [attention(*mine, causal=True)]
    outs += [attention(*mine, **SPELLINGS[(i + dist.get_rank(group)) % len(SPELLINGS)]) for i in range(len(SPELLINGS))]
    assert len(attention.calls.engines) == 1
    return outs


def test_the_same_call_may_be_spelled_differently(pool: RankPool) -> None:
    for outs in pool.run(4, spell_differently):
        assert all(torch.equal(out, outs[0]) for out in outs)


def fail_in_mid_call(group: Any) -> list[str]:
    """Rank 0 runs out of memory in mid-call, catches that, and goes on with the next batch."""
    rank = dist.get_rank(group)
    answers = []
    with new_group(group, 5.0) as made:
        attention = MeshAttention(made, method="ring")
        attention(*inputs(rank))
        (engine,) = attention.calls.engines.values()
        kernel = engine.kernel_for(torch.device("cpu"), lse_gradient=False)
        if rank == 0:
            (key,) = engine.kernels
            engine.kernels[key] = OutOfMemory(kernel)  # type: ignore[assignment]
        try:
            attention(*inputs(10 + rank))
        except (torch.OutOfMemoryError, MeshAttentionError) as error:
            answers.append(type(error).__name__)
        if rank == 0:
            engine.kernels[key] = kernel
        answers += [outcome(lambda: attention(*inputs(20 + rank)))]
        answers += [outcome(lambda: MeshAttention(made)(*inputs(20 + rank)))]
        answers += [outcome(lambda: MeshAttention(made).unshard(inputs(rank)[0]))]
    with new_group(group) as made:
        answers += [outcome(lambda: MeshAttention(made)(*inputs(rank)))]
    return answers


class OutOfMemory:
    """A kernel that fails at its second call."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.calls, self.name = kernel, 0, kernel.name

    def forward(self, *given: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise torch.OutOfMemoryError("made to fail")
        return self.kernel.forward(*given)


def test_a_group_whose_call_failed_stays_failed(pool: RankPool) -> None:
    for rank, answers in enumerate(pool.run(4, fail_in_mid_call)):
        *failed, recovered = answers
        if rank == 0:
            assert failed.pop(0) == "OutOfMemoryError"
        assert all("TransportError" in answer for answer in failed)
        assert "an earlier call on this group failed" in failed[-1]
        assert "torch.distributed.new_group" in failed[-1]
        assert recovered == "a result"


def test_one_rank_goes_on_after_a_failure() -> None:
    """It has sent nothing that could meet a later call."""
    attention = MeshAttention(LocalGroup(1).comm(0))
    with pytest.raises(torch.OutOfMemoryError), attention.session.call():
        raise torch.OutOfMemoryError
    attention(*inputs(0), cu_seqlens_q=[0, 3, TOKENS])


def use_threads(attentions: list[MeshAttention], given: Callable[[int], Any], calls: int) -> list[Any]:
    """Results of calls that two threads make at the same time."""
    with ThreadPoolExecutor(2) as threads:
        asked = [
            threads.submit(attentions[i % len(attentions)], *given(i), causal=bool(i % 3), return_lse=True)
            for i in range(calls)
        ]
        return [future.result() for future in asked]


def test_threads_may_share_a_local_group() -> None:
    group = LocalGroup(4)

    def given(i: int) -> list[list[Tensor]]:
        return [list(tensor.chunk(4, dim=1)) for tensor in inputs(i, 64)]

    attentions = [MeshAttention(group), MeshAttention(group, method="ring")]
    alone = [attentions[i % 2](*given(i), causal=bool(i % 3))[0] for i in range(40)]
    together = use_threads(attentions, given, 40)
    assert all(torch.equal(outs[0], due) for (outs, _), due in zip(together, alone, strict=True))


def use_threads_on_a_rank(group: Any) -> list[str]:
    rank = dist.get_rank(group)
    with new_group(group) as made:
        attention = MeshAttention(made)
        answers = [outcome(lambda: attention(*inputs(rank)))]
        with ThreadPoolExecutor(1) as thread:
            answers.append(thread.submit(outcome, lambda: attention(*inputs(rank))).result())
        return [*answers, outcome(lambda: attention(*inputs(rank)))]


def test_a_second_thread_on_a_real_rank_is_refused(pool: RankPool) -> None:
    """Threads make their calls in an order that no rank controls."""
    for first, second, third in pool.run(4, use_threads_on_a_rank):
        assert first == "a result"
        assert second.startswith("UsageError: threads MainThread and ThreadPoolExecutor")
        assert "give each thread its own group" in second
        assert third.startswith("TransportError: an earlier call on this group failed")


# Marks on a device


def compare_on_the_device(group: Any, what: str) -> tuple[list[bool], str]:
    """As on NCCL: nothing is compared until the pass ends. In a 2x2 tile, rank 2 hears nothing from rank 1."""
    rank = dist.get_rank(group)
    with new_group(group, 10.0) as made:
        comm = TorchComm(made)
        comm.is_capturable = True
        attention = MeshAttention(Counting(comm), tile=(2, 2))
        with torch.inference_mode():
            outs = [attention(*inputs(rank), softmax_scale=scale) for scale in (None, 0.5)]
        leaves = [tensor.requires_grad_() for tensor in inputs(rank)]
        outs += torch.autograd.grad(attention(*leaves).sum(), leaves)
        if what == "call":
            spoilt = attention(*inputs(rank), softmax_scale=0.5 if rank == 1 else None, return_lse=True)
        else:
            both = [attention(*leaves) for _ in range(2)]
            spoilt = torch.autograd.grad(both[rank == 1].sum(), leaves)
        are_right = not any(out.isnan().any() for out in outs)
        return [are_right, all(bool(out.isnan().all()) for out in spoilt)], outcome(lambda: attention(*inputs(rank)))


@pytest.mark.parametrize("what", ["call", "order of backward"])
def test_a_device_that_sees_another_mark_spoils_the_results_of_all_ranks(pool: RankPool, what: str) -> None:
    for answers, raised in pool.run(4, compare_on_the_device, what):
        assert answers == [True, True]
        assert raised.startswith("TransportError: an earlier call on this group failed")
        # On a busy machine, ranks that answer late are not among those that are named, and perhaps nobody is.
        named = "rank 1 makes a different call from ranks? [023](, [023])*|rank [23] makes a different call from rank 1"
        who = f"({named}) in pass 5|ranks made different calls" if what == "call" else "ranks made different calls"
        assert re.search(f"an earlier call on this group failed: ({who})", raised), raised


def test_a_refusal_does_not_fail_a_group() -> None:
    session = Session(TwoRanks())
    with pytest.raises(DisagreementError), session.call(DisagreementError):
        raise DisagreementError("refused before anything was sent")
    with pytest.raises(KeyboardInterrupt), session.call(DisagreementError):
        raise KeyboardInterrupt
    with pytest.raises(TransportError, match="KeyboardInterrupt"), session.call():
        pass


class TwoRanks:
    """A transport as seen by one of two ranks; nothing is sent."""

    rank, size, is_capturable = 0, 2, False

    def share(self, text: str) -> Any:
        raise AssertionError("nothing is to be sent")

    post = share


@given(st.data(), st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=200)
def test_the_simplest_form_of_a_mask_leaves_the_same_pairs(data: st.DataObject, seq_q: int, seq_kv: int) -> None:
    mask = data.draw(strategies.masks(seq_q, seq_kv))
    simple = mask.within(seq_q, seq_kv)
    for q, kv in product(range(seq_q), range(seq_kv)):
        assert is_unmasked(mask, q, kv, seq_q, seq_kv) == is_unmasked(simple, q, kv, seq_q, seq_kv)
