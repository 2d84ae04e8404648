"""Agreement: before a configuration is first used, ranks compare what they were asked for and what they hold.

Every rank sees every answer, so all ranks reach the same verdict, and nothing has been sent by then. If
something goes wrong on one rank before that, it tells the others (`driving.Telling`).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from typing import Any

from torch import Tensor

from mesh_attention.arguments import CallOptions, Softmax
from mesh_attention.comm.base import Comm, Work
from mesh_attention.errors import DisagreementError, TransportError, UsageError
from mesh_attention.plan.assignment import Axis
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.steps import DIRECTIONS, Direction
from mesh_attention.plan.text import format_numbers
from mesh_attention.problem import Problem

PATIENCE_S = 20.0
"""Seconds that a rank waits for the others to hear of its error. They do not listen if the call is not new to them."""
LONGEST = 160
"""Characters of a value in an agreement text; a longer one is cut, and a hash added."""
LONGEST_REFUSAL = 2000
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A call: its problem, how it runs, and the plans of both passes, once they are made."""

    options: CallOptions
    problem: Problem
    layout: Layout
    softmax: Softmax
    gradient: bool
    may_keep: bool
    cuda_graphs: bool
    plans: Mapping[Direction, Plan] = field(default_factory=dict)


def agree_on_call(
    comm: Comm, found: Configuration, tensors: Sequence[Tensor]
) -> Generator[Work, None, list[dict[str, int]]]:
    """Raise on every rank unless all ask for this configuration with tensors that fit it.

    `tensors` are this rank's q, k and v.
    """
    problem, ranks = found.problem, comm.size
    sides: tuple[tuple[str, Axis, int], ...] = (("q", "row", problem.seq_q), ("kv", "col", problem.seq_kv))
    layouts = [(name, found.layout.along(axis, problem), tokens) for name, axis, tokens in sides]

    def shard_sizes(rank: int) -> dict[str, int]:
        return {name: sum(map(len, one.segments(rank, tokens=n, ranks=ranks))) for name, one, n in layouts}

    holds = {"q": tensors[0].shape[1], "kv": tensors[1].shape[1]}
    return agree(comm, asked=_asked(found, tensors, ranks), holds=holds, expected=shard_sizes)


def meet_on_call(
    comm: Comm, found: Configuration, tensors: Sequence[Tensor], *, step: str, says: Any
) -> Generator[Work, None, list[Any]]:
    """Compare calls before there are plans, which ranks make together, in steps. Returns what each rank says, any JSON.

    What ranks hold is compared when they agree on the call.
    """
    asked = _asked(found, tensors, comm.size) | {f"{direction} plan": step for direction in DIRECTIONS}
    return (yield from exchange(comm, asked=asked, says=says))


def exchange(comm: Comm, *, asked: Mapping[str, str], says: Any) -> Generator[Work, None, list[Any]]:
    """Raise on every rank unless all were asked for the same. Returns what each rank says, any JSON."""
    answers = yield from _answers(comm, asked, {}, None, says)
    return [answer["says"] for answer in answers]


def number_of_call(found: Configuration, tensors: Sequence[Tensor]) -> int:
    """A hash of a call that ranks have agreed on; the same on all of them."""
    asked = json.dumps(_asked(found, tensors, found.problem.ranks))
    return int.from_bytes(sha256(asked.encode()).digest()[:6], "big")


def _asked(found: Configuration, tensors: Sequence[Tensor], ranks: int) -> dict[str, str]:
    own = found.options.problem(tensors, ranks)
    return {
        "operation": "attention",
        **{each.name: str(getattr(own, each.name)) for each in fields(own)},
        "softmax": str(found.softmax),
        "device": tensors[0].device.type,
        "deterministic": str(found.options.deterministic),
        "cuda_graphs": str(found.cuda_graphs),
        "gradient": "needed" if found.gradient else "not needed",
        "keeping inputs for backward": "possible" if found.may_keep else "impossible (compiled, or in a dispatch mode)",
        **{f"{direction} plan": f"{plan!r}" for direction, plan in found.plans.items()},
    }


def agree(
    comm: Comm,
    *,
    asked: Mapping[str, str] | None = None,
    holds: Mapping[str, int] | None = None,
    expected: Callable[[int], Mapping[str, int]] | None = None,
) -> Generator[Work, None, list[dict[str, int]]]:
    """Raise on every rank unless all were asked for the same and each holds what is expected of it.

    Yields what it waits for, and returns what each rank holds. `holds` are this rank's token counts; `expected` gives
    those of any rank.
    """
    answers = yield from _answers(comm, asked or {}, holds or {}, expected, None)
    return [answer["holds"] for answer in answers]


def _answers(
    comm: Comm,
    asked: Mapping[str, str],
    holds: Mapping[str, int],
    expected: Callable[[int], Mapping[str, int]] | None,
    says: Any,
) -> Generator[Work, None, list[Any]]:
    sharing = comm.share(_text(asked, holds, None, says))
    yield sharing
    texts = sharing.result()
    known = {text: json.loads(text) for text in set(texts)}  # most ranks say the same
    answers = [known[text] for text in texts]
    if verdict := _verdict(answers, expected):
        raise DisagreementError(f"{verdict}; nothing was sent")
    return answers


def _text(asked: Mapping[str, str], holds: Mapping[str, int], refusal: str | None, says: Any = None) -> str:
    from mesh_attention import __version__

    said = {name: _cut(value, LONGEST) for name, value in asked.items()}
    refusal = None if refusal is None else _cut(refusal, LONGEST_REFUSAL)
    text = {"version": __version__, "asked": said, "holds": dict(holds), "refusal": refusal, "says": says}
    return json.dumps(text)


def _cut(text: str, longest: int) -> str:
    """The text, cut if it is too long to be shared in one message, and then still different for different texts."""
    if len(text) <= longest:
        return text
    return f"{text[: longest - 20]}… #{sha256(text.encode()).hexdigest()[:16]}"


def _verdict(answers: Sequence[Mapping[str, Any]], expected: Callable[[int], Mapping[str, int]] | None) -> str | None:
    """Why this call cannot be made, the same on every rank; None if it can."""
    versions = [{"version": answer["version"]} for answer in answers]
    if difference := find_difference(versions):
        return f"ranks run different versions of mesh-attention: {difference}; install the same one on every rank"
    for rank, answer in enumerate(answers):
        if answer["refusal"] is not None:
            return f"rank {rank} refused the call: {answer['refusal']}"
    if difference := find_difference([answer["asked"] for answer in answers]):
        return f"ranks were called with different arguments: {difference}"
    return None if expected is None else find_misfit([answer["holds"] for answer in answers], expected)


def tell(comm: Comm, error: Exception) -> None:
    """Let every other rank raise a `DisagreementError` with this reason, when it agrees on a call.

    Raises a `TransportError` if the others do not: they may make a call that is not new to them.
    """
    said = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
    start, is_noted = time.monotonic(), False
    sharing = comm.share(_text({}, {}, said))
    while not sharing.is_done():
        waited = time.monotonic() - start
        if waited > 1.0 and not is_noted:
            logger.warning("rank %d is waiting to tell the other ranks about its error: %s", comm.rank, said)
            is_noted = True
        if waited > PATIENCE_S:
            raise TransportError(f"rank {comm.rank} refused a call, but could not tell the other ranks: {said}")
        time.sleep(0.001)
    sharing.wait()


def find_difference(asked: Sequence[Mapping[str, str]]) -> str | None:
    """The first name whose value differs between ranks, with its values; None if all agree."""
    if all(one == asked[0] for one in asked):
        return None
    for name in dict.fromkeys(name for one in asked for name in one):
        says: dict[str, list[int]] = {}
        for rank, one in enumerate(asked):
            says.setdefault(one.get(name, "nothing"), []).append(rank)
        if len(says) > 1:
            parts = (f"{value} on rank(s) {format_numbers(ranks)}" for value, ranks in says.items())
            return f"{name} is {', but '.join(parts)}"
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
