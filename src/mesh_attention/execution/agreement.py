"""Agreement: before a configuration is first used, ranks compare what they were asked for and what they hold.

Every rank sees every answer, so all ranks reach the same verdict, and nothing has been sent by then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, fields

from torch import Tensor

from mesh_attention.arguments import CallOptions, Softmax
from mesh_attention.comm.base import Comm, Work
from mesh_attention.errors import DisagreementError, UsageError
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import Direction
from mesh_attention.plan.text import format_numbers
from mesh_attention.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A call after planning: its problem, the plans of both passes, and how they run."""

    options: CallOptions
    problem: Problem
    layout: Layout
    plans: Mapping[Direction, Plan]
    softmax: Softmax
    gradient: bool
    cuda_graphs: bool


def agree_on_call(
    comm: Comm, found: Configuration | UsageError, tensors: Sequence[Tensor]
) -> Generator[Work, None, None]:
    """Raise on every rank unless all ask for this configuration with tensors that fit it.

    `tensors` are this rank's q, k and v; a `UsageError` is why this rank cannot make the call.
    """
    if isinstance(found, UsageError):
        return agree(comm, refusal=str(found))
    layout, ranks = found.layout, comm.size
    totals = {"q": found.problem.seq_q, "kv": found.problem.seq_kv}

    def shard_sizes(rank: int) -> dict[str, int]:
        return {n: sum(map(len, layout.segments(rank, tokens=t, ranks=ranks))) for n, t in totals.items()}

    holds = {"q": tensors[0].shape[1], "kv": tensors[1].shape[1]}
    return agree(comm, asked=_asked(found, tensors, ranks), holds=holds, expected=shard_sizes)


def _asked(found: Configuration, tensors: Sequence[Tensor], ranks: int) -> dict[str, str]:
    own = found.options.problem(tensors, ranks)
    return {
        **{field.name: str(getattr(own, field.name)) for field in fields(own)},
        "softmax": str(found.softmax),
        "device": tensors[0].device.type,
        "deterministic": str(found.options.deterministic),
        "cuda_graphs": str(found.cuda_graphs),
        "gradient": "needed" if found.gradient else "not needed",
        **{f"{direction} plan": f"{plan!r}" for direction, plan in found.plans.items()},
    }


def agree(
    comm: Comm,
    *,
    asked: Mapping[str, str] | None = None,
    holds: Mapping[str, int] | None = None,
    expected: Callable[[int], Mapping[str, int]] | None = None,
    refusal: str | None = None,
) -> Generator[Work, None, None]:
    """Raise on every rank unless all were asked for the same and each holds what is expected of it.

    Yields what it waits for. `holds` are this rank's token counts; `expected` gives those of any rank. A rank that
    refuses the call says why, so that the others raise as well instead of waiting for it; its caller then raises.
    """
    sharing = comm.share(json.dumps({"asked": dict(asked or {}), "holds": dict(holds or {}), "refusal": refusal}))
    yield sharing
    answers = [json.loads(text) for text in sharing.result()]
    if refusal is not None:
        return
    for rank, answer in enumerate(answers):
        if answer["refusal"] is not None:
            raise DisagreementError(f"rank {rank} refused the call: {answer['refusal']}; nothing was sent")
    verdict = find_difference([answer["asked"] for answer in answers])
    if verdict is None and expected is not None:
        verdict = find_misfit([answer["holds"] for answer in answers], expected)
    if verdict is not None:
        raise DisagreementError(f"{verdict}; nothing was sent")


def find_difference(asked: Sequence[Mapping[str, str]]) -> str | None:
    """The first argument that differs between ranks, with its values; None if all agree."""
    for name in dict.fromkeys(name for one in asked for name in one):
        says: dict[str, list[int]] = {}
        for rank, one in enumerate(asked):
            says.setdefault(one.get(name, "nothing"), []).append(rank)
        if len(says) > 1:
            parts = (f"{value} on rank(s) {format_numbers(ranks)}" for value, ranks in says.items())
            return f"ranks were called with different arguments: {name} is {', but '.join(parts)}"
    return None


def find_misfit(holds: Sequence[Mapping[str, int]], expected: Callable[[int], Mapping[str, int]]) -> str | None:
    """The first rank that does not hold what is expected of it; None if all do."""
    for rank, held in enumerate(holds):
        for name, tokens in expected(rank).items():
            if held.get(name) != tokens:
                return (
                    f"rank {rank} holds {held.get(name)} tokens of {name} but its shard has {tokens}; shard inputs "
                    "with `MeshAttention.shard`, and give seq_len (and seq_len_k) when ranks hold unequal numbers"
                )
    return None
