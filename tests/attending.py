"""One harness for attention: a call as plain data, made on a local group or on one rank of several, on any device, and
compared with dense attention in float64 that shares no code with the library.

`CASES` are calls that must work, `planners` all ways to plan them. `campaign/fuzz.py` draws more of both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesh_attention import LocalGroup, MeshAttention
from mesh_attention.plan.plan import Plan, rank_costs
from mesh_attention.plan.steps import DIRECTIONS
from mesh_attention.problem import Problem

DTYPES = {str(dtype)[6:]: dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


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
    spoiled: tuple[str, int, int, str] | None = None
    """Some of Q, K, V and dO as letters of "qkvo", a row of the batch, a document, and "nan" or "inf", the only number
    that the document has there. All other documents have to keep their bits."""
    wrong: str | None = None


def _case(**given: Any) -> Call:
    """A call whose arguments are among the fields; it states its lengths and asks for the LSE."""
    own = {name: given.pop(name) for name in Call.__dataclass_fields__ if name in given}
    call = Call(**{"seq_q": 37, "seq_k": 37, "heads": 4, "kv_heads": 4} | own)
    return replace(call, arguments={"seq_len": call.seq_q, "seq_len_k": call.seq_k, "return_lse": True} | given)


CASES: dict[str, Call] = {
    "multi-head": _case(),
    "grouped-query": _case(kv_heads=2),
    "multi-query": _case(kv_heads=1),
    "two-head-sizes": _case(dim_v=5),
    "causal": _case(kv_heads=2, causal=True),
    "window": _case(window_size=(7, 2)),
    "causal-window": _case(kv_heads=2, causal=True, window_size=(9, -1)),
    "documents": _case(cu_seqlens_q=[0, 5, 5, 20, 37]),
    "causal-documents-window": _case(kv_heads=2, causal=True, window_size=(6, 0), cu_seqlens_q=[0, 11, 30, 37]),
    "packed": _case(kv_heads=2, causal=True, cu_seqlens_q=[0, 9, 37], is_packed=True),
    "cross": _case(seq_q=23, seq_k=41),
    "cross-causal": _case(seq_q=23, seq_k=41, causal=True),
    "cross-causal-blind-rows": _case(seq_q=29, seq_k=11, causal=True),
    "cross-documents": _case(seq_q=20, seq_k=31, causal=True, cu_seqlens_q=[0, 7, 20], cu_seqlens_k=[0, 21, 31]),
    "shorter-than-the-ranks": _case(seq_q=3, seq_k=3, causal=True),
    "one-token": _case(seq_q=1, seq_k=1),
    "batch": _case(batch=3, kv_heads=2, causal=True),
    "softcap": _case(kv_heads=2, causal=True, softcap=1.5),
    "scale": _case(causal=True, softmax_scale=0.7),
    "lse-gradient": _case(kv_heads=2, causal=True, into=("out", "lse")),
    "not-contiguous": _case(kv_heads=2, batch=2, causal=True, memory=(Memory((3, 1, 2, 0), 1),) * 4),
    "only-q": _case(causal=True, needs=(True, False, False)),
    "only-v": _case(causal=True, needs=(False, False, True)),
}


def call_of(problem: Problem, **arguments: Any) -> Call:
    """The call that a problem is derived from."""
    mask = problem.mask
    arguments["window_size"] = tuple(-1 if reach is None else reach for reach in (mask.left, mask.right))
    if mask.documents is not None:
        arguments |= {"cu_seqlens_q": list(mask.documents.q), "cu_seqlens_k": list(mask.documents.kv)}
    return _case(
        seq_q=problem.seq_q,
        seq_k=problem.seq_kv,
        batch=problem.batch,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        dim=problem.head_dim_qk,
        dim_v=problem.head_dim_v,
        **arguments,
    )


# Planners


def tiles(ranks: int) -> list[tuple[int, int]]:
    return [(a, ranks // a) for a in range(1, ranks + 1) if ranks % a == 0]


def planners(ranks: int) -> dict[str, dict[str, Any]]:
    """Every planner, route and grouping for a number of ranks, by name."""
    tile = min(tiles(ranks), key=lambda tile: abs(tile[0] - tile[1]))
    found: dict[str, dict[str, Any]] = {
        "ring": {"method": "ring"},
        "ring, routed": {"method": "ring", "route": "ring"},
        "pass-q": {"method": "pass-q"},
        "mesh": {"method": "mesh", "tile": tile},
        "mesh, routed": {"method": "mesh", "tile": tile, "route": "ring", "partials": "ring"},
        "mesh, grouped": {"method": "mesh", "tile": tile, "blocks_per_call": 3},
        "mesh, kept": {"method": "mesh", "tile": tile, "blocks_per_call": 2, "keep": ("kv",)},
        "mesh, waves": {"method": "mesh", "tile": tile, "waves": 2},
        "attention2d": {"method": "attention2d", "tile": tile},
        "attention2d, kept": {"method": "attention2d", "tile": tile, "keep": ("q", "kv")},
        "ulysses": {"method": "ulysses", "ulysses_degree": ranks},
    }
    degree = next((n for n in (2, 3) if ranks % n == 0 and n < ranks), None)
    if degree is not None:
        waves = {"keep": ("own",), "cut": "rows"}
        inner = {4: (2, 1), 6: (1, 3)}.get(ranks, (2, 2))
        found |= {
            "mesh, inner": {"method": "mesh", "tile": tile, "inner": inner},
            "ulysses x mesh": {"method": "mesh", "ulysses_degree": degree},
            "ulysses x mesh, kept": {"method": "mesh", "ulysses_degree": degree, "keep": ("q", "kv")},
            "ulysses x mesh, waves": {"method": "mesh", "ulysses_degree": degree, "waves": degree, **waves},
            "ulysses, waves": {"method": "ulysses", "ulysses_degree": ranks, "waves": 2, **waves},
            "usp": {"method": "ring", "ulysses_degree": degree},
        }
    return found


def widened(call: Call, options: dict[str, Any]) -> Call:
    """With as many times the heads, so that Ulysses and waves can share them out."""
    waves = options.get("waves", 1) if options.get("cut", "heads") == "heads" else 1
    factor = options.get("ulysses_degree", 1) * waves
    return replace(call, heads=call.heads * factor, kv_heads=call.kv_heads * factor)


def options_of(plan: Plan) -> dict[str, Any]:
    """What a `MeshAttention` is told to plan like this."""
    tile = (plan.assignment.tile.rows, plan.assignment.tile.cols)
    options: dict[str, Any] = {"method": plan.method, "tile": tile, "ulysses_degree": plan.assignment.ulysses_degree}
    options |= {"keep": plan.schedule.keep, "waves": plan.assignment.waves, "cut": plan.assignment.cut}
    if plan.method == "mesh":
        options |= {"route": plan.schedule.route, "partials": plan.schedule.partials, "blocks_per_call": 2}
    return options


# One call


class MismatchError(AssertionError):
    """A result that is wrong, or a call that should have been refused."""


class Attended:
    """A valid call on the local ranks: forward when made, backward when compared."""

    def __init__(
        self,
        attention: MeshAttention,
        call: Call,
        device: torch.device | str = "cpu",
        *,
        truth: Truth | None = None,
        attend: Callable[..., Any] | None = None,
    ) -> None:
        """`attend` calls the attention, in some other way than by its name."""
        self.attention, self.call, self.attend, self.device = attention, call, attend or attention, device
        self.wholes = wholes_of(call, device)
        self.has_grad = call.mode in ("grad", "autocast", "meta") and any(call.needs) and call.poison is None
        self.has_lse = call.arguments.get("return_lse", False)
        self.into = [name for name in call.into if self.has_grad and (name == "out" or self.has_lse)]
        self.ids = [_positions(attention, seq) for seq in (call.seq_q, call.seq_k)]
        self.is_first = attention.tensor_format == "bhsd" and not call.is_packed
        self.skipped = [bool(call.skips >> comm.rank & 1) for comm in attention.comms]
        self.leaves: list[list[Tensor]] = []
        self.problems: list[str] = []
        self._truth = truth
        self._forward(device)

    @property
    def truth(self) -> Truth:
        self._truth = self._truth or Truth(self.call, *self.wholes[:3], *self.weights())
        return self._truth

    def _forward(self, device: torch.device | str) -> None:
        call, attention = self.call, self.attention
        sides = []
        for name, whole, memory, need in zip("qkv", self.wholes, call.memory, (*call.needs, False), strict=False):
            ids = self.ids[name != "q"]
            leaves = [_stored(_take(whole, at), memory).requires_grad_(need) for at in ids]
            shards = [leaf.expand(_take(whole, at).shape) for leaf, at in zip(leaves, ids, strict=True)]
            self.leaves.append(leaves)
            sides.append([self._formatted(x) for x in shards])
        versions = [x._version for side in sides for x in side]
        modes: dict[str, Any] = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
        modes |= {"autocast": partial(torch.autocast, torch.device(device).type, torch.bfloat16)}
        modes |= {"meta": partial(torch.device, "meta")}  # the default device
        with modes[call.mode]():
            inputs = sides if attention.is_local else [side[0] for side in sides]
            results = self.attend(*inputs, **arguments_of(call, device))
            if call.is_repeated and not _is_same(results, self.attend(*inputs, **arguments_of(call, device))):
                self.problems.append("the same call gave other bits")
        outs, lses = results if self.has_lse else (results, None)
        self.outs = outs if attention.is_local else [outs]
        self.lses = None if lses is None else lses if attention.is_local else [lses]
        if versions != [x._version for side in sides for x in side]:
            self.problems.append("an input was written to")

    def _formatted(self, shard: Tensor) -> Tensor:
        """As this call takes and gives tensors."""
        return shard[0] if self.call.is_packed else shard.transpose(1, 2) if self.is_first else shard

    def _plain(self, shard: Tensor) -> Tensor:
        return shard[None] if self.call.is_packed else shard.transpose(1, 2) if self.is_first else shard

    def weights(self) -> tuple[Tensor, Tensor]:
        """The gradients of the whole output and LSE; zero where none are given."""
        d_out, d_lse = (
            x.clone() if name in self.into else torch.zeros_like(x)
            for name, x in zip(("out", "lse"), self.wholes[3:], strict=True)
        )
        for ids, skip in zip(self.ids[0], self.skipped, strict=True):
            if skip:
                d_out[:, ids] = 0.0
                d_lse[:, :, ids] = 0.0
        return d_out, d_lse

    def ends(self) -> list[tuple[Tensor, Tensor]]:
        """The results that gradients come from, each with its gradient."""
        (d_out, d_lse), ends = self.weights(), []
        for at, (ids, skip) in enumerate(zip(self.ids[0], self.skipped, strict=True)):
            if "out" in self.into and not skip:
                given = _take(d_out, ids)
                given = _stored(given, self.call.memory[3]).expand(given.shape)
                ends.append((self.outs[at], self._formatted(given)))
            if "lse" in self.into and not skip:
                given = d_lse[:, :, ids]
                assert self.lses is not None
                ends.append((self.lses[at], given[0] if self.call.is_packed else given))
        return ends

    def compare(self) -> None:
        """Raise unless everything is right."""
        if wrong := self.wrong():
            raise MismatchError("\n".join(wrong))

    def wrong(self) -> list[str]:
        """What is wrong with the results of both passes. Nothing is raised: other ranks go on."""
        ends = self.ends()
        if ends:
            torch.autograd.backward(*zip(*ends, strict=True))
        if self.call.spoiled is not None:
            return self._spread()
        return [*self.wrong_results(), *(self.wrong_gradients() if ends else []), *self._wrong_whole()]

    def _spread(self) -> list[str]:
        """What has other bits outside of the spoiled document than in the same call without it."""
        assert self.call.spoiled is not None
        clean = Attended(self.attention, replace(self.call, spoiled=None), self.device, attend=self.attend)
        if ends := clean.ends():
            torch.autograd.backward(*zip(*ends, strict=True))
        found, spans = list(self.problems), document_of(self.call)
        for (name, side, ids, ours), (*_, due) in zip(self._by_token(), clean._by_token(), strict=True):
            kept = torch.ones(ours.shape[:2], dtype=torch.bool)
            kept[self.call.spoiled[1]] = (ids < spans[side].start) | (ids >= spans[side].stop)
            if not torch.equal(ours[kept], due[kept]):
                found.append(f"{name} of another document than the spoiled one has changed")
        return found

    def _by_token(self) -> Iterator[tuple[str, int, Tensor, Tensor]]:
        """Results and gradients of each rank, (batch, tokens, …): name, side, positions, numbers."""
        for at, (comm, q_ids, k_ids) in enumerate(zip(self.attention.comms, *self.ids, strict=True)):
            yield f"out of rank {comm.rank}", 0, q_ids, self._plain(self.outs[at].detach())
            if self.lses is not None:
                lse = self.lses[at].detach()
                yield f"lse of rank {comm.rank}", 0, q_ids, (lse[None] if self.call.is_packed else lse).transpose(1, 2)
            for name, leaves in zip("qkv", self.leaves, strict=True):
                if (grad := leaves[at].grad) is not None:
                    yield f"d{name} of rank {comm.rank}", int(name != "q"), k_ids if name != "q" else q_ids, grad

    def wrong_results(self) -> list[str]:
        call, truth, found = self.call, self.truth, list(self.problems)
        dtype = DTYPES[call.dtype]
        wide = torch.promote_types(dtype, torch.float32)
        for at, (comm, ids) in enumerate(zip(self.attention.comms, self.ids[0], strict=True)):
            out = self._plain(self.outs[at].detach())
            found += self._far(f"out of rank {comm.rank}", out, *(_take(x, ids) for x in truth.out), dtype)
            if self.lses is not None:
                lse = self.lses[at].detach()
                lse = lse[None] if call.is_packed else lse
                found += self._far(f"lse of rank {comm.rank}", lse, *(x[:, :, ids] for x in truth.lse), wide)
        return found

    def _wrong_whole(self) -> list[str]:
        """All ranks take part in this."""
        outs = [out.detach() for out in self.outs]
        dim = 0 if self.call.is_packed else 2 if self.is_first else 1
        whole = self.attention.unshard(outs if self.attention.is_local else outs[0], dim=dim)
        return self._far("the whole output", self._plain(whole), *self.truth.out, DTYPES[self.call.dtype])

    def wrong_gradients(self) -> list[str]:
        """After backward."""
        found = []
        for name, leaves, due, memory in zip("qkv", self.leaves, self.truth.gradients, self.call.memory, strict=False):
            for comm, leaf, ids in zip(self.attention.comms, leaves, self.ids[name != "q"], strict=True):
                found += self._far_gradient(f"d{name} of rank {comm.rank}", leaf, [_take(x, ids) for x in due], memory)
        return found

    def _far(self, name: str, ours: Tensor, due: Tensor, allowed: Tensor, dtype: torch.dtype) -> list[str]:
        if ours.shape != due.shape or ours.dtype != dtype:
            return [f"{name}: {tuple(ours.shape)} {ours.dtype}, not {tuple(due.shape)} {dtype}"]
        if not ours.numel():
            return []
        # Equal covers an LSE of -inf; where rounding alone may be worse than anything, nothing is asked.
        wrong = ~((ours.double() == due) | ((ours.double() - due).abs() <= allowed) | (allowed == torch.inf))
        if self.call.poison is not None:  # NaN must show wherever it has an effect; elsewhere, see `Truth`
            wrong = torch.where(due.isnan(), ~ours.isnan(), wrong)
        if not wrong.any():
            return []
        at = tuple(int(i) for i in wrong.nonzero()[0])
        return [
            f"{name} is {ours[at].item():.6g} at {at}, expected {due[at].item():.6g} ± {allowed[at].item():.1e}; "
            f"wrong in {int(wrong.sum())} of {wrong.numel()} places"
        ]

    def _far_gradient(self, name: str, leaf: Tensor, due: list[Tensor], memory: Memory) -> list[str]:
        if not leaf.requires_grad:
            return [] if leaf.grad is None else [f"{name} was not asked for"]
        if leaf.grad is None:
            return [f"{name} is missing"]
        if not leaf.numel():
            due, memory = [leaf, leaf], Memory()
        value, allowed = (x.sum(memory.expanded, keepdim=True) if memory.expanded else x for x in due)
        if memory.expanded:  # autograd adds the gradients in their own dtype
            allowed = allowed + 4 * torch.finfo(leaf.dtype).eps * due[0].abs().sum(memory.expanded, keepdim=True)
        return self._far(name, leaf.grad, value, allowed, leaf.dtype)


def wrong_of(group: Any, options: dict[str, Any], call: Call, device: torch.device | str = "cpu") -> list[str]:
    """What is wrong with a call on a group, or on one rank of several."""
    return Attended(MeshAttention(group, **options), widened(call, options), device).wrong()


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))
    return all(map(_is_same, first, second))


def _positions(attention: MeshAttention, seq: int) -> list[Tensor]:
    """Those of each local rank."""
    if not attention.is_local:
        return [attention.position_ids(seq)]
    ids: list[Tensor] = attention.position_ids(seq)
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


def wholes_of(call: Call, device: torch.device | str = "cpu") -> list[Tensor]:
    """Q, K, V, dO and dLSE of the whole sequence, on every rank, with the values that expanded tensors can have."""
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
    if call.spoiled is not None:
        sides, row, _, value = call.spoiled
        for at in map("qkvo".index, sides):
            span = document_of(call)[at in (1, 2)]
            found[at] = found[at].clone()
            found[at][row, span.start : span.stop] = float(value)
    wide = torch.promote_types(DTYPES[call.dtype], torch.float32)
    d_lse = torch.randn((call.batch, call.heads, call.seq_q), generator=generator, dtype=torch.float64) * call.sizes[3]
    return [*found, d_lse.to(device, wide)]


def arguments_of(call: Call, device: torch.device | str) -> dict[str, Any]:
    arguments = dict(call.arguments)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if isinstance(arguments.get(name), list):
            cuts = arguments[name]
            forms: dict[str, Any] = {"list": cuts, "tuple": tuple(cuts)}
            as_tensor = {"int32": torch.int32, "int64": torch.int64}.get(call.cuts_as)
            arguments[name] = torch.tensor(cuts, dtype=as_tensor, device=device) if as_tensor else forms[call.cuts_as]
    return arguments


# Truth


def cuts_of(call: Call) -> tuple[list[int], list[int]]:
    """Where the documents of queries and of keys end."""
    cuts_q, cuts_k = (call.arguments.get(f"cu_seqlens_{side}") for side in "qk")
    return cuts_q or [0, call.seq_q], cuts_k or cuts_q or [0, call.seq_k]


def document_of(call: Call) -> tuple[range, range]:
    """Queries and keys of the spoiled document, or of the one of the poisoned token."""
    sides = cuts_of(call)
    if call.spoiled is not None:
        at = call.spoiled[2] % (len(sides[0]) - 1)
    else:
        at = bisect_right(sides[call.poison == "k"], 0) - 1
    return range(*sides[0][at : at + 2]), range(*sides[1][at : at + 2])


def seen(call: Call) -> Tensor:
    """(queries, keys), by definition: the same document, and within the window around the aligned position."""
    arguments = call.arguments
    cuts_q, cuts_k = cuts_of(call)
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
        if call.poison is not None:  # it may spread to masked pairs of its document
            queries, _ = document_of(call)
            self.out[1][0, queries.start : queries.stop] = torch.inf
            off[0, :, queries.start : queries.stop] = torch.inf
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


def truth_of(call: Call, device: torch.device | str = "cpu") -> Truth:
    """Of a call on all ranks."""
    q, k, v, d_out, d_lse = wholes_of(call, device)
    return Truth(call, q, k, v, d_out * ("out" in call.into), d_lse * ("lse" in call.into))


def relative_error(ours: Tensor, theirs: Tensor, least: float = 0.01) -> float:
    """Against `least` at least: gradients that are zero have nothing to be relative to."""
    if not theirs.numel():
        return 0.0
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp_min(least))


# Both passes of large tensors, and what they send


def both_passes(attention: MeshAttention, wholes: list[Tensor], **arguments: Any) -> list[Tensor]:
    """The whole output and gradients of whole Q, K, V and dO."""
    *sides, d_out = (attention.shard(whole.detach()) for whole in wholes)
    leaves = [[x.requires_grad_() for x in (side if attention.is_local else [side])] for side in sides]
    outs = attention(*(leaves if attention.is_local else [side[0] for side in leaves]), **arguments)
    ends = zip(outs, d_out, strict=True) if attention.is_local else [(outs, d_out)]
    torch.autograd.backward(*zip(*ends, strict=True))
    gradients = [[leaf.grad for leaf in side] for side in leaves]
    shards = [outs, *(gradients if attention.is_local else [side[0] for side in gradients])]
    return [attention.unshard([x.detach() for x in s] if attention.is_local else s.detach()) for s in shards]


def error_ratios(given: list[tuple[str, MeshAttention]], wholes: list[Tensor], **arguments: Any) -> dict[str, float]:
    """The largest error of each attention, in the output and the gradients, as a multiple of that of one kernel."""
    alone = MeshAttention(LocalGroup(1).comm(0))
    due = both_passes(alone, [whole.double() for whole in wholes], **arguments)

    def errors(attention: MeshAttention) -> Tensor:
        ours = both_passes(attention, wholes, **arguments)
        return torch.stack([(a.double() - b).square().mean().sqrt() for a, b in zip(ours, due, strict=True)])

    single = errors(alone)
    return {name: float((errors(attention) / single).max()) for name, attention in given}


class Counts(NamedTuple):
    """Of one rank in one pass. Bytes by kind; the most bytes held at once."""

    sent: dict[str, int]
    received: dict[str, int]
    messages: int
    peak: int


def counts_of(attention: MeshAttention, call: Call) -> list[tuple[Counts, Counts]]:
    """What local ranks counted in each pass, and what plans say. Their transports are `Counting`."""
    attended, found = Attended(attention, call), []
    (engine,) = attention.calls.engines.values()
    for direction in DIRECTIONS:
        if direction == "backward":
            torch.autograd.backward(*zip(*attended.ends(), strict=True))
        for comm, compiled, meter in zip(attention.comms, engine.programs(direction), engine.meters, strict=True):
            counted = Counts(dict(comm.sent_nbytes), dict(comm.received_nbytes), comm.messages, meter.peak)  # type: ignore[attr-defined]
            costs = rank_costs(compiled.plan, comm.rank)
            sent, received = ({kind: s.total for kind, s in side.items()} for side in (costs.sent, costs.received))
            found.append((counted, Counts(sent, received, costs.messages, costs.peak_nbytes)))
            comm.sent_nbytes.clear()  # type: ignore[attr-defined]
            comm.received_nbytes.clear()  # type: ignore[attr-defined]
            comm.messages = 0  # type: ignore[attr-defined]
    return found
