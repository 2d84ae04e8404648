"""A training loop of accelerate, with each sequence spread over ranks; with --cp 2, every two of them.

Run as: torchrun --nproc-per-node 4 examples/recipes/accelerate_loop.py --cp 2
"""

import argparse
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, LlamaConfig

from mesh_attention import MeshAttention
from mesh_attention.batches import batch_loss, count_items, shard_batch
from mesh_attention.integrations.accelerate import shared_batches
from mesh_attention.transformers import parallelize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_model():  # yours: AutoModelForCausalLM.from_pretrained(name)
    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return AutoModelForCausalLM.from_config(config)


def make_rows():  # yours: a dataset; these rows differ in length
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 64, (33 + 17 * row % 70,), generator=generator) for row in range(24)]


def collate(rows):
    ids, labels = pad_sequence(rows, batch_first=True), pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long()}


def train(accelerator, attention, groups):
    rows = make_rows()
    loader = torch.utils.data.DataLoader(rows, batch_size=4 // groups, shuffle=True, collate_fn=collate)
    model = parallelize(make_model(), attention)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    with shared_batches(accelerator, attention):  # the ranks of a group get the same batches
        loader = accelerator.prepare(loader)
    for step, batches in enumerate(zip(*[iter(loader)] * 2, strict=True)):  # gradients of two batches are added up
        parts = [shard_batch(attention, batch) for batch in batches]  # this rank's tokens; shifts labels first
        total = count_items(parts, group=None)  # the labels of both batches, of all ranks
        losses = []
        for part in parts:
            with nullcontext() if part is parts[-1] else accelerator.no_sync(model):
                losses.append(batch_loss(model(**part).loss, part, group=None, total_items=total))
                accelerator.backward(losses[-1])
        accelerator.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step} loss {sum(losses):.12f}")
    accelerator.print(f"weights {torch.stack([p.norm() for p in model.parameters()]).norm():.12f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cp", type=int, help="number of ranks that share a sequence; by default all of them")
    cp = parser.parse_args().cp
    torch.set_default_dtype(torch.float64)  # only to compare runs; leave it out
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    cp = cp or dist.get_world_size()
    mesh = init_device_mesh(DEVICE, (dist.get_world_size() // cp, cp), mesh_dim_names=("dp", "cp"))
    train(Accelerator(cpu=DEVICE == "cpu"), MeshAttention(mesh["cp"]), groups=mesh["dp"].size())
    dist.destroy_process_group()
    time.sleep(0.5)  # Gloo's threads may still hold tensors; Python must not exit before they let go
