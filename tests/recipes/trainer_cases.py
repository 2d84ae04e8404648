"""Runs Trainer on the recipe's model and rows, case by case, and prints a line of JSON for each.

With --cp it is the recipe's MeshTrainer, on ranks; without, plain Trainer with torch's attention.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import Trainer

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples" / "recipes"))
import trainer as recipe

from mesh_attention import MeshAttention, UsageError
from mesh_attention.transformers import parallelize

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "counted": {"include_num_input_tokens_seen": "non_padding"},
    "counted all": {"include_num_input_tokens_seen": "all"},
    "clipped": {"max_grad_norm": 0.1},
    "checkpointed": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "no remainder": {"dataloader_drop_last": True},
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


class ShardedOnCpu(recipe.MeshTrainer):
    """Shards parameters by FSDP2 through accelerate, which does so on GPUs only, unless it is made to."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = True


def make_rows(name: str, count: int, seed: int) -> Any:
    rows = recipe.make_rows(count, seed)
    if name == "few labels":  # whole batches of them have none
        for number, row in enumerate(rows):
            row["labels"] = row["labels"] if number in (7, 15, 20) else torch.full_like(row["labels"], -100)
    return Endless(rows) if name == "iterable" else rows


def make_model(attention: MeshAttention | None) -> Any:
    model = recipe.make_model()
    return model if attention is None else parallelize(model, attention)


def run(name: str, groups: int, attention: MeshAttention | None) -> dict[str, Any]:
    is_mesh = attention is not None
    torch.set_default_dtype(torch.float32 if name == "bf16" else torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        settings = recipe.make_settings(folder, groups, save_strategy="no", **CASES[name])
        if name == "few labels":
            settings.train_sampling_strategy = "sequential"
        kind: Any = Trainer if not is_mesh else ShardedOnCpu if name == "fsdp" else recipe.MeshTrainer
        model = make_model(attention)
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
    is_sharded = any(isinstance(p, DTensor) for p in trainer.model.parameters())
    assert is_sharded == (is_mesh and name == "fsdp")
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


REFUSED: dict[str, dict[str, Any]] = {
    "label_smoothing_factor=0.1 is not supported": {"label_smoothing_factor": 0.1},
    "compute_loss_func is not supported": {"compute_loss_func": print},
    "neftune_noise_alpha is not supported": {"neftune_noise_alpha": 5.0},
    "auto_find_batch_size is not supported": {"auto_find_batch_size": True},
    "train_sampling_strategy='group_by_length' is not supported": {"train_sampling_strategy": "group_by_length"},
    "average_tokens_across_devices=False is not supported": {"average_tokens_across_devices": False},
    "use_seedable_sampler=False is not supported": {"accelerator_config": {"use_seedable_sampler": False}},
    "split_batches=True is not supported": {"accelerator_config": {"split_batches": True}},
    "eval_use_gather_object=True is not supported": {"eval_use_gather_object": True},
    "LlamaForCausalLM does not use mesh attention": {"axis": None},
    "expected groups of consecutive ranks": {"axis": "dp"},
    "train was called after evaluate or predict": {},
}
"""Settings by what is said of them."""


def refuse_late_training(groups: int, attention: MeshAttention) -> str:
    with tempfile.TemporaryDirectory() as folder:
        settings = recipe.make_settings(folder, groups, save_strategy="no")
        rows = {"train_dataset": recipe.make_rows(8, 1), "eval_dataset": recipe.make_rows(8, 2)}
        trainer = recipe.MeshTrainer(make_model(attention), settings, data_collator=recipe.collate, **rows)
        trainer.evaluate()
        try:
            trainer.train()
        except UsageError as error:
            return str(error)
    return ""


def refuse(expected: str, groups: int, attentions: dict[str | None, MeshAttention]) -> str:
    if not REFUSED[expected]:
        return refuse_late_training(groups, attentions["cp"])
    settings = dict(REFUSED[expected])
    model = make_model(attentions.get(settings.pop("axis", "cp")))
    given = {name: settings.pop(name) for name in ("compute_loss_func",) if name in settings}
    with tempfile.TemporaryDirectory() as folder:
        try:
            recipe.MeshTrainer(model, recipe.make_settings(folder, groups, eval_strategy="no", **settings), **given)
        except UsageError as error:
            return str(error)
    return ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cp", type=int)
    parser.add_argument("--refused", action="store_true")
    parser.add_argument("cases", nargs="*")
    flags = parser.parse_args()
    groups, attentions = 1, {}
    if flags.cp:
        dist.init_process_group("gloo")
        groups = dist.get_world_size() // flags.cp
        mesh = init_device_mesh("cpu", (groups, flags.cp), mesh_dim_names=("dp", "cp"))
        attentions = {axis: MeshAttention(mesh[axis]) for axis in ("cp", "dp")}
    for name in flags.cases:
        found = run(name, groups, attentions.get("cp"))
        if not flags.cp or dist.get_rank() == 0:
            print("result", json.dumps(found), flush=True)
    for name in REFUSED if flags.refused else ():
        message = refuse(name, groups, attentions)
        if dist.get_rank() == 0:
            print("result", json.dumps({"case": name, "message": message}), flush=True)
    if flags.cp:
        dist.destroy_process_group()
        time.sleep(0.5)  # Gloo's threads may still hold tensors
