"""`generate` on ranks: token for token what one process gives, or a refusal on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pool import shared_pool
from tiny_models import Exact, make_model
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from mesh_attention import LocalGroup
from mesh_attention.api import MeshAttention
from mesh_attention.errors import DisagreementError, UsageError
from mesh_attention.integrations.transformers import GenerationCache, register, unregister
from mesh_attention.testing.run_ranks import RankPool

Result = tuple[list[Any], list[Tensor]]
"""Tokens, and the logits that they were chosen from."""
WINDOWS = ("mistral", "gemma3", "gpt_oss", "gemma2")


@pytest.fixture(scope="module")
def pool() -> RankPool:
    return shared_pool()


def ids(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 29, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def mask(lengths: list[int], tokens: int) -> Tensor:
    return torch.stack([(torch.arange(tokens) >= tokens - n).long() for n in lengths])


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
    seen = torch.cat([mask(lengths, 17), torch.ones(2, asked.shape[1] - 17, dtype=torch.long)], 1)
    second = generated(model, asked, attention_mask=seen, past_key_values=first.past_key_values)
    new = torch.cat([second.sequences[:, -1:], ids(2, 20, seed=2)], 1)
    seen = torch.cat([seen, torch.ones(2, 25, dtype=torch.long)], 1)
    third = generated(model, new, attention_mask=seen, past_key_values=second.past_key_values)
    new = torch.cat([third.sequences[:, -1:], ids(2, 2, seed=3)], 1)
    seen = torch.cat([seen, torch.ones(2, 7, dtype=torch.long)], 1)
    fourth = generated(model, new, attention_mask=seen, past_key_values=third.past_key_values)
    turns = (first, second, third, fourth)
    return [turn.sequences.tolist() for turn in turns], [logits for turn in turns for logits in turn.logits]


class StopsAfter(StoppingCriteria):
    """Stops row 1 after so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.arange(input_ids.shape[0]) * (input_ids.shape[1] >= self.tokens) == 1


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
    cache = CACHES[model.config._attn_implementation]()
    real = mask([22, 5, 13], 22)
    whole = model(ids(3, 22), attention_mask=real, past_key_values=cache).logits
    found = [whole[real == 1]]
    for number, (new, kept) in enumerate([(3, 2), (18, 0), (19, torch.tensor([1, -1, 4])), (1, 1)]):
        real = torch.cat([real, torch.ones(3, new, dtype=torch.long)], 1)
        given = {"attention_mask": real, "past_key_values": cache, "logits_to_keep": kept}
        found.append(model(ids(3, new, seed=number), **given).logits)
    if model.config.model_type in WINDOWS:  # transformers' sliding caches keep too little to be cropped
        return [], found
    cache.crop(-4)
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.batch_repeat_interleave(2)
    real = torch.cat([real[:, :-4][[0, 0, 2, 2]], torch.ones(4, 17, dtype=torch.long)], 1)
    found.append(model(ids(4, 17), attention_mask=real, past_key_values=cache).logits)
    return [cache.get_seq_length()], found


CACHES: dict[str, Callable[[], Any]] = {"eager": DynamicCache}
CASES = {
    case.__name__: case
    for case in (
        *(greedy, unequal, short, sampled, chunks, turns, stopped, beams, looked_up, embedded, called),
    )
}
SOME = ("greedy", "unequal", "sampled", "turns", "beams")
OPTIONS: dict[int, dict[str, Any]] = {
    1: {},
    2: {},
    3: {"layout": "striped"},
    4: {"method": "mesh", "tile": (2, 2), "ulysses_degree": 1},
}


@contextmanager
def registered(group: Any, **options: Any) -> Iterator[MeshAttention]:
    attention = MeshAttention(group, **options)
    register(attention)
    CACHES["mesh_attention"] = lambda: GenerationCache(attention)
    try:
        yield attention
    finally:
        unregister()


def outcomes(group: Any, model_name: str, cases: list[str]) -> dict[str, tuple[bool, float]]:
    """For each case, whether the tokens are those of one process, and the largest difference in logits."""
    found = {}
    with registered(group, **OPTIONS[group.size()]), Exact(), torch.no_grad():
        one, ours = (make_model(model_name, kind).eval() for kind in ("eager", "mesh_attention"))
        for case in cases:
            due, got = CASES[case](one, 0), CASES[case](ours, group.rank())
            assert len(due[1]) == len(got[1])
            found[case] = due[0] == got[0], max(error(*pair) for pair in zip(due[1], got[1], strict=True))
    return found


def error(due: Tensor, got: Tensor) -> float:
    assert due.shape == got.shape, (due.shape, got.shape)
    return float((torch.nan_to_num(due) - torch.nan_to_num(got)).abs().max())


MODELS = [
    ("llama", 2, list(CASES)),
    ("llama", 3, list(CASES)),
    ("llama", 4, list(CASES)),
    ("llama", 1, ["greedy", "called", "chunks"]),
    ("mistral", 3, list(CASES)),
    ("gemma3", 4, list(CASES)),
    ("qwen3", 2, list(SOME)),
    ("gpt_oss", 3, list(SOME)),
    ("deepseek_v3", 2, list(SOME)),
    ("gemma2", 4, list(SOME)),
]


@pytest.mark.parametrize(("model_name", "ranks", "cases"), MODELS)
def test_tokens_and_logits_are_those_of_one_process(
    pool: RankPool, model_name: str, ranks: int, cases: list[str]
) -> None:
    for found in pool.run(ranks, outcomes, model_name, cases):
        wrong = {case: said for case, said in found.items() if not said[0] or said[1] > 1e-10}
        assert not wrong
        assert list(found) == cases
