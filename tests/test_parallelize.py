"""`parallelize` changes one model, lasts through what other libraries do to models, and is undone without a trace."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import MethodType
from typing import Any

import pytest
import torch
from pool import shared_pool
from run_ranks import RankPool
from tiny_models import BATCHES, make_model, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaForCausalLM, LlavaConfig
from transformers.modeling_outputs import CausalLMOutput

from mesh_attention import LocalGroup, UsageError
from mesh_attention.api import MeshAttention
from mesh_attention.batches import shard_batch
from mesh_attention.transformers import parallelize, unparallelize

Local = dict[str, Any]


@pytest.fixture(scope="module")
def pool() -> RankPool:
    return shared_pool()


@pytest.fixture
def attention() -> MeshAttention:
    return MeshAttention(LocalGroup(1).comm(0))


@pytest.fixture
def local(attention: MeshAttention) -> Local:
    return shard_batch(attention, tokens(2, 9))


def logits_of(model: Any, batch: Local) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(**batch).logits
    return logits


def whole_logits() -> Tensor:
    return logits_of(make_model("llama"), {"input_ids": tokens(2, 9)["input_ids"], "use_cache": False})


def assert_whole(logits: Tensor) -> None:
    torch.testing.assert_close(logits, whole_logits(), rtol=1e-4, atol=1e-5)


# No other model


IN_A_PROCESS = """
import torch, transformers
from torch import nn
from transformers.modeling_outputs import CausalLMOutput
from transformers import AttentionInterface, GenerationMixin, LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

classes = nn.Module, PreTrainedModel, GenerationMixin, LlamaModel, LlamaForCausalLM
CACHED = "_can_set_attn_implementation_cached_value"  # by transformers itself

def state():
    members = [{name: value for name, value in vars(kind).items() if name != CACHED} for kind in classes]
    return members, dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)

LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
before = state()
from mesh_attention import LocalGroup, MeshAttention
from mesh_attention.batches import shard_batch
from mesh_attention.transformers import parallelize, unparallelize
from tiny_models import make_model, tokens
assert state() == before, "import"
attention = MeshAttention(LocalGroup(1).comm(0))
model = parallelize(make_model("llama"), attention).eval()
model(**shard_batch(attention, tokens(1, 9)))
model.generate(tokens(1, 9)["input_ids"], max_new_tokens=2)
members, functions, masks = state()
for kind, old, new in zip(classes, before[0], members):
    changed = [name for name in {*old, *new} if old.get(name) is not new.get(name)]
    assert not changed, (kind, changed)
assert len({*functions} - {*before[1]}) == len({*masks} - {*before[2]}) == 1
unparallelize(model)
assert state() == before, "unparallelize"
print("untouched")
"""


def test_neither_import_nor_a_parallelized_model_changes_transformers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "untouched", done.stderr


def test_models_of_the_same_class_and_config_are_left_alone(attention: MeshAttention, local: Local) -> None:
    model = make_model("llama", "sdpa")
    other = LlamaForCausalLM(model.config).double()
    other.load_state_dict(model.state_dict())
    before, config = dict(vars(other)), dict(vars(other.config))
    assert other.config is model.config
    parallelize(model, attention)
    assert_whole(logits_of(model, local))
    assert type(other) is LlamaForCausalLM
    assert (vars(other), vars(other.config)) == (before, config)
    assert_whole(logits_of(other, {"input_ids": tokens(2, 9)["input_ids"], "use_cache": False}))


def test_several_models_run_on_several_attentions(attention: MeshAttention, local: Local) -> None:
    other = MeshAttention(LocalGroup(1).comm(0))
    models = [parallelize(make_model("llama"), one) for one in (attention, other)]
    logits_of(models[1], local)
    assert other.calls.engines
    assert not attention.calls.engines
    assert torch.equal(*(logits_of(model, local) for model in models))


# Undone


def traces(model: nn.Module) -> list[Any]:
    """Everything that a model and its parts have: classes, attributes, and the values of configs."""
    parts = [(type(module), dict(vars(module))) for module in model.modules()]
    configs = {id(value): value for _, members in parts for value in members.values() if hasattr(value, "sub_configs")}
    return [parts, {number: dict(vars(config)) for number, config in configs.items()}]


def same(before: list[Any], after: list[Any]) -> bool:
    identical = all(
        one[0] is other[0] and one[1].keys() == other[1].keys() and all(one[1][k] is other[1][k] for k in one[1])
        for one, other in zip(before[0], after[0], strict=True)
    )
    return identical and before[1] == after[1]


def test_undoing_restores_every_attribute(attention: MeshAttention, local: Local) -> None:
    model = make_model("llama", "sdpa").eval()
    before = traces(model)
    assert parallelize(model, attention) is model
    name = model.config._attn_implementation
    assert name in AttentionInterface._global_mapping
    assert_whole(logits_of(model, local))
    model.generate(tokens(1, 9)["input_ids"], max_new_tokens=2)
    assert unparallelize(model) is model
    assert same(before, traces(model))
    gc.collect()
    assert name not in AttentionInterface._global_mapping


def test_undoing_keeps_what_was_changed_meanwhile(attention: MeshAttention, local: Local) -> None:
    model, shared = make_model("llama", "sdpa"), make_model("llama", "sdpa")
    config = model.config
    for module in shared.modules():
        if hasattr(module, "config"):
            module.config = config
    parallelize(model, attention)
    model.resize_token_embeddings(31)
    shared.config.use_cache = False
    unparallelize(model)
    assert model.config is config
    assert (config.vocab_size, config.use_cache, config._attn_implementation) == (31, False, "sdpa")


def fail_in_a_layer(model: Any, local: Local) -> None:
    hook = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            model(**local, output_hidden_states=False)
    finally:
        hook.remove()


def fail_in_generate(model: Any, local: Local) -> None:
    with pytest.raises(UsageError, match="use_cache=False is not supported"):
        model.generate(tokens(1, 9)["input_ids"], max_new_tokens=2, use_cache=False)


def fail_in_the_trial(model: Any, local: Local) -> None:
    with pytest.raises(UsageError, match="logits_to_keep was given"):
        model(**local, logits_to_keep=1)


@pytest.mark.parametrize("fail", [fail_in_a_layer, fail_in_generate, fail_in_the_trial])
def test_errors_leave_a_model_as_it_was(attention: MeshAttention, local: Local, fail: Any) -> None:
    model = make_model("llama", "sdpa").eval()
    before = traces(model)
    parallelize(model, attention)
    logits_of(model, local)
    running = traces(model)
    fail(model, local)
    assert same(running, traces(model))
    assert_whole(logits_of(model, local))
    unparallelize(model)
    assert same(before, traces(model))


@pytest.mark.parametrize("name", ["llama", "convolutions"])
def test_a_refused_model_is_not_changed(name: str) -> None:
    model = make_model(name, "sdpa")
    before = traces(model)
    with pytest.raises(UsageError):
        parallelize(model, MeshAttention(LocalGroup(2)) if name == "llama" else MeshAttention(LocalGroup(1).comm(0)))
    assert same(before, traces(model))


# What others do to a model


def test_a_deep_copy_is_parallelized_and_of_its_own(attention: MeshAttention, local: Local) -> None:
    model = make_model("llama", "sdpa")
    parallelize(model, attention)
    twin = copy.deepcopy(model)
    assert torch.equal(logits_of(twin, local), logits_of(model, local))
    unparallelize(model)
    gc.collect()
    assert_whole(logits_of(twin, local))
    unparallelize(twin)
    assert type(twin) is LlamaForCausalLM
    assert twin.config is not model.config
    assert twin.config == model.config
    assert_whole(logits_of(twin, {"input_ids": tokens(2, 9)["input_ids"], "use_cache": False}))


def test_a_saved_model_is_an_ordinary_one(attention: MeshAttention, local: Local, tmp_path: Path) -> None:
    model = parallelize(make_model("llama", "sdpa"), attention)
    due = logits_of(model, local)
    model.save_pretrained(tmp_path)
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert "mesh_attention" not in (tmp_path / "config.json").read_text()
    for read in (AutoModelForCausalLM.from_pretrained, type(model).from_pretrained):
        again = read(tmp_path, dtype=torch.float64)
        assert again.config._attn_implementation == "sdpa"
        assert_whole(logits_of(again, {"input_ids": tokens(2, 9)["input_ids"], "use_cache": False}))
    ordinary = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(ordinary) is LlamaForCausalLM
    assert torch.equal(logits_of(parallelize(ordinary, attention), local), due)
    torch.save(model.state_dict(), tmp_path / "weights")
    assert torch.load(tmp_path / "weights").keys() == ordinary.state_dict().keys()


class LowRank(nn.Module):
    """A linear layer with a small trained part, as LoRA makes it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.full((2, layer.in_features), 0.1, dtype=layer.weight.dtype))
        self.b = nn.Parameter(torch.full((layer.out_features, 2), 0.1, dtype=layer.weight.dtype))

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) + x @ self.a.T @ self.b.T


class Adapter(nn.Module):
    """What PEFT does: it changes layers in place, passes attributes on, and calls the model's `forward`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base = model
        for layer in model.model.layers:
            layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)


def adapted_gradients(group: Any) -> list[tuple[float, bool]]:
    """Differences of the gradients of adapters from those of one process, and whether both generate the same."""
    from mesh_attention.batches import batch_loss

    batch = tokens(2, 24)
    alone, ours = (make_model("llama", "sdpa") for _ in range(2))
    attention = MeshAttention(group)
    model, due = Adapter(parallelize(ours, attention)), Adapter(alone)
    local = shard_batch(attention, batch)
    batch_loss(model(**local).loss, local, group=group, gradients="summed").backward()
    due(**batch).loss.backward()
    errors = []
    for ours, theirs in zip(model.parameters(), due.parameters(), strict=True):
        if theirs.grad is not None:
            torch.distributed.all_reduce(ours.grad, group=group)
            errors.append(float((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()))
    given: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    texts = [one.eval().generate(batch["input_ids"], **given) for one in (model, due)]
    return [(max(errors), torch.equal(*texts))]


def test_an_adapter_that_calls_forward_trains_and_generates_on_ranks(pool: RankPool) -> None:
    for ((error, is_same),) in pool.run(2, adapted_gradients):
        assert error <= 1e-4  # norms are in float32 here
        assert is_same


def replace_forward(model: Any) -> Any:
    """As TRL does, to compute the loss without logits: its own function calls a part of the model."""

    def forward(
        model: Any, labels: Any = None, shift_labels: Any = None, num_items_in_batch: Any = 1, **batch: Any
    ) -> Any:
        logits = model.lm_head(model.base_model(**batch).last_hidden_state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum")
        return CausalLMOutput(logits=logits, loss=loss / num_items_in_batch)

    model.forward = MethodType(forward, model)
    return model


def test_an_adapter_cannot_call_the_forward_of_another(attention: MeshAttention, local: Local) -> None:
    model = Adapter(replace_forward(parallelize(make_model("llama", "sdpa"), attention)))
    with pytest.raises(UsageError, match="a part of a parallelized model was called"):
        model(**local)


def wrap_forward(model: Any) -> Any:
    """As accelerate does, for mixed precision."""
    function = model.forward.__func__
    model.forward = MethodType(lambda model, *args, **kwargs: function(model, *args, **kwargs), model)
    return model


def compile_in_place(model: Any) -> Any:
    model.compile(backend="aot_eager")
    return model


def compile_layers(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    return model


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "another forward": replace_forward,
    "a wrapped forward": wrap_forward,
    "compiled": lambda model: torch.compile(model, backend="aot_eager"),
    "compiled in place": compile_in_place,
    "compiled layers": compile_layers,
    "a compiled step": lambda model: torch.compile(lambda **batch: model(**batch), backend="aot_eager"),
    "a part of another": lambda model: nn.ModuleDict({"inner": model})["inner"],
    "forward itself": lambda model: model.forward,
}


def wrapped_difference(group: Any, how: str) -> list[float]:
    """How far the logits of a wrapped model are from those of the model, in two calls."""
    torch.compiler.reset()
    attention = MeshAttention(group)
    model = parallelize(make_model("llama", "sdpa"), attention).eval()
    local = shard_batch(attention, BATCHES["plain"]())
    due = logits_of(model, local)
    wrapped = WRAPPERS[how](model)
    return [float((logits_of(wrapped, local) - due).abs().max()) for _ in range(2)]


@pytest.mark.parametrize("how", WRAPPERS)
def test_a_wrapped_model_runs_on_ranks(pool: RankPool, how: str) -> None:
    for differences in pool.run(2, wrapped_difference, how):
        assert max(differences) <= 1e-5


def sharded_outcome(group: Any, is_first: bool) -> tuple[float, str, bool]:
    """With FSDP2 before `parallelize` or after it: the error of the logits, and what the class is when undone."""
    batch = BATCHES["plain"]()
    due = logits_of(make_model("llama"), {"input_ids": batch["input_ids"], "use_cache": False})
    attention = MeshAttention(group)
    model = make_model("llama", "sdpa")
    mesh = DeviceMesh.from_group(group, "cpu")
    for change in (True, False) if is_first else (False, True):
        if change:
            for part in (*model.model.layers, model):
                fully_shard(part, mesh=mesh)
        else:
            parallelize(model, attention)
    local = shard_batch(attention, batch)
    error = float((attention.unshard(logits_of(model, local)) - due).abs().max())
    unparallelize(model)
    alone = logits_of(model, {"input_ids": batch["input_ids"], "use_cache": False})
    is_restored = type(model).__bases__ == (FSDPModule, LlamaForCausalLM) and torch.allclose(alone, due, atol=1e-5)
    return error, type(model).__name__, is_restored


@pytest.mark.parametrize("is_first", [True, False])
def test_fully_shard_goes_before_or_after(pool: RankPool, is_first: bool) -> None:
    for error, name, is_restored in pool.run(2, sharded_outcome, is_first):
        assert error <= 1e-4
        assert (name, is_restored) == ("FSDPLlamaForCausalLM", True)


def test_only_the_text_of_a_multimodal_model_is_parallelized(attention: MeshAttention) -> None:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaForConditionalGeneration

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    text = LlamaConfig(**sizes, num_attention_heads=4, vocab_size=29)
    vision = CLIPVisionConfig(**sizes, num_attention_heads=4, image_size=8, patch_size=4)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=28)
    model = LlavaForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    before = traces(model)
    parallelize(model, attention)
    configs = model.config, model.config.text_config, model.model.language_model.config
    assert all(one._attn_implementation.startswith("mesh_attention") for one in configs)
    assert model.model.vision_tower.config._attn_implementation == "sdpa"
    assert model.config.text_config is model.model.language_model.config
    unparallelize(model)
    assert same(before, traces(model))


# What is refused while it runs; the rest is in tests/golden/python/transformers-models.txt


def change_implementation(model: Any, local: Local) -> None:
    model.set_attn_implementation("sdpa")
    model(**local)


def call_again(model: Any, local: Local) -> None:
    model.model.layers[0].register_forward_hook(lambda *_: model(**local))
    model(**local)


def call_in_a_thread(model: Any, local: Local) -> None:
    errors: list[Exception] = []

    def other() -> None:
        try:
            model(**local)
        except UsageError as error:
            errors.append(error)

    def run(*_: object) -> None:
        thread = Thread(target=other)
        thread.start()
        thread.join()

    model.model.layers[0].register_forward_hook(run)
    model(**local)
    raise errors[0]


REFUSED: list[tuple[Callable[[Any, Local], object], str]] = [
    (change_implementation, "the attention implementation of a parallelized model was changed, to 'sdpa'"),
    (call_again, "LlamaForCausalLM is called by itself, or by a copy; a parallelized model and its copies make one"),
    (call_in_a_thread, "LlamaForCausalLM is running in another thread"),
]


@pytest.mark.parametrize(("attempt", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_goes_past_a_parallelized_model_is_refused(
    attention: MeshAttention, local: Local, attempt: Callable[[Any, Local], object], message: str
) -> None:
    model = parallelize(make_model("llama", "sdpa"), attention)
    logits_of(model, local)
    with pytest.raises(UsageError, match=message):
        attempt(model, local)
