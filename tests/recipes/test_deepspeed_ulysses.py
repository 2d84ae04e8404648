"""DeepSpeed: a ZeRO engine trained on 4 processes, with our module in the place of Ulysses's DistributedAttention.

The module alone is in tests/test_adapters.py.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from recipe_runs import Run, run_recipe

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

RECIPE = "deepspeed_ulysses.py"


@pytest.fixture(scope="module")
def one_process() -> Run:
    return run_recipe(RECIPE, "attention=torch", ranks=1)


# DeepSpeed adds up gradients in float32.
@pytest.mark.parametrize("flags", [(), ("stage=1",), ("stage=3", "sp=2")], ids=" ".join)
def test_four_processes_train_like_one_without_mesh_attention(flags: tuple[str, ...], one_process: Run) -> None:
    run = run_recipe(RECIPE, *flags)
    assert len(run.losses) == 3
    assert run.losses == pytest.approx(one_process.losses, rel=1e-8)
    assert run.weights == pytest.approx(one_process.weights, rel=1e-8)
