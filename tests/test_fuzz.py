"""A share of the random campaign in `campaign/fuzz.py`, with a fixed seed; and that the campaign notices mistakes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent / "campaign"))

from attending import Call, Memory, seen
from fuzz import WRONG, WRONG_SETTINGS, Object, check, check_settings, run, script

from mesh_attention.kernels.base import CallMask
from mesh_attention.kernels.merging import TorchMerging


def test_random_calls_are_right_or_refused() -> None:
    tally = run(seed=13, seconds=60.0, count=80)
    assert not tally.failures, "\n".join(tally.failures)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("arguments", [{}, {"cu_seqlens_q": [0, 3, 8], "softmax_scale": 0.5}], ids=str)
def test_every_invalid_call_is_refused(ranks: int, arguments: dict[str, Any]) -> None:
    calls = [Call(wrong=wrong, arguments=arguments) for wrong in WRONG if wrong != "k is too short a list"]
    cached = Call(arguments={"seq_len": 8} | arguments)
    check(Object(ranks), cached, *calls, *(replace(call, arguments=cached.arguments) for call in calls), cached)
    check(Object(1, plays_one=True), *calls)


@pytest.mark.parametrize("settings", WRONG_SETTINGS, ids=str)
def test_every_invalid_setting_is_refused(settings: dict[str, Any]) -> None:
    check_settings(4, settings)


def test_a_script_repeats_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = (Memory(), Memory((3, 1, 2, 0), 1), Memory(), Memory(expanded=(1,)))
    given, call = (
        Object(2, {"method": "ring"}),
        Call(arguments={"causal": True}, memory=memory, needs=(True, False, True)),
    )
    text = script(given, [call, Call()], late=True, device="cpu")
    assert text.count("\n") < 10
    made: list[Any] = []
    monkeypatch.setattr("fuzz.check", lambda *episode, **options: made.append((episode, options)))
    exec(text, {})
    assert made == [((given, call, Call()), {"late": True})]


def _merge_by_rounded_weights(_: Any, total: Tensor, total_lse: Tensor, partial: Tensor, lse: Tensor) -> None:
    joint = torch.logaddexp(total_lse, lse).float().double()
    total.mul_((total_lse - joint).exp()[..., None]).add_(partial * (lse - joint).exp()[..., None])
    total_lse.copy_(joint)


def _without_the_edge(self: CallMask, device: torch.device) -> Tensor:
    seen = _dense(self, device)
    return seen & (seen.long().cumsum(-1) > 1)


_dense = CallMask.dense


@pytest.mark.parametrize(
    ("place", "mistake"),
    [
        ((TorchMerging, "merge_output"), _merge_by_rounded_weights),
        ((TorchMerging, "add"), lambda _, total, partial: total.add_(partial.abs())),
        ((CallMask, "dense"), _without_the_edge),
    ],
    ids=["weights of a merge", "sign of a gradient", "edge of a mask"],
)
def test_the_campaign_notices(
    place: tuple[Any, str],
    mistake: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(*place, mistake)
    monkeypatch.setattr("fuzz.smaller", lambda given, calls, late, fails: (given, calls, late))
    assert run(seed=13, seconds=60.0, count=80, most_failures=1).failures
    assert "check(Object(" in capsys.readouterr().out


def test_masks_by_definition() -> None:
    """Four queries in front of six keys, aligned at the end; two documents; a window."""

    def rows(**arguments: Any) -> list[str]:
        return ["".join(".x"[one] for one in row) for row in seen(Call(4, 6, arguments=arguments)).long().tolist()]

    assert rows(causal=True) == ["xxx...", "xxxx..", "xxxxx.", "xxxxxx"]
    assert rows(window_size=(1, 0)) == [".xx...", "..xx..", "...xx.", "....xx"]
    assert rows(cu_seqlens_q=[0, 1, 4], cu_seqlens_k=[0, 4, 6], causal=True) == ["xxxx..", "......", "....x.", "....xx"]
