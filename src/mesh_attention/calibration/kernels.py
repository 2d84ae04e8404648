"""Times of attention calls: full and causal, forward and backward, from small ones to large.

Tensors have the strides of the executor's buffers; merging the result is not part of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mesh_attention.calibration.effort import THOROUGH, Effort
from mesh_attention.calibration.fit import CallTime
from mesh_attention.calibration.timing import Report, time_call
from mesh_attention.comm.base import Comm
from mesh_attention.execution.buffers import DTYPES, Buffer, token_format
from mesh_attention.kernels.base import CallMask, Demand, Kernel, RowGradient, Scores
from mesh_attention.kernels.select import choose_kernel
from mesh_attention.masks import causal, full
from mesh_attention.problem import Direction, Problem

LONGEST_CALL_S = 0.6
"""Sizes whose longest call would take more are left out."""


class Shape(NamedTuple):
    q_tokens: int
    kv_tokens: int
    is_causal: bool


def time_kernel(
    setting: Problem, *, comm: Comm, device: torch.device, report: Report, effort: Effort = THOROUGH
) -> list[CallTime]:
    """Times of calls with the heads, head sizes and dtype of a problem; its lengths, mask and ranks do not matter."""
    kernel = kernel_for(setting, device)
    sizes, times = effort.call_tokens[device.type], list[CallTime]()
    for number, tokens in enumerate(sizes):
        report(f"attention calls of {tokens} tokens, forward and backward", number / len(sizes))
        shapes = [Shape(tokens, tokens, False)]
        shapes += [Shape(tokens, 2 * tokens, False)] if effort.is_thorough else []
        shapes += [Shape(tokens, tokens, True)] if effort.is_thorough or tokens == sizes[-1] else []
        found = [t for shape in shapes for t in _time_shape(shape, setting, kernel, comm, device, effort)]
        times += found
        # Every rank has the same times, so all stop at the same size.
        if 4 * max(call.time_s for call in found) > LONGEST_CALL_S and number > 0:
            break
    return times


def kernel_for(setting: Problem, device: torch.device) -> Kernel:
    """The kernel that attention with these heads and this dtype would use."""
    return choose_kernel(
        Demand(
            device=device.type,
            dtype=DTYPES[setting.dtype],
            head_dim_qk=setting.head_dim_qk,
            head_dim_v=setting.head_dim_v,
            softcap=0.0,
            lse_gradient=False,
        )
    )


def _time_shape(
    shape: Shape, setting: Problem, kernel: Kernel, comm: Comm, device: torch.device, effort: Effort
) -> Iterator[CallTime]:
    q, k, v, do = _tensors(shape, setting, device)
    mask, scale = _call_mask(shape), setting.head_dim_qk**-0.5
    out, lse = kernel.forward(q, k, v, Scores(mask, scale))
    delta = (out.to(lse.dtype) * do.to(lse.dtype)).sum(-1)

    def forward() -> object:
        return kernel.forward(q, k, v, Scores(mask, scale))

    def backward() -> object:
        return kernel.backward(q, k, v, RowGradient(do, lse, delta), Scores(mask, scale))

    runs: dict[Direction, Callable[[], object]] = {"forward": forward, "backward": backward}
    for direction, run in runs.items():
        yield CallTime(
            direction=direction,
            heads=setting.heads,
            q_tokens=shape.q_tokens,
            kv_tokens=shape.kv_tokens,
            is_causal=shape.is_causal,
            flops=call_flops(shape, setting, direction),
            time_s=time_call(run, comm=comm, device=device, effort=effort),
        )


def call_flops(shape: Shape, setting: Problem, direction: Direction) -> int:
    """Operations that the mask leaves, for one batch entry, counted as plans count them."""
    q, kv = shape.q_tokens, shape.kv_tokens
    pairs = q * (q + 1) // 2 if shape.is_causal else q * kv
    return setting.flops(direction, pairs=pairs) // setting.batch


def _tensors(shape: Shape, setting: Problem, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row, col, do = (
        Buffer.empty(token_format(kind, setting, 1, False), tokens=tokens, batch=1, device=device).fields
        for kind, tokens in (("q", shape.q_tokens), ("kv", shape.kv_tokens), ("do", shape.q_tokens))
    )
    q, k, v, d_out = (tensor.normal_() for tensor in (row["q"], col["k"], col["v"], do["do"]))
    return q, k, v, d_out


def _call_mask(shape: Shape) -> CallMask:
    q, kv = range(shape.q_tokens), range(shape.kv_tokens)
    if shape.is_causal:
        return CallMask("causal", causal(), (q,), (kv,), len(q), len(kv))
    return CallMask("full", full(), (q,), (kv,), len(q), len(kv))
