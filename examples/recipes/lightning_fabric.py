"""Lightning Fabric with a transformers model: sequences spread over cp, FSDP2 over dp × cp, accumulated gradients.

torchrun --nproc-per-node 4 examples/recipes/lightning_fabric.py [--cp 2] [--save FOLDER] [--load FOLDER]
"""

import argparse
import os
import time

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from mesh_attention import MeshAttention
from mesh_attention.batches import batch_loss, count_items, shard_batch
from mesh_attention.transformers import parallelize

SEQ, ROWS, BATCH, MICRO_BATCHES, MAX_NORM = 301, 16, 8, 2, 0.3
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def make_model():
    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def make_data():
    text = torch.randint(64, (ROWS, SEQ), generator=torch.Generator().manual_seed(1))
    labels = text.masked_fill(torch.arange(SEQ) < 12 * torch.arange(ROWS)[:, None], -100)  # prompts have no labels
    return [{"input_ids": ids, "labels": wanted} for ids, wanted in zip(text, labels, strict=True)]


def shard_parameters(model, mesh):
    tokens_mesh = mesh._flatten("tokens")  # all ranks that hold different tokens
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=tokens_mesh)
    return model


if __name__ == "__main__":
    world = int(os.environ["WORLD_SIZE"])
    parser = argparse.ArgumentParser()
    parser.add_argument("--cp", type=int, default=world, help="ranks that share a sequence")
    parser.add_argument("--save", help="folder for a checkpoint at the end")
    parser.add_argument("--load", help="folder of a checkpoint to start from")
    args = parser.parse_args()
    dp = world // args.cp
    # Lightning has no cp axis. Its tensor-parallel one does what cp needs: all of its ranks get the same batches.
    strategy = ModelParallelStrategy(shard_parameters, data_parallel_size=dp, tensor_parallel_size=args.cp)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    attention = MeshAttention(strategy.device_mesh["tensor_parallel"])
    model = fabric.setup_module(parallelize(make_model(), attention))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))
    if args.load:
        fabric.load(args.load, {"model": model, "optimizer": optimizer})
    loader = fabric.setup_dataloaders(DataLoader(make_data(), batch_size=BATCH // dp // MICRO_BATCHES, shuffle=True))
    for step in zip(*[iter(loader)] * MICRO_BATCHES, strict=True):
        step, total = [shard_batch(attention, batch) for batch in step], 0.0
        items = count_items(step, group=strategy.device_mesh)  # of all ranks and micro-batches
        for local in step:
            with fabric.no_backward_sync(model, enabled=local is not step[-1]):
                loss = batch_loss(model(**local).loss, local, group=strategy.device_mesh, total_items=items)
                fabric.backward(loss)
            total += loss.item()
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        fabric.print(f"loss {total:.12f}")
    fabric.print(f"weights {torch.stack([p.full_tensor().norm() for p in model.parameters()]).norm():.12f}")
    if args.save:
        fabric.save(args.save, {"model": model, "optimizer": optimizer})
    torch.distributed.destroy_process_group()
    time.sleep(0.5)  # Gloo's threads must let go of tensors before Python exits
