"""The five stages of a call: what is made once, and what a call like an earlier one does not make again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import shared_pool

from mesh_attention import MeshAttention
from mesh_attention.arguments import CallOptions
from mesh_attention.execution import call
from mesh_attention.problem import Problem


def derivations(group: Any) -> list[int]:
    """How often the problem has been derived after a call, after the same again, and after another spelling of it."""
    counted: list[Problem] = []
    derive = CallOptions.problem

    def counting(*given: Any, **named: Any) -> Problem:
        counted.append(derive(*given, **named))
        return counted[-1]

    counts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallOptions, "problem", counting)
        call.derive_problem.cache_clear()
        attention = MeshAttention(group)
        q = torch.randn(1, 8, 2, 4, requires_grad=True)
        for options in ({}, {}, {"softmax_scale": 0.5}):
            out = attention(q, q, q, causal=True, **options)
            out.sum().backward()
            counts.append(len(counted))
        assert len(attention.calls.engines) == 1  # 0.5 is the scale of head size 4
    return counts


def test_a_call_derives_its_problem_once() -> None:
    assert shared_pool().run(2, derivations) == [[1, 1, 2]] * 2
