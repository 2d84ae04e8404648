"""Agreement: every rank states what it was asked to do, and all ranks raise unless all statements are equal.

Ranks compare a new call in this way before they send its tensors, and a rank that refuses a call tells the others so.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

from mesh_attention.comm.base import Comm, Work
from mesh_attention.errors import DisagreementError, TransportError, UsageError
from mesh_attention.plan.text import format_numbers

PATIENCE_S = 20.0
"""Seconds that a rank waits for the others to receive its error. Ranks that repeat a known call never receive it."""
MAX_VALUE_LENGTH = 160
"""Characters of a value in an agreement text; a longer one is truncated, and a hash added."""
MAX_REFUSAL_LENGTH = 2000
logger = logging.getLogger(__name__)
ShardSizes = Callable[[int], Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What one rank puts to all ranks of its group.

    `asked` must be the same on every rank. `holds` are this rank's token counts; `expected` gives those that any rank
    must have. `says` is any JSON, passed on to the others without being compared. `advice` ends the error's text.
    """

    asked: Mapping[str, str] = field(default_factory=dict)
    holds: Mapping[str, int] = field(default_factory=dict)
    expected: ShardSizes | None = None
    says: Any = None
    advice: str = ""

    @property
    def call_id(self) -> int:
        """A hash of what is asked, equal on all ranks that have agreed."""
        return int.from_bytes(sha256(json.dumps(dict(self.asked)).encode()).digest()[:6], "big")


class Answer(NamedTuple):
    """What a rank holds and says."""

    holds: Mapping[str, int]
    says: Any


def ask(comm: Comm, question: Question) -> Generator[Work, None, list[Answer]]:
    """The answers of all ranks; raises on every rank if they differ. Yields what it waits for."""
    sharing = comm.share(_text(question))
    yield sharing
    texts = sharing.result()
    read = {text: json.loads(text) for text in set(texts)}  # most ranks say the same
    answers = [read[text] for text in texts]
    if verdict := _verdict(answers, question.expected):
        advice = f". {question.advice}" if question.advice else ""
        raise DisagreementError(f"{verdict}; nothing was sent{advice}")
    return [Answer(answer["holds"], answer["says"]) for answer in answers]


def tell(comm: Comm, error: Exception) -> None:
    """Make every other rank raise a `DisagreementError` with this reason at its next agreement.

    Raises a `TransportError` if the others do not come to one, perhaps because they know the call already.
    """
    reason = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
    start, is_noted = time.monotonic(), False
    sharing = comm.share(_text(Question(), refusal=reason))
    while not sharing.is_done():
        waited = time.monotonic() - start
        if waited > 1.0 and not is_noted:
            logger.warning("rank %d is waiting to tell the other ranks about its error: %s", comm.rank, reason)
            is_noted = True
        if waited > PATIENCE_S:
            raise TransportError(f"rank {comm.rank} refused a call, but could not tell the other ranks: {reason}")
        time.sleep(0.001)
    sharing.wait()


def _text(question: Question, *, refusal: str | None = None) -> str:
    from mesh_attention import __version__

    asked = {name: _truncated(value, MAX_VALUE_LENGTH) for name, value in question.asked.items()}
    refusal = None if refusal is None else _truncated(refusal, MAX_REFUSAL_LENGTH)
    holds = dict(question.holds)
    return json.dumps(
        {"version": __version__, "asked": asked, "holds": holds, "refusal": refusal, "says": question.says}
    )


def _truncated(text: str, length: int) -> str:
    """The text, short enough to be shared in one message, and still different for different texts."""
    if len(text) <= length:
        return text
    return f"{text[: length - 20]}… #{sha256(text.encode()).hexdigest()[:16]}"


def _verdict(answers: Sequence[Mapping[str, Any]], expected: ShardSizes | None) -> str | None:
    """Why ranks disagree, the same on every rank; None if they agree."""
    versions = [{"version": answer["version"]} for answer in answers]
    if difference := find_difference(versions):
        return f"ranks run different versions of mesh-attention: {difference}; install the same one on every rank"
    for rank, answer in enumerate(answers):
        if answer["refusal"] is not None:
            return f"rank {rank} refused the call: {answer['refusal']}"
    if difference := find_difference([answer["asked"] for answer in answers]):
        return f"ranks were called with different arguments: {difference}"
    return None if expected is None else find_misfit([answer["holds"] for answer in answers], expected)


def find_difference(asked: Sequence[Mapping[str, str]]) -> str | None:
    """The first name whose value differs between ranks, with its values; None if all agree."""
    if all(question == asked[0] for question in asked):
        return None
    for name in dict.fromkeys(name for question in asked for name in question):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, question in enumerate(asked):
            ranks_by_value.setdefault(question.get(name, "nothing"), []).append(rank)
        if len(ranks_by_value) > 1:
            parts = (f"{value} on rank(s) {format_numbers(ranks)}" for value, ranks in ranks_by_value.items())
            return f"{name} is {', but '.join(parts)}"
    return None


def find_misfit(holds: Sequence[Mapping[str, int]], expected: ShardSizes) -> str | None:
    """The first rank that does not hold what is expected of it; None if all do."""
    for rank, held in enumerate(holds):
        for name, tokens in expected(rank).items():
            if held.get(name) != tokens:
                return (
                    f"rank {rank} holds {held.get(name)} tokens of {name} but its shard has {tokens}; shard inputs "
                    "with `MeshAttention.shard`, and give seq_len (and seq_len_k) when ranks hold unequal numbers"
                )
    return None
