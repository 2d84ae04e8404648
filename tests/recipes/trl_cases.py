"""Runs the TRL recipe's training, case by case, and prints its log as a line of JSON for each.

With --cp it is the recipe's MeshSFTTrainer, on ranks; without, plain SFTTrainer with torch's attention.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from trl import SFTTrainer

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples" / "recipes"))
import trl_packed as recipe

from mesh_attention import MeshAttention
from mesh_attention.transformers import parallelize

CASES: dict[str, dict[str, Any]] = {
    "packed": {},
    "padded": {"packing": False},
    "flattened": {"packing": False, "padding_free": True, "max_length": None},
    "dft": {"loss_type": "dft"},
    "whole eval": {"per_device_eval_batch_size": 16},
}


def make_model(attention: MeshAttention | None) -> Any:
    model = recipe.make_model()
    return model if attention is None else parallelize(model, attention)


def run(name: str, groups: int, attention: MeshAttention | None) -> dict[str, Any]:
    kind: Any = recipe.MeshSFTTrainer if attention is not None else SFTTrainer
    fresh, trainer = (recipe.make_trainer(kind, make_model(attention), groups, **CASES[name]) for _ in range(2))
    first = fresh.evaluate()["eval_loss"]
    trainer.train()
    return {"case": name, "first": first, "due": by_document(), **recipe.read_log(trainer)}


def by_document() -> float:
    """The mean loss over the evaluation texts before training, one document per row."""
    model, tokenizer = recipe.make_model(), recipe.make_tokenizer()
    rows = [torch.tensor([tokenizer(text)["input_ids"]]) for text in recipe.make_texts(12, seed=2)["text"]]
    rows = [torch.cat([row, torch.tensor([[tokenizer.eos_token_id]])], dim=1) for row in rows]
    with torch.no_grad():
        sums = [model(row, labels=row).loss * (row.shape[1] - 1) for row in rows]
    return float(sum(sums)) / sum(row.shape[1] - 1 for row in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cp", type=int)
    parser.add_argument("cases", nargs="*")
    flags = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    groups, attention = 1, None
    if flags.cp:
        dist.init_process_group("gloo")
        groups = dist.get_world_size() // flags.cp
        mesh = init_device_mesh("cpu", (groups, flags.cp), mesh_dim_names=("dp", "cp"))
        attention = MeshAttention(mesh["cp"])
    for name in flags.cases:
        found = run(name, groups, attention)
        if not flags.cp or dist.get_rank() == 0:
            print("result", json.dumps(found), flush=True)
    if flags.cp:
        dist.destroy_process_group()
        time.sleep(0.5)  # Gloo's threads may still hold tensors
