"""A rank that fails over NCCL: the others name it in time. Processes of their own, for all faults at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from campaign.nccl_faults import RANKS, TESTED, Found

SCRIPT = Path(__file__).parents[1] / "campaign" / "nccl_faults.py"
MOST_S = 90.0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What became of each fault. The script runs by itself: its processes are forked, and nothing here must be."""
    answers = tmp_path_factory.mktemp("faults") / "found.json"
    command = [sys.executable, str(SCRIPT), "--json", str(answers), "--fault", *TESTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_S, env=os.environ, check=False)
    assert answers.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    by_number = [Found(**one) for one in json.loads(answers.read_text())]
    for one in by_number:  # JSON has no whole numbers as keys
        one.said = {int(rank): said for rank, said in one.said.items()}
        one.ended = {int(rank): seconds for rank, seconds in one.ended.items()}
    return {one.fault: one for one in by_number}


@pytest.mark.usefixtures("needs_cuda")
@pytest.mark.parametrize("fault", TESTED)
def test_survivors_name_the_rank_and_the_step_in_time(request: pytest.FixtureRequest, fault: str) -> None:
    outcome = request.getfixturevalue("found")[fault]  # not before it is known that there is a GPU
    assert outcome.breaches == []
    assert len(outcome.said) >= RANKS - 1
