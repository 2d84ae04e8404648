"""Executes a plan, all ranks in one process, as hostile as a real network may be, and compares it with dense attention.

The network runs each rank's posts strictly one after the other, as NCCL does; a post is over when all its transfers
have both ends. When data moves between the first and the last possible moment is drawn. Memory has NaN in it before it
is written and after it is freed. A plan over a cache is run over a past that is spread over the ranks at random: some
hold nothing, and a new token is kept by any of them.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from attending import Truth, call_of, wholes_of

from mesh_attention.arguments import Softmax
from mesh_attention.comm.base import Comm, Parcel, Work, drive
from mesh_attention.execution.buffers import Buffer, Fields, token_format
from mesh_attention.execution.compiled import compile_program, lay_out
from mesh_attention.execution.engine import Outputs
from mesh_attention.execution.executor import Executor
from mesh_attention.kernels.decode import TorchDecode
from mesh_attention.kernels.reference import ReferenceKernel
from mesh_attention.masks import causal
from mesh_attention.plan.layout import position_ids
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import Item
from mesh_attention.problem import Problem

TOLERANCE = 1e-10
NOT_A_NUMBER = 255
"""A byte that makes any float of these bytes NaN."""
CPU = torch.device("cpu")


class WrongPlanError(Exception):
    """An accepted plan that is not right."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


MOST_CACHED = 30
"""Tokens of the past that a plan over a cache is executed with, at most."""


@lru_cache(maxsize=8)
def truth_of_decoding(problem: Problem, past: int) -> dict[str, Tensor]:
    """Rows of a decoded step, each of which sees the past and the rows before it; k and v are also of the past."""
    whole = replace(problem, seq_kv=past + problem.seq_q, mask=causal())
    truth = truth_of(whole)
    return {**truth, "new k": truth["k"][:, past:], "new v": truth["v"][:, past:]}


@lru_cache(maxsize=8)
def truth_of(problem: Problem) -> dict[str, Tensor]:
    """Inputs, results and gradients of the whole problem, (batch, tokens, heads, dim); statistics without dim."""
    call = call_of(problem)
    q, k, v, do, d_lse = wholes_of(call)
    truth = Truth(call, q, k, v, do, torch.zeros_like(d_lse))
    (o, _), (lse, _) = truth.out, truth.lse
    found = {"q": q, "k": k, "v": v, "do": do, "o": o, "lse": lse.transpose(1, 2), "delta": (o * do).sum(-1)}
    return found | dict(zip(("dq", "dk", "dv"), (due for due, _ in truth.gradients), strict=True))


FIELDS = {
    "q": ("q",),
    "kv": ("k", "v"),
    "do": ("lse", "delta", "do"),
    "o": ("o", "lse"),
    "dq": ("dq",),
    "dkv": ("dk", "dv"),
}


def _fields(truth: Mapping[str, Tensor], kind: str, positions: Sequence[int], heads: slice) -> dict[str, Tensor]:
    """The fields of a kind at these positions, (batch, heads, tokens, dim)."""
    return {name: truth[name][:, list(positions)].transpose(1, 2)[:, heads] for name in FIELDS[kind]}


ALL_HEADS = slice(None)


# The network


class _Batch:
    """What one rank posts at once."""

    def __init__(self, rank: int, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> None:
        self.rank, self.sends, self.recvs = rank, sends, recvs
        self.transfers: list[_Transfer] = []
        self.is_over = False

    def is_done(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        raise AssertionError("nobody waits here; ranks are advanced in turn")


class _Transfer:
    """A transfer whose ends have begun, or one of them."""

    def __init__(self) -> None:
        self.sent: Parcel | None = None
        self.received: Parcel | None = None
        self.has_moved = False

    @property
    def has_both_ends(self) -> bool:
        return self.sent is not None and self.received is not None

    def move(self) -> None:
        if self.has_moved:
            return
        assert self.sent is not None
        assert self.received is not None
        sizes = [[chunk.numel() for chunk in parcel.chunks] for parcel in (self.sent, self.received)]
        if sizes[0] != sizes[1]:
            raise WrongPlanError(
                "mismatched transfer", f"{self.sent.label} {sizes[0]} meets {self.received.label} {sizes[1]}"
            )
        for source, dest in zip(self.sent.chunks, self.received.chunks, strict=True):
            dest.copy_(source)
        self.has_moved = True


class Network:
    """Posts of each rank one after the other; a post is over when all its transfers have both ends."""

    def __init__(self, ranks: int) -> None:
        self.queues: list[deque[_Batch]] = [deque() for _ in range(ranks)]
        self.open: dict[tuple[int, int], tuple[deque[_Transfer], deque[_Transfer]]] = {}

    def post(self, batch: _Batch) -> None:
        self.queues[batch.rank].append(batch)
        if len(self.queues[batch.rank]) == 1:
            self._begin(batch)

    def _begin(self, batch: _Batch) -> None:
        for parcel in batch.recvs:
            transfer = self._end((parcel.peer, batch.rank), 1)
            transfer.received = parcel
            batch.transfers.append(transfer)
        for parcel in batch.sends:
            transfer = self._end((batch.rank, parcel.peer), 0)
            transfer.sent = parcel
            batch.transfers.append(transfer)

    def _end(self, pair: tuple[int, int], side: int) -> _Transfer:
        """The next transfer of a pair of ranks that lacks this end."""
        ours, theirs = self.open.setdefault(pair, (deque(), deque()))[:: 1 if side == 0 else -1]
        if theirs:
            return theirs.popleft()
        ours.append(_Transfer())
        return ours[-1]

    def can_end(self) -> list[_Batch]:
        return [queue[0] for queue in self.queues if queue and all(t.has_both_ends for t in queue[0].transfers)]

    def end(self, batch: _Batch) -> None:
        for transfer in batch.transfers:
            transfer.move()
        batch.is_over = True
        queue = self.queues[batch.rank]
        queue.popleft()
        if queue:
            self._begin(queue[0])


class StrictComm:
    """One rank's end of the network."""

    is_capturable = False

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank, self.size = network, rank, len(network.queues)

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> Work:
        for parcel in recvs:
            for chunk in parcel.chunks:
                chunk.fill_(NOT_A_NUMBER)
        batch = _Batch(self.rank, sends, recvs)
        self.network.post(batch)
        return batch

    def share(self, text: str) -> Any:
        raise AssertionError("executors share no texts")


# Ranks


class _Cache:
    """One rank's part of a cache, of any tokens. A query sees those before it that are kept, wherever they are."""

    def __init__(self, truth: Mapping[str, Tensor], past: int, kept: Sequence[int]) -> None:
        self.positions, self.past = torch.tensor(sorted(kept), dtype=torch.int64), past
        self.k, self.v = (truth[name][0, self.positions].clone() for name in "kv")
        is_new = self.positions >= past
        self.k[is_new] = self.v[is_new] = torch.nan  # until they are appended

    def decode(self, tokens: Fields, partials: Fields) -> None:
        new = self.positions >= self.past
        at = self.positions[new] - self.past
        self.k[new], self.v[new] = tokens["k"][at], tokens["v"][at]
        q = tokens["q"]
        shared = q.shape[1] // self.k.shape[1]
        scores = torch.einsum("qhd,khd->qhk", q, self.k.repeat_interleave(shared, 1)) * q.shape[2] ** -0.5
        seen = self.positions[None] <= torch.arange(q.shape[0])[:, None] + self.past
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        weights = scores.softmax(-1).nan_to_num()  # of queries that see nothing here
        partials["o"].copy_(torch.einsum("qhk,khd->qhd", weights, self.v.repeat_interleave(shared, 1)))
        partials["lse"].copy_(scores.logsumexp(-1)[..., None].view(partials["lse"].shape))

    def combine(self, partials: Fields, total: Fields) -> None:
        TorchDecode().merge(partials["o"], partials["lse"], total["o"], total["lse"])


class _Poisoned(Executor):
    """An executor whose memory has NaN in it before it is written and after it is freed."""

    def _allocate(self, item: Item) -> Buffer:
        buffer = super()._allocate(item)
        for chunk in self._chunks(item):
            chunk.fill_(NOT_A_NUMBER)
        return buffer

    def _release(self, item: Item) -> None:
        for chunk in self._chunks(item):
            chunk.fill_(NOT_A_NUMBER)
        super()._release(item)


def execute(plan: Plan, rng: Random) -> None:
    """Run all ranks of a plan; raise `WrongPlanError` unless every result is there and right."""
    network = Network(plan.problem.ranks)
    past = _Past.drawn(plan, rng) if plan.matrix.is_over_cache else None
    executors = [_executor(plan, past, StrictComm(network, rank)) for rank in range(plan.problem.ranks)]
    results = _drive([executor.run() for executor in executors], network, rng)
    if any(network.queues) or any(side for sides in network.open.values() for side in sides):
        raise WrongPlanError("left over", "transfers without their other end")
    for executor, result in zip(executors, results, strict=True):
        _check_peak(executor)
        _compare(plan, past, executor, result)
        if past is None and plan.direction == "forward":
            _compare_kept(plan, executor)


class _Past(NamedTuple):
    """The tokens before a step, and the positions that each rank keeps, new ones among them."""

    tokens: int
    kept: list[list[int]]

    @classmethod
    def drawn(cls, plan: Plan, rng: Random) -> _Past:
        ranks, tokens = plan.problem.ranks, rng.choice((0, 1, rng.randrange(MOST_CACHED)))
        holders = [rank for rank in range(ranks) if rng.random() < 0.7] or [rng.randrange(ranks)]
        kept: list[list[int]] = [[] for _ in range(ranks)]
        for position in range(tokens + plan.problem.seq_q):
            kept[rng.choice(holders)].append(position)
        return cls(tokens, kept)


def _over_cache(plan: Plan, past: _Past, comm: Comm) -> Executor:
    truth, rows = truth_of_decoding(plan.problem, past.tokens), _rows(plan, comm.rank)
    return _Poisoned(
        compiled=compile_program(plan, comm.rank),
        comm=comm,
        inputs={"q": {name: truth[of][:, rows].transpose(1, 2) for name, of in NEW.items()}},
        device=CPU,
        cache=_Cache(truth, past.tokens, past.kept[comm.rank]),
    )


def _compare_rows(plan: Plan, past: _Past, executor: Executor) -> None:
    truth, rank = truth_of_decoding(plan.problem, past.tokens), executor.compiled.rank
    rows, result = _rows(plan, rank), executor.result
    if rows and result is None:
        raise WrongPlanError("wrong", f"rank {rank} has no result")
    for name in ("o", "lse") if result is not None else ():
        _assert_equal(f"{name} of rank {rank}", result.fields[name], truth[name][:, rows].transpose(1, 2))


NEW = {"q": "q", "k": "new k", "v": "new v"}
"""The fields of new tokens, and their names among the truth."""


def _rows(plan: Plan, rank: int) -> list[int]:
    """The rows that a rank gives, and gets the results of."""
    ranks = range(plan.problem.ranks) if plan.matrix.is_replicated else (rank,)
    return [row for each in ranks for segment in plan.matrix.home_segments("row", each) for row in segment]


def _check_peak(executor: Executor) -> None:
    told = executor.compiled.peak_nbytes
    if executor.meter.peak > told:
        rank = executor.compiled.rank
        raise WrongPlanError("memory", f"rank {rank} held {executor.meter.peak} bytes, its program states {told}")


def execute_rank(plan: Plan, comm: Comm) -> None:
    """Run one rank of a plan over a real transport, and compare its results."""
    past = _Past.drawn(plan, Random(plan.digest)) if plan.matrix.is_over_cache else None  # the same on all ranks
    executor = _executor(plan, past, comm)
    _compare(plan, past, executor, drive(executor.run()))


def _executor(plan: Plan, past: _Past | None, comm: Comm) -> Executor:
    if past is not None:
        return _over_cache(plan, past, comm)
    problem, rank, truth = plan.problem, comm.rank, truth_of(plan.problem)
    inputs = {
        kind: _fields(truth, kind, _home(plan, kind, rank), ALL_HEADS)
        for kind in (("q", "kv") if plan.direction == "forward" else ("q", "kv", "do"))
    }
    tokens = {kind: len(_home(plan, kind, rank)) for kind in ("q", "kv")}
    return _Poisoned(
        compiled=compile_program(plan, rank),
        comm=comm,
        kernel=ReferenceKernel(),
        softmax=Softmax(scale=problem.head_dim_qk**-0.5),
        inputs=inputs,
        device=CPU,
        new_output=Outputs(problem, tokens, CPU),
        kept=_kept_buffers(plan, rank, truth) if plan.direction == "backward" else {},
    )


def _home(plan: Plan, kind: str, rank: int) -> list[int]:
    """The positions one rank is home to."""
    problem = plan.problem
    tokens = problem.seq_kv if kind in ("kv", "dkv") else problem.seq_q
    return position_ids(plan.layout, rank, seq_len=tokens, ranks=problem.ranks)


def _drive(
    ranks: Sequence[Generator[Work, None, dict[str, Any]]], network: Network, rng: Random
) -> list[dict[str, Any]]:
    """Advance ranks and end posts in a drawn order; `eagerness` says which of the two goes first."""
    eagerness = rng.choice((0.0, 0.0, 0.5, 1.0))
    results: dict[int, dict[str, Any]] = {}
    waiting: dict[int, Work | None] = dict.fromkeys(range(len(ranks)))
    while waiting or any(network.queues):
        ready = [rank for rank, work in waiting.items() if work is None or work.is_done()]
        endable = network.can_end()
        if not ready and not endable:
            if not waiting:
                break  # left over
            raise WrongPlanError("stall", f"ranks {', '.join(map(str, waiting))} wait for each other")
        if endable and (not ready or rng.random() < eagerness):
            network.end(rng.choice(endable))
            continue
        rank = rng.choice(ready)
        try:
            waiting[rank] = next(ranks[rank])
        except StopIteration as stop:
            results[rank] = stop.value
            del waiting[rank]
    return [results[rank] for rank in range(len(ranks))]


# Comparing


def _compare(plan: Plan, past: _Past | None, executor: Executor, result: Mapping[str, Mapping[str, Tensor]]) -> None:
    if past is not None:
        return _compare_rows(plan, past, executor)
    rank, truth = executor.compiled.rank, truth_of(plan.problem)
    for kind in ("o",) if plan.direction == "forward" else ("dq", "dkv"):
        due = _fields(truth, kind, _home(plan, kind, rank), ALL_HEADS)
        if kind not in result:
            if any(tensor.numel() for tensor in due.values()):
                raise WrongPlanError("wrong", f"rank {rank} returns no {kind}")
            continue
        for name, tensor in due.items():
            _assert_equal(f"{name} of rank {rank}", result[kind][name], tensor)
    return None


def _assert_equal(what: str, ours: Tensor, due: Tensor) -> None:
    if ours.shape != due.shape:
        raise WrongPlanError("wrong", f"{what} has shape {tuple(ours.shape)}, expected {tuple(due.shape)}")
    if not torch.allclose(ours, due, rtol=TOLERANCE, atol=TOLERANCE):
        error = (ours - due).abs().max() if ours.numel() else 0.0
        raise WrongPlanError("wrong", f"{what} is off by {float(error):.3g}")


def _kept_groups(
    plan: Plan, rank: int, truth: Mapping[str, Tensor]
) -> list[tuple[tuple[Item, ...], dict[str, Tensor]]]:
    """The items kept for backward, by the buffer they share, and the contents of that buffer, sorted by position."""
    matrix, assignment = plan.matrix, plan.assignment
    found = []
    for group in matrix.kept(plan.schedule.keep, rank):
        if not group:
            continue
        segments = sorted((s for item in group for s in matrix.positions(item)), key=lambda s: s.start)
        heads = (plan.problem.heads if group[0].kind == "q" else plan.problem.kv_heads) // assignment.head_shares
        first = assignment.head_slice(rank) * (assignment.head_shares // assignment.ulysses_degree)
        first = (first + (group[0].part if assignment.cut == "heads" else 0)) * heads
        positions = [position for segment in segments for position in segment]
        found.append((group, _fields(truth, group[0].kind, positions, slice(first, first + heads))))
    return found


def _kept_buffers(plan: Plan, rank: int, truth: Mapping[str, Tensor]) -> dict[Item, Buffer]:
    kept: dict[Item, Buffer] = {}
    for group, fields in _kept_groups(plan, rank, truth):
        allocation = lay_out(group, plan.matrix)
        fmt = token_format(group[0].kind, plan.problem, plan.assignment.head_shares, False)
        buffer = Buffer.empty(fmt, tokens=allocation.tokens, batch=plan.problem.batch, device=CPU)
        for name, tensor in fields.items():
            buffer.fields[name].copy_(tensor)
        kept |= dict.fromkeys(group, buffer)
    return kept


def _compare_kept(plan: Plan, executor: Executor) -> None:
    rank, kept = executor.compiled.rank, executor.kept_for_backward()
    for group, fields in _kept_groups(plan, rank, truth_of(plan.problem)):
        if len({id(kept[item]) for item in group}) != 1:
            raise WrongPlanError("wrong", f"rank {rank} keeps {group[0].kind} in several buffers")
        for name, tensor in fields.items():
            _assert_equal(f"kept {name} of rank {rank}", kept[group[0]].fields[name], tensor)
