"""transformers' models get a sharded batch right, or refuse it: positions, labels, layers that mix tokens."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from run_ranks import RankPool
from tiny_models import BATCHES, Exact, make_model, relative_error, tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import (
    AutoModelForMaskedLM,
    EuroBertConfig,
)

from mesh_attention import LocalGroup, UsageError
from mesh_attention.api import MeshAttention
from mesh_attention.batches import batch_loss, shard_batch
from mesh_attention.errors import DisagreementError
from mesh_attention.transformers import parallelize

sys.path.insert(0, str(Path(__file__).parent / "campaign"))


@pytest.fixture
def attention() -> MeshAttention:
    return MeshAttention(LocalGroup(1).comm(0))


FAMILIES = [
    line for line in Path(__file__).with_name("families.txt").read_text().splitlines() if line[:1] not in ("", "#")
]


def family_outcome(group: Any, model_type: str, kind: str, batch_name: str) -> str:
    from families import batches, errors_of_batch, find_sizes, judged, ordinary
    from tiny_families import build

    sizes, implementation = find_sizes(model_type, kind)
    batch = {name: value for name, value in batches(kind)[batch_name].items() if name != "labels"}
    with torch.no_grad():
        due = ordinary(build(model_type, kind, implementation, sizes), batch_name, batch)
    attention = MeshAttention(group)
    verdict, why = judged(partial(errors_of_batch, attention, (model_type, kind, sizes), batch, (due, {})))
    return verdict if verdict == "right" else f"{verdict}: {why}"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.partition(":")[0])
def test_a_family_is_right_or_told_why_not(pool: RankPool, family: str) -> None:
    case, _, expected = family.partition(": ")
    for outcome in pool.run(2, family_outcome, *case.split(", ")):
        assert outcome.removeprefix("refused: ").startswith(expected), outcome


def test_the_page_of_families_has_none_that_is_wrong_or_unclear() -> None:
    page = (Path(__file__).parent.parent / "docs" / "transformers-families.md").read_text()
    assert re.search(r"^\d+ classes: \d+ right, \d+ refused, 0 wrong, 0 unclear, \d+ not built\.$", page, flags=re.M)


# The trial leaves no trace


def test_a_trial_changes_neither_random_numbers_nor_modes_nor_gradients(attention: MeshAttention) -> None:
    model = parallelize(make_model("llama"), attention).train()
    model.lm_head.eval()
    torch.manual_seed(3)
    model(**shard_batch(attention, BATCHES["plain"]()))
    assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(3)))
    assert [name for name, module in model.named_modules() if not module.training] == ["lm_head"]
    assert all(parameter.grad is None for parameter in model.parameters())


def calls_of(model: nn.Module, run: Any) -> int:
    calls: list[object] = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    run()
    hook.remove()
    return len(calls)


def test_a_model_is_tried_once_for_each_kind_of_call(attention: MeshAttention) -> None:
    model = parallelize(make_model("llama"), attention)
    plain, right, left = (shard_batch(attention, BATCHES[name]()) for name in ("plain", "padded right", "padded left"))
    counts = [calls_of(model, lambda batch=batch: model(**batch)) for batch in (plain, plain, right, left, right)]
    # The whole sequence, some of its tokens, a loss, and the call itself. A mask is tried with padding and without, so
    # that ranks with other batches, which may share parameters, make as many calls.
    assert counts == [4, 1, 7, 1, 1]


class Shifting(nn.Module):
    """Adds the previous token: a layer that no config tells of."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.layer(hidden + nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "experts", "mistral"])
def test_rounding_is_not_taken_for_a_difference(attention: MeshAttention, name: str, dtype: torch.dtype) -> None:
    model = parallelize(make_model(name), attention).to(dtype)
    assert model(**shard_batch(attention, BATCHES["plain"]())).logits.isfinite().all()


class Picky(nn.Linear):
    """As kernels in FP8 are, which take 16 or 32 tokens at a time."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if given[..., 0].numel() % 32:
            raise RuntimeError("the number of tokens must be a multiple of 32")
        return super().forward(given)


def test_layers_that_take_many_tokens_at_a_time_are_tried(attention: MeshAttention) -> None:
    model = parallelize(make_model("llama"), attention)
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = Picky
    assert model(**shard_batch(attention, tokens(2, 32))).logits.isfinite().all()


def kind_of_logits(group: Any) -> str:
    """Of a model whose head gives each rank a part of the vocabulary."""
    attention = MeshAttention(LocalGroup(1).comm(0))
    model = parallelize(make_model("llama"), attention)
    plan = {"lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    parallelize_module(model, DeviceMesh.from_group(group, "cpu"), plan)
    local = shard_batch(attention, tokens(1, 8))
    with pytest.raises(UsageError, match="returns DTensor logits, so its loss cannot be checked; call it without"):
        model(**local)
    logits = model(local["input_ids"], position_ids=local["position_ids"]).logits
    return type(logits).__name__


def test_logits_may_be_dtensors(pool: RankPool) -> None:
    assert pool.run(2, kind_of_logits) == [DTensor.__name__] * 2


# What a trial does not show


def outcomes_of_other_arguments(group: Any) -> list[str]:
    """Of calls in which rank 0 gives other arguments than rank 1."""
    attention = MeshAttention(group)
    outcomes = []
    model, local = parallelize(make_model("llama"), attention), shard_batch(attention, tokens(1, 8))
    model(**local)
    is_first = torch.distributed.get_rank(group) == 0
    wanted = {"output_hidden_states": True} if is_first else {}
    unlabelled = {name: value for name, value in local.items() if is_first or "labels" not in name}
    for call in (local | wanted, unlabelled, local):
        try:
            model(**call)
            outcomes.append("ran")
        except (UsageError, DisagreementError) as refusal:
            outcomes.append(str(refusal))
    return outcomes


def test_ranks_may_want_other_outputs_but_not_give_other_inputs(pool: RankPool) -> None:
    for outcomes in pool.run(2, outcomes_of_other_arguments):
        assert (outcomes[0], outcomes[2]) == ("ran", "ran")
        assert "ranks were called with different arguments: operation is a model's" in outcomes[1]


def test_a_whole_model_cannot_be_compiled_without_breaks(attention: MeshAttention) -> None:
    model = torch.compile(parallelize(make_model("llama"), attention), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile its layers one by one, or without fullgraph=True"):
        model(**shard_batch(attention, tokens(1, 8)))


# Labels


def masked_model() -> Any:
    config = EuroBertConfig(
        vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    torch.manual_seed(0)
    return AutoModelForMaskedLM.from_config(config, attn_implementation="eager").double()


def masked_loss_error(group: Any) -> float:
    """Of a gradient of a masked language model on ranks."""
    batch = BATCHES["padded right"]()
    attention = MeshAttention(group)
    with Exact():
        alone = masked_model()
        alone(**batch).loss.backward()
        model = parallelize(masked_model(), attention)
        local = shard_batch(attention, batch, shift_labels=False)
        loss = batch_loss(model(**local).loss, local, group=group, gradients="summed")
        loss.backward()
    gradient = model.model.embed_tokens.weight.grad
    torch.distributed.all_reduce(gradient, group=group)
    return relative_error(gradient, alone.model.embed_tokens.weight.grad)


def test_a_masked_language_model_learns_the_labelled_tokens(pool: RankPool) -> None:
    assert max(pool.run(2, masked_loss_error)) <= 1e-9


# Ranks


def refusal_on_one_rank(group: Any) -> str:
    """A model that only one rank has changed: all refuse it."""
    attention = MeshAttention(group)
    try:
        model = parallelize(make_model("llama"), attention)
        if torch.distributed.get_rank(group) == 1:
            model.model.layers[1].mlp = Shifting(model.model.layers[1].mlp)
        model(**shard_batch(attention, BATCHES["plain"]()))
    except (UsageError, DisagreementError) as refusal:
        return str(refusal)
    return "ran"


def test_a_model_that_one_rank_refuses_is_refused_by_all(pool: RankPool) -> None:
    for said in pool.run(2, refusal_on_one_rank):
        assert "mixes tokens outside of plain attention" in said
