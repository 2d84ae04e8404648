"""Prompts in chunks and turns, and decoding, over a cache spread over ranks: equal to one process's attention."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from campaign.lives import lives, lives_on_rank
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import shared_pool
from serving_cases import HEAD_DIM, HEADS, KV_HEADS, VALUE_DIM, Model, cache_of, layers_of
from strategies import plans_of
from torch import Tensor

from mesh_attention import DisagreementError, LocalGroup, MeshAttention
from mesh_attention.arguments import TensorKind
from mesh_attention.errors import CacheFullError, UsageError
from mesh_attention.execution.compiled import Compiled, compile_program, stretched
from mesh_attention.plan.layout import Zigzag
from mesh_attention.plan.plan import rank_costs
from mesh_attention.serving import ShardedCache, Step, Turn
from mesh_attention.serving.book import Shares, clip
from mesh_attention.serving.step_runner import MOST_STEPS
from mesh_attention_lab.recording import record
from mesh_attention_lab.testing.wrappers import Counting


def test_random_lives_equal_one_processs_attention() -> None:
    """A share of `make lives`."""
    assert lives(range(120), None) == []


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_lives_on_processes_do_too(ranks: int) -> None:
    assert shared_pool().run(ranks, lives_on_rank, 1000 * ranks, 15, ranks) == [[]] * ranks


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 5),
    st.sampled_from([None, 4]),
    st.sampled_from([0.0, 2.0]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([torch.nan, torch.inf]),
)
def test_a_spoiled_sequence_stays_alone(
    ranks: int, window: int | None, softcap: float, dtype: torch.dtype, value: float
) -> None:
    """In turns and steps, also those of its fork, and when its memory goes to another."""
    clean, beside = (kept_of(ranks, window, softcap, dtype, spoilt) for spoilt in (None, value))
    assert all(map(torch.equal, clean, beside))


def kept_of(ranks: int, window: int | None, softcap: float, dtype: torch.dtype, value: float | None) -> list[Tensor]:
    """Outputs and LSEs of all sequences but one, whose numbers are `value`, and its fork."""
    cache = cache_of(ranks, (window,), dtype=dtype, sequences=5, block_tokens=3)
    generator, found = torch.Generator().manual_seed(0), []
    first, bad, last = (cache.new() for _ in range(3))
    spoiled = {bad}

    def attend(turn: Turn | Step, new: dict[int, int]) -> None:
        owners = torch.cat([torch.full((tokens,), number in spoiled) for number, tokens in new.items()])
        sides = [
            torch.randn(len(owners), heads, dim, generator=generator).to(dtype)
            for heads, dim in ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM))
        ]
        if value is not None:
            for side in sides:
                side[owners] = value
        shape = (1, -1) if isinstance(turn, Turn) else turn.position_ids.shape
        given = [x.reshape(*shape, *x.shape[1:]) for x in (*sides, owners)]
        *local, masks = (turn.shard(x) if isinstance(turn, Turn) else [x] * ranks for x in given)
        outs, lses = turn.attend(0, *local, softcap=softcap, return_lse=True)
        for out, lse, mask in zip(outs, lses, masks, strict=True):
            found.extend((out[~mask], lse.transpose(1, 2)[~mask]))

    for new in ({first: 7, bad: 9, last: 5}, {first: 4, bad: 1, last: 2}):
        attend(cache.prefill(new), new)
    twins = [cache.fork(number) for number in (first, bad)]
    spoiled.add(twins[1])
    for tokens in (1, 2):
        new = dict.fromkeys((first, *twins, bad, last), tokens)
        attend(cache.decode(new), new)
    new = {first: 1, twins[1]: 3, bad: 2, twins[0]: 1}
    attend(cache.decode(new), new)
    for number in spoiled:
        cache.remove(number)
    new = {cache.new(): 6, last: 1}
    attend(cache.prefill(new), new)
    attend(cache.decode(new), new)
    return found


def test_a_prompt_of_the_same_length_is_planned_once() -> None:
    cache = cache_of(3, (None, 3))
    model = Model(cache)
    for length in (20, 20, 31, 20):
        number = model.new()
        model.prefill({number: length})
        cache.remove(number)
    assert len(cache.attention.calls.turn_engines) == 4  # two lengths, two windows
    assert not cache.attention.calls.engines
    assert model.error < 1e-12


def test_a_turn_with_a_longer_past_takes_the_plan_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until pasts have doubled. The turns of windows are not told apart from others of their layout."""
    model = Model(cache_of(3, [None, None], tokens=999))
    chats = [model.new(), model.new()]
    model.prefill(dict.fromkeys(chats, 3 * 64))
    compiled = []
    monkeypatch.setattr(
        "mesh_attention.execution.call.compile_program",
        lambda plan, rank: compiled.append(rank) or compile_program(plan, rank),  # type: ignore[func-returns-value]
    )
    for turn in range(8):
        model.prefill(dict(zip(chats, (6, 9), strict=True)))
        model.decode(chats, 3)
        assert compiled == [0, 1, 2], turn
    model.prefill({chats[0]: 6})
    assert compiled == [0, 1, 2] * 2
    assert model.error < 1e-12


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_stretched_program_is_the_one_of_the_longer_turn(data: st.DataObject) -> None:
    """Whether or not keys that all queries see get calls of their own, which depends on how many there are."""
    ranks = data.draw(st.integers(1, 8))
    layout = data.draw(st.sampled_from(["zigzag", "striped", "contiguous", "chunks"]))
    cache = cache_of(MeshAttention(LocalGroup(ranks), layout=layout), tokens=999, dtype=torch.bfloat16)
    chats = [cache.new() for _ in range(data.draw(st.integers(1, 3)))]
    for chat in chats:
        for tokens in data.draw(st.lists(st.integers(1, 40), max_size=3)):
            cache.book.extend({chat: tokens}, is_decoded=data.draw(st.booleans()))
    turn = cache.prefill({chat: data.draw(st.integers(1, 20)) for chat in chats})
    view = turn._view(None)
    kinds = [TensorKind((1, 1, heads, 4), torch.bfloat16, torch.device("cpu")) for heads in (4, 2, 2)]
    problem, typical = (call.options.checked().problem(*kinds, ranks=ranks) for call in (view.call, view.typical))
    typical_plan = data.draw(plans_of(typical, view.typical.layout, "forward"))
    rank, many = data.draw(st.integers(0, ranks - 1)), data.draw(st.sampled_from([1e-9, 1e9]))
    with mock.patch("mesh_attention.plan.kernel_calls.MANY_KEYS", many):
        plan = replace(typical_plan, problem=problem, layout=view.call.layout)
        found, due = stretched(compile_program(typical_plan, rank), plan), compile_program(plan, rank)
    assert comparable(found) == comparable(due)
    assert (found.peak_nbytes, found.device_nbytes) == (due.peak_nbytes, due.device_nbytes)


def comparable(compiled: Compiled) -> list[object]:
    """All that a program says; masks are otherwise compared by identity."""
    calls = [call for instruction in compiled.instructions for call in instruction.calls]
    return [
        *(getattr(compiled, field.name) for field in fields(compiled) if field.name != "instructions"),
        *(replace(instruction, calls=()) for instruction in compiled.instructions),
        *(replace(call, mask=None) for call in calls),  # type: ignore[arg-type]
        *(getattr(call.mask, field.name) for call in calls for field in fields(call.mask)),
    ]


def test_a_plan_does_not_see_in_how_many_pieces_keys_were_cached() -> None:
    cache = cache_of(3, (None, 3))
    model = Model(cache)
    chats = [model.new(), model.new()]
    segments = []
    for _ in range(9):
        model.prefill(dict.fromkeys(chats, 7))
        turn = cache.prefill(dict.fromkeys(chats, 7))
        segments.append(sum(map(len, turn.layout().kv.along("col", None).shards)))  # type: ignore[arg-type, attr-defined]
        for chat in chats:
            cache.truncate(chat, cache.length(chat) - 7)
    assert max(segments) == segments[0]
    assert model.error < 1e-12


def test_a_recording_ends_with_its_block_also_for_turns() -> None:
    cache = cache_of(3, (None, 3))
    number = cache.new()
    turn = cache.prefill({number: 20})
    q, k, v = (
        turn.shard(torch.randn(1, 20, heads, dim, dtype=torch.float64))
        for heads, dim in ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM))
    )
    with record(cache.attention) as recording:
        turn.attend(0, q, k, v)
    turn.attend(1, q, k, v)
    cache.remove(number)
    again = cache.prefill({cache.new(): 20})
    again.attend(0, q, k, v)
    assert len(recording.passes()) == 1


def test_autocast_does_not_reach_a_turn_or_a_step() -> None:
    model = Model(cache_of(3, (None, 3), dtype=torch.float32))
    chat = model.new()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.prefill({chat: 20})
        model.decode([chat], 2)
    assert model.error < 1e-5


# Processes


def serve(group: Any, seed: int, windows: Sequence[int | None], layout: str) -> float:
    """A conversation of two sequences on real ranks; this rank's largest error."""
    attention = MeshAttention(group, layout=layout)  # type: ignore[arg-type]
    cache = cache_of(attention, windows, block_tokens=4)
    model = Model(cache, softcap=1.5, seed=seed)
    first, second = model.new(), model.new()
    model.prefill({first: 37, second: 3})
    model.decode([first, second], queries="replicated", combine="reduce_scatter")
    model.decode([first, second], 3, queries="sharded")
    model.prefill({second: 20})
    copy = model.fork(first)
    model.decode([copy, second], 2, queries="replicated", combine="all_gather")
    model.truncate(copy, cache.length(copy) - 1 if windows == (None,) else cache.length(copy))
    model.decode([first, second, copy], 1)
    model.prefill({first: 9, copy: 1})
    return model.error


@pytest.mark.parametrize(
    ("ranks", "layout", "windows"), [(2, "zigzag", (None,)), (3, "striped", (None, 6)), (4, "zigzag", (4, None))]
)
def test_real_ranks_give_the_same(ranks: int, layout: str, windows: tuple[int | None, ...]) -> None:
    assert max(shared_pool().run(ranks, serve, ranks, windows, layout)) < 1e-12


DIFFERENCES = (
    *("tokens", "softcap", "scale", "heads", "layers swapped", "dtype"),
    *("sequences swapped", "forks swapped", "caches swapped"),
    *("sequences swapped in a turn", "forks swapped in a turn", "caches swapped in a turn"),
    *(
        "heads in a known turn",
        "softcap in a known turn",
        "layers swapped in a known turn",
        "sequences swapped in a known turn",
    ),
)


def do_something_else(_: Any, difference: str) -> str | None:
    """Two ranks whose steps or turns differ in one thing. Unless it is the heads, their transfers have equal sizes."""
    group = dist.new_group([0, 1])  # of no use afterwards
    if dist.get_rank() > 1:
        return None
    is_other = dist.get_rank(group) == 1
    differs = {name: is_other and difference.startswith(name) for name in DIFFERENCES}
    is_known = difference.endswith("known turn")
    dtype = torch.bfloat16 if differs["dtype"] else torch.float16
    attention = MeshAttention(group)
    caches = [cache_of(attention, [None, None], tokens=64, dtype=dtype) for _ in range(2)]
    heads = 2 if differs["heads"] else 4
    shapes = ((heads, 4), *SHAPES[1:])
    try:
        chats = [[cache.new(), cache.new()] for cache in caches]
        for cache, both in zip(caches, chats, strict=True):
            if difference == "dtype":  # a turn would notice before the step
                break
            first = cache.prefill(dict.fromkeys(both, 20))  # a rank's 10 and 12 tokens are 8 to plans
            for layer in range(2):
                first.attend(layer, *(first.shard(torch.zeros(1, 40, n, dim, dtype=dtype)) for n, dim in SHAPES))
            both.append(cache.fork(both[0]))
        cache = caches[differs["caches swapped"]]
        pair = [chats[0][0], chats[0][2 if difference.startswith("forks") else 1]]
        order = pair[::-1] if differs["sequences swapped"] or differs["forks swapped"] else pair
        if is_known:
            turn = cache.prefill(dict.fromkeys(pair, 4))
            for layer in range(2):
                turn.attend(layer, *(turn.shard(torch.zeros(1, 8, n, dim, dtype=dtype)) for n, dim in SHAPES))
        if difference.endswith("turn"):
            turn = cache.prefill(dict.fromkeys(order, 4))
            local = [turn.shard(torch.zeros(1, 8, n, dim, dtype=dtype)) for n, dim in shapes]
            turn.attend(int(differs["layers swapped"]), *local, softcap=float(differs["softcap"]))
        else:
            step = cache.decode(dict.fromkeys(order, 1))
            step.fingerprint = 7 + differs["tokens"]
            step.attend(
                int(differs["layers swapped"]),
                *(torch.zeros(2, 1, n, dim, dtype=dtype) for n, dim in shapes),
                softcap=1.0 + differs["softcap"],
                softmax_scale=1.0 + differs["scale"],
            )
    except DisagreementError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_ranks_whose_steps_or_turns_differ_raise(difference: str) -> None:
    for said in shared_pool().run(8, do_something_else, difference)[:2]:
        assert "differ" in str(said), said


# Bytes


@given(st.integers(1, 12), st.integers(1, 2000), st.integers(1, 5), st.integers(1, 4), st.sampled_from([1, 16, 64]))
def test_a_rank_holds_its_share_of_the_tokens_and_a_block_a_sequence(
    ranks: int, tokens: int, sequences: int, layers: int, block: int
) -> None:
    cache = cache_of(ranks, [None] * layers, tokens=tokens, sequences=sequences, block_tokens=block)
    a_token = layers * 2 * (4 + 3) * 8
    share = -(-tokens // ranks)
    # Besides the share: a block a sequence, one that is not full, and one for what other ranks hold.
    assert share * a_token <= cache.nbytes <= (share + (sequences + 2) * block) * a_token
    assert cache.nbytes == sum(t.nbytes for stored in cache.memories[0].stored for t in stored)
    sizes = {"tokens": tokens, "sequences": sequences, "dtype": torch.float64, "block_tokens": block}
    assert cache.nbytes == ShardedCache.required_nbytes(cache.layers, ranks=ranks, **sizes)


@settings(deadline=None)
@given(st.integers(1, 9), st.lists(st.tuples(st.booleans(), st.integers(1, 40)), min_size=1, max_size=8))
def test_ranks_differ_by_at_most_a_token_and_every_position_has_a_home(
    ranks: int, runs: list[tuple[bool, int]]
) -> None:
    shares = Shares(ranks)
    for is_decoded, tokens in runs:
        counts = shares.counts()
        shares = shares.decoded(tokens, counts) if is_decoded else shares.appended(tokens, Zigzag(), counts)
    counts = shares.counts()
    assert max(counts) - min(counts) <= 1
    segments = [shares.segments(rank) for rank in range(ranks)]
    assert sorted(p for shard in segments for s in shard for p in s) == list(range(shares.length))
    assert all(list(chain.from_iterable(shard)) == sorted(chain.from_iterable(shard)) for shard in segments)
    half = shares.truncate(shares.length // 2)
    assert [half.segments(rank) for rank in range(ranks)] == [clip(shard, 0, half.length) for shard in segments]


@pytest.mark.parametrize(
    ("queries", "combine"),
    [("replicated", "all_gather"), ("replicated", "reduce_scatter"), ("sharded", "reduce_scatter")],
)
@pytest.mark.parametrize(("ranks", "new_tokens"), [(1, 1), (3, 2), (8, 1)])
def test_a_step_sends_the_bytes_of_its_plan(ranks: int, new_tokens: int, queries: str, combine: str) -> None:
    group = LocalGroup(ranks)
    counting = [Counting(group.comm(rank)) for rank in range(ranks)]
    cache = cache_of(MeshAttention(counting), sequences=5)
    model = Model(cache)
    sequences = [model.new() for _ in range(5)]
    model.decode(sequences, new_tokens, queries=queries, combine=combine)
    assert model.error < 1e-12
    (steps,) = cache.steps.by_shape.values()
    due = [rank_costs(steps.plan, rank).sent_nbytes for rank in range(ranks)]
    assert [comm.sent_nbytes.total() for comm in counting] == due


@pytest.mark.parametrize("other", [{"kv_heads": 1}, {"head_dim_v": 5}], ids=str)
def test_layers_that_differ_in_keys_or_values_only_do_not_share_an_engine(other: dict[str, int]) -> None:
    """Query heads and scores of both layers are the same, in one turn."""
    (layer,) = layers_of([None])
    cache = ShardedCache(
        MeshAttention(LocalGroup(3)),
        [layer, replace(layer, **other), layer],
        tokens=99,
        dtype=torch.float64,
        device="cpu",
    )
    model = Model(cache)
    chat = model.new()
    model.prefill({chat: 40})  # compared with dense attention
    model.prefill({chat: 7})
    assert model.error < 1e-12


def test_windows_drop_what_no_query_can_see() -> None:
    cache = cache_of(2, tokens=1000, windows=[None, 8], block_tokens=4, sequences=1)
    model = Model(cache)
    chat = model.new()
    for tokens in (100, 200, 100):
        model.prefill({chat: tokens})
    for _ in range(20):
        model.decode([chat])
    tables = cache.book.entry(chat).tables
    assert len(tables[None].blocks) == 420 // 2 // 4 + 1
    assert len(tables[8].blocks) <= 4
    assert model.error < 1e-12


def test_removed_sequences_give_all_blocks_back() -> None:
    cache = cache_of(3, windows=[None, 5], block_tokens=2)
    model = Model(cache)
    chats = [model.new(), model.new()]
    model.prefill({chats[0]: 31, chats[1]: 8})
    chats.append(model.fork(chats[0]))
    model.decode(chats)
    model.truncate(chats[1], 9)
    for chat in chats:
        cache.remove(chat)
    assert all(pool.free == pool.size for pool in cache.book.pools.values())


def test_a_cache_that_grows_keeps_what_it_holds() -> None:
    cache = cache_of(3, tokens=40, sequences=1, block_tokens=4, windows=[None, 5])
    model = Model(cache)
    chat = model.new()
    model.prefill({chat: 38})
    with pytest.raises(CacheFullError, match=r"make room with cache\.reserve"):
        cache.prefill({chat: 60})
    cache.reserve(200, 2)
    model.prefill({chat: 60})
    model.decode([chat, model.new()], 2)
    assert model.error < 1e-12


def test_a_cache_is_released_with_the_last_reference() -> None:
    """Left to the garbage collector, its graphs might go while another one is captured."""
    cache = cache_of(2)
    model = Model(cache)
    chat = model.new()
    model.prefill({chat: 9})
    model.decode([chat])
    (steps,) = cache.steps.by_shape.values()
    gone = [ref(cache), ref(steps), ref(next(iter(cache.steps.layers.values())))]
    gc.disable()
    try:
        del model, cache, steps
        assert [one() for one in gone] == [None] * 3
    finally:
        gc.enable()


def zeros(turn: Turn, tokens: int) -> list[list[Tensor]]:
    return [turn.shard(torch.zeros(1, tokens, heads, dim).double()) for heads, dim in SHAPES]


@pytest.mark.parametrize("layers", [0, 1])
@pytest.mark.parametrize("give_up", ["cut", "remove"])
def test_tokens_of_an_abandoned_turn_can_be_given_up(layers: int, give_up: str) -> None:
    model = Model(cache_of(2, windows=[None, None]))
    cache, chat, other = model.cache, model.new(), model.new()
    model.prefill({chat: 6, other: 3})
    turn = cache.prefill({chat: 4})
    for layer in range(layers):
        turn.attend(layer, *zeros(turn, 4))
    for call in (lambda: cache.decode({other: 1}), lambda: cache.prefill({chat: 1}), lambda: cache.fork(chat)):
        with pytest.raises(
            UsageError, match=rf"layer {layers} did not attend in the last turn.*cache\.truncate\(0, 6\)"
        ):
            call()
    if give_up == "cut":
        cache.truncate(chat, 6)
        model.decode([chat])
    else:
        cache.remove(chat)
    with pytest.raises(UsageError, match="this turn is over"):
        turn.attend(1, *zeros(turn, 4))
    model.decode([other])
    assert model.error < 1e-12


def test_more_shapes_than_are_kept() -> None:
    model = Model(cache_of(2, tokens=600, sequences=20))
    chats = [model.new() for _ in range(20)]
    for number in [*range(1, 21), 3, 20, 1]:
        model.decode(chats[:number])
    assert model.error < 1e-12
    assert len(model.cache.steps.by_shape) == MOST_STEPS


def test_a_failed_reserve_can_be_repeated_with_less(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(cache_of(2, windows=[None, 5, None]))
    chat = model.new()
    model.prefill({chat: 30})
    memory, real, calls = model.cache.memories[0], model.cache.memories[0]._empty, []

    def fails_later(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return real(*given)

    monkeypatch.setattr(memory, "_empty", fails_later)
    with pytest.raises(torch.OutOfMemoryError):
        model.cache.reserve(100_000)
    model.cache.reserve(2000)
    model.prefill({chat: 300})
    model.decode([chat])
    assert model.error < 1e-12


SHAPES = ((4, 4), (2, 4), (2, 3))


def new_cache(layers: int = 1) -> ShardedCache:
    """With one empty sequence, for the refusals in tests/golden/python/serving.txt."""
    cache = cache_of(2, windows=[None] * layers)
    cache.new()
    return cache


def test_a_window_that_was_dropped_cannot_be_cut_back_to() -> None:
    for max_rollback, least in ((0, 40), (7, 33)):
        cache = cache_of(2, windows=[4], block_tokens=2, max_rollback=max_rollback)
        model = Model(cache)
        chat = model.new()
        model.prefill({chat: 40})
        with pytest.raises(UsageError, match=rf"expected {least} to 40; its windows have dropped what"):
            cache.truncate(chat, least - 1)
        model.truncate(chat, least)
        model.prefill({chat: 11})
        model.decode([chat])
        assert model.error < 1e-12


def test_steps_may_be_in_and_out_of_inference_mode() -> None:
    model = Model(cache_of(3))
    chat = model.new()
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            model.prefill({chat: 5})
            model.decode([chat])
    assert model.error < 1e-12
