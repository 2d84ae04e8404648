"""Break a good kernel in one way at a time: every check of the conformance suite catches a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mesh_attention.kernels.base import CallMask, Demand, Gradients, RowGradient, Scores
from mesh_attention.kernels.merging import output_of
from mesh_attention.kernels.reference import PerDocument, ReferenceKernel
from mesh_attention_lab.testing import kernel_conformance as suite
from mesh_attention_lab.testing.kernel_conformance import CHECKS, Check, Setting

Inputs = tuple[Tensor, Tensor, Tensor, Scores]
GOOD = PerDocument(ReferenceKernel())


class Broken(ReferenceKernel):
    """The reference, with what it is given or what it returns changed."""

    name = "broken"

    def __init__(
        self,
        inputs: Callable[[Tensor, Tensor, Tensor, Scores], Inputs] = lambda *given: given,
        row: Callable[[RowGradient], RowGradient] = lambda row: row,
        outputs: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda out, lse: (out, lse),
        gradients: Callable[[Gradients], Gradients] = lambda gradients: gradients,
    ) -> None:
        self.inputs, self.row, self.outputs, self.gradients = inputs, row, outputs, gradients

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        return self.outputs(*GOOD.forward(*self.inputs(q, k, v, scores)))

    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: RowGradient, scores: Scores) -> Gradients:
        q, k, v, scores = self.inputs(q, k, v, scores)
        return self.gradients(GOOD.backward(q, k, v, self.row(row), scores))


class Dense(ReferenceKernel):
    name = "broken"


class RefusesEverything(Broken):
    def unsupported_reason(self, demand: Demand) -> str | None:
        return "has had enough"


class UsesItsOwnLse(Broken):
    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: RowGradient, scores: Scores) -> Gradients:
        return super().backward(q, k, v, row._replace(lse=self.forward(q, k, v, scores)[1]), scores)


class WeighsByItsLse(Broken):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        out, lse = super().forward(q, k, v, scores)
        return out * (1 + lse.abs()[..., None] * torch.finfo(lse.dtype).eps), lse


def masked(change: Callable[[CallMask], CallMask]) -> Broken:
    return Broken(inputs=lambda q, k, v, scores: (q, k, v, scores._replace(mask=change(scores.mask))))


def drops_the_last_key(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Inputs:
    k = torch.cat([k[:, :, :-1], k[:, :, :-1].mean(2, keepdim=True)], 2) if scores.mask.form == "full" else k
    return q, k, v, scores


def reads_kv_heads_in_turn(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Inputs:
    groups = q.shape[1] // k.shape[1]
    order = torch.arange(q.shape[1]).view(-1, groups).T.flatten()
    return q[:, order], k, v, scores


def ignores_the_last_stride(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Inputs:
    return q.as_strided(q.shape, (*q.stride()[:-1], 1)), k, v, scores


def scales_by_the_size_of_v(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Inputs:
    return q, k, v, scores._replace(scale=scores.scale * (q.shape[-1] / v.shape[-1]) ** 0.5)


def scales_q_in_place(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Inputs:
    return q.mul_(scores.scale), k, v, scores._replace(scale=1.0)


def rounds_to_eight_queries(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    whole = out.shape[2] // 8 * 8
    return torch.cat([out[:, :, :whole], torch.zeros_like(out[:, :, whole:])], 2), lse


def noisy(gradients: Gradients) -> Gradients:
    return gradients._replace(dq=gradients.dq * (1 + 1e-15 * torch.rand_like(gradients.dq)))


BROKEN: dict[Check, Broken] = {
    suite.a_plain_call_is_supported: RefusesEverything(),
    suite.unmasked_calls_are_exact: Broken(inputs=drops_the_last_key),
    suite.causal_calls_are_exact: masked(lambda m: replace(m, form="full") if m.form == "causal" else m),
    suite.bands_are_exact: masked(lambda m: replace(m, mask=replace(m.mask, right=None))),
    suite.documents_are_exact: masked(lambda m: replace(m, mask=replace(m.mask, documents=None))),
    suite.documents_stay_apart: Dense(),
    suite.tokens_in_several_segments_are_exact: masked(
        lambda m: replace(m, q=(range(m.q[0].start, m.q[0].start + sum(map(len, m.q))),)) if len(m.q) > 1 else m
    ),
    suite.rows_that_see_nothing_have_output_0_and_lse_minus_infinity: Broken(
        outputs=lambda out, lse: (out, lse.masked_fill(lse == -torch.inf, 0.0))
    ),
    suite.query_heads_share_kv_heads: Broken(inputs=reads_kv_heads_in_turn),
    suite.two_head_sizes_are_exact: Broken(inputs=scales_by_the_size_of_v),
    suite.softcap_is_exact: Broken(inputs=lambda q, k, v, scores: (q, k, v, scores._replace(softcap=0.0))),
    suite.large_scores_keep_their_weights: WeighsByItsLse(),
    suite.scores_that_overflow_do_not_count: Broken(outputs=lambda out, lse: (out, lse.clamp_min(0.0))),
    suite.a_gradient_into_the_lse_is_exact_where_do_is_zero: Broken(
        row=lambda row: RowGradient(row.do, row.lse, out=output_of(row))
    ),
    suite.the_output_may_be_given_instead_of_delta: Broken(
        row=lambda row: row._replace(delta=torch.zeros_like(row.lse)) if row.delta is None else row
    ),
    suite.small_gradients_do_not_vanish: Broken(
        row=lambda row: row._replace(do=torch.where(row.do.abs() < 1e-15, 0.0, row.do))
    ),
    suite.deterministic_kernels_give_the_same_bits: Broken(gradients=noisy),
    suite.no_length_is_special: Broken(outputs=rounds_to_eight_queries),
    suite.calls_without_queries_or_keys_are_exact: Broken(
        inputs=lambda q, k, v, scores: (q, k, v, scores) if k.shape[2] else drops_the_last_key(q, q, q, scores)
    ),
    suite.strides_are_followed: Broken(inputs=ignores_the_last_stride),
    suite.expanded_tensors_are_exact: Broken(
        row=lambda row: row._replace(do=row.do * 2) if 0 in row.do.stride() else row
    ),
    suite.unusual_strides_are_followed: Broken(
        row=lambda row: row._replace(do=row.do * 2) if 10**6 in row.do.stride() else row
    ),
    suite.inputs_are_not_written_to: Broken(inputs=scales_q_in_place),
}


@pytest.mark.parametrize("check", [*CHECKS, suite.documents_stay_apart], ids=lambda check: check.__name__)
def test_each_check_catches_a_broken_kernel(check: Check) -> None:
    with pytest.raises(AssertionError, match="broken"):
        check(BROKEN[check], Setting())


def test_a_kernel_that_ignores_the_lse_it_is_given_is_caught() -> None:
    with pytest.raises(AssertionError, match="broken"):
        suite.unmasked_calls_are_exact(UsesItsOwnLse(), Setting())


OPTIONAL = (
    suite.two_head_sizes_are_exact,
    suite.softcap_is_exact,
    suite.a_gradient_into_the_lse_is_exact_where_do_is_zero,
    suite.deterministic_kernels_give_the_same_bits,
)


@pytest.mark.parametrize("check", OPTIONAL, ids=lambda check: check.__name__)
def test_what_is_optional_is_not_asked_of_a_kernel_that_refuses(check: Check) -> None:
    check(RefusesEverything(outputs=lambda out, lse: (torch.rand_like(out), lse)), Setting())
