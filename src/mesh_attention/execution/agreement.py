"""Agreement: before a configuration is first used, ranks compare what they were asked for and what they hold.

Every rank sees everybody's answer, so every rank comes to the same verdict, and nothing has been sent by then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence

from mesh_attention.comm.base import Comm, Work
from mesh_attention.errors import DisagreementError
from mesh_attention.plan.text import format_numbers


def agree(
    comm: Comm,
    *,
    asked: Mapping[str, str],
    holds: Mapping[str, int],
    expected: Callable[[int], Mapping[str, int]],
    refusal: str | None = None,
) -> Generator[Work, None, None]:
    """Raise on every rank unless all were asked for the same and each holds what its layout says.

    Yields what it waits for. `holds` are this rank's token counts; `expected` gives those of any rank. A rank that has
    to refuse says why, so that the others raise as well instead of waiting for it.
    """
    sharing = comm.share(json.dumps({"asked": dict(asked), "holds": dict(holds), "refusal": refusal}))
    yield sharing
    answers = [json.loads(text) for text in sharing.result()]
    if refusal is not None:
        return  # the caller raises it
    for rank, answer in enumerate(answers):
        if answer["refusal"] is not None:
            raise DisagreementError(f"rank {rank} refused the call: {answer['refusal']}; nothing was sent")
    verdict = find_difference([answer["asked"] for answer in answers]) or find_misfit(
        [answer["holds"] for answer in answers], expected
    )
    if verdict is not None:
        raise DisagreementError(f"{verdict}; nothing was sent")


def find_difference(asked: Sequence[Mapping[str, str]]) -> str | None:
    """The first thing in which ranks differ, and who was asked for what; None if all agree."""
    for name in dict.fromkeys(name for one in asked for name in one):
        says: dict[str, list[int]] = {}
        for rank, one in enumerate(asked):
            says.setdefault(one.get(name, "nothing"), []).append(rank)
        if len(says) > 1:
            parts = (f"{value} on rank(s) {format_numbers(ranks)}" for value, ranks in says.items())
            return f"ranks were asked for different things: {name} is {', but '.join(parts)}"
    return None


def find_misfit(holds: Sequence[Mapping[str, int]], expected: Callable[[int], Mapping[str, int]]) -> str | None:
    """The first rank whose shard is not the layout's; None if all fit."""
    for rank, held in enumerate(holds):
        due = expected(rank)
        for name in due:
            if held.get(name) != due[name]:
                return (
                    f"rank {rank} holds {held.get(name)} tokens of {name} but its shard has {due[name]}; shard inputs "
                    "with `MeshAttention.shard`, and give seq_len (and seq_len_k) when ranks hold unequal numbers"
                )
    return None
