"""transformers models on ranks: the same logits and gradients as one process with eager attention, or a refusal."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from run_ranks import RankPool
from tiny_models import BATCHES, CONFIGS, UNUSUAL, Exact, make_model, packed, relative_error, tokens, truth
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from mesh_attention import MeshAttention
from mesh_attention.batches import batch_loss, shard_batch
from mesh_attention.errors import DisagreementError, UsageError
from mesh_attention.sequences import CUTS
from mesh_attention.transformers import parallelize

METHODS: list[dict[str, Any]] = [
    {"method": "ring"},
    {"method": "mesh", "tile": (2, 2), "layout": "striped"},
    {"method": "mesh", "tile": (1, 2), "ulysses_degree": 2, "tensor_format": "bhsd"},
    {"method": "mesh", "tile": (2, 2)},
    {"method": "mesh", "tile": (2, 1), "ulysses_degree": 2, "layout": "contiguous"},
]


def errors_of(
    group: Any, model_name: str, batch_name: str, options: dict[str, Any], device: str = "cpu", due: Any = None
) -> dict[str, float]:
    """Relative errors of the logits of this rank's real tokens, of the loss, and of all gradients."""
    logits, loss, gradients = due or truth(model_name, batch_name)
    attention = MeshAttention(group, **options)
    with Exact():
        model = parallelize(make_model(model_name), attention).to(device)
        batch = on_device(BATCHES[batch_name](), device)
        local = shard_batch(attention, batch)
        out = model(**local)
        ours = batch_loss(out.loss, local, group=group, gradients="summed")
        ours.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
    real = attention.shard(batch.get("attention_mask", torch.ones_like(batch["input_ids"]))) == 1
    errors = {name: relative_error(p.grad, gradients[name]) for name, p in model.named_parameters()}
    errors["logits"] = relative_error(out.logits[real], attention.shard(logits)[real.cpu()])
    errors["loss"] = abs(ours.item() - loss) / loss
    return errors


def on_device(batch: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Some models with every batch, the others with every third one; batches and methods meet."""
    for i, model_name in enumerate(name for name in CONFIGS if name not in UNUSUAL):
        for j, batch_name in enumerate(BATCHES):
            if model_name in ("llama", "gemma2") or (i + j) % 3 == 0:
                yield model_name, batch_name, METHODS[(i + j) % len(METHODS)]


@pytest.mark.parametrize(("model_name", "batch_name", "options"), list(cases()))
def test_logits_and_gradients_are_those_of_one_process(
    pool: RankPool, model_name: str, batch_name: str, options: dict[str, Any]
) -> None:
    due = truth(model_name, batch_name)
    for errors in pool.run(4, errors_of, model_name, batch_name, options, "cpu", due):
        assert max(errors.values()) <= 1e-9, errors


def fully_sharded_errors(group: Any, model_name: str, batch_name: str, device: str = "cpu") -> list[float]:
    """Errors of the loss and of all gradients when FSDP2 holds the parameters and averages the gradients."""
    _, loss, gradients = truth(model_name, batch_name)
    mesh = DeviceMesh.from_group(group, device)
    attention = MeshAttention(mesh)
    with Exact():
        model = parallelize(make_model(model_name), attention).to(device)
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
        local = shard_batch(attention, on_device(BATCHES[batch_name](), device))
        ours = batch_loss(model(**local).loss, local, group=mesh)
        ours.backward()
    errors = [relative_error(p.grad.full_tensor(), gradients[name]) for name, p in model.named_parameters()]
    return [abs(ours.item() - loss) / loss, *errors]


def test_fully_sharded_models_have_the_gradients_of_one_process(pool: RankPool) -> None:
    for errors in pool.run(4, fully_sharded_errors, "gemma3", "padded both"):
        assert max(errors) <= 1e-9


def difference_made(group: Any, change: str, model_name: str, batch_name: str) -> float:
    """The largest difference, in logits and gradients, that a change to a model makes to it."""
    attention = MeshAttention(group)
    results = []
    for change_model in (CHANGES[change], CHANGES["nothing"]):  # what is changed meets the batch first
        local = shard_batch(attention, BATCHES[batch_name]())
        model = parallelize(make_model(model_name), attention).train()
        change_model(model)
        out = model(**local)
        out.loss.backward()
        results.append([out.logits.detach(), *(parameter.grad for parameter in model.parameters())])
    return max(relative_error(ours, due) for ours, due in zip(*results, strict=True))


def compile_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda model: None,
    "checkpointing": lambda model: model.gradient_checkpointing_enable(),
    "reentrant checkpointing": lambda model: model.gradient_checkpointing_enable({"use_reentrant": True}),
    "compiled layers": compile_layers,
}


@pytest.mark.parametrize("change", ["checkpointing", "reentrant checkpointing"])
def test_gradient_checkpointing_changes_nothing(pool: RankPool, change: str) -> None:
    assert max(pool.run(4, difference_made, change, "gemma2", "padded left")) == 0


@pytest.mark.parametrize(
    ("model_name", "batch_name"),
    [("gemma2", "padded both"), ("qwen2", "packed rows")],
)
def test_layers_are_compiled_without_breaks_and_give_the_same(pool: RankPool, model_name: str, batch_name: str) -> None:
    differences = pool.run(2, difference_made, "compiled layers", model_name, batch_name)
    assert max(differences) <= 1e-6  # norms are in float32 here


def spoiled_differences(group: Any, model_name: str, options: dict[str, Any]) -> tuple[bool, bool]:
    """Whether the other documents and rows of a batch are finite and as before, if one document is NaN."""
    attention, results = MeshAttention(group, **options), []
    model = parallelize(make_model(model_name), attention)
    batch = packed((7, 12, 3), (20, 2), by="cu_seq_lens")
    embedded = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    del batch["labels"]
    for value in (0.5, torch.nan):
        x = embedded.clone()
        x[0, 7:19] = value
        x.requires_grad_()
        logits = model(**shard_batch(attention, batch | {"inputs_embeds": x})).logits
        logits.backward(attention.shard(torch.ones(*x.shape[:2], logits.shape[-1], dtype=logits.dtype)))
        kept = torch.ones(x.shape[:2], dtype=torch.bool)
        kept[0, 7:19] = False
        results.append((attention.unshard(logits.detach())[kept], x.grad[kept]))
    return all(x.isfinite().all() for x in results[1]), all(map(torch.equal, *results))


@pytest.mark.parametrize("model_name", ["llama", "gemma2"])
@pytest.mark.parametrize("options", [METHODS[0], METHODS[2]], ids=str)
def test_a_spoiled_document_stays_alone(pool: RankPool, model_name: str, options: dict[str, Any]) -> None:
    assert pool.run(4, spoiled_differences, model_name, options) == [(True, True)] * 4


# Without shard_batch


def logits_by_hand(group: Any, layout: str, seq: int) -> float:
    """A model given shards and position ids by hand, with the cache that transformers makes unless told not to."""
    attention = MeshAttention(group, layout=layout)
    with Exact(), torch.no_grad():
        ids = tokens(2, seq)["input_ids"]
        due = make_model("mistral")(ids).logits
        model = parallelize(make_model("mistral"), attention)
        out = model(attention.shard(ids), position_ids=attention.position_ids(seq)[None])
    return relative_error(attention.unshard(out.logits), due)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_shards_and_position_ids_are_enough_when_ranks_hold_as_many_tokens(pool: RankPool, layout: str) -> None:
    assert max(pool.run(4, logits_by_hand, layout, 24)) <= 1e-9


def refusal_by_hand(group: Any, layout: str, mistake: str) -> str:
    attention = MeshAttention(group, layout=layout)
    try:
        model = parallelize(make_model("llama"), attention)
        seq = 22 if mistake == "uneven" else 24
        call: dict[str, Any] = {"input_ids": attention.shard(tokens(1, seq)["input_ids"])}
        if mistake == "packed":  # as transformers would take it, in each rank's own tokens
            restarted = torch.cat([torch.arange(10), torch.arange(14)])
            call["position_ids"] = attention.shard(restarted[None])
        if mistake == "uneven":
            call["position_ids"] = attention.position_ids(seq)[None]
        if mistake == "own mask":
            call["position_ids"] = attention.position_ids(seq)[None]
            call["attention_mask"] = torch.ones_like(call["input_ids"])
        model(**call)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_forgotten_position_ids_are_refused_on_every_rank(pool: RankPool, layout: str) -> None:
    answers = pool.run(4, refusal_by_hand, layout, "forgotten positions")
    for rank, answer in enumerate(answers):
        assert "are not those of this rank's tokens" in answer
        if layout == "contiguous" and rank == 0:  # its own are right, by chance
            assert answer.startswith("DisagreementError: rank 1 refused the call: position_ids of row 0 (0, 1, 2, 3, …")


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("packed", "if they restart for packed documents"),
        ("uneven", "or ranks hold unequal numbers of tokens, also pass cu_seq_lens_q/k of the whole sequence"),
        ("own mask", "give attention_mask and cu_seq_lens of the whole sequence on every rank"),
    ],
)
def test_mistakes_in_cutting_are_refused_on_every_rank(pool: RankPool, mistake: str, message: str) -> None:
    for answer in pool.run(4, refusal_by_hand, "zigzag", mistake):
        assert message in answer


def refusals_of_the_second(group: Any, change: str, mistake: str) -> tuple[str, str]:
    """What a second forward without position ids, or boundaries, says, and a third that is right, after a right one."""
    torch.compiler.reset()
    attention = MeshAttention(group, layout="contiguous")
    said = []
    model = parallelize(make_model("llama"), attention).train()
    CHANGES[change](model)
    batch = BATCHES["plain"]() if mistake == "position_ids" else packed((12, 3, 9), by="position_ids")
    for is_right in (True, False, True):
        local = dict(shard_batch(attention, batch))
        for name in () if is_right else (mistake,) if mistake == "position_ids" else CUTS:
            del local[name]
        try:
            model(**local).loss.backward()
            said.append("")
        except (UsageError, DisagreementError) as refusal:
            said.append(f"{type(refusal).__name__}: {refusal}")
        gc.collect()  # before 2.13, torch keeps the hooks of a checkpointed forward that raised until then
    assert said[0] == ""
    return said[1], said[2]


@pytest.mark.parametrize(
    ("change", "mistake"),
    [
        ("nothing", "position_ids"),
        ("nothing", "boundaries"),
        ("compiled layers", "boundaries"),
        ("checkpointing", "position_ids"),
    ],
)
def test_a_mistake_in_a_later_forward_is_refused_on_every_rank(pool: RankPool, change: str, mistake: str) -> None:
    answers = pool.run(2, refusals_of_the_second, change, mistake)
    assert answers[0][0].startswith("DisagreementError: rank 1 refused the call: position_ids of row 0")
    assert answers[1][0].startswith("UsageError: position_ids of row 0")
    assert [later for _, later in answers] == ["", ""]


def rotary_outcome(group: Any, model_name: str, layout: str, seq: int) -> float | str:
    """The error of the logits of a model with rotary frequencies that may depend on the length, or a refusal."""
    attention = MeshAttention(group, layout=layout)
    try:
        with Exact(), torch.no_grad():
            batch = {"input_ids": tokens(1, seq)["input_ids"]}
            due = make_model(model_name)(**batch).logits
            out = parallelize(make_model(model_name), attention)(**shard_batch(attention, batch))
            return relative_error(attention.unshard(out.logits), due)
    except UsageError as refusal:
        return str(refusal)


@pytest.mark.parametrize(
    ("model_name", "layout", "seq", "is_refused"),
    [
        ("dynamic rotary", "zigzag", 16, False),
        ("dynamic rotary", "zigzag", 17, True),
        ("dynamic rotary", "contiguous", 40, True),
        ("long rotary", "contiguous", 16, False),
        ("long rotary", "contiguous", 17, True),
        ("long rotary", "contiguous", 32, True),  # rank 0 ends at the last short position
        ("long rotary", "contiguous", 34, False),
        ("long rotary", "striped", 17, True),
        ("long rotary", "striped", 18, False),
        ("long rotary", "zigzag", 22, False),
    ],
)
def test_rotary_frequencies_are_those_of_the_whole_sequence_or_refused(
    pool: RankPool, model_name: str, layout: str, seq: int, is_refused: bool
) -> None:
    for outcome in pool.run(2, rotary_outcome, model_name, layout, seq):
        if is_refused:
            assert "whose frequencies depend on the largest position" in str(outcome)
        else:
            assert isinstance(outcome, float), outcome
            assert outcome <= 1e-9


def refusal_of_a_loss(group: Any, is_parallel: bool) -> str:
    attention = MeshAttention(group)
    try:
        model = parallelize(make_model("llama"), attention) if is_parallel else make_model("llama")
        local = shard_batch(attention, BATCHES["plain"]())
        batch_loss(model(**local).loss, local, group=group)
    except UsageError as refusal:
        return str(refusal)
    return "none"


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_loss_of_a_model_that_attends_by_other_means_is_refused(pool: RankPool, is_refused: bool) -> None:
    for said in pool.run(2, refusal_of_a_loss, not is_refused):
        assert ("every rank attended to its own tokens only" in said) == is_refused, said
