"""Attention under those who look at operators: torch.compile, selective checkpointing, fake tensors, FLOP counters."""

from __future__ import annotations

import copy
import gc
import json
import pickle
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from pool import shared_pool
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from mesh_attention import LocalGroup, MeshAttention, UsageError
from mesh_attention.arguments import CallOptions
from mesh_attention.comm.torch_dist import TorchComm
from mesh_attention.execution.warm_up import DryComm
from mesh_attention.integrations.pytorch import flop_formulas, saved_attention
from mesh_attention_lab.recording import record
from mesh_attention_lab.testing.wrappers import Counting

# torch 2.11's own, when it compiles
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
WIDTH, HEADS, KV_HEADS, HEAD_DIM = 24, 4, 2, 8
CALLS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window and softcap": {"window_size": (5, 2), "softcap": 3.0},
    "documents as numbers": {"causal": True, "cu_seqlens_q": (0, 7, 7, 20, 29)},
    "documents as a tensor": {"causal": True, "cu_seqlens_q": torch.tensor([0, 13, 29])},
    "scale": {"softmax_scale": 0.3, "deterministic": True},
}


class Layer(nn.Module):
    """Attention between two things a compiler would like to fuse."""

    def __init__(self, attention: MeshAttention) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.attention = attention
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=torch.float64)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, **call: Any) -> Tensor:
        q, k, v = self.qkv(x.sin()).unflatten(-1, (-1, HEAD_DIM)).split((HEADS, KV_HEADS, KV_HEADS), 2)
        out, lse = self.attention(q, k, v, return_lse=True, **call)
        return self.out(out.flatten(2)).cos() + lse.mean(1)[..., None]


def whole_input(tokens: int) -> Tensor:
    return torch.randn((2, tokens, WIDTH), dtype=torch.float64, generator=torch.Generator().manual_seed(tokens))


def results_of(layer: Layer, function: Any, x: Tensor, call: dict[str, Any]) -> list[Tensor]:
    """The output, and the gradients of input and parameters."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    out = function(x, **call)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(parameter.grad.clone() for parameter in layer.parameters())]  # type: ignore[list-item, union-attr]


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def alone(**options: Any) -> MeshAttention:
    return MeshAttention(LocalGroup(1).comm(0), **options)


def compiled_against_plain(group: Any, options: dict[str, Any]) -> list[float]:
    torch._dynamo.reset()
    attention = MeshAttention(group, **options)
    layer = Layer(attention)
    function = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = []
    for tokens in (29, 32, 41):  # compiled once for 29, then with lengths as symbols
        for name in CALLS if tokens == 29 else ["causal"]:
            x, call = attention.shard(whole_input(tokens)), CALLS[name] | {"seq_len": tokens}
            found.append(difference(results_of(layer, function, x, call), results_of(layer, layer, x, call)))
    return found


def test_a_compiled_model_is_one_graph_with_the_same_results() -> None:
    """A graph holds attention as one operator, so the plan behind it does not change how calls are compiled."""
    for errors in shared_pool().run(2, compiled_against_plain, {"ulysses_degree": 2}):
        assert max(errors) <= 1e-12


@pytest.mark.parametrize(
    ("shape", "options", "call"),
    [
        ((1, 4, 9, 8), {"tensor_format": "bhsd"}, {"causal": True}),
        ((9, 4, 8), {}, {"cu_seqlens_q": torch.tensor([0, 4, 9])}),
    ],
    ids=["heads first", "packed tokens without a batch"],
)
def test_other_formats_are_compiled_as_well(shape: Any, options: dict[str, Any], call: dict[str, Any]) -> None:
    torch._dynamo.reset()
    attention, q = alone(**options), torch.randn(shape)
    function = torch.compile(
        lambda q: attention(q, q.sin(), q, return_lse=True, **call), backend="aot_eager", fullgraph=True
    )
    expected = attention(q, q.sin(), q, return_lse=True, **call)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(function(q), expected, strict=True))


def test_the_operators_keep_torchs_rules() -> None:
    attention = alone()
    q, k, v = (torch.randn(1, 6, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))
    asked = (*CallOptions(causal=True), True, attention._number)
    torch.library.opcheck(torch.ops.mesh_attention.attend.default, (q, k, v, *asked))
    with torch.no_grad():
        out, lse, forward_pass = torch.ops.mesh_attention.attend(q, k, v, *asked)
        given = [t.detach() for t in (out, lse, out, lse, forward_pass, q, k, v)]
        torch.library.opcheck(torch.ops.mesh_attention.attend_backward.default, (*given, *asked))


def messages_of(group: Any, how: str) -> tuple[int, float]:
    """Messages of a forward and a backward pass, and how far gradients are from those without checkpointing."""
    plain = Layer(MeshAttention(group, tile=(2, 2)))
    comm = Counting(TorchComm(group))
    layer = Layer(MeshAttention(comm, tile=(2, 2)))
    x, call = plain.attention.shard(whole_input(29)), {"causal": True, "seq_len": 29}
    contexts = {"context_fn": saved_attention} if how == "saved" else {}

    def checkpointed(x: Tensor, **call: Any) -> Any:
        return checkpoint(layer, x, use_reentrant=False, **contexts, **call)

    ours = results_of(layer, layer if how == "plain" else checkpointed, x, call)
    return comm.messages, difference(ours, results_of(plain, plain, x, call))


def test_checkpointing_does_not_repeat_communication_when_attention_is_saved() -> None:
    messages = {}
    for how in ("plain", "saved", "again"):
        answers = shared_pool().run(4, messages_of, how)
        assert max(error for _, error in answers) <= 1e-13
        messages[how] = [count for count, _ in answers]
    assert messages["saved"] == messages["plain"]
    assert all(more > few for more, few in zip(messages["again"], messages["plain"], strict=True))


def test_fake_tensors_get_shapes_and_nothing_is_run() -> None:
    attention = alone()
    with FakeTensorMode():
        q, k, v = (
            torch.empty(2, 10**6, heads, dim, dtype=torch.bfloat16) for heads, dim in ((8, 64), (2, 64), (2, 32))
        )
        out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert (out.shape, out.dtype) == ((2, 10**6, 8, 32), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 8, 10**6), torch.float32)
    assert not attention.calls.engines


def test_flops_are_counted_as_torch_counts_them() -> None:
    attention = alone(tensor_format="bhsd")
    q, k, v = (torch.randn(2, 4, 10, dim, requires_grad=True) for dim in (8, 8, 6))
    with FlopCounterMode(display=False, custom_mapping=flop_formulas()) as counter:
        out = attention(q, k, v)
        assert counter.get_total_flops() == sdpa_flop_count(q.shape, k.shape, v.shape)
        out.sum().backward()
    forward = sdpa_flop_count(q.shape, k.shape, v.shape)
    backward = sdpa_backward_flop_count(out.shape, q.shape, k.shape, v.shape)
    assert counter.get_total_flops() == forward + backward > 0


class Seen(TorchDispatchMode):
    """Which gradients come to the backward operator: of O, of the LSE."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[tuple[bool, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.mesh_attention.attend_backward.default:
            self.gradients.append((args[0] is not None, args[1] is not None))
        return func(*args, **(kwargs or {}))


def test_only_gradients_that_exist_come_to_backward() -> None:
    attention = alone()  # kernels that take a gradient of the LSE are slow on CUDA: it must not be made of zeros
    with Seen() as seen:
        for of_out, of_lse in ((1, 0), (0, 1), (1, 1)):
            q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
            out, lse = attention(q, k, v, return_lse=True)
            sum(result.sum() for result, used in ((out, of_out), (lse, of_lse)) if used).backward()  # type: ignore[union-attr]
    assert seen.gradients == [(True, False), (False, True), (True, True)]


def test_what_was_compiled_needs_its_attention_alive() -> None:
    attention = alone()
    q = torch.randn(1, 6, 2, 8)
    asked = (*CallOptions(causal=True), False, attention._number)
    torch.ops.mesh_attention.attend(q, q, q, *asked)
    del attention
    gc.collect()
    with pytest.raises(UsageError, match="no longer exists; keep it as long"):
        torch.ops.mesh_attention.attend(q, q, q, *asked)


def test_a_graph_keeps_its_attention_until_backward() -> None:
    q = torch.randn(1, 6, 2, 8, requires_grad=True)
    with FlopCounterMode(display=False):
        out = alone()(q, q, q)
        gc.collect()
        out.sum().backward()
    assert q.grad is not None


def test_a_copy_of_a_model_has_the_same_attention_and_pickling_is_refused() -> None:
    layer = Layer(alone())
    assert copy.deepcopy(layer).attention is layer.attention
    with pytest.raises(UsageError, match="a MeshAttention cannot be pickled"):
        pickle.dumps(layer)


def recorded_operators(group: Any) -> list[str]:
    layer = Layer(MeshAttention(group, tile=(1, 2)))
    x = layer.attention.shard(whole_input(20))
    with record(layer.attention) as recording:
        checkpoint(layer, x, use_reentrant=False, context_fn=saved_attention, causal=True).sum().backward()
    return [one.plan.direction for one in recording.passes()]


def test_operators_are_recorded_as_calls_are() -> None:
    assert shared_pool().run(2, recorded_operators) == [["forward", "backward"]] * 2


def kept_under_checkpointing(group: Any) -> tuple[float, str]:
    """How far a plan that keeps is from one that does not, under a mode; and the refusal of the operator itself."""
    keeping, plain = (Layer(MeshAttention(group, tile=(1, 2), **more)) for more in ({"keep": ("kv",)}, {}))
    x, call = plain.attention.shard(whole_input(20)), {"causal": True}

    def saved(x: Tensor, **call: Any) -> Any:
        return checkpoint(keeping, x, use_reentrant=False, context_fn=saved_attention, **call)

    error = difference(results_of(keeping, saved, x, call), results_of(plain, plain, x, call))
    q = torch.randn(1, 6, 2, 8)
    asked = (*CallOptions(causal=True), True, keeping.attention._number)
    with pytest.raises(UsageError) as refusal:
        torch.ops.mesh_attention.attend(q, q, q, *asked)
    return error, str(refusal.value)


def test_plans_that_keep_run_step_by_step_and_not_as_operators() -> None:
    for error, refusal in shared_pool().run(2, kept_under_checkpointing):
        assert error <= 1e-13
        assert "keeps kv for backward, which torch.compile and selective checkpointing cannot" in refusal


@pytest.mark.parametrize("options", [{}, {"tile": (1, 2), "keep": ("kv",)}], ids=["local", "keep"])
def test_what_has_no_operator_is_one_break_in_the_graph(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    attention = MeshAttention(LocalGroup(2), **options)
    shards = [torch.randn(1, 6, 2, 8) for _ in range(2)]

    def function(shards: list[Tensor]) -> Tensor:
        outs = attention(*[[shard.sin() for shard in shards]] * 3, causal=True, return_lse=False)
        return outs[0].cos() + outs[1]

    graphs = torch._dynamo.testing.CompileCounter()
    assert torch.equal(torch.compile(function, backend=graphs)(shards), function(shards))
    assert graphs.frame_count == 2  # before attention and after it; nothing of planning or running is traced


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"causal": "yes"}, "causal='yes': expected True or False"),
        ({"window_size": 5}, r"window_size=5: expected \(left, right\)"),
        ({"dropout_p": 0.5}, "dropout is not supported"),
        ({"casual": True}, "unknown argument 'casual' of attention"),
        ({"cu_seqlens_q": torch.tensor([0.0, 6.0])}, "expected running totals"),
        pytest.param(
            {"cu_seqlens_q": "0 6"},
            "cu_seqlens_q='0 6': expected running totals",
            marks=pytest.mark.skipif(torch.__version__ < "2.13", reason="the compiler raises an error of its own"),
        ),
    ],
    ids=str,
)
def test_refusals_are_those_of_plain_calls(call: dict[str, Any], message: str) -> None:
    torch._dynamo.reset()
    attention = alone()
    q = torch.randn(1, 6, 2, 8)
    function = torch.compile(lambda q: attention(q, q, q, **call), backend="eager")
    with pytest.raises(UsageError, match=message):
        function(q)
    with FlopCounterMode(display=False), pytest.raises(UsageError, match=message):
        attention(q, q, q, **call)


def test_a_refusal_while_tracing_reaches_the_other_ranks() -> None:
    """It is raised when the graph runs: while a compiler traces, no rank can be told."""
    told: list[str] = []

    class TwoRanks(DryComm):
        def share(self, text: str) -> Any:
            told.append(json.loads(text)["refusal"])
            return LocalGroup(1).comm(0).share(text)

    torch._dynamo.reset()
    attention = MeshAttention(TwoRanks(0, 2))
    q = torch.randn(1, 6, 2, 8)
    wrong: list[tuple[Any, dict[str, Any]]] = [(q, {"window_size": 5}), (q, {"casual": True}), (q[0, 0], {})]
    for given, call in wrong:
        function = torch.compile(lambda x, call=call: attention(x, q, q, **call), backend="eager", fullgraph=True)
        with pytest.raises(UsageError) as caught:
            function(given)
        assert told.pop() == str(caught.value)
    trained = torch.compile(
        lambda x: sum(part.sum() for part in attention(x, x, x, casual=True, return_lse=True)), backend="aot_eager"
    )
    with pytest.raises(UsageError) as caught:
        trained(q.clone().requires_grad_())
    assert told.pop() == str(caught.value)
    with FakeTensorMode(), pytest.raises(UsageError):
        attention(torch.empty(1, 6, 2, 8), q, q, casual=True)
    assert not told  # with fake tensors no rank sends anything


def test_second_derivatives_are_refused() -> None:
    attention = alone()
    q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
    asked = (*CallOptions(causal=True), True, attention._number)
    out, *_ = torch.ops.mesh_attention.attend(q, k, v, *asked)
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(UsageError, match="has no second derivatives"):
        gradient.sum().backward()
