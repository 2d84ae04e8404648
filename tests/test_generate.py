"""`generate` on ranks: token for token what one process gives, or a refusal on every rank."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import said
from run_ranks import RankPool
from tiny_models import Exact, make_model
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from mesh_attention import LocalGroup
from mesh_attention.api import MeshAttention
from mesh_attention.errors import DisagreementError, UsageError
from mesh_attention.serving import ShardedCache
from mesh_attention.transformers import GenerationCache, parallelize, unparallelize
from mesh_attention.transformers import generation_cache as cache_module
from mesh_attention.transformers.parallelize import find_parallel

Result = tuple[list[Any], list[Tensor]]
"""Tokens, and the logits that they were chosen from."""
PLACE = {"device": "cpu"}
"""Where prompts are."""
WINDOWS = ("mistral", "gemma3", "gpt_oss", "gemma2")


def ids(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 29, (rows, tokens), generator=torch.Generator().manual_seed(seed)).to(PLACE["device"])


def mask(lengths: list[int], tokens: int) -> Tensor:
    return torch.stack([(torch.arange(tokens) >= tokens - n).long() for n in lengths]).to(PLACE["device"])


def ones(rows: int, tokens: int) -> Tensor:
    return mask([tokens] * rows, tokens)


def generated(model: Any, inputs: Tensor | None, **given: Any) -> Any:
    given = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None} | given
    return model.generate(inputs, output_logits=True, return_dict_in_generate=True, **given)


def of(out: Any) -> Result:
    return out.sequences.tolist(), list(out.logits)


# Cases: what a model generates


def greedy(model: Any, rank: int) -> Result:
    return of(generated(model, ids(2, 23)))


def unequal(model: Any, rank: int) -> Result:
    return of(generated(model, ids(4, 19), attention_mask=mask([19, 3, 12, 1], 19)))


def short(model: Any, rank: int) -> Result:
    """So few tokens, and different numbers of them, that some ranks get none."""
    return of(generated(model, ids(2, 4), attention_mask=mask([4, 1], 4)))


def sampled(model: Any, rank: int) -> Result:
    torch.manual_seed(5 + rank)  # rank 0's counts
    out = generated(model, ids(2, 18), do_sample=True, temperature=1.5, top_k=20, num_return_sequences=2)
    again = generated(model, ids(1, 9), do_sample=True)
    return out.sequences.tolist() + again.sequences.tolist(), list(out.logits)


def chunks(model: Any, rank: int) -> Result:
    """The first chunks of some rows are padding, and the first of all is padding alone."""
    given = {"attention_mask": mask([40, 3, 38, 17], 45), "max_new_tokens": 4}
    outs = [generated(model, ids(4, 45), prefill_chunk_size=size, **given) for size in (18, 4)]
    return [out.sequences.tolist() for out in outs], [logits for out in outs for logits in out.logits]


def turns(model: Any, rank: int) -> Result:
    """Four turns: whole texts, then only what is new, then a turn of few tokens, then one without a new token."""
    lengths = [17, 6]
    first = generated(model, ids(2, 17), attention_mask=mask(lengths, 17))
    asked = torch.cat([first.sequences, ids(2, 21, seed=1)], 1)
    seen = torch.cat([mask(lengths, 17), ones(2, asked.shape[1] - 17)], 1)
    second = generated(model, asked, attention_mask=seen, past_key_values=first.past_key_values)
    new = torch.cat([second.sequences[:, -1:], ids(2, 20, seed=2)], 1)
    seen = torch.cat([seen, ones(2, 25)], 1)
    third = generated(model, new, attention_mask=seen, past_key_values=second.past_key_values)
    new = torch.cat([third.sequences[:, -1:], ids(2, 2, seed=3)], 1)
    seen = torch.cat([seen, ones(2, 7)], 1)
    fourth = generated(model, new, attention_mask=seen, past_key_values=third.past_key_values)
    turns = (first, second, third, fourth)
    return [turn.sequences.tolist() for turn in turns], [logits for turn in turns for logits in turn.logits]


class StopsAfter(StoppingCriteria):
    """Stops row 1 when the text has a number of tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.arange(input_ids.shape[0], device=input_ids.device) * (input_ids.shape[1] >= self.tokens) == 1


def stopped(model: Any, rank: int) -> Result:
    """Rows end at different times; the others go on, and then the text of those is padding."""
    free = generated(model, ids(3, 17), max_new_tokens=7)
    end = int(free.sequences[0, 17 + 2])
    given = {"eos_token_id": end, "pad_token_id": 0, "max_new_tokens": 7}
    out = generated(model, ids(3, 17), stopping_criteria=StoppingCriteriaList([StopsAfter(21)]), **given)
    return out.sequences.tolist(), list(out.logits)


def beams(model: Any, rank: int) -> Result:
    given = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6}
    outs = [generated(model, ids(2, 21), **given), generated(model, ids(2, 8), attention_mask=mask([8, 5], 8), **given)]
    return [out.sequences.tolist() for out in outs], [logits for out in outs for logits in out.logits]


def looked_up(model: Any, rank: int) -> Result:
    """Tokens guessed from the prompt, of which most are cut off again."""
    repeated = ids(1, 6).repeat(1, 4)
    return of(generated(model, repeated, prompt_lookup_num_tokens=3, max_new_tokens=12))


def embedded(model: Any, rank: int) -> Result:
    return of(generated(model, None, inputs_embeds=model.get_input_embeddings()(ids(1, 20))))


def called(model: Any, rank: int) -> Result:
    """The model itself, without `generate`: all logits, then some, of rows that are padded; crop, repeat and select."""
    parallel = find_parallel(model)
    cache = GenerationCache(parallel.attention) if parallel is not None else DynamicCache()
    real = mask([22, 5, 13], 22)
    whole = model(ids(3, 22), attention_mask=real, past_key_values=cache).logits
    found = [whole[real == 1]]
    for number, (new, kept) in enumerate([(3, 2), (18, 0), (19, torch.tensor([1, -1, 4])), (1, 1)]):
        real = torch.cat([real, ones(3, new)], 1)
        given = {"attention_mask": real, "past_key_values": cache, "logits_to_keep": kept}
        found.append(model(ids(3, new, seed=number), **given).logits)
    if model.config.model_type in WINDOWS:  # transformers' sliding caches keep too little to be cropped
        return [], found
    cache.crop(-3)
    cache.crop(cache.get_seq_length() - 1 if isinstance(cache, GenerationCache) else -1)
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.batch_repeat_interleave(2)
    real = torch.cat([real[:, :-4][[0, 0, 2, 2]], ones(4, 17)], 1)
    found.append(model(ids(4, 17), attention_mask=real, past_key_values=cache).logits)
    return [cache.get_seq_length()], found


CASES = {
    case.__name__: case
    for case in (*(greedy, unequal, short, sampled, chunks, turns, stopped, beams, looked_up, embedded, called),)
}
SOME = ("greedy", "unequal", "sampled", "turns", "beams")
OPTIONS: dict[int, dict[str, Any]] = {
    1: {},
    2: {},
    3: {"layout": "striped", "block_tokens": 2},
    4: {"method": "mesh", "tile": (2, 2), "ulysses_degree": 1},
}


@contextmanager
def over_ranks(group: Any, *, block_tokens: int = 64, **options: Any) -> Iterator[MeshAttention]:
    """Mesh attention, and caches of such blocks; windows drop small ones after a few tokens."""
    attention = MeshAttention(group, **options)
    try:
        cache_module.ShardedCache = partial(ShardedCache, block_tokens=block_tokens)  # type: ignore[misc, assignment]
        yield attention
    finally:
        cache_module.ShardedCache = ShardedCache  # type: ignore[misc]


@lru_cache(maxsize=1)
def due_results(model_name: str, cases: tuple[str, ...], device: str = "cpu") -> list[Result]:
    """Of one process."""
    PLACE["device"] = device
    with Exact(), torch.no_grad():
        one = make_model(model_name).eval().to(device)
        return [CASES[case](one, 0) for case in cases]


def outcomes(
    group: Any, model_name: str, cases: Sequence[str], device: str = "cpu", dues: Sequence[Result] = ()
) -> dict[str, tuple[bool, float]]:
    """For each case, whether the tokens are those of one process, and the largest difference in logits."""
    found = {}
    dues = dues or due_results(model_name, tuple(cases), device)
    PLACE["device"] = device
    with over_ranks(group, **OPTIONS[group.size()]) as attention, Exact(), torch.no_grad():
        ours = parallelize(make_model(model_name).eval().to(device), attention)
        for case, due in zip(cases, dues, strict=True):
            got = CASES[case](ours, group.rank())
            assert len(due[1]) == len(got[1])
            found[case] = due[0] == got[0], max(error(*pair) for pair in zip(due[1], got[1], strict=True))
    return found


def error(due: Tensor, got: Tensor) -> float:
    assert due.shape == got.shape, (due.shape, got.shape)
    return float((torch.nan_to_num(due) - torch.nan_to_num(got)).abs().max())


MODELS = [
    ("llama", 2, list(SOME)),
    ("llama", 3, list(CASES)),
    ("llama", 4, list(CASES)),
    ("llama", 1, ["greedy", "called", "chunks"]),
    ("mistral", 3, list(CASES)),
    ("gemma3", 4, list(CASES)),
    ("qwen3", 2, list(SOME)),
    ("gpt_oss", 3, list(SOME)),
    ("deepseek_v3", 2, list(SOME)),
    ("gemma2", 4, list(SOME)),
    ("llava", 3, list(SOME)),  # text alone
    ("qwen2_vl", 2, list(SOME)),
]


@pytest.mark.parametrize(("model_name", "ranks", "cases"), MODELS)
def test_tokens_and_logits_are_those_of_one_process(
    pool: RankPool, model_name: str, ranks: int, cases: list[str]
) -> None:
    for found in pool.run(ranks, outcomes, model_name, cases, "cpu", due_results(model_name, tuple(cases))):
        wrong = {case: said for case, said in found.items() if not said[0] or said[1] > 1e-10}
        assert not wrong
        assert list(found) == cases


# What is not sharded


def tokens_run(group: Any, tokens: int) -> list[int]:
    """The numbers of tokens that the first MLP of this rank's model runs, call by call."""
    with over_ranks(group) as attention, torch.no_grad():
        model = parallelize(make_model("llama"), attention).eval()
        generated(model, ids(1, 9))  # tries the model first
        seen: list[int] = []
        hook = model.model.layers[0].mlp.register_forward_hook(lambda *call: seen.append(call[1][0].shape[1]))
        rows: list[int] = []
        head = model.lm_head.register_forward_hook(lambda *call: rows.append(call[1][0].shape[1]))
        out = generated(model, ids(1, tokens), max_new_tokens=3)
        hook.remove()
        head.remove()
        assert rows == [1, 1, 1]  # logits of one token, whoever has it
        store = out.past_key_values.store
        held = sum(map(len, store.book.entry(out.past_key_values.sequences[0]).shares.segments(group.rank())))
        assert store.attention is attention
        return [*seen, held]


def test_a_rank_runs_and_holds_its_share_of_the_prompt(pool: RankPool) -> None:
    assert pool.run(4, tokens_run, 40) == [[10, 1, 1, 11], [10, 1, 1, 11], [10, 1, 1, 10], [10, 1, 1, 10]]


# Streaming


class Heard(BaseStreamer):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []

    def put(self, value: Tensor) -> None:
        self.heard.append(value.flatten().tolist())

    def end(self) -> None:
        self.heard.append([])


def streamed(group: Any) -> tuple[list[list[int]], list[list[int]]]:
    with over_ranks(group) as attention:
        model = parallelize(make_model("llama"), attention).eval()
        heard = Heard() if group.rank() == 0 else None
        out = generated(model, ids(1, 20), streamer=heard)
    return heard.heard if heard is not None else [], out.sequences.tolist()


def test_a_streamer_on_one_rank_hears_the_tokens(pool: RankPool) -> None:
    (heard, sequences), (nothing, same) = pool.run(2, streamed)
    assert heard == [sequences[0][:20], *([token] for token in sequences[0][20:]), []]
    assert nothing == []
    assert same == sequences


# Random numbers


def seeded(group: Any, is_shared: bool) -> tuple[Any, float]:
    """Tokens sampled with another seed on each rank, or what is said of them, and the rank's next random number."""
    from mesh_attention.transformers import generation

    kept = generation._set_random_states
    if not is_shared:
        generation._set_random_states = lambda *_: None
    try:
        with over_ranks(group) as attention:
            model = parallelize(make_model("llama"), attention).eval()
            torch.manual_seed(group.rank())
            given = {"do_sample": True, "temperature": 3.0, "max_new_tokens": 1, "num_return_sequences": 4}
            try:
                return generated(model, ids(1, 20), **given).sequences[:, -1].tolist(), float(torch.rand(1))
            except DisagreementError as error:
                return str(error), float(torch.rand(1))
    finally:
        generation._set_random_states = kept


def test_ranks_with_other_seeds_take_the_random_numbers_of_rank_0(pool: RankPool) -> None:
    first, *others = pool.run(3, seeded, True)
    assert all(other == first for other in others)
    assert all("texts is (4, 21) torch.int64 #" in told for told, _ in pool.run(3, seeded, False))


def undisturbed(group: Any) -> tuple[float, float]:
    with over_ranks(group) as attention:
        model = parallelize(make_model("llama"), attention).eval()
        torch.manual_seed(group.rank())
        generated(model, ids(1, 20))
        return float(torch.rand(1)), float(torch.rand(1, generator=torch.Generator().manual_seed(group.rank())))


def test_greedy_generation_leaves_random_numbers_alone(pool: RankPool) -> None:
    assert all(found == due for found, due in pool.run(2, undisturbed))


# Disagreement


def disagreement(group: Any, how: str) -> str:
    rank = group.rank()
    with over_ranks(group) as attention:
        model = parallelize(make_model("llama"), attention).eval()
        prompts = {"prompts": ids(1, 20, seed=rank), "lengths": ids(1, 20 if rank else 3), "rows": ids(1 + rank, 20)}
        settings: dict[str, dict[str, Any]] = {
            "settings": {"max_new_tokens": 4 + rank},
            "arguments": {"cache_implementation": "static"} if rank else {},
            "streamer": {"num_beams": 2} | ({} if rank else {"streamer": Heard()}),
        }
        prompt, given = prompts.get(how, ids(1, 20)), {"max_new_tokens": 4} | settings.get(how, {})
        try:
            generated(model, prompt, **given)
        except (DisagreementError, UsageError, ValueError) as said:
            return f"{type(said).__name__}: {said}"
    return "ran"


DISAGREEMENTS = {
    "prompts": ("DisagreementError", "must make the same call, with the same whole prompt"),
    "lengths": ("DisagreementError", "max_length is 7 on rank(s) 0, but 24 on rank(s) 1"),
    "rows": ("DisagreementError", "new tokens is (1, 20) torch.int64"),
    "settings": ("DisagreementError", "max_length is 24 on rank(s) 0, but 25 on rank(s) 1"),
    "arguments": ("DisagreementError", "rank 1 refused the call: cache_implementation='static' is not supported"),
    "streamer": (
        "DisagreementError",
        "rank 0 refused the call: ValueError: `streamer` cannot be used with beam search",
    ),
}


@pytest.mark.parametrize("how", DISAGREEMENTS)
def test_ranks_that_differ_are_refused_together(pool: RankPool, how: str) -> None:
    found = pool.run(2, disagreement, how)
    kind, text = DISAGREEMENTS[how]
    assert all(said != "ran" for said in found), found
    assert any(said.startswith(kind) and text in said for said in found), found


def other_calls(group: Any) -> list[str]:
    """Calls that differ between ranks in the bits of embeddings, in the order of tokens, or in the wanted logits."""
    rank, said = group.rank(), []
    with over_ranks(group) as attention, torch.no_grad():
        model = parallelize(make_model("llama"), attention).eval()
        embeds = model.get_input_embeddings()(ids(1, 20))
        kept = torch.tensor([1, 5] if rank else [1, 6])
        pairs = torch.tensor([[[5, 7], [7, 6]][rank] * 6]), torch.tensor([[[5, 7], [15, 2]][rank] + [3] * 10])
        calls: list[Callable[[], object]] = [
            lambda: generated(model, None, inputs_embeds=embeds + rank),
            *(partial(model, tokens, past_key_values=GenerationCache(attention)) for tokens in pairs),
            lambda: model(ids(1, 20), past_key_values=GenerationCache(attention), logits_to_keep=kept),
        ]
        for call in calls:
            try:
                call()
                said.append("ran")
            except DisagreementError as error:
                said.append(str(error))
    return said


def test_embeddings_orders_of_tokens_and_wanted_logits_are_compared(pool: RankPool) -> None:
    for *tokens, kept in pool.run(2, other_calls):
        assert all("new tokens is " in said for said in tokens), tokens
        assert "logits_to_keep is 2 columns #" in kept


class Odd:
    """A streamer, or a stopping criterion, that raises or stops in the middle or at the end of a text."""

    def __init__(self, what: str) -> None:
        self.what, self.heard = what, 0

    def put(self, value: Tensor) -> None:
        self.heard += 1
        if self.heard == 3 and self.what == "streamer raises":
            raise ValueError("the client has left")

    def end(self) -> None:
        if self.what == "streamer raises at the end":
            raise ValueError("the client has left")

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if input_ids.shape[1] == 22 and self.what == "criterion raises":
            raise AssertionError
        return torch.full((1,), input_ids.shape[1] == 22)


def part_ways(group: Any, how: str, odd: int) -> tuple[str, float]:
    """What a rank raises if one of them is odd, and after how many seconds."""
    dist.barrier(group)
    own = dist.new_group(dist.get_process_group_ranks(group))  # with torch's timeout of half an hour
    is_odd, given = own.rank() == odd, {}
    if how.startswith("streamer") and is_odd:
        given = {"streamer": Odd(how)}
    elif how.startswith("criterion") and is_odd:
        given = {"stopping_criteria": StoppingCriteriaList([Odd(how)])}  # type: ignore[list-item]
    elif how == "end tokens":
        given = {"eos_token_id": torch.tensor([2, 5 + is_odd])}
    elif how == "tokens":
        given = {"prefix_allowed_tokens_fn": lambda *_: [3 + is_odd]}
    with over_ranks(own) as attention:
        model = parallelize(make_model("llama"), attention).eval()
        generated(model, ids(1, 5))  # tries the model first
        start = time.monotonic()
        raised = said(lambda: generated(model, ids(1, 20), **given))
    return raised, time.monotonic() - start


WAYS = {
    ("streamer raises", 1): "rank 1 refused the call: ValueError: the client has left",
    ("streamer raises at the end", 1): "rank 1 refused the call: ValueError: the client has left",
    ("criterion raises", 2): "rank 2 refused the call: AssertionError",
    ("criterion stops", 1): "operation is a decoded step on rank(s) 0,2, but the end of generate() on rank(s) 1",
    ("criterion stops", 0): "operation is the end of generate() on rank(s) 0, but a decoded step on rank(s) 1-2",
    ("end tokens", 1): "eos_token_id is [2, 5] on rank(s) 0,2, but [2, 6] on rank(s) 1",
    ("tokens", 1): "rank 1 makes a different call from ranks 0, 2 in pass",
}


@pytest.fixture(scope="module")
def three() -> Iterator[RankPool]:
    with RankPool(3) as made:
        yield made


@pytest.mark.parametrize(("how", "odd"), WAYS)
def test_ranks_that_part_ways_all_raise_within_seconds(three: RankPool, how: str, odd: int) -> None:
    for rank, (raised, seconds) in enumerate(three.run(3, part_ways, how, odd)):
        own = {"streamer": "ValueError: the client has left", "criterion raises": "AssertionError: "}
        due = next((text for start, text in own.items() if rank == odd and how.startswith(start)), WAYS[how, odd])
        assert due in raised
        assert raised.startswith(due) or re.match("(Disagreement|Transport)Error: ", raised), raised
        assert seconds < 5.0


# Refusals; those of one process are in tests/golden/python/transformers-generation.txt


def parallel_model() -> Any:
    """A tiny Llama with mesh attention over one rank."""
    return parallelize(make_model("llama"), MeshAttention(LocalGroup(1).comm(0))).eval()


model = pytest.fixture(parallel_model, name="model")


def attention_of(model: Any) -> MeshAttention:
    parallel = find_parallel(model)
    assert parallel is not None
    return parallel.attention


@torch.no_grad()
@pytest.mark.parametrize(("tokens", "real"), [(20, 20), (20, 3), (3, 3)])
def test_a_spoiled_row_stays_alone(model: Any, tokens: int, real: int) -> None:
    given = {"attention_mask": mask([tokens, tokens, real], tokens)}
    embedded, kept = model.get_input_embeddings()(ids(3, tokens)), []
    for value in (0.5, torch.nan):
        embedded[1] = value
        out = generated(model, None, inputs_embeds=embedded, **given)
        kept.append(torch.stack(out.logits, 1)[[0, 2]])
    assert torch.equal(*kept)
    assert kept[1].isfinite().all()


def test_tokens_are_not_guessed_on_a_cache_that_cannot_be_cropped(model: Any) -> None:
    windowed = parallelize(make_model("mistral"), attention_of(model)).eval()
    first = generated(windowed, ids(1, 8))
    given = {"past_key_values": first.past_key_values, "prompt_lookup_num_tokens": 3}
    with pytest.raises(UsageError, match=r"begin the first turn with GenerationCache\(attention, max_rollback=3\)"):
        generated(windowed, ids(1, 5), attention_mask=ones(1, first.past_key_values.columns + 5), **given)


def test_an_unparallelized_model_generates_as_before(model: Any) -> None:
    due = generated(make_model("llama", "eager").eval(), ids(1, 8), use_cache=False).sequences
    unparallelize(model)
    assert torch.equal(generated(model, ids(1, 8), use_cache=False).sequences, due)
    assert isinstance(generated(model, ids(1, 8)).past_key_values, DynamicCache)


@torch.no_grad()
def call(model: Any, cache: Any, **given: Any) -> Any:
    return model(ids(2, 4), past_key_values=cache, **given).logits.shape


def filled() -> tuple[Any, Any]:
    """A model, and a cache with four tokens in one row and two in another."""
    model = parallel_model()
    cache = GenerationCache(attention_of(model))
    call(model, cache, attention_mask=mask([4, 2], 4))
    return model, cache


def later(cache: Any) -> dict[str, Any]:
    real = torch.cat([mask([4, 2], 4), ones(2, 1)], 1)
    return {"input_ids": ids(2, 1), "attention_mask": real, "past_key_values": cache}


def test_tokens_are_guessed_in_a_later_turn_from_its_new_tokens_only(model: Any) -> None:
    first = generated(model, ids(1, 8))
    whole = torch.cat([first.sequences, ids(1, 4)], 1)
    given = {"past_key_values": first.past_key_values, "prompt_lookup_num_tokens": 3}
    with pytest.raises(UsageError, match="prompt_lookup_num_tokens on a filled cache needs the new tokens only, with"):
        generated(model, whole, **given)
    new = whole[:, first.past_key_values.columns :]
    generated(model, new, attention_mask=torch.ones_like(whole), **given)


class Skipped(torch.nn.Module):
    """A layer that does nothing."""

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        return hidden


@torch.no_grad()
def test_a_cache_is_empty_after_a_reset_and_of_no_use_after_a_failure() -> None:
    model, cache = filled()
    cache.reset()
    assert (cache.get_seq_length(), cache.batch_size, cache.store.sequences) == (0, -1, ())
    due = make_model("llama", "eager").eval()(ids(1, 6)).logits
    with Exact():
        torch.testing.assert_close(model(ids(1, 6), past_key_values=cache).logits, due, rtol=1e-5, atol=1e-5)
    layer, model.model.layers[1] = model.model.layers[1], Skipped()
    with pytest.raises(UsageError, match="1 of 2 layers of LlamaForCausalLM called mesh attention"):
        model(ids(1, 1), past_key_values=cache)
    model.model.layers[1] = layer
    with pytest.raises(UsageError, match="an earlier call with this cache failed"):
        model(ids(1, 1), past_key_values=cache)


@torch.no_grad()
def test_autocast_decides_the_dtype_of_the_cache(model: Any) -> None:
    model.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = generated(model, ids(1, 20))
    assert out.past_key_values.store.dtype == torch.bfloat16


def test_frequencies_that_depend_on_the_largest_position_are_refused_where_ranks_differ(pool: RankPool) -> None:
    assert pool.run(2, rotary_outcomes) == [("ran", "refused")] * 2


def rotary_outcomes(group: Any) -> tuple[str, ...]:
    found = []
    with over_ranks(group) as attention:
        model = parallelize(make_model("dynamic rotary"), attention).eval()
        for tokens in (14, 20):  # the limit is 16
            try:
                generated(model, ids(1, tokens), max_new_tokens=6)
                found.append("ran")
            except UsageError as said:
                found.append("refused" if "depend on the largest position beyond 16" in str(said) else str(said))
    return tuple(found)
