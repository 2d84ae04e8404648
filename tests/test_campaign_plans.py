"""A short share of the campaign of mutated plans (tests/campaign/plans.py), and a check that it can fail."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "campaign"))

import plans
import strict
from pool import shared_pool

from mesh_attention import Plan
from mesh_attention.comm.torch_dist import TorchComm
from mesh_attention.errors import UsageError
from mesh_attention.verification import rules
from mesh_attention.verification.rules import RULES

FOR_ORDER = ("purpose", "tidiness")
"""Rules without which results are right nearly always: they forbid waste."""


def test_accepted_mutants_are_right() -> None:
    tally = plans.run_cases(0, range(1200), float("inf"))
    assert not tally.failures, "\n\n".join(tally.reports)
    assert tally.executed > 80


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in FOR_ORDER])
def test_the_campaign_notices_a_missing_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "RULES", {name: found for name, found in RULES.items() if name != rule})
    tally, executed = plans.Tally(), set[int]()
    for index in range(8000):
        plans.judge(1, index, tally, executed)
        if tally.failures:
            return
    pytest.fail(f"8,000 plans that were not checked for {rule} were right")


def execute_all(group: Any, accepted: list[Plan]) -> None:
    comm = TorchComm(group)
    for plan in accepted:
        strict.execute_rank(plan, comm)


def test_accepted_mutants_are_right_on_real_processes() -> None:
    accepted: list[Plan] = []
    for index in range(100_000):
        if plans.base_plan(2, index // plans.MUTANTS).problem.ranks != 3 or not index % plans.MUTANTS:
            continue
        try:
            plan = plans.case(2, index)
        except UsageError:
            continue
        if plan.problem.ranks == 3 and not rules.check(plan):
            accepted.append(plan)
        if len(accepted) == 60:
            break
    assert len(set(accepted)) > 40
    shared_pool().run(3, execute_all, accepted)
