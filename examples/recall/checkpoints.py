"""Checkpoints that any number of ranks can write, and any other number can read: ``DIR/step-000120/``.

A checkpoint is written under a temporary name and renamed when every rank is done, so a checkpoint with its final name
is always complete. All random numbers follow from the seed and the step, so no other random state is saved.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from mesh_attention.errors import UsageError

SETTINGS = "settings.json"
KEPT = 2
"""How many checkpoints are kept; older ones are removed."""


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: Optimizer, *, step: int, settings: Mapping[str, Any]
) -> Path:
    """Write what is needed to continue at `step`. Call it on every rank."""
    final, partial = folder / f"step-{step:06}", folder / f".step-{step:06}.partial"
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / SETTINGS).write_text(json.dumps(dict(settings), indent=1) + "\n")
    dist.barrier()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=partial)
    dist.barrier()
    if is_first:
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        for old in _whole(folder)[:-KEPT]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def find_checkpoint(folder: Path, *, settings: Mapping[str, Any]) -> tuple[Path, int]:
    """The newest complete checkpoint and its step; refuses one that was made with other settings."""
    found = _whole(folder)
    if not found:
        raise UsageError(f"--resume: there is no checkpoint in {folder}; leave --resume out to start a new run there")
    newest = found[-1]
    theirs = json.loads((newest / SETTINGS).read_text())
    for name, ours in json.loads(json.dumps(dict(settings))).items():
        if theirs.get(name) != ours:
            raise UsageError(
                f"{newest} was made with {name}={theirs.get(name)}, but this run has {name}={ours}; use the same "
                "settings, or another --checkpoint"
            )
    return newest, int(newest.name.removeprefix("step-"))


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Each rank reads its part, for any number of ranks that wrote the checkpoint."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def refuse_used(folder: Path) -> None:
    """Refuse a folder that has checkpoints already: a new run must not mix its checkpoints with them."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--checkpoint {folder} is a file; expected a folder, or a name for a new one")
    if found := _whole(folder):
        raise UsageError(f"{folder} holds {found[-1].name}; add --resume to continue it, or choose another folder")


def _whole(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / SETTINGS).is_file())


def load_weights(folder: Path, model: nn.Module) -> int:
    """Load the weights of the newest complete checkpoint into a model that is not sharded; returns its step."""
    found = _whole(folder)
    if not found:
        raise UsageError(f"there is no checkpoint in {folder}; make one with train_recall.py --checkpoint {folder}")
    weights = {"model": model.state_dict()}
    dcp.load(weights, checkpoint_id=found[-1])
    model.load_state_dict(weights["model"])
    return int(found[-1].name.removeprefix("step-"))
