"""The accelerate recipe on 4 processes, compared with one process that does the same by hand."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")

import accelerate
from recipe_runs import Run, run_recipe

from mesh_attention import LocalGroup, MeshAttention, UsageError
from mesh_attention.integrations.accelerate import batches_of, make_mesh, refuse_parallelism

ALONE = Path(__file__).parent / "accelerate_alone.py"


@cache
def alone() -> Run:
    return run_recipe(str(ALONE), ranks=0)


@pytest.mark.parametrize("flags", [(), ("--cp", "2")])
def test_the_recipe_gives_the_results_of_one_process(flags: tuple[str, ...]) -> None:
    run = run_recipe("accelerate_loop.py", *flags)
    assert len(run.losses) == 3
    assert run.losses == pytest.approx(alone().losses, rel=3e-7)  # transformers computes losses in float32
    assert run.weights == pytest.approx(alone().weights, rel=1e-8)


@pytest.mark.parametrize("name", ["cp_size", "sp_size", "tp_size"])
def test_other_parallelism_is_refused(name: str) -> None:
    sizes = {"cp_size": 1, "sp_size": 1, "tp_size": 1} | {name: 2}
    with pytest.raises(UsageError, match=f"parallelism_config has {name}=2, which cannot be combined"):
        refuse_parallelism(SimpleNamespace(parallelism_config=accelerate.ParallelismConfig(**sizes)))


def test_dispatched_batches_are_refused() -> None:
    config = accelerate.DataLoaderConfiguration(dispatch_batches=True)
    accelerator: Any = SimpleNamespace(state=SimpleNamespace(device_mesh=None), dataloader_config=config)
    mesh: Any = None
    with pytest.raises(UsageError, match="dispatch_batches=True is not supported"), batches_of(accelerator, mesh):
        pass


def test_a_local_group_is_refused() -> None:
    with pytest.raises(UsageError, match="expected one rank per process"):
        make_mesh(MeshAttention(LocalGroup(2)), "cpu")
