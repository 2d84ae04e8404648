"""What is refused, before anything is sent: each with its message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mesh_attention import DisagreementError, LocalGroup, MeshAttention, ProblemError, TileError, UsageError
from mesh_attention.comm.wrappers import Recording


def tensors(ranks: int = 4, tokens: int = 8, heads: int = 4, dim: int = 8, **changes: Any) -> list[list[torch.Tensor]]:
    return [[torch.randn(1, tokens, heads, dim, **changes) for _ in range(ranks)] for _ in range(3)]


def attention(**options: Any) -> MeshAttention:
    group = LocalGroup(4)
    return MeshAttention([Recording(group.comm(rank)) for rank in range(4)], **options)


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
        (call(dropout_p=0.1), UsageError, "dropout_p came, but dropout is not supported; leave dropout_p out"),
        (call(attn_mask=torch.ones(2, 2)), UsageError, "attn_mask came, but a dense mask is not supported"),
        (call(attn_bias=torch.ones(2, 2)), UsageError, "attn_bias came, but an attention bias is not supported"),
        (call(alibi_slopes=torch.ones(4)), UsageError, "alibi_slopes came, but ALiBi is not supported"),
        (call(casual=True), UsageError, "unknown argument 'casual' of attention; did you mean causal?"),
        (call(window_size=(-3, 0)), UsageError, "window left=-3"),
        (call(softcap=-1.0), UsageError, "softcap=-1.0: expected finite numbers, softcap 0"),
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
        (call(inputs=lambda: tensors(ranks=3)), UsageError, "takes lists of 4 tensors, one a rank"),
    ],
)
def test_a_refusal_says_why_and_nothing_is_sent(
    refused: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=None) as caught:
        refused()
    assert message in str(caught.value)


def test_a_gradient_of_a_gradient_is_refused() -> None:
    made = attention()
    q, k, v = ([t.requires_grad_() for t in side] for side in tensors())
    out = torch.cat(made(q, k, v)).sum()
    with pytest.raises(UsageError, match="only first derivatives exist"):
        torch.autograd.grad(out, q, create_graph=True)
