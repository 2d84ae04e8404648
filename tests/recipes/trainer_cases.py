"""Runs Trainer on the recipe's model and rows with other settings, and prints what came of each as a line of JSON.

Started as one process without --cp it is plain Trainer with torch's attention.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Trainer

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples" / "recipes"))
import trainer as recipe

from mesh_attention import MeshAttention
from mesh_attention.integrations.transformers import register

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "counted": {"include_num_input_tokens_seen": "non_padding"},
    "counted all": {"include_num_input_tokens_seen": "all"},
    "clipped": {"max_grad_norm": 0.1},
    "checkpointed": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "no remainder": {"dataloader_drop_last": True},
    "workers": {"dataloader_num_workers": 1},
    "iterable": {},
    "few labels": {},
    "fsdp": {
        "fsdp": "full_shard",
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    },
}


class Endless(torch.utils.data.IterableDataset[Any]):
    """The rows, without a length."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def make_rows(name: str, count: int, seed: int) -> Any:
    rows = recipe.make_rows(count, seed)
    if name == "few labels":  # whole batches of them have none
        for number, row in enumerate(rows):
            row["labels"] = row["labels"] if number in (7, 15, 20) else torch.full_like(row["labels"], -100)
    return Endless(rows) if name == "iterable" else rows


def run(name: str, groups: int, *, is_mesh: bool) -> dict[str, Any]:
    torch.set_default_dtype(torch.float32 if name == "bf16" else torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        settings = recipe.make_settings(folder, groups, save_strategy="no", **{"seed": 3} | CASES[name])
        if name == "few labels":
            settings.train_sampling_strategy = "sequential"
        kind: Any = recipe.MeshTrainer if is_mesh else Trainer
        model = recipe.make_model("mesh_attention" if is_mesh else "sdpa")
        trainer = kind(
            model,
            settings,
            data_collator=recipe.collate,
            train_dataset=make_rows(name, 24 if name == "iterable" else 22, 1),
            eval_dataset=recipe.make_rows(10, 2),
            compute_metrics=lambda found: {"right": float((found.predictions.argmax(-1) == found.label_ids).sum())},
        )
        trainer.train()
        test = trainer.predict(recipe.make_rows(5, 3))
    history = trainer.state.log_history
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.model.parameters()]
    return {
        "case": name,
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "grad_norms": [float(entry["grad_norm"]) for entry in history if "loss" in entry],
        "eval_losses": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "right": [entry["eval_right"] for entry in history if "eval_right" in entry],
        "weights": float(torch.stack([p.detach().norm() for p in weights]).norm()),
        "tokens": trainer.state.num_input_tokens_seen,
        "flos": trainer.state.total_flos,
        "logits": [float(abs(row[labels > 0]).sum()) for row, labels in zip(*test[:2], strict=True)],
        "labels": test.label_ids.sum(-1).tolist(),
        "test_loss": test.metrics["test_loss"],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cp", type=int)
    parser.add_argument("cases", nargs="+")
    flags = parser.parse_args()
    groups = 1
    if flags.cp:
        dist.init_process_group("gloo")
        groups = dist.get_world_size() // flags.cp
        mesh = init_device_mesh("cpu", (groups, flags.cp), mesh_dim_names=("dp", "cp"))
        register(MeshAttention(mesh["cp"]))
    for name in flags.cases:
        found = run(name, groups, is_mesh=bool(flags.cp))
        if not flags.cp or dist.get_rank() == 0:
            print("result", json.dumps(found), flush=True)
