"""The Trainer recipe on 4 processes, and Trainer with other settings, compared with plain Trainer in one process."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

import recipe_runs
from recipe_runs import Run, run_recipe
from transformers import Trainer

from mesh_attention import LocalGroup, MeshAttention, UsageError
from mesh_attention.transformers.trainer import MeshTrainerMixin

CASES = Path(__file__).parent / "trainer_cases.py"
SETTINGS = ("plain", "counted", "clipped", "checkpointed", "no remainder", "iterable", "few labels", "bf16")
run_cases = partial(recipe_runs.run_cases, CASES)
REPEATED = ("tokens", "flos")
"""Figures that count rows twice if accelerate repeats them to fill up the last batch, as they do with DDP."""
FROM_FLOAT32 = 3e-7
"""transformers computes losses in float32, and each rank adds up its own."""


def check_same(found: dict[str, Any], due: dict[str, Any], *, but: tuple[str, ...] = ()) -> None:
    is_narrow = due["case"] == "bf16"
    for name in sorted(due.keys() - {"case", *but}):
        rel = 3e-2 if is_narrow else FROM_FLOAT32 if "loss" in name else 1e-9
        assert found[name] == pytest.approx(due[name], rel=rel, abs=2.0 if is_narrow and name == "right" else 0), name


@pytest.mark.parametrize("cp", [4, 2])
@pytest.mark.parametrize("case", SETTINGS)
def test_trainer_gives_the_results_of_one_process(case: str, cp: int) -> None:
    more = ("fsdp", "--refused") if cp == 2 else ()
    check_same(run_cases(cp, *SETTINGS, *more)[case], run_cases(0, *SETTINGS)[case], but=REPEATED if cp == 2 else ())


def test_sharded_parameters_change_nothing() -> None:
    due = run_cases(0, *SETTINGS)["plain"]
    check_same(run_cases(2, *SETTINGS, "fsdp", "--refused")["fsdp"], due, but=REPEATED)


def test_settings_that_would_go_wrong_are_refused() -> None:
    found = {name: one for name, one in run_cases(2, *SETTINGS, "fsdp", "--refused").items() if "message" in one}
    assert len(found) == 12
    for expected, one in found.items():
        assert expected in one["message"]


def test_the_mixin_must_come_first() -> None:
    with pytest.raises(UsageError, match=r"write class Wrong\(MeshTrainerMixin, Trainer\)"):

        class Wrong(Trainer, MeshTrainerMixin):
            pass


def test_the_recipe_resumes_on_half_of_the_ranks(tmp_path: Path) -> None:
    due = run_cases(0, *SETTINGS)["plain"]
    flags = ("--cp", "2", "--folder", str(tmp_path))
    check_run(run_recipe("trainer.py", *flags), due)
    shutil.rmtree(tmp_path / "checkpoint-6")
    check_run(run_recipe("trainer.py", *flags, "--resume", ranks=2), due)


def check_run(run: Run, due: dict[str, Any]) -> None:
    assert run.losses == pytest.approx(due["losses"], rel=FROM_FLOAT32)
    assert run.weights == pytest.approx(due["weights"], rel=1e-9)


def made_alone() -> MeshTrainerMixin:
    """The mixin on one rank, without a Trainer."""
    trainer = MeshTrainerMixin.__new__(MeshTrainerMixin)
    trainer.mesh_attention, trainer._loss_shifts_labels = MeshAttention(LocalGroup(1).comm(0)), True
    return trainer


def test_seq_idx_is_dropped_only_if_something_else_states_the_documents() -> None:
    ids = torch.arange(6)[None]
    batch = {"input_ids": ids, "labels": ids, "seq_idx": ids // 3}
    trainer = made_alone()
    assert "seq_idx" not in trainer._shard(batch | {"position_ids": ids % 3}, is_newest=False)
    with pytest.raises(UsageError, match="shard_batch does not know how to cut 'seq_idx'"):
        trainer._shard(batch, is_newest=False)


def test_objects_are_not_gathered() -> None:
    with pytest.raises(UsageError, match="use_gather_object=True is not supported"):
        made_alone()._gather_for_metrics(torch.zeros(1), use_gather_object=True)
