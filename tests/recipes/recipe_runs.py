"""Runs of the recipes, and what they print: a loss per step, and the weights at the end as one number."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pool import run_script

RECIPES = Path(__file__).parent.parent.parent / "examples" / "recipes"


class Run(NamedTuple):
    """Losses by step, and the norm of all weights after the last."""

    losses: tuple[float, ...]
    weights: float


def run_recipe(name: str, *flags: str, ranks: int = 4, timeout_s: float = 300.0) -> Run:
    """Run a recipe as torchrun does. It must succeed, and print ``loss 1.234567890123`` and ``weights 12.345…``."""
    done = run_script(RECIPES / name, *flags, ranks=ranks, timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = tuple(map(float, re.findall(r"\bloss (\S+)", done.stdout)))
    (weights,) = map(float, re.findall(r"\bweights (\S+)", done.stdout))
    return Run(losses, weights)


@cache
def run_cases(script: Path, cp: int, *flags: str) -> dict[str, dict[str, Any]]:
    """The results that a script of cases prints, by name: on 4 ranks, or in one process without context parallelism."""
    given = ("--cp", str(cp)) if cp else ()
    done = run_script(script, *given, *flags, ranks=4 if cp else 0, timeout_s=300.0)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line.removeprefix("result ")) for line in done.stdout.splitlines() if line.startswith("result")]
    return {one["case"]: one for one in lines}
