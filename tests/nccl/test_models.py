"""Training on NCCL in other people's stacks: the parameters, logits and gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_composition import CASES, train
from test_context_parallel import sdpa_errors
from test_dtensors import one_axis_errors
from torch import Tensor
from training_model import TOKENS, VOCABULARY, Model, plain_attention

from mesh_attention import MeshAttention
from nccl.attending import worst
from nccl.rig import DEVICE, IS_TRIED_ON_CPU, Rig

COMPILER = "aot_eager" if IS_TRIED_ON_CPU else "inductor"
ON_NCCL = ("HSDP, replicated over dp and sharded over cp", "DDP over dp × cp", "FSDP2 × context × tensor parallel")
"""All ways are tried over Gloo."""
WAYS = {name: CASES[name] for name in ON_NCCL}
if not IS_TRIED_ON_CPU:
    axes, how, options = CASES["FSDP2 over dp × cp"]
    WAYS["FSDP2 over dp × cp, CUDA graphs"] = (axes, how, options | {"cuda_graphs": True})


@pytest.mark.parametrize("case", WAYS)
def test_parameters_after_training_are_those_of_a_single_process(rig: Rig, case: str) -> None:
    for errors in rig.run(8, train, *WAYS[case], DEVICE.type):
        for name, error in errors:
            assert error <= 1e-9, (name, error)


def test_torchs_attention_means_in_the_context_what_it_means_outside(rig: Rig) -> None:
    for errors in rig.run(4, sdpa_errors, DEVICE.type):
        assert worst(map(worst, errors.values())) <= 1e-11


def test_dtensors_go_in_and_come_out_with_their_gradients(rig: Rig) -> None:
    for errors in rig.run(3, one_axis_errors, [(16, 16, True), (5, 5, True), (14, 5, False)], DEVICE.type):
        assert worst(errors) <= 1e-11


# Compiled models


def compiled_errors(group: Any, options: dict[str, Any]) -> list[float]:
    """Errors of the logits and gradients of a compiled model, against the same model in one process."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    ids = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weights = torch.randn(2, TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    due = model(ids, torch.arange(TOKENS, device=DEVICE), plain_attention)
    due_gradients = torch.autograd.grad((due * weights).sum(), list(model.parameters()))
    attention = MeshAttention(group, **options)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, seq_len=TOKENS)

    compiled = torch.compile(model, backend=COMPILER, fullgraph=True)
    errors = []
    for _ in range(3):
        logits = compiled(attention.shard(ids), attention.position_ids(TOKENS, device=DEVICE), attend)
        gradients = torch.autograd.grad((logits * attention.shard(weights)).sum(), list(model.parameters()))
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)
        pairs = [(logits, attention.shard(due)), *zip(gradients, due_gradients, strict=True)]
        errors.append(worst(float((a - b).abs().max() / b.abs().max().clamp_min(1.0)) for a, b in pairs))
    return errors


def test_compiled_models_give_what_one_process_gives(rig: Rig) -> None:
    for errors in rig.run(3, compiled_errors, {}, timeout_s=200.0):
        assert worst(errors) <= 1e-4


# transformers


@pytest.mark.parametrize(
    ("ranks", "model_name", "batch_name"),
    [
        (3, "gemma2", "padded both"),
        (4, "gpt_oss", "packed by boundaries"),
    ],
)
def test_transformers_have_the_logits_and_gradients_of_one_process(
    rig: Rig, ranks: int, model_name: str, batch_name: str
) -> None:
    pytest.importorskip("transformers")
    from test_transformers import errors_of, fully_sharded_errors

    for errors in rig.run(ranks, errors_of, model_name, batch_name, {}, DEVICE.type):
        assert worst(errors.values()) <= 1e-9, errors
    for found in rig.run(ranks, fully_sharded_errors, model_name, batch_name, DEVICE.type):
        assert worst(found) <= 1e-9


@pytest.mark.parametrize(("ranks", "model_name"), [(2, "llama"), (3, "gpt_oss"), (4, "deepseek_v3")])
def test_transformers_generate_what_one_process_gives(rig: Rig, ranks: int, model_name: str) -> None:
    pytest.importorskip("transformers")
    from test_generate import outcomes

    cases = ("unequal", "short", "sampled", "chunks", "turns", "beams")
    for found in rig.run(ranks, outcomes, model_name, cases, DEVICE.type):
        assert all(is_same and error <= 1e-9 for is_same, error in found.values()), found
