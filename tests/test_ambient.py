"""What a program sets for all of torch (autocast, default dtype and device, modes) changes no number of the library.

Where the library stands for torch's own attention, the result is what that gives in the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from run_ranks import RankPool
from serving_cases import HEAD_DIM, HEADS, KV_HEADS, VALUE_DIM, cache_of
from test_context_parallel import mesh_of
from tiny_models import make_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import LocalGroup, MeshAttention
from mesh_attention.batches import shard_batch
from mesh_attention.context_parallel import context_parallel
from mesh_attention.errors import UsageError
from mesh_attention.transformers import parallelize

State = Callable[[], AbstractContextManager[Any]]


@contextmanager
def default_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def default_meta() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


STATES: dict[str, State] = {
    "nothing": torch.enable_grad,
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "default dtype float64": default_float64,
    "inference mode": torch.inference_mode,
    "deterministic algorithms": deterministic,
    "default device meta": default_meta,
}


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    random = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=torch.float64, device="cpu").to(dtype)


# What is called: everything but tensors is made inside the state


def attention(group: Any) -> list[Tensor]:
    found = []
    for on in (group, LocalGroup(1).comm(0)):
        for dtype, dim_v, given in (
            (torch.float32, 8, {"causal": True, "cu_seqlens_q": [0, 9, 24], "window_size": (5, -1)}),
            (torch.bfloat16, 8, {"causal": True}),
            (torch.float16, 5, {"softcap": 2.0}),
        ):
            called = MeshAttention(on)
            wholes = [numbers(1, 24, heads, dim, dtype=dtype) for heads, dim in ((4, 8), (2, 8), (2, dim_v))]
            q, k, v = (called.shard(x).requires_grad_() for x in wholes)
            out, lse = called(q, k, v, return_lse=True, seq_len=24, **given)
            found += [out, lse, called.unshard(out.detach()), called.position_ids(24, device=torch.device("cpu"))]
            if out.requires_grad:
                found += torch.autograd.grad([out, lse], [q, k, v], [torch.ones_like(out), torch.ones_like(lse)])
            else:
                found += [torch.zeros_like(x) for x in (q, k, v)]
    return [x.detach() for x in found]


def turns_and_steps(group: Any) -> list[Tensor]:
    found = []
    for dtype in (torch.float32, torch.float16):
        for window in (None, 4):
            cache = cache_of(MeshAttention(group), (window,), dtype=dtype)
            chats = [cache.new(), cache.new()]
            turn = cache.prefill({chats[0]: 9, chats[1]: 5})
            found += [*attended(turn, turn.shard, (1, 14), dtype), turn.position_ids]
            for new in ((1, 1), (2, 2), (1, 3)):
                step = cache.decode(dict(zip(chats, new, strict=True)))
                found += [*attended(step, lambda x: x, step.position_ids.shape, dtype), step.position_ids]
            cache.reserve(1000)
            step = cache.decode({chats[1]: 1}, queries="sharded")  # some ranks run none
            own = slice(step.rows(group.rank()).start, step.rows(group.rank()).stop)
            found += attended(step, lambda x, own=own: x[own], (1, 1), dtype)
            found += attended(turn := cache.prefill({cache.fork(chats[0]): 3}), turn.shard, (1, 3), dtype)
    return found


def attended(turn: Any, shard: Any, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    sides = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM))
    return list(turn.attend(0, *(shard(numbers(*shape, *side, dtype=dtype)) for side in sides), return_lse=True))


def compiled(group: Any) -> list[Tensor]:
    torch.compiler.reset()
    called, found = MeshAttention(group), []
    for cuts in (None, [0, 9, 24]):
        q, k, v = (called.shard(numbers(1, 24, heads, 8)).requires_grad_() for heads in (4, 2, 2))
        function = torch.compile(lambda *x, cuts=cuts: called(*x, causal=True, cu_seqlens_q=cuts), backend="aot_eager")
        out = function(q, k, v)
        found.append(out.detach())
        if out.requires_grad:
            found += torch.autograd.grad(out.sum(), [q, k, v])
        else:
            found += [torch.zeros_like(x) for x in (q, k, v)]
    refusing = torch.compile(lambda x: called(x, x, None), backend="aot_eager")
    with pytest.raises(UsageError):
        refusing(q.detach())
    return found


EXACT = {"attention": attention, "turns and steps": turns_and_steps, "torch.compile": compiled}


def same_numbers(group: Any, name: str, state: str) -> list[str]:
    """What is not the same inside the state, before and after something was kept from outside."""
    with STATES[state]():
        inside = EXACT[name](group)
    due, wrong = EXACT[name](group), []
    assert len(inside) == len(due)
    for number, (ours, theirs) in enumerate(zip(inside, due, strict=True)):
        if state == "inference mode" and not ours.any() and ours.shape == theirs.shape:
            continue  # gradients
        if ours.dtype != theirs.dtype or ours.device != theirs.device or not torch.equal(ours, theirs):
            wrong.append(f"{number}: {ours.dtype} {ours.device}, not {theirs.dtype} {theirs.device}, or other numbers")
    return wrong


@pytest.mark.parametrize("state", list(STATES)[1:])
@pytest.mark.parametrize("name", EXACT)
def test_numbers_are_the_same_in_every_state(pool: RankPool, name: str, state: str) -> None:
    assert pool.run(2, same_numbers, name, state) == [[], []]


# What stands for torch's attention


def seam_error(group: Any, state: str, is_inner: bool) -> float:
    """How far attention in a context is from torch's in the same state, in units of its rounding."""
    mesh, whole, results = mesh_of(group), numbers(1, 4, 24, 8), []
    shard = MeshAttention(mesh).shard
    for is_parallel in (False, True):
        x = whole.clone()
        with ExitStack() as entered:
            contexts: list[State] = [STATES[state]]
            if is_parallel:
                contexts.insert(0 if is_inner else 1, partial(context_parallel, mesh, buffers=[x], buffer_seq_dims=[2]))
            for context in contexts:
                entered.enter_context(context())
            leaf = x.detach().clone().requires_grad_()
            out = scaled_dot_product_attention(leaf, leaf, leaf, is_causal=True)
            gradients = torch.autograd.grad(out.float().sum(), [leaf]) if out.requires_grad else ()
        results.append([out.detach(), *gradients])
    error = 0.0
    for due, ours in zip(*results, strict=True):
        due = shard(due, dim=2)
        assert (ours.dtype, ours.device) == (due.dtype, due.device)
        error = max(error, float((ours.float() - due.float()).abs().max()) / torch.finfo(results[0][0].dtype).eps)
    return error


@pytest.mark.parametrize("is_inner", [True, False])
@pytest.mark.parametrize("state", STATES)
def test_torchs_attention_does_in_a_context_what_it_does_without(pool: RankPool, state: str, is_inner: bool) -> None:
    assert max(pool.run(2, seam_error, state, is_inner)) <= 40


def model_answers(group: Any, state: str) -> tuple[float, list[Any]]:
    """The largest difference of logits from those of the plain model in the same state, in units of rounding; and
    generated tokens: the plain model's, and the parallel one's."""
    ids = torch.randint(3, 29, (2, 20), generator=torch.Generator().manual_seed(0))
    plain, parallel = (make_model("llama", "sdpa").float().eval() for _ in range(2))
    batch = {"input_ids": ids}
    with STATES[state](), torch.no_grad():
        called = MeshAttention(group)
        parallelize(parallel, called)
        ours = called.unshard(parallel(**shard_batch(called, batch)).logits)
        due = plain(**batch).logits
        told: list[Any] = []
        beams = [{"num_beams": 2}] * ("meta" not in state)  # with which transformers' own search fails
        for given in (
            {},
            *beams,
            {"attention_mask": (torch.arange(20, device="cpu") > 3).expand(2, 20).long()},
        ):
            made = [
                m.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, **given) for m in (plain, parallel)
            ]
            told.append([tokens.tolist() for tokens in made])
        parallel.generate(ids, max_new_tokens=2, do_sample=True, pad_token_id=0)
    assert ours.dtype == due.dtype
    rounding = torch.finfo(
        torch.bfloat16 if "bfloat16" in state else torch.float16 if "float16" in state else due.dtype
    ).eps
    return float((ours - due).abs().max() / due.abs().max()) / rounding, told


@pytest.mark.parametrize("state", STATES)
def test_a_model_gives_what_it_gives_without_mesh_attention(pool: RankPool, state: str) -> None:
    for error, tokens in pool.run(2, model_answers, state):
        assert error <= 40
        assert all(ours == due for due, ours in tokens)
