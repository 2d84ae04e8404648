"""What is refused, before anything is sent: each with its message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from mesh_attention import (
    DisagreementError,
    LocalGroup,
    MeshAttention,
    MeshAttentionError,
    Problem,
    TransportError,
    UsageError,
    make_plan,
)
from mesh_attention.api import _SETTINGS
from mesh_attention.errors import ProblemError, TileError
from mesh_attention.execution import autograd
from mesh_attention.plan.layout import Zigzag
from mesh_attention_lab.testing.wrappers import Counting, Failing


def tensors(ranks: int = 4, tokens: int = 8, heads: int = 4, dim: int = 8, **changes: Any) -> list[list[torch.Tensor]]:
    return [[torch.randn(1, tokens, heads, dim, **changes) for _ in range(ranks)] for _ in range(3)]


def attention(**options: Any) -> MeshAttention:
    group = LocalGroup(4)
    return MeshAttention([Counting(group.comm(rank)) for rank in range(4)], **options)


def call(options: dict[str, Any] | None = None, inputs: Any = None, **arguments: Any) -> Callable[[], MeshAttention]:
    def run() -> MeshAttention:
        made = attention(**(options or {}))
        q, k, v = tensors() if inputs is None else inputs()
        try:
            made(q, k, v, **arguments)
        finally:
            assert all(not comm.messages and not comm.sent_nbytes for comm in made.comms)  # type: ignore[attr-defined]
        return made

    return run


def mixed(which: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], list[list[torch.Tensor]]]:
    def make() -> list[list[torch.Tensor]]:
        inputs = tensors()
        inputs[which] = [change(t) for t in inputs[which]]
        return inputs

    return make


@pytest.mark.parametrize(
    ("refused", "error", "message"),
    [
        (call(dropout_p=0.1), UsageError, "dropout_p was given, but dropout is not supported; leave dropout_p out"),
        (call(attn_mask=torch.ones(2, 2)), UsageError, "attn_mask was given, but a dense mask is not supported"),
        (call(attn_bias=torch.ones(2, 2)), UsageError, "attn_bias was given, but an attention bias is not supported"),
        (call(alibi_slopes=torch.ones(4)), UsageError, "alibi_slopes was given, but ALiBi is not supported"),
        (call(casual=True), UsageError, "unknown argument 'casual' of attention; did you mean causal?"),
        (call(window_size=(-3, 0)), UsageError, "window left=-3"),
        (call(softcap=-1.0), UsageError, "softcap=-1.0: expected 0 (off) or a number from 1e-30 to 1e+30"),
        (call(softcap=1e-300), UsageError, "softcap=1e-300: expected 0 (off)"),
        (call(softcap=float("nan")), UsageError, "softcap=nan: expected 0 (off)"),
        (call(softmax_scale=0.0), UsageError, "softmax_scale=0.0: expected a number from 1e-30 to 1e+30; to get"),
        (call(softmax_scale=-0.5, causal=True), UsageError, "multiply q by it and pass softmax_scale=1.0"),
        (call(softmax_scale=1e-46, causal=True), UsageError, "softmax_scale=1e-46: expected a number"),
        (call(softmax_scale=10**400), UsageError, "softmax_scale=inf: expected a number"),
        (call(softmax_scale=float("nan")), UsageError, "softmax_scale=nan"),
        (call(cu_seqlens_q=[0, 5]), DisagreementError, "holds 8 tokens of q but its shard has"),
        (call(cu_seqlens_q=[0, 5, 3, 32]), UsageError, "expected running totals that start at 0 and never fall"),
        (call(seq_len=31), DisagreementError, "rank 3 holds 8 tokens of q but its shard has 7"),
        (call({"tile": (3, 2)}), TileError, "4 ranks cannot form a 3x2 tile; rows·cols must be 4: 1x4 2x2 4x1"),
        (call({"ulysses_degree": 3}), TileError, "Ulysses degree 3 does not divide 4 ranks"),
        (call({"method": "torus"}), UsageError, "method 'torus': expected one of"),
        (call({"layout": "spiral"}), UsageError, "layout 'spiral': expected one of"),
        (call({"tensor_format": "sbhd"}), UsageError, "tensor_format 'sbhd': expected bshd or bhsd"),
        (call({"overlap": True}), UsageError, "unknown argument 'overlap' of MeshAttention"),
        (call(inputs=mixed(1, lambda t: t.double())), ProblemError, "q is torch.float32 on cpu and k is torch.float64"),
        (call(inputs=mixed(2, lambda t: t.to("meta"))), ProblemError, "and v is torch.float32 on meta"),
        (call(inputs=mixed(1, lambda t: t[..., :4])), ProblemError, "q has head size 8 and k has 4"),
        (call(inputs=mixed(2, lambda t: t[:, :4])), ProblemError, "batch, tokens and heads must be the same"),
        (
            call(inputs=lambda: [tensors(heads=4)[0], tensors(heads=3)[0], tensors(heads=3)[0]]),
            ProblemError,
            "4 heads cannot share 3 KV heads evenly",
        ),
        (call(inputs=lambda: tensors(dtype=torch.complex64)), ProblemError, "q is torch.complex64: expected one of"),
        (call(inputs=lambda: [[t[0, 0] for t in s] for s in tensors()]), ProblemError, "expected a tensor of 4 dim"),
        (call(cu_seqlens_k=[0, 16, 32]), UsageError, "cu_seqlens_k was given without cu_seqlens_q"),
        (call(window_size=(2.9, 0)), UsageError, "window_size=(2.9, 0): expected (left, right) in tokens"),
        (call(window_size=(2, 0, 7)), UsageError, "expected (left, right)"),
        (call(window_size=None), UsageError, "window_size=None: expected (left, right)"),
        (call(deterministic="x"), UsageError, "deterministic='x': expected True or False"),
        (call(return_lse="no"), UsageError, "return_lse='no': expected True or False"),
        (call(causal="False"), UsageError, "causal='False': expected True or False"),
        (call(softmax_scale=True), UsageError, "softmax_scale=True: expected a number"),
        (call(softmax_scale=torch.tensor(0.5)), UsageError, "expected a number"),
        (call(softcap=None), UsageError, "softcap=None: expected a number"),
        (call(cu_seqlens_q=torch.empty(2, device="meta")), UsageError, "expected running totals, whole numbers in one"),
        (call(cu_seqlens_q=[[0, 32]]), UsageError, "expected running totals, whole numbers in one dimension"),
        (
            call({"planner": make_plan, "tile": (2, 2)}),
            UsageError,
            "tile cannot be combined with planner=",
        ),
        (call(inputs=mixed(0, lambda t: t[0])), ProblemError, "q, k and v have [3, 4] dimensions: expected the same"),
        (
            call(inputs=lambda: [[t.double() if i == 1 else t for i, t in enumerate(side)] for side in tensors()]),
            DisagreementError,
            "dtype is float32 on rank(s) 0,2-3, but float64 on rank(s) 1",
        ),
        (
            call(
                inputs=lambda: [[t.expand(2, -1, -1, -1) if i == 1 else t for i, t in enumerate(s)] for s in tensors()]
            ),
            DisagreementError,
            "batch is 1 on rank(s) 0,2-3, but 2 on rank(s) 1",
        ),
        (
            call(inputs=lambda: tensors(ranks=3)),
            UsageError,
            "one per rank of the local group; got a list of 3",
        ),
    ],
)
def test_a_refusal_says_why_and_nothing_is_sent(
    refused: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=None) as caught:
        refused()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (torch.Tensor.to_sparse, "layout torch.sparse_coo; expected a dense tensor"),
        (torch.Tensor.to_mkldnn, "layout torch._mkldnn; expected a dense tensor"),
        (lambda t: torch.nested.nested_tensor([t[0]]), "a nested tensor; expected a dense tensor"),
        (lambda t: torch.nested.nested_tensor([t[0]], layout=torch.jagged), "a nested tensor; expected a dense tensor"),
        (lambda t: t.to("meta"), "on meta"),
        (lambda t: FakeTensorMode().from_tensor(t), "got a FakeTensor, which holds no numbers of its own"),
        (lambda t: TwoTensor(t, t), "got a TwoTensor, which holds no numbers of its own"),
    ],
    ids=["sparse", "mkldnn", "nested", "jagged", "meta", "fake", "wrapper"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_tensors_that_are_not_plain_numbers_in_memory_are_refused(change: Any, message: str) -> None:
    for which in ((2,), (0, 1, 2)):
        inputs = tensors()
        for side in which:
            inputs[side] = [change(t) for t in inputs[side]]
        with pytest.raises(UsageError) as caught:
            call(inputs=lambda inputs=inputs: inputs)()  # type: ignore[misc]
        assert message in str(caught.value)


@pytest.mark.parametrize("group", [LocalGroup(4), LocalGroup(1).comm(0)], ids=["4 ranks", "1 rank"])
def test_results_of_asynchronous_collectives_are_waited_for(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = MeshAttention(group)
    q, k, v = (side if made.is_local else side[0] for side in tensors())
    seen = set()
    for name in ("_forward_inputs", "_backward_inputs", "_single_backward"):
        original = getattr(autograd, name)

        def watched(*given: Any, original: Any = original) -> Any:
            seen.update(type(one) for one in tree_leaves(given) if isinstance(one, torch.Tensor))
            return original(*given)

        monkeypatch.setattr(autograd, name, watched)
    gradients = []
    for wrap in (lambda t: t.clone(), lambda t: AsyncCollectiveTensor(t.clone()), lambda t: t.clone()):
        inputs = tree_map(lambda t, wrap=wrap: wrap(t).requires_grad_(), [q, k, v])
        outs = tree_leaves(made(*inputs))
        gradients.append(torch.autograd.grad(outs, tree_leaves(inputs), [wrap(torch.ones_like(out)) for out in outs]))
    assert seen == {torch.Tensor}
    assert all(torch.equal(plain, waited) for plain, waited, _ in zip(*gradients, strict=True))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch uses it for tangents
def test_a_transform_is_refused_where_calls_are_operators() -> None:
    made, k = MeshAttention(LocalGroup(1).comm(0)), torch.randn(1, 4, 1, 8)
    with FlopCounterMode(display=False), forward_ad.dual_level():
        dual_k = forward_ad.make_dual(k, torch.ones_like(k))
        with pytest.raises(UsageError, match="supports neither forward-mode derivatives"):
            made(k, dual_k, k)


def transformed(how: Callable[[Callable[..., Any], torch.Tensor], Any], ranks: int) -> None:
    """Attention with softcap, whose kernel is plain torch, under a transform of torch of one of its inputs."""
    made = MeshAttention(LocalGroup(ranks)) if ranks > 1 else MeshAttention(LocalGroup(1).comm(0))
    k = torch.randn(1, 4, 1, 8)
    other: Any = [k] * ranks if ranks > 1 else k
    for _ in range(2):
        made(other, other, other, softcap=5.0)  # a call like one before is checked less
    how(lambda x: made(other, [x] * ranks if ranks > 1 else x, other, softcap=5.0), k)


def dual(attend: Callable[..., Any], x: torch.Tensor) -> None:
    with forward_ad.dual_level():
        attend(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch uses it for tangents
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "how",
    [
        dual,
        lambda attend, x: torch.func.vmap(attend)(x[None]),
        lambda attend, x: torch.func.jvp(attend, (x,), (x,)),
        lambda attend, x: torch.func.grad(lambda x: attend(x)[0].sum())(x),
    ],
    ids=["forward_ad", "vmap", "jvp", "grad"],
)
def test_transforms_that_do_not_travel_are_refused(how: Any, ranks: int) -> None:
    with pytest.raises(UsageError, match="supports neither forward-mode derivatives nor torch"):
        transformed(how, ranks)


def test_several_gradients_at_once_are_refused_where_they_would_travel() -> None:
    q = torch.randn(1, 4, 1, 8, requires_grad=True)
    upstream = torch.randn(3, 1, 4, 1, 8)
    out = MeshAttention(LocalGroup(2))([q, q], [q, q], [q, q])[0]
    with pytest.raises(
        UsageError, match=r"batched gradients \(is_grads_batched=True, .* are not supported; compute one"
    ):
        torch.autograd.grad(out, q, upstream, is_grads_batched=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda made, x: made.shard(x, dim=5), "which has no dim 5"),
        (lambda made, x: made.shard(x, dim=None), "which has no dim None"),
        (lambda made, x: made.shard(x.numpy()), "got a ndarray; expected a plain tensor"),
        (lambda made, x: made.shard([x]), "got a list; expected a plain tensor"),
        (lambda made, x: made.position_ids(-1), "seq_len=-1: expected a whole number of at least 0"),
        (lambda made, x: made.position_ids(2.5), "seq_len=2.5: expected a whole number"),
        (lambda made, x: made.position_ids("4"), "seq_len='4': expected a whole number"),
    ],
)
def test_sharding_says_what_it_expects(wrong: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        wrong(attention(), torch.zeros(1, 8))
    assert message in str(caught.value)


def test_a_gradient_of_a_gradient_is_refused() -> None:
    made = attention()
    q, k, v = ([t.requires_grad_() for t in side] for side in tensors())
    out = torch.cat(made(q, k, v)).sum()
    with pytest.raises(UsageError, match="has no second derivatives"):
        torch.autograd.grad(out, q, create_graph=True)


def test_a_local_group_works_again_after_an_error() -> None:
    group = LocalGroup(4)
    comms = [Failing(group.comm(rank), when=lambda parcel: parcel.label == "o") for rank in range(4)]
    with pytest.raises(TransportError, match=r"rank \d, step \d+ 'recv o.*': could not be posted: made to fail"):
        MeshAttention(comms, tile=(2, 2))(*tensors())
    good = MeshAttention(group, tile=(2, 2))
    q, k, v = tensors()
    whole = torch.nn.functional.scaled_dot_product_attention(
        *(good.unshard(side).transpose(1, 2) for side in (q, k, v))
    )
    torch.testing.assert_close(good.unshard(good(q, k, v)).transpose(1, 2), whole)


def test_autocast_changes_nothing() -> None:
    q, k, v = tensors()
    plain = attention()(q, k, v, softcap=3.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = attention()(q, k, v, softcap=3.0)
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))


def test_configurations_used_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh_attention.execution.call.MAX_ENGINES", 3)
    made = attention()
    for window in (1, 2, 3, 4, 5):
        made(*tensors(), window_size=(window, 0))
    assert len(made.calls.engines) == 3


@pytest.mark.parametrize(
    "changed",
    [{"causal": 1}, {"return_lse": 0}, {"softcap": False}, {"window_size": (-1, -1.0)}, {"dropout_p": 0.5}],
    ids=str,
)
def test_a_repeated_call_on_one_rank_is_checked_like_the_first(changed: dict[str, Any]) -> None:
    made = MeshAttention(LocalGroup(1).comm(0))
    q = torch.randn(1, 6, 2, 8)
    made(q, q, q, causal=True)
    assert made._ready
    with pytest.raises(UsageError):
        made(q, q, q, **{"causal": True} | changed)


def test_repeated_calls_on_one_rank_are_told_apart() -> None:
    calls: list[dict[str, Any]] = [{}, {"causal": True}, {"window_size": (2, 0)}, {"softmax_scale": 0.5}]
    shapes = ((1, 6, 2, 8), (2, 6, 2, 8), (1, 9, 2, 8))
    made = MeshAttention(LocalGroup(1).comm(0))
    for _ in range(2):
        for shape in shapes:
            q = torch.randn(shape, dtype=torch.float64)
            for arguments in calls:
                fresh = MeshAttention(LocalGroup(1).comm(0))
                assert torch.equal(made(q, q, q, **arguments), fresh(q, q, q, **arguments))
    assert len(made._ready) == len(shapes) * len(calls)


def test_what_was_kept_is_let_go_with_the_graph() -> None:
    made = attention(tile=(2, 2), keep=("q", "kv"))
    q, k, v = ([t.requires_grad_() for t in side] for side in tensors())
    loss = torch.cat(made(q, k, v)).sum()
    loss.backward(retain_graph=True)
    first = q[0].grad.clone()
    loss.backward()
    assert torch.equal(q[0].grad, 2 * first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


# Values that no argument expects: clear, or working, for every argument of the constructor

ODD_VALUES: list[Any] = [
    *(None, True, 0, -1, 3, 10**30, 2.5, float("nan"), "", "x", "auto", b"x"),
    *([], {}, set(), (), [1, 1], ["kv"], ["q", "kv"], [[1], 2], ("kv", "q"), ("kv",), {"a": 1}),
    *(object(), torch.zeros(2), lambda: None, int, LocalGroup(2)),
]


def is_unclear(attend: Callable[[], Any]) -> str:
    """The type of an error that is not the library's."""
    try:
        attend()
    except MeshAttentionError:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("name", _SETTINGS)
def test_no_value_of_a_setting_gives_an_error_of_python(name: str) -> None:
    x = [torch.randn(1, 4, 2, 8) for _ in range(2)]
    answers = {
        repr(value): is_unclear(lambda value=value: MeshAttention(LocalGroup(2), **{name: value})(x, x, x))  # type: ignore[misc]
        for value in ODD_VALUES
        if not (name == "planner" and callable(value))  # it is called, and its errors are its own
    }
    assert {value: answer for value, answer in answers.items() if answer} == {}


@pytest.mark.parametrize("group", [*ODD_VALUES[1:], 0, [object()], [None]])
def test_no_group_gives_an_error_of_python(group: Any) -> None:
    if not isinstance(group, LocalGroup):
        with pytest.raises(MeshAttentionError):
            MeshAttention(group)


@pytest.mark.parametrize("size", [value for value in ODD_VALUES if type(value) is not int] + [0, -1])
def test_a_local_group_has_a_number_of_ranks(size: Any) -> None:
    with pytest.raises(UsageError, match="expected a number of ranks, at least 1"):
        LocalGroup(size)


@pytest.mark.parametrize("rank", [-1, 2, "0", None])
def test_a_local_group_has_no_other_ranks(rank: Any) -> None:
    with pytest.raises(UsageError, match="LocalGroup of 2 ranks, expected a rank from 0 to 1"):
        LocalGroup(2).comm(rank)


def test_a_choice_may_stand_beside_options_that_are_left_open() -> None:
    assert MeshAttention(LocalGroup(2), choice="ring", layout=None, tile=None).layout == Zigzag()
    assert (
        make_plan(Problem.self_attention(seq_len=8, heads=2, head_dim=8, ranks=2), "ring", layout=None).method == "ring"
    )
    assert MeshAttention(LocalGroup(2), keep=["q", "kv"])._has_operator is False
