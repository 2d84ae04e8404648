"""Lightning's Trainer with a transformers model: sequences spread over cp, FSDP2 over dp × cp.

torchrun --nproc-per-node 4 examples/recipes/lightning_trainer.py [--cp 2]
"""

import argparse
import os
import time

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from mesh_attention import MeshAttention
from mesh_attention.batches import batch_loss, shard_batch
from mesh_attention.transformers import parallelize

SEQ, ROWS, BATCH, MAX_NORM = 301, 16, 4, 0.3
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def make_model():
    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def make_data():
    text = torch.randint(64, (ROWS, SEQ), generator=torch.Generator().manual_seed(1))
    labels = text.masked_fill(torch.arange(SEQ) < 12 * torch.arange(ROWS)[:, None], -100)  # prompts have no labels
    return [{"input_ids": ids, "labels": wanted} for ids, wanted in zip(text, labels, strict=True)]


class LongSequences(LightningModule):
    def configure_model(self):
        if not hasattr(self, "model"):  # Lightning may call this more than once
            self.attention = MeshAttention(self.device_mesh["tensor_parallel"])
            self.model = parallelize(make_model(), self.attention)
            for part in (*self.model.model.layers, self.model):
                fully_shard(part, mesh=self.device_mesh._flatten("tokens"))  # all ranks that hold different tokens

    def training_step(self, batch, number):
        local = shard_batch(self.attention, batch)
        loss = batch_loss(self.model(**local).loss, local, group=self.device_mesh)
        self.log("loss", loss, prog_bar=True)  # the mean over all ranks already: no sync_dist
        self.print(f"loss {loss:.12f}")
        return loss

    def on_train_end(self):
        self.print(f"weights {torch.stack([p.full_tensor().norm() for p in self.parameters()]).norm():.12f}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.9)


if __name__ == "__main__":
    world = int(os.environ["WORLD_SIZE"])
    parser = argparse.ArgumentParser()
    parser.add_argument("--cp", type=int, default=world, help="ranks that share a sequence")
    args = parser.parse_args()
    # Lightning has no cp axis. Its tensor-parallel one does what cp needs: all of its ranks get the same batches.
    strategy = ModelParallelStrategy(data_parallel_size=world // args.cp, tensor_parallel_size=args.cp)
    quiet = {
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "logger": False,
    }
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy=strategy, max_epochs=1, gradient_clip_val=MAX_NORM, **quiet
    )
    trainer.fit(LongSequences(), DataLoader(make_data(), batch_size=BATCH * args.cp // world, shuffle=True))
    torch.distributed.destroy_process_group()
    time.sleep(0.5)  # Gloo's threads must let go of tensors before Python exits
