"""Hugging Face Trainer, with each sequence spread over ranks; with --cp 2, every two of them.

Run as: torchrun --nproc-per-node 4 examples/recipes/trainer.py --cp 2 --folder checkpoints [--resume]
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from mesh_attention import MeshAttention
from mesh_attention.transformers import parallelize
from mesh_attention.transformers.trainer import MeshTrainerMixin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRAINING = {"gradient_accumulation_steps": 2, "learning_rate": 1e-2, "max_steps": 6}
SAVING = {"eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, "logging_steps": 1, "disable_tqdm": True}


class MeshTrainer(MeshTrainerMixin, Trainer):
    """Trainer for a model with mesh attention."""


def make_model():  # yours: AutoModelForCausalLM.from_pretrained(name)
    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return AutoModelForCausalLM.from_config(config)


def make_rows(count, seed):  # yours: a dataset; these rows differ in length, and in how many tokens have labels
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(1, 64, (33 + 17 * row % 70,), generator=generator) for row in range(count)]
    labels = [one.where(torch.arange(len(one)) >= 7 * (row % 4), -100) for row, one in enumerate(ids)]
    return [{"input_ids": one, "labels": label} for one, label in zip(ids, labels, strict=True)]


def collate(rows):
    ids, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
    padded = {"input_ids": pad_sequence(ids, batch_first=True), "labels": pad_sequence(labels, True, -100)}
    return {**padded, "attention_mask": (padded["input_ids"] != 0).long()}


def make_settings(folder, groups, **others):  # a batch of 4 rows, however many groups it is divided among
    sizes = {f"per_device_{part}_batch_size": 4 // groups for part in ("train", "eval")}
    given = {**sizes, **TRAINING, **SAVING, **others}
    return TrainingArguments(folder, **given, use_cpu=DEVICE == "cpu", report_to="none")


def train(trainer, *, is_resumed=False):
    trainer.train(resume_from_checkpoint=is_resumed)
    if trainer.args.process_index == 0:
        for entry in trainer.state.log_history[:-1]:
            print(*(f"{name} {entry[name]:.12f}" for name in ("loss", "grad_norm", "eval_loss") if name in entry))
        print(f"weights {torch.stack([p.norm() for p in trainer.model.parameters()]).norm():.12f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cp", type=int, help="number of ranks that share a sequence; by default all of them")
    parser.add_argument("--folder", default="/tmp/mesh-attention-trainer", help="where checkpoints are")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint, on any number of ranks")
    flags = parser.parse_args()
    torch.set_default_dtype(torch.float64)  # only to compare runs; leave it out

    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    cp = flags.cp or dist.get_world_size()
    mesh = init_device_mesh(DEVICE, (dist.get_world_size() // cp, cp), mesh_dim_names=("dp", "cp"))
    model = parallelize(make_model(), MeshAttention(mesh["cp"]))
    settings = make_settings(flags.folder, groups=mesh["dp"].size())
    rows = {"train_dataset": make_rows(22, seed=1), "eval_dataset": make_rows(10, seed=2)}
    train(MeshTrainer(model, settings, data_collator=collate, **rows), is_resumed=flags.resume)
    dist.destroy_process_group()
    time.sleep(0.5)  # Gloo's threads may still hold tensors; Python must not exit before they let go
