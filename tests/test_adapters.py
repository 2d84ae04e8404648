"""Every option through every adapter is right or refused, on four real ranks; and the DeepSpeed module, which needs no
DeepSpeed. Megatron's and torchtitan's adapters import their stacks: `tests/recipes` has the same of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pool import said
from run_ranks import RankPool
from tiny_models import make_model, tokens
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention import LocalGroup, UsageError, make_plan
from mesh_attention.api import MeshAttention, mesh_attention
from mesh_attention.batches import shard_batch
from mesh_attention.context_parallel import attend_dtensor, context_parallel, context_parallel_unshard
from mesh_attention.integrations.deepspeed import MeshDistributedAttention
from mesh_attention.plan.layout import LAYOUTS
from mesh_attention.planners.choice import METHODS, ChoiceOptions
from mesh_attention.planners.costs import Costs
from mesh_attention.transformers import parallelize

RANKS, TOKENS = 4, 16
"""A rank has as many tokens as there are heads, so that no check of shapes notices that they are mixed up."""
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "group": [{"group": 1}],
    "choice": [{"choice": "ring"}, {"choice": "ring 1x4, striped"}],
    "tensor_format": [{"tensor_format": name} for name in ("bshd", "bhsd")],
    "cluster": [{"cluster": "h100x8"}],
    "memory_limit": [{"memory_limit": 10**9, "cluster": "h100x8"}],
    "planner": [{"planner": make_plan}],
    "cuda_graphs": [{"cuda_graphs": False}, {"cuda_graphs": True}],
    "costs": [{"costs": Costs(kv=3.0)}],
    "method": [{"method": method} for method in METHODS],
    "tile": [{"tile": (2, 2)}],
    "ulysses_degree": [{"ulysses_degree": 2}],
    "inner": [{"inner": (1, 2), "tile": (2, 2)}],
    "layout": [{"layout": layout} for layout in LAYOUTS],
    "route": [{"route": "ring", "method": "ring"}],
    "partials": [{"partials": "ring", "tile": (2, 2)}],
    "blocks_per_call": [{"blocks_per_call": 2}],
    "keep": [{"keep": ("kv",)}],
    "waves": [{"waves": 2}],
    "cut": [{"cut": "rows", "waves": 2, "ulysses_degree": 2, "keep": ("own",)}],
}
CALLS: dict[str, list[dict[str, Any]]] = {
    "causal": [{"causal": False}, {"causal": True}],
    "softmax_scale": [{"softmax_scale": 0.3}],
    "window_size": [{"window_size": (3, 0)}],
    "cu_seqlens_q": [{"cu_seqlens_q": [0, 9, 16]}],
    "cu_seqlens_k": [{"cu_seqlens_q": [0, 9, 16], "cu_seqlens_k": [0, 4, 16]}],
    "softcap": [{"softcap": 1.5}],
    "deterministic": [{"deterministic": True}],
    "return_lse": [{"return_lse": True}, {"return_lse": False}],
    "seq_len": [{"seq_len": 16}],
    "seq_len_k": [{"seq_len": 16, "seq_len_k": 16}],
    "others": [{"dropout_p": 0.1}, {"casual": True}],
}


def names_of(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "q", "k", "v"}


def test_the_cases_are_all_options_of_mesh_attention() -> None:
    assert set(OPTIONS) == (names_of(MeshAttention) - {"options"}) | set(ChoiceOptions.__annotations__)
    assert set(CALLS) == names_of(MeshAttention.__call__)


def wholes() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, TOKENS, 4, 8, dtype=torch.float64, generator=generator) for _ in range(3)]


def dense(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Any:
    return MeshAttention(LocalGroup(1).comm(0))(q, k, v, **call)


def attention_of(group: Any, options: dict[str, Any]) -> MeshAttention:
    return MeshAttention(**{"group": group, **options})


def through_the_function(group: Any, options: dict[str, Any], call: dict[str, Any]) -> Any:
    layout = MeshAttention(group, layout=options.get("layout"), choice=options.get("choice"))
    is_bhsd = options.get("tensor_format") == "bhsd"
    parts = [layout.shard(x) for x in wholes()]
    out = mesh_attention(*(x.transpose(1, 2) if is_bhsd else x for x in parts), **{"group": group, **options}, **call)
    out, *lse = out if isinstance(out, tuple) else (out,)
    out = layout.unshard(out.transpose(1, 2) if is_bhsd else out)
    return (out, layout.unshard(lse[0], dim=2)) if lse else out


def through_deepspeed(gather_idx: int) -> Callable[..., Any]:
    def attend(group: Any, options: dict[str, Any], call: dict[str, Any]) -> Any:
        module = MeshDistributedAttention(None, group, 2, gather_idx, call=call, **options)
        runs = MeshAttention(group, layout="contiguous")
        parts = [x if gather_idx else x.transpose(0, 1) for x in map(runs.shard, wholes())]
        return runs.unshard(module(*parts, 1 - gather_idx), dim=gather_idx).transpose(0, 1 - gather_idx)

    return attend


def through_context_parallel(group: Any, options: dict[str, Any], call: dict[str, Any]) -> Any:
    attention, mesh = attention_of(group, options), DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    q, k, v = (x.transpose(1, 2).contiguous() for x in wholes())
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3, attention=attention):
        out = scaled_dot_product_attention(q, k, v, is_causal=call["causal"])
    return context_parallel_unshard(mesh, [out], [2], attention=attention)[0].transpose(1, 2)


def through_dtensors(group: Any, options: dict[str, Any], call: dict[str, Any]) -> Any:
    attention = attention_of(group, {"layout": "chunks"} | options)
    mesh = DeviceMesh.from_group(group, "cpu")
    is_bhsd = options.get("tensor_format") == "bhsd"
    parts = [x.transpose(1, 2) if is_bhsd else x for x in wholes()]
    placed = [distribute_tensor(x.contiguous(), mesh, [Shard(2 if is_bhsd else 1)]) for x in parts]
    out = attend_dtensor(attention, *placed, **call)
    if isinstance(out, tuple):
        return tuple(result.full_tensor() for result in out)
    return out.full_tensor().transpose(1, 2) if is_bhsd else out.full_tensor()


def through_a_model(group: Any, options: dict[str, Any], call: dict[str, Any]) -> Any:
    attention = attention_of(group, options)
    model = parallelize(make_model("llama"), attention)
    with torch.no_grad():
        return attention.unshard(model(**shard_batch(attention, tokens(2, TOKENS))).logits)


def whole_model() -> Tensor:
    with torch.no_grad():
        return make_model("llama")(input_ids=tokens(2, TOKENS)["input_ids"], use_cache=False).logits


def wrong_through(group: Any, adapter: str, cases: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, str]:
    """What was neither right nor refused. Norms of a model compute in float32."""
    wrong, right = {}, 0
    for options, call in cases:
        results: list[Any] = []

        def attend(options: Any = options, call: Any = call, results: Any = results) -> None:
            results.append(ADAPTERS[adapter](group, options, call))

        raised = said(attend)
        if results:
            due = whole_model() if adapter == "a model" else dense(*wholes(), **call)
            pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (results[0], due)), strict=True)
            right += 1
            error = max((ours - other).abs().max().item() for ours, other in pairs)
            raised = "" if error <= (1e-5 if adapter == "a model" else 1e-12) else f"wrong by {error:.2g}"
        if raised and not raised.split(":")[0].endswith(("UsageError", "ProblemError", "ScheduleError", "TileError")):
            wrong[f"{options} {call}"] = raised
    assert right > len(cases) / 2
    return wrong


ADAPTERS: dict[str, Callable[..., Any]] = {
    "the function": through_the_function,
    "DeepSpeed, tokens first": through_deepspeed(0),
    "DeepSpeed, batch first": through_deepspeed(1),
    "context_parallel": through_context_parallel,
    "DTensors": through_dtensors,
    "a model": through_a_model,
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_option_through_every_adapter_is_right_or_refused(pool: RankPool, adapter: str) -> None:
    cases = [(options, {"causal": True}) for values in OPTIONS.values() for options in values]
    for wrong in pool.run(RANKS, wrong_through, adapter, cases):
        assert not wrong


@pytest.mark.parametrize("adapter", [name for name in ADAPTERS if name not in ("context_parallel", "a model")])
def test_every_argument_of_a_call_through_every_adapter_is_right_or_refused(pool: RankPool, adapter: str) -> None:
    cases: list[Any] = [({}, call) for values in CALLS.values() for call in values]
    for wrong in pool.run(RANKS, wrong_through, adapter, cases):
        assert not wrong


# The DeepSpeed module


MADE: dict[str, Any] = {"local_attention": None, "sequence_process_group": LocalGroup(1).comm(0)}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"local_attention": torch.nn.Identity()}, "local_attention is a Identity: expected None"),
        ({"scatter_idx": 1}, "scatter_idx=1, gather_idx=0: expected heads in dim 2"),
        ({"sp_stream": object()}, "sp_stream is not supported"),
        *(
            ({name: None}, f"{name}= cannot be given here: .* give method=, tile= or ulysses_degree= instead")
            for name in ("group", "choice", "layout", "tensor_format")
        ),
        ({"call": {"return_lse": True}}, "return_lse cannot be given here: the module returns the output alone"),
    ],
)
def test_a_module_that_cannot_be_right_is_refused(made: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MeshDistributedAttention(**MADE | made)


@pytest.mark.parametrize(
    ("called", "message"),
    [
        ({"batch_dim_idx": 0}, "batch_dim_idx=0 with gather_idx=0: expected 1"),
        ({"rotary_pos_emb": torch.zeros(1)}, "rotary_pos_emb is not supported"),
        ({"query": torch.zeros(6, 2, 12)}, "expected \\(tokens, batch, heads, dim\\)"),
        ({"key": torch.zeros(6, 2, 1, 4)}, "num_kv_heads=3, but key has 1 heads"),
    ],
)
def test_a_call_that_cannot_be_right_is_refused(called: dict[str, Any], message: str) -> None:
    x = torch.zeros(6, 2, 3, 4)
    with pytest.raises(UsageError, match=message):
        MeshDistributedAttention(**MADE, num_kv_heads=3)(
            **{"query": x, "key": x, "value": x, "batch_dim_idx": 1} | called
        )


def test_arguments_of_the_local_attention_are_refused() -> None:
    x = torch.zeros(6, 2, 3, 4)
    with pytest.raises(UsageError, match="got 1 arguments for local_attention, which is not called"):
        MeshDistributedAttention(**MADE)(x, x, x, 1, None, torch.ones(6, 6))
