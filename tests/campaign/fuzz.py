"""Random calls of `MeshAttention`, each compared with dense attention in float64 that shares no code with the library.

    PYTHONPATH=src python tests/campaign/fuzz.py --seconds 60 --processes 2 [--seed 0] [--count N] [--device cuda]

An episode is one `MeshAttention` and a few calls on it, valid and invalid ones, in any order. Everything about it is
plain data, drawn from its seed and number. A failure is made smaller and printed as a script of a few lines.

A valid call fails if it raises, or if a result is off by more than rounding explains (see `Truth`). An invalid call
fails if it is accepted, if it raises anything but the library's own errors, or if its message is empty.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mesh_attention import LocalGroup, MeshAttention, make_plan
from mesh_attention.errors import MeshAttentionError

DTYPES = {str(dtype)[6:]: dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
LAYOUTS = ("contiguous", "zigzag", "striped", "chunks")


@dataclass(frozen=True)
class Object:
    """A `MeshAttention`. One that `plays_one` has one rank, and takes tensors instead of lists of them."""

    ranks: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    plays_one: bool = False
    has_planner: bool = False

    def make(self) -> MeshAttention:
        group: Any = LocalGroup(self.ranks)
        settings = self.settings | ({"planner": _planner} if self.has_planner else {})
        return MeshAttention(group.comm(0) if self.plays_one else group, **settings)


def _planner(problem: Any, *, direction: Any, layout: Any) -> Any:
    return make_plan(problem, direction=direction, layout=layout, blocks_per_call=2)


@dataclass(frozen=True)
class Memory:
    """How a tensor is stored: its axes in memory, outermost first; a gap after each; the axes it is expanded over."""

    order: tuple[int, ...] = (0, 1, 2, 3)
    gap: int = 0
    expanded: tuple[int, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call: shapes, values, arguments and what is differentiated. `wrong` names a fault, for an invalid call."""

    seq_q: int = 8
    seq_k: int = 8
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    dim: int = 8
    dim_v: int = 8
    dtype: str = "float64"
    arguments: dict[str, Any] = field(default_factory=dict)
    cuts_as: str = "list"
    sizes: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    """Of Q, K, V and the gradients."""
    seed: int = 0
    is_packed: bool = False
    memory: tuple[Memory, Memory, Memory, Memory] = (Memory(), Memory(), Memory(), Memory())
    needs: tuple[bool, bool, bool] = (True, True, True)
    """Which of Q, K and V require a gradient."""
    into: tuple[str, ...] = ("out",)
    """Results that gradients come from: out, lse."""
    skips: int = 0
    """Ranks, as bits, whose results get no gradient."""
    mode: str = "grad"
    is_repeated: bool = False
    """The call is made twice and has to give the same bits."""
    poison: str | None = None
    """Q or K, whose first number is NaN."""
    wrong: str | None = None


# Running


class MismatchError(AssertionError):
    """A result that is wrong, or a call that should have been refused."""


def check(given: Object, *calls: Call, device: str = "cpu", late: bool = False) -> None:
    """Make the object, make the calls, and compare; raises on the first that is wrong. `late`: backward at the end."""
    attention = given.make()
    pending = []
    for call in calls:
        if call.wrong is not None:
            _check_refusal(attention, given, call, device)
            continue
        run = Run(attention, given, call, device)
        pending.append(run)
        if not late:
            pending.pop().compare()
    for run in reversed(pending):
        run.compare()


class Run:
    """A valid call: forward when made, backward when compared."""

    def __init__(self, attention: MeshAttention, given: Object, call: Call, device: str) -> None:
        self.call, self.given = call, given
        self.wholes = _wholes(call, device)
        self.ids = [_positions(attention, given, seq) for seq in (call.seq_q, call.seq_k)]
        is_first = self.is_first = attention.tensor_format == "bhsd" and not call.is_packed
        self.leaves, lists = [], []
        for name, whole, memory, need in zip("qkv", self.wholes, call.memory, (*call.needs, False), strict=False):
            ids = self.ids[name != "q"]
            leaves = [_stored(_take(whole, at), memory).requires_grad_(need) for at in ids]
            seen = [leaf.expand(_take(whole, at).shape) for leaf, at in zip(leaves, ids, strict=True)]
            seen = [x[0] if call.is_packed else x.transpose(1, 2) if is_first else x for x in seen]
            self.leaves.append(leaves)
            lists.append(seen)
        versions = [x._version for side in lists for x in side]
        modes: dict[str, Any] = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
        with modes[call.mode]():
            inputs = [side[0] for side in lists] if given.plays_one else lists
            results = attention(*inputs, **_arguments(call, device))
            if call.is_repeated and not _is_same(results, attention(*inputs, **_arguments(call, device))):
                raise MismatchError("the same call gave other bits")
        has_lse = call.arguments.get("return_lse", False)
        pairs = results if has_lse else (results, None)
        outs, lses = ([x] if given.plays_one else x for x in pairs)
        self.raw_outs, self.raw_lses = outs, lses
        self.outs = [x[None] if call.is_packed else x.transpose(1, 2) if is_first else x for x in outs]
        self.lses = None if not has_lse else [x[None] if call.is_packed else x for x in lses]
        if versions != [x._version for side in lists for x in side]:
            raise MismatchError("an input was written to")

    def compare(self) -> None:
        call, (q, k, v, d_out, d_lse) = self.call, self.wholes
        has_grad = call.mode == "grad" and any(call.needs) and call.poison is None
        into = [name for name in call.into if has_grad and (name == "out" or self.lses is not None)]
        skipped = [bool(call.skips >> rank & 1) for rank in range(self.given.ranks)]
        d_out, d_lse = d_out.clone(), d_lse.clone()
        for ids, skip in zip(self.ids[0], skipped, strict=True):
            if skip or "out" not in into:
                d_out[:, ids] = 0.0
            if skip or "lse" not in into:
                d_lse[:, :, ids] = 0.0
        truth = Truth(call, q, k, v, d_out, d_lse)
        wide = torch.promote_types(DTYPES[call.dtype], torch.float32)
        for rank, ids in enumerate(self.ids[0]):
            self._near("out", rank, self.outs[rank], *(_take(x, ids) for x in truth.out), DTYPES[call.dtype])
            if self.lses is not None:
                self._near("lse", rank, self.lses[rank], *(x[:, :, ids] for x in truth.lse), wide)
        if into and not all(skipped):
            self._backward(into, skipped, d_out, d_lse)
            for name, leaves, due, memory in zip("qkv", self.leaves, truth.gradients, call.memory, strict=False):
                for rank, (leaf, ids) in enumerate(zip(leaves, self.ids[name != "q"], strict=True)):
                    self._near_gradient(f"d{name}", rank, leaf, [_take(x, ids) for x in due], memory)

    def _backward(self, into: list[str], skipped: list[bool], d_out: Tensor, d_lse: Tensor) -> None:
        call, ends = self.call, []
        for rank, (ids, skip) in enumerate(zip(self.ids[0], skipped, strict=True)):
            if "out" in into and not skip:
                given = _take(d_out, ids)
                given = _stored(given, call.memory[3]).expand(given.shape)
                given = given[0] if call.is_packed else given.transpose(1, 2) if self.is_first else given
                ends.append((self.raw_outs[rank], given))
            if "lse" in into and not skip:
                given = d_lse[:, :, ids]
                ends.append((self.raw_lses[rank], given[0] if call.is_packed else given))
        torch.autograd.backward(*zip(*ends, strict=True))

    def _near(self, name: str, rank: int, ours: Tensor, due: Tensor, allowed: Tensor, dtype: torch.dtype) -> None:
        if ours.shape != due.shape or ours.dtype != dtype:
            raise MismatchError(
                f"{name} of rank {rank}: {tuple(ours.shape)} {ours.dtype}, not {tuple(due.shape)} {dtype}"
            )
        if not ours.numel():
            return
        # Equal covers an LSE of -inf; where rounding alone may be worse than anything, nothing is asked.
        wrong = ~((ours.double() == due) | ((ours.double() - due).abs() <= allowed) | (allowed == torch.inf))
        if self.call.poison is not None:  # NaN must show wherever it has an effect; it may spread to masked pairs
            wrong = torch.where(due.isnan(), ~ours.isnan(), wrong & ~ours.isnan())
        if wrong.any():
            at = tuple(int(i) for i in wrong.nonzero()[0])
            raise MismatchError(
                f"{name} of rank {rank} is {ours[at].item():.6g} at {at}, expected {due[at].item():.6g} "
                f"± {allowed[at].item():.1e}; wrong in {int(wrong.sum())} of {wrong.numel()} places"
            )

    def _near_gradient(self, name: str, rank: int, leaf: Tensor, due: list[Tensor], memory: Memory) -> None:
        if not leaf.requires_grad:
            if leaf.grad is not None:
                raise MismatchError(f"{name} of rank {rank} was not asked for")
            return
        if leaf.grad is None:
            raise MismatchError(f"{name} of rank {rank} is missing")
        if not leaf.numel():
            due, memory = [leaf, leaf], Memory()
        value, allowed = (x.sum(memory.expanded, keepdim=True) if memory.expanded else x for x in due)
        if memory.expanded:  # autograd adds the gradients in their own dtype
            allowed = allowed + 4 * torch.finfo(leaf.dtype).eps * due[0].abs().sum(memory.expanded, keepdim=True)
        self._near(name, rank, leaf.grad, value, allowed, leaf.dtype)


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))
    return all(map(_is_same, first, second))


def _check_refusal(attention: MeshAttention, given: Object, call: Call, device: str) -> None:
    wrong = call.wrong
    assert wrong is not None
    q, k, v = (whole.clone() for whole in _wholes(call, device)[:3])
    ids = [_positions(attention, given, seq) for seq in (call.seq_q, call.seq_k)]
    sides = [[_take(x, at) for at in ids[number > 0]] for number, x in enumerate((q, k, v))]
    if attention.tensor_format == "bhsd":
        sides = [[x.transpose(1, 2) for x in side] for side in sides]
    arguments = _arguments(call, device)
    sides, arguments = WRONG[wrong](sides, arguments)
    inputs = [side[0] if given.plays_one and isinstance(side, list) else side for side in sides]
    try:
        attention(*inputs, **arguments)
    except MeshAttentionError as error:
        if len(str(error)) < 20:
            raise MismatchError(f"{wrong}: refused without a reason: {error!r}") from None
        return
    raise MismatchError(f"{wrong}: accepted")


def _positions(attention: MeshAttention, given: Object, seq: int) -> list[Tensor]:
    ids = attention.position_ids(seq)
    ids = [ids] if given.plays_one else ids
    if sorted(torch.cat(ids).tolist()) != list(range(seq)):
        raise MismatchError(f"shards of {seq} tokens do not hold every token once")
    return ids


def _take(whole: Tensor, ids: Tensor) -> Tensor:
    return whole[:, ids.to(whole.device)]


def _stored(values: Tensor, memory: Memory) -> Tensor:
    """A copy stored that way, without the copies that expanding makes; NaN around it."""
    for axis in memory.expanded:
        values = values.narrow(axis, 0, min(1, values.shape[axis]))
    room = [values.shape[axis] + memory.gap for axis in memory.order]
    whole = values.new_full((memory.gap + torch.Size(room).numel(),), torch.nan)[memory.gap :].view(room)
    laid = whole.permute([memory.order.index(axis) for axis in range(4)])
    laid = laid[tuple(slice(size) for size in values.shape)]
    return laid.copy_(values).detach()


def _wholes(call: Call, device: str) -> list[Tensor]:
    """Q, K, V, dO and dLSE of the whole sequence, with the values that expanded tensors can have."""
    generator = torch.Generator().manual_seed(call.seed)
    queries, keys = (call.batch, call.seq_q, call.heads), (call.batch, call.seq_k, call.kv_heads)
    shapes = [(*queries, call.dim), (*keys, call.dim), (*keys, call.dim_v), (*queries, call.dim_v)]
    found = []
    for shape, size, memory in zip(shapes, call.sizes, call.memory, strict=True):
        drawn = [1 if axis in memory.expanded else length for axis, length in enumerate(shape)]
        values = (torch.randn(drawn, generator=generator, dtype=torch.float64) * size).to(DTYPES[call.dtype])
        found.append(values.expand(shape).to(device))
    if call.poison is not None:
        at = "qk".index(call.poison)
        found[at] = found[at].clone()
        found[at][0, 0, 0, 0] = torch.nan
    wide = torch.promote_types(DTYPES[call.dtype], torch.float32)
    d_lse = torch.randn((call.batch, call.heads, call.seq_q), generator=generator, dtype=torch.float64) * call.sizes[3]
    return [*found, d_lse.to(device, wide)]


def _arguments(call: Call, device: str) -> dict[str, Any]:
    arguments = dict(call.arguments)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if isinstance(arguments.get(name), list):
            cuts = arguments[name]
            forms: dict[str, Any] = {"list": cuts, "tuple": tuple(cuts)}
            as_tensor = {"int32": torch.int32, "int64": torch.int64}.get(call.cuts_as)
            arguments[name] = torch.tensor(cuts, dtype=as_tensor, device=device) if as_tensor else forms[call.cuts_as]
    return arguments


# Truth


def seen(call: Call) -> Tensor:
    """(queries, keys), by definition: the same document, and within the window around the aligned position."""
    arguments = call.arguments
    cuts_q = arguments.get("cu_seqlens_q") or [0, call.seq_q]
    cuts_k = arguments.get("cu_seqlens_k") or (cuts_q if arguments.get("cu_seqlens_q") else [0, call.seq_k])
    left, right = arguments.get("window_size", (-1, -1))
    found = torch.zeros(call.seq_q, call.seq_k, dtype=torch.bool)
    for document in range(len(cuts_q) - 1):
        end_q, end_k = cuts_q[document + 1], cuts_k[document + 1]
        queries, keys = torch.arange(cuts_q[document], end_q)[:, None], torch.arange(cuts_k[document], end_k)[None, :]
        after = (keys - end_k) - (queries - end_q)  # how many tokens after the query's own position
        visible = torch.ones_like(after, dtype=torch.bool)
        if left != -1:
            visible &= after >= -left
        if right != -1:
            visible &= after <= right
        if arguments.get("causal", False):
            visible &= after <= 0
        found[cuts_q[document] : end_q, cuts_k[document] : end_k] = visible
    return found


class Truth:
    """Dense attention in float64, and how far each number may be off.

    A result is a sum of products, so rounding is measured against the sum of their absolute values. `row` is how far
    a weight may be off, relative to itself: a few roundings to the dtype (weights, partials and results are rounded to
    it) and, since it is an exponential, the absolute error of a score and of the LSE. Both are computed in float32
    (float64 for float64): an error of eps times the sum of |q·k|, and of eps times the LSE, times a few operations.
    `floor` is for what is too small for the dtype.
    """

    def __init__(self, call: Call, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, d_lse: Tensor) -> None:
        q, k, v, d_out, d_lse = (x.double() for x in (q, k, v, d_out, d_lse))
        dtype = DTYPES[call.dtype]
        narrow, wide = torch.finfo(dtype), torch.finfo(torch.promote_types(dtype, torch.float32))
        groups = call.heads // call.kv_heads
        q, d_out = q.transpose(1, 2), d_out.transpose(1, 2)
        k, v = (x.repeat_interleave(groups, 2).transpose(1, 2) for x in (k, v))
        scale = call.arguments.get("softmax_scale")
        scale = call.dim**-0.5 if scale is None else scale
        visible = seen(call).to(q.device)
        scores, reach = q @ k.mT * scale, (q.abs() @ k.abs().mT).masked_fill(~visible, 0.0).amax(-1) * scale
        slope: Tensor | float = 1.0
        off_slope: Tensor | float = 0.0
        if cap := call.arguments.get("softcap", 0.0):
            bent = torch.tanh(scores / cap)
            scores, slope = cap * bent, 1 - bent * bent
            off_slope = 8 * wide.eps * (1 + slope * reach[..., None] / cap)  # where it saturates, 1 - tanh² cancels
        blind = ~visible.any(-1)
        scores = scores.masked_fill(~visible, -torch.inf)
        lse = scores.masked_fill(blind[:, None], 0.0).logsumexp(-1)
        weights = (scores - scores.masked_fill(blind[:, None], 0.0).amax(-1, keepdim=True)).exp()
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
        exponent = wide.eps * (16 + 4 * reach + 8 * lse.abs())
        row = (8 * narrow.eps + torch.expm1(exponent.clamp_max(60.0)))[..., None]
        tiny = (narrow.tiny * narrow.eps if dtype == torch.float16 else 64 * narrow.tiny) * call.seq_k
        out = weights @ v
        bound = (row * (weights @ v.abs())).minimum(2 * v.abs().amax((-1, -2), keepdim=True)) if call.seq_k else out
        self.out = [x.transpose(1, 2) for x in (out, bound + tiny * (1 + v.abs().max()))]
        off = exponent + narrow.eps / 8  # fast exponentials of 16-bit kernels
        self.lse = [lse.masked_fill(blind, -torch.inf), off]
        slopes = weights * slope
        d_scores = slopes * (d_out @ v.mT - (out * d_out).sum(-1, keepdim=True) + d_lse[..., None])
        size = d_out.abs() @ v.abs().mT + ((weights @ v.abs()) * d_out.abs()).sum(-1, keepdim=True)
        size = weights * (size + d_lse.abs()[..., None])
        row = torch.where(exponent[..., None] > 10, torch.inf, 2 * row)
        off = ((row * slope + off_slope) * size).nan_to_num(0.0, torch.inf)
        # Scores of about 1e9: backward's weights may overflow, and an infinity times 0 is NaN.
        overflows = exponent[..., None] > 80
        off = off.masked_fill(overflows, torch.inf)
        ends = [
            (d_scores @ k * scale, off @ k.abs() * scale, k),
            (d_scores.mT @ q * scale, off.mT @ q.abs() * scale, q),
            (
                weights.mT @ d_out,
                (row * weights).nan_to_num(0.0, torch.inf).masked_fill(overflows, torch.inf).mT @ d_out.abs(),
                d_out,
            ),
        ]
        self.gradients = []
        for name, (value, allowed, factor) in zip("qkv", ends, strict=True):
            floor = tiny * (1 + scale) * max(call.seq_q, call.seq_k) * (1 + factor.abs().max())
            both = value, allowed.nan_to_num(torch.inf, torch.inf) + floor
            if name != "q":
                both = tuple(x.unflatten(1, (call.kv_heads, groups)).sum(2) for x in both)
            self.gradients.append([x.transpose(1, 2) for x in both])


# Invalid calls: each changes the inputs, by rank, or the arguments of a call that would be valid. Those that
# tests/test_api_refusals.py makes, one by one and with their messages, are left out.

Change = Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]


def _giving(**arguments: Any) -> Change:
    return lambda sides, others: (sides, others | arguments)


def _changing(which: int, change: Callable[[Tensor], Any]) -> Change:
    def apply(sides: Any, arguments: dict[str, Any]) -> Any:
        return [[change(x) for x in side] if number == which else side for number, side in enumerate(sides)], arguments

    return apply


def _without_length(sides: Any, arguments: dict[str, Any]) -> Any:
    return sides, arguments | {"seq_len": sum(x.shape[1] for x in sides[0]) + 1000, "cu_seqlens_q": None}


WRONG: dict[str, Change] = {
    "scale is inf": _giving(softmax_scale=float("inf")),
    "scale is text": _giving(softmax_scale="0.5"),
    "causal is 1": _giving(causal=1),
    "deterministic is None": _giving(deterministic=None),
    "return_lse is 1": _giving(return_lse=1),
    "window has one side": _giving(window_size=(3,)),
    "window is -2": _giving(window_size=(-2, 0)),
    "window is 1.5": _giving(window_size=(1.5, 0)),
    "window is a number": _giving(window_size=4),
    "cuts are empty": _giving(cu_seqlens_q=[], cu_seqlens_k=None),
    "cuts start at 1": _giving(cu_seqlens_q=[1, 8], cu_seqlens_k=None),
    "cuts are too long": _giving(cu_seqlens_q=[0, 100000], cu_seqlens_k=[0, 100000]),
    "cuts are floats": _giving(cu_seqlens_q=[0.0, 8.0], cu_seqlens_k=None),
    "cuts are a float tensor": _giving(cu_seqlens_q=torch.tensor([0.0, 8.0]), cu_seqlens_k=None),
    "cuts are text": _giving(cu_seqlens_q="08", cu_seqlens_k=None),
    "cuts are a number": _giving(cu_seqlens_q=8, cu_seqlens_k=None),
    "cuts differ in number": _giving(cu_seqlens_q=[0, 1, 2], cu_seqlens_k=[0, 8]),
    "length is 0": _giving(seq_len=0),
    "length is negative": _giving(seq_len=-8),
    "length is 8.0": _giving(seq_len=8.0),
    "length is True": _giving(seq_len=True),
    "length is text": _giving(seq_len="8"),
    "length of keys is -1": _giving(seq_len_k=-1),
    "length is of other tokens": _without_length,
    "q is None": lambda sides, arguments: ([None, *sides[1:]], arguments),
    "q is a list of None": _changing(0, lambda x: None),
    "k is a number": _changing(1, lambda x: 3.0),
    "k is too short a list": lambda sides, arguments: ([sides[0], sides[1] + sides[1], sides[2]], arguments),
    "q has 2 dimensions": _changing(0, lambda x: x[0].flatten(0, 1)),
    "q has 5 dimensions": _changing(0, lambda x: x[None]),
    "k has another head size": _changing(1, lambda x: torch.cat([x, x], -1)),
    "q is of whole numbers": lambda sides, arguments: ([[x.long() for x in side] for side in sides], arguments),
    "k has another batch": _changing(1, lambda x: torch.cat([x, x])),
    "v has another batch": _changing(2, lambda x: torch.cat([x, x])),
    "no head": lambda sides, arguments: ([[x[:, :, :0] for x in side] for side in sides], arguments),
    "no head size": lambda sides, arguments: ([[x[..., :0] for x in side] for side in sides], arguments),
    "no batch": lambda sides, arguments: ([[x[:0] for x in side] for side in sides], arguments),
}

WRONG_SETTINGS: list[dict[str, Any]] = [
    {"tile": (0, 4)},
    {"tile": "4x"},
    {"tile": (1, 2, 3)},
    {"method": 3},
    {"layout": 4},
    {"route": "detour"},
    {"partials": True},
    {"ulysses_degree": 0},
    {"ulysses_degree": 1.0},
    {"blocks_per_call": 0},
    {"blocks_per_call": 1.5},
    {"keep": ("o",)},
    {"keep": "kv"},
    {"planner": 3},
    {"costs": 3},
    {"choice": "mesh 3x5"},
    {"choice": "nonsense"},
    {"choice": 5},
    {"tensor_format": None},
    {"cuda_graphs": "yes"},
    {"memory_limit": 100},
    {"cluster": "no such cluster"},
    {"cluster": 3},
    {"method": "ring", "tile": (2, 2)},
    {"method": "attention2d", "route": "ring"},
]


def check_settings(ranks: int, settings: dict[str, Any]) -> None:
    """Settings that cannot be: refused when the object is made, or at its first call."""
    try:
        attention = MeshAttention(LocalGroup(ranks), **settings)
        x = attention.shard(torch.randn(1, 8, 1, 8))
        attention(x, x, x, seq_len=8)
    except MeshAttentionError as error:
        if len(str(error)) < 20:
            raise MismatchError(f"refused without a reason: {error!r}") from None
        return
    raise MismatchError("accepted")


# Drawing


def draw_episode(rng: random.Random, device: str) -> tuple[Object, list[Call], bool]:
    given, multiple = _draw_object(rng)
    calls: list[Call] = []
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        if calls and rng.random() < 0.4:  # like an earlier one, with other values, or other details
            call = replace(rng.choice(calls), seed=rng.randrange(10**6), wrong=None)
            if rng.random() < 0.5:
                call = replace(call, **_draw_details(rng, call, given))
        else:
            call = _draw_call(rng, given, multiple, device)
        if rng.random() < 0.03:
            call = replace(call, poison=rng.choice("qk"), memory=tuple(replace(x, expanded=()) for x in call.memory))
        if rng.random() < 0.12:
            call = replace(call, wrong=rng.choice(_possible_faults(call, given)), is_packed=False)
        calls.append(call)
    return given, calls, rng.random() < 0.2


def _possible_faults(call: Call, given: Object) -> list[str]:
    faults = list(WRONG)
    if given.plays_one:
        faults.remove("k is too short a list")
    if "cu_seqlens_q" in call.arguments:
        faults.remove("length is of other tokens")
    return faults


def _draw_object(rng: random.Random) -> tuple[Object, int]:
    """An object, and what its calls' KV heads must be a multiple of."""
    ranks = rng.choice((1, 2, 2, 3, 4, 4, 5, 6, 7, 8))
    settings: dict[str, Any] = {}
    if rng.random() < 0.7:
        settings["layout"] = rng.choice(LAYOUTS)
    if rng.random() < 0.3:
        settings["tensor_format"] = rng.choice(("bshd", "bhsd"))
    if rng.random() < 0.08:
        return Object(ranks, settings, has_planner=True), 1
    if rng.random() < 0.01:
        settings["cluster"] = rng.choice(("h100x8", "h200x8"))
        return Object(ranks, settings), 1
    multiple = 1
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    method = rng.choice((None, "ring", "pass-q", "mesh", "mesh", "mesh", "attention2d", "ulysses"))
    if method is not None:
        settings["method"] = method
    if method == "ulysses":
        multiple = ranks
    elif rng.random() < 0.25:
        multiple = settings["ulysses_degree"] = rng.choice(divisors)
    places = ranks // multiple
    if method in ("mesh", "attention2d") and rng.random() < 0.8:
        rows = rng.choice([n for n in range(1, places + 1) if places % n == 0])
        settings["tile"] = rng.choice(((rows, places // rows), f"{rows}x{places // rows}"))
    if method in (None, "mesh", "ring", "pass-q"):
        for name, values in (("route", ("direct", "ring")), ("partials", ("direct", "ring"))):
            if rng.random() < 0.4:
                settings[name] = rng.choice(values)
        if rng.random() < 0.4:
            settings["blocks_per_call"] = rng.randint(1, 5)
    if rng.random() < 0.25:
        settings["keep"] = rng.choice(((), ("q",), ("kv",), ("q", "kv")))
    elif method == "mesh" and "tile" in settings and "ring" not in settings.values() and rng.random() < 0.3:
        rows, cols = settings["tile"] if isinstance(settings["tile"], tuple) else map(int, settings["tile"].split("x"))
        inner = [rng.choice([n for n in range(1, side + 1) if side % n == 0]) for side in (rows, cols)]
        if rng.random() < 0.5:
            settings["inner"] = tuple(inner)
        elif set(settings) <= {"method", "tile", "layout", "tensor_format"}:
            text = f"mesh {rows}x{cols}, {settings.pop('layout', 'zigzag')}, inner {inner[0]}x{inner[1]}"
            settings = {"choice": text} | {key: settings[key] for key in settings if key == "tensor_format"}
    plays_one = ranks == 1 and rng.random() < 0.6
    return Object(ranks, settings, plays_one), multiple


def _draw_call(rng: random.Random, given: Object, multiple: int, device: str) -> Call:
    most = rng.choice((8, 24, 48)) if device == "cpu" else rng.choice((8, 48, 200, 600))
    seq_q = rng.randint(1, most)
    seq_k = seq_q if rng.random() < 0.7 else rng.randint(1, most)
    if rng.random() < 0.3:
        seq_q, seq_k = (-(-seq // given.ranks) * given.ranks for seq in (seq_q, seq_k))
    kv_heads = multiple * rng.choice((1, 1, 2))
    dims = (1, 2, 3, 4, 8, 8, 16, 33) if device == "cpu" or rng.random() < 0.3 else (8, 16, 64, 64, 128, 256)
    dim = rng.choice(dims)
    dtype = rng.choice(("float64", "float32", "float32", "bfloat16", "bfloat16", "float16"))
    call = Call(
        seq_q=seq_q,
        seq_k=seq_k,
        batch=rng.choice((1, 1, 1, 2, 3)),
        heads=kv_heads * rng.choice((1, 1, 2, 3)),
        kv_heads=kv_heads,
        dim=dim,
        dim_v=dim if rng.random() < 0.8 else rng.choice(dims),
        dtype=dtype,
        seed=rng.randrange(10**6),
    )
    return replace(call, **_draw_details(rng, call, given), arguments=_draw_arguments(rng, call, given))


def _draw_arguments(rng: random.Random, call: Call, given: Object) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rng.random() < 0.5:
        found["causal"] = rng.random() < 0.9
    if rng.random() < 0.3:
        reach = max(call.seq_q, call.seq_k)
        sides = [rng.choice((-1, 0, 1, rng.randint(0, reach), 10**6)) for _ in range(2)]
        found["window_size"] = rng.choice((tuple(sides), sides))
    if rng.random() < 0.2:
        found["softmax_scale"] = rng.choice((None, 1.0, 1, 0.1, 0.02, 1.7, 1e-30, 1e-3))
    if rng.random() < 0.15:
        found["softcap"] = rng.choice((0.0, 0, 0.5, 3.0, 30.0, 1e-3, 1e30, 1))
    if rng.random() < 0.2:
        found["deterministic"] = rng.random() < 0.8
    if rng.random() < 0.6:
        found["return_lse"] = rng.random() < 0.9
    if rng.random() < 0.3:
        inner = rng.randint(0, 4)
        found["cu_seqlens_q"] = _draw_cuts(rng, call.seq_q, inner)
        if call.seq_k != call.seq_q or rng.random() < 0.3:
            found["cu_seqlens_k"] = _draw_cuts(rng, call.seq_k, inner)
    is_even = all(_is_even(seq, given) for seq in (call.seq_q, call.seq_k))
    if not (is_even or "cu_seqlens_q" in found) or rng.random() < 0.4:
        found["seq_len"] = call.seq_q
        if call.seq_k != call.seq_q or rng.random() < 0.3:
            found["seq_len_k"] = call.seq_k
    return found


def _is_even(seq: int, given: Object) -> bool:
    return seq % given.ranks == 0


def _draw_cuts(rng: random.Random, seq: int, inner: int) -> list[int]:
    return [0, *sorted(rng.randint(0, seq) for _ in range(inner)), seq]


def _draw_details(rng: random.Random, call: Call, given: Object) -> dict[str, Any]:
    """Whatever does not make it another configuration: values, memory, gradients."""
    return {
        "sizes": _draw_sizes(rng, call),
        "cuts_as": rng.choice(("list", "tuple", "int32", "int64")),
        "is_packed": call.batch == 1 and rng.random() < 0.2,
        "memory": tuple(_draw_memory(rng) for _ in range(4)),
        "needs": rng.choice(
            ((True, True, True),) * 4 + tuple((bool(n & 1), bool(n & 2), bool(n & 4)) for n in range(8))
        ),
        "into": rng.choice((("out",), ("out",), ("lse",), ("out", "lse"))),
        "skips": rng.randrange(2**given.ranks) if rng.random() < 0.2 else 0,
        "mode": rng.choice(("grad",) * 8 + ("no_grad", "inference")),
        "is_repeated": rng.random() < 0.05,
        "poison": None,
    }


def _draw_sizes(rng: random.Random, call: Call) -> tuple[float, float, float, float]:
    if rng.random() < 0.7:
        return (1.0, 1.0, 1.0, 1.0)
    if call.dtype == "float16":  # which overflows at 65504
        return (
            rng.choice((0.0, 0.1, 30.0)),
            rng.choice((0.1, 1.0, 10.0)),
            rng.choice((0.1, 3.0)),
            rng.choice((0.1, 1.0)),
        )
    q = rng.choice((0.0, 1e-3, 1.0, 10.0, 1e3, 1e5, 1e8))
    return (
        q,
        rng.choice((1e-3, 1.0, 1.0, 10.0)),
        rng.choice((1e-6, 1.0, 1e3, 1e6)),
        rng.choice((0.0, 1e-12, 1.0, 1e3)),
    )


def _draw_memory(rng: random.Random) -> Memory:
    if rng.random() < 0.5:
        return Memory()
    order = list(range(4))
    rng.shuffle(order)
    expanded = () if rng.random() < 0.6 else tuple(sorted(rng.sample(range(4), rng.choice((1, 1, 2, 4)))))
    return Memory(tuple(order), rng.choice((0, 0, 1, 3)), expanded)


# Failures


def smaller(given: Object, calls: list[Call], late: bool, fails: Callable[..., bool], seconds: float = 20.0) -> Any:
    """A simpler episode that fails as well: fewer calls, and as many details as possible at their defaults."""
    end = time.monotonic() + seconds

    def still(*episode: Any) -> bool:
        return time.monotonic() < end and fails(*episode)

    for at in reversed(range(len(calls))):
        fewer = calls[:at] + calls[at + 1 :]
        if fewer and still(given, fewer, late):
            calls = fewer
    if late and still(given, calls, False):
        late = False
    for name in list(given.settings):
        plainer = replace(given, settings={key: value for key, value in given.settings.items() if key != name})
        if still(plainer, calls, late):
            given = plainer
    for at in range(len(calls)):
        for plainer_call in _plainer(calls[at]):
            changed = {name: getattr(plainer_call[0], name) for name in plainer_call[1]}
            tried = [*calls[:at], replace(calls[at], **changed), *calls[at + 1 :]]
            if still(given, tried, late):
                calls = tried
    return given, calls, late


def _plainer(call: Call) -> Iterator[tuple[Call, tuple[str, ...]]]:
    plain = Call()
    for spec in fields(Call):
        if spec.name not in ("wrong", "arguments", "memory", "seq_q", "seq_k") and getattr(call, spec.name) != getattr(
            plain, spec.name
        ):
            yield replace(call, **{spec.name: getattr(plain, spec.name)}), (spec.name,)
    for number in range(4):
        memory = tuple(Memory() if at == number else one for at, one in enumerate(call.memory))
        yield replace(call, memory=memory), ("memory",)
    yield replace(call, memory=plain.memory), ("memory",)
    for name in call.arguments:
        arguments = {key: value for key, value in call.arguments.items() if key != name}
        yield replace(call, arguments=arguments), ("arguments",)


def script(given: Object, calls: list[Call], late: bool, device: str) -> str:
    """The episode as a script of at most ten lines, to run in the root of the repository."""
    shown = [_spell(call) for call in calls]
    if len(shown) > 6:
        shown = [*shown[:5], ", ".join(shown[5:])]
    options = (f", device={device!r}" if device != "cpu" else "") + (", late=True" if late else "")
    lines = ["import sys", 'sys.path[:0] = ["src", "tests/campaign"]', "from fuzz import Call, Memory, Object, check"]
    return "\n".join([*lines, f"check({_spell(given)},", *(f"    {one}," for one in shown), f"    {options[2:]})"])


def _spell(value: Any) -> str:
    """A value with the fields that are not at their defaults."""
    if isinstance(value, tuple) and value and isinstance(value[0], Memory):
        return f"({', '.join(map(_spell, value))})"
    if not isinstance(value, Object | Call | Memory):
        return repr(value)
    plain = type(value)()
    given = {spec.name: getattr(value, spec.name) for spec in fields(value)}
    parts = [f"{name}={_spell(one)}" for name, one in given.items() if one != getattr(plain, name)]
    return f"{type(value).__name__}({', '.join(parts)})"


def _failure(given: Object, calls: list[Call], late: bool, device: str) -> str | None:
    """What is wrong with an episode; None if nothing is."""
    try:
        check(given, *calls, device=device, late=late)
    except MismatchError as error:
        return str(error)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
    return None


def report(given: Object, calls: list[Call], late: bool, device: str, failure: str) -> str:
    kind = failure.split(" of rank")[0][:40]

    def fails(*episode: Any) -> bool:
        found = _failure(*episode, device)
        return found is not None and found.split(" of rank")[0][:40] == kind

    given, calls, late = smaller(given, calls, late, fails)
    return f"{_failure(given, calls, late, device) or failure}\n{script(given, calls, late, device)}\n"


# Campaign


@dataclass
class Tally:
    episodes: int = 0
    calls: int = 0
    refusals: int = 0
    passes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def run(
    seed: int,
    *,
    seconds: float,
    count: int | None,
    device: str = "cpu",
    start: int = 0,
    log: Path | None = None,
    most_failures: int = 20,
) -> Tally:
    """Episodes of one seed, until the time is over, `count` calls are made or there are that many failures."""
    tally, end = Tally(), time.monotonic() + seconds
    number = start
    while time.monotonic() < end and (count is None or tally.calls < count) and len(tally.failures) < most_failures:
        if log is not None:
            log.write_text(str(number))
        rng = random.Random(f"{seed}/{number}")
        number += 1
        tally.episodes += 1
        if rng.random() < 0.02:
            ranks, settings = rng.randint(2, 8), rng.choice(WRONG_SETTINGS)
            _tally_settings(tally, ranks, settings)
            continue
        given, calls, late = draw_episode(rng, device)
        tally.calls += len(calls)
        tally.refusals += sum(call.wrong is not None for call in calls)
        tally.passes.update(call.dtype for call in calls if call.wrong is None)
        failure = _failure(given, calls, late, device)
        if failure is not None:
            tally.failures.append(f"[seed {seed}, episode {number - 1}] {report(given, calls, late, device, failure)}")
            print(tally.failures[-1], flush=True)
    return tally


def _tally_settings(tally: Tally, ranks: int, settings: dict[str, Any]) -> None:
    tally.calls += 1
    tally.refusals += 1
    try:
        check_settings(ranks, settings)
    except Exception as error:
        text = f"MeshAttention(LocalGroup({ranks}), **{settings!r}): {type(error).__name__}: {error}\n"
        tally.failures.append(text)
        print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--count", type=int, help="calls of each process, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first episode")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.processes > 1:
        return _in_processes(given)
    torch.set_num_threads(1)
    begun = time.monotonic()
    tally = run(
        given.seed, seconds=given.seconds, count=given.count, device=given.device, start=given.start, log=given.log
    )
    print(json.dumps(vars(tally) | {"failures": len(tally.failures), "seconds": round(time.monotonic() - begun, 1)}))
    return bool(tally.failures)


def _in_processes(given: argparse.Namespace) -> int:
    """Each process has its own seed, and a file with the number of its episode: it may crash."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    options = ["--seconds", str(given.seconds), "--device", given.device, "--start", str(given.start)]
    options += [] if given.count is None else ["--count", str(given.count)]
    started = []
    for number in range(given.processes):
        own = ["--seed", str(given.seed * 1000 + number), "--log", str(folder / str(number))]
        command = [sys.executable, __file__, *options, *own]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ))
    total: Counter[str] = Counter()
    for number, process in enumerate(started):
        text, _ = process.communicate()
        *lines, last = text.strip().split("\n")
        print("\n".join(lines), end="\n" if lines else "")
        if process.returncode in (0, 1) and last.startswith("{"):
            found = json.loads(last)
            total.update(
                {name: found[name] for name in ("episodes", "calls", "refusals", "failures")} | found["passes"]
            )
        else:
            total["failures"] += 1
            print(f"{last}\nended with {process.returncode} in --seed {given.seed * 1000 + number} --start", end=" ")
            print((folder / str(number)).read_text(), "--count 1")
    print(json.dumps(dict(total)))
    return bool(total["failures"])


if __name__ == "__main__":
    sys.exit(main())
