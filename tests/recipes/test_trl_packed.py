"""The TRL recipe on 4 processes, and SFTTrainer with other settings, compared with plain SFTTrainer in one process."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from pool import run_script
from recipe_runs import run_recipe

SCRIPT = Path(__file__).parent / "trl_cases.py"
CASES = ("packed", "padded", "flattened", "dft", "whole eval")
NARROW = 1e-6
"""TRL computes losses and what it logs in float32."""


@cache
def run_cases(cp: int) -> dict[str, dict[str, Any]]:
    given = ("--cp", str(cp)) if cp else ()
    done = run_script(SCRIPT, *given, *CASES, ranks=4 if cp else 0, timeout_s=300.0)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line.removeprefix("result ")) for line in done.stdout.splitlines() if line.startswith("result")]
    return {one["case"]: one for one in lines}


@pytest.mark.parametrize("cp", [4, 2])
@pytest.mark.parametrize("case", CASES)
def test_sft_gives_the_results_of_one_process(case: str, cp: int) -> None:
    found, due = run_cases(cp)[case], run_cases(0)[case]
    logged = ["entropy", "mean_token_accuracy", "num_tokens", "eval_mean_token_accuracy"]
    # With two groups, a group's last batch may hold repeated rows alone, which are counted if they were flattened.
    losses = ["loss", *(["first", "eval_loss"] if cp == 4 or case != "whole eval" else [])]
    for name in losses + (logged if cp == 4 else []):
        assert found[name] == pytest.approx(due[name], rel=NARROW), name
    assert found["weights"] == pytest.approx(due["weights"], rel=1e-8)


@pytest.mark.parametrize("cp", [4, 0])
def test_packed_documents_have_the_loss_that_they_have_alone(cp: int) -> None:
    found = run_cases(cp)["whole eval"]
    assert found["first"] == pytest.approx(found["due"], rel=NARROW)


def test_the_recipe_gives_the_results_of_one_process() -> None:
    run, due = run_recipe("trl_packed.py", "--cp", "2"), run_cases(0)["packed"]
    assert run.losses == pytest.approx(due["loss"], rel=NARROW)
    assert run.weights == pytest.approx(*due["weights"], rel=1e-8)
