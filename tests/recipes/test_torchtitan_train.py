"""torchtitan's Trainer with mesh attention on 4 processes: as torchtitan alone, in one."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recipe_runs import Run, run_recipe

from mesh_attention import LocalGroup, MeshAttention, UsageError
from mesh_attention.errors import MaskError

pytest.importorskip("torchtitan")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchtitan imports parts of torch that warn
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models import gpt_oss, llama3, qwen3

    from mesh_attention.integrations import torchtitan as ours

NAME = "torchtitan_train.py"
COMBINATIONS = {
    "cp 4": ("--cp", "4"),
    "cp 2 × tp 2": ("--cp", "2", "--tp", "2", "--ac", "full"),
    "fsdp 2 × cp 2, compiled": ("--cp", "2", "--backend", "aot_eager"),
}


@pytest.fixture(scope="module")
def alone() -> Run:
    return run_recipe(str(Path(__file__).parent / "torchtitan_alone.py"), ranks=1)


@pytest.mark.parametrize("flags", COMBINATIONS.values(), ids=COMBINATIONS)
def test_four_processes_train_as_one(alone: Run, flags: tuple[str, ...]) -> None:
    run = run_recipe(NAME, *flags)
    assert len(run.losses) == 3
    assert run.losses == pytest.approx(alone.losses, abs=5e-6)  # torchtitan computes and adds losses in float32
    assert run.weights == pytest.approx(alone.weights, abs=1e-7)


@pytest.mark.parametrize("registry", [llama3.model_registry, qwen3.model_registry], ids=["llama3", "qwen3"])
def test_every_layer_gets_mesh_attention(registry: Any) -> None:
    spec = registry("debugmodel")
    replaced = ours.with_mesh_attention(spec, method="ring")
    inner = {type(layer.attention.inner_attention) for layer in replaced.model.layers}
    assert inner == {ours.InnerAttention.Config}
    assert type(spec.model.layers[0].attention.inner_attention) is not ours.InnerAttention.Config  # spec is unchanged


def test_selective_checkpointing_keeps_the_output_of_attention() -> None:
    saved = ours.SavedAttention.Config().build().get_save_ops()
    assert torch.ops.mesh_attention.attend.default in saved


def find(positions: list[list[int]] | None, *, masks: object = None, attention: Any = None) -> list[list[int]]:
    hook = ours._FindDocuments(attention or MeshAttention(LocalGroup(1).comm(0)))
    given = None if positions is None else torch.tensor(positions)
    _, kwargs = hook(torch.nn.Identity(), (torch.zeros(1),), {"positions": given, "attention_masks": masks})
    return [cuts.tolist() for cuts in kwargs["attention_masks"]]


def test_documents_are_found_in_positions() -> None:
    assert find([[0, 1, 2, 3]]) == []
    assert find([[0, 1, 0, 1], [0, 1, 0, 1]]) == [[0, 2, 4]]
    assert find([[0, 1, 0, 0], [0, 1, 2, 3]]) == [[0, 2, 3, 4], [0, 4]]
    assert find(None) == []  # one rank: all tokens are one document
    with pytest.raises(MaskError, match="neither count on nor restart from 0"):
        find([[0, 1, 4, 5]])
    with pytest.raises(UsageError, match="the model was given no positions; expected those of this rank's tokens"):
        find(None, attention=SimpleNamespace(ranks=2))
    with pytest.raises(UsageError, match="expected none: mesh attention finds documents in the positions"):
        find([[0, 1]], masks=torch.ones(2))


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = llama3.model_registry("debugmodel")
    with pytest.raises(UsageError, match="expected one of a torchtitan Decoder"):
        ours.with_mesh_attention(replace(spec, model=TrainingConfig()))
    for name in ("group", "layout", "tensor_format", "choice"):
        with pytest.raises(UsageError, match=f"{name}= cannot be given here"):
            ours.with_mesh_attention(spec, **{name: None})
    with pytest.raises(UsageError, match="makes masks of its own, such as sliding windows"):
        ours.with_mesh_attention(gpt_oss.model_registry("debugmodel"))
    with pytest.raises(UsageError, match=r"layer 0 attends with .*InnerAttention"):
        ours.with_mesh_attention(ours.with_mesh_attention(spec))
    with pytest.raises(UsageError, match="spmd_backend='spmd_types' is not supported with mesh attention; expected"):
        ours._check(TrainingConfig(), ParallelismConfig())
    parallelism = ParallelismConfig(expert_parallel_degree=2, spmd_backend="partial_dtensor")
    with pytest.raises(UsageError, match="expert_parallel_degree=2 is not supported with mesh attention; expected 1"):
        ours._check(TrainingConfig(), parallelism)
    parallelism = replace(parallelism, expert_parallel_degree=1, context_parallel_degree=2)
    ours._check(TrainingConfig(), parallelism)
    with pytest.raises(UsageError, match="context_parallel_load_balancer=None; expected headtail"):
        ours._check(TrainingConfig(), replace(parallelism, context_parallel_load_balancer=None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match=r"CUDA graphs; set training\.disable_cuda_graphs"):
        ours._check(TrainingConfig(), parallelism)
    ours._check(TrainingConfig(disable_cuda_graphs=True), parallelism)


def test_attention_refuses_what_it_cannot_honour() -> None:
    inner, q = ours.InnerAttention.Config().build(), torch.randn(1, 4, 2, 8)
    with pytest.raises(UsageError, match="before its parallelize_fn"):
        inner(q, q, q)
    inner.attention = MeshAttention(LocalGroup(1).comm(0))
    with pytest.raises(UsageError, match="asks for score_mod, which is not supported"):
        inner(q, q, q, attention_masks=(), score_mod=torch.add)
