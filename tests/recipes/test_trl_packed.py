"""The TRL recipe on 4 processes, and SFTTrainer with other settings, compared with plain SFTTrainer in one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("trl")

import recipe_runs
from recipe_runs import run_recipe

SCRIPT = Path(__file__).parent / "trl_cases.py"
CASES = ("packed", "padded", "flattened", "dft", "whole eval")
run_cases = partial(recipe_runs.run_cases, SCRIPT)
NARROW = 1e-6
"""TRL computes losses and what it logs in float32."""


@pytest.mark.parametrize("cp", [4, 2])
@pytest.mark.parametrize("case", CASES)
def test_sft_gives_the_results_of_one_process(case: str, cp: int) -> None:
    found, due = run_cases(cp, *CASES)[case], run_cases(0, *CASES)[case]
    logged = ["entropy", "mean_token_accuracy", "num_tokens", "eval_mean_token_accuracy"]
    # With two groups, a group's last batch may hold repeated rows alone, which are counted if they were flattened.
    losses = ["loss", *(["first", "eval_loss"] if cp == 4 or case != "whole eval" else [])]
    for name in losses + (logged if cp == 4 else []):
        assert found[name] == pytest.approx(due[name], rel=NARROW), name
    assert found["weights"] == pytest.approx(due["weights"], rel=1e-8)


@pytest.mark.parametrize("cp", [4, 0])
def test_packed_documents_have_the_loss_that_they_have_alone(cp: int) -> None:
    found = run_cases(cp, *CASES)["whole eval"]
    assert found["first"] == pytest.approx(found["due"], rel=NARROW)


def test_the_recipe_gives_the_results_of_one_process() -> None:
    run, due = run_recipe("trl_packed.py", "--cp", "2"), run_cases(0, *CASES)["packed"]
    assert run.losses == pytest.approx(due["loss"], rel=NARROW)
    assert run.weights == pytest.approx(*due["weights"], rel=1e-8)
