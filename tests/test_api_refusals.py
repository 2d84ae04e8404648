"""What is refused before anything is sent, in any form; the messages are in tests/golden/python/calls.txt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from mesh_attention import (
    LocalGroup,
    MeshAttention,
    MeshAttentionError,
    TransportError,
    UsageError,
)
from mesh_attention.api import _SETTINGS
from mesh_attention.execution import autograd
from mesh_attention_lab.testing.wrappers import Counting, Failing


def tensors(ranks: int = 4, tokens: int = 8, heads: int = 4, dim: int = 8, **changes: Any) -> list[list[torch.Tensor]]:
    return [[torch.randn(1, tokens, heads, dim, **changes) for _ in range(ranks)] for _ in range(3)]


def attention(**options: Any) -> MeshAttention:
    group = LocalGroup(4)
    return MeshAttention([Counting(group.comm(rank)) for rank in range(4)], **options)


def attend(options: dict[str, Any] | None = None, inputs: Any = None, **arguments: Any) -> None:
    """A call that is refused; nothing may have been sent by then."""
    made = attention(**(options or {}))
    q, k, v = tensors() if inputs is None else inputs()
    try:
        made(q, k, v, **arguments)
    finally:
        assert all(not comm.messages and not comm.sent_nbytes for comm in made.comms)  # type: ignore[attr-defined]


def mixed(which: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], list[list[torch.Tensor]]]:
    def make() -> list[list[torch.Tensor]]:
        inputs = tensors()
        inputs[which] = [change(t) for t in inputs[which]]
        return inputs

    return make


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
