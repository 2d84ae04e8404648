"""A training loop in plain PyTorch: a model of your own, sequences spread over cp, FSDP2 over dp × cp.

torchrun --nproc-per-node 4 examples/recipes/plain_pytorch.py [--cp 2] [--compile inductor]
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from mesh_attention import MeshAttention
from mesh_attention.batches import reduce_loss, shard_batch
from mesh_attention.integrations.pytorch import saved_attention

VOCABULARY, WIDTH, HEADS, KV_HEADS, SEQ, ROWS, BATCH = 64, 64, 4, 2, 301, 20, 4
IDS = torch.randint(VOCABULARY, (ROWS, SEQ), generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(IDS, IDS.masked_fill(torch.arange(SEQ) < 9 * torch.arange(ROWS)[:, None], -100))  # prompts: -100


class Layer(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention, self.norms = attention, nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, WIDTH * (HEADS + 2 * KV_HEADS) // HEADS), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH))
        speeds = 10000.0 ** -torch.linspace(0, 1, WIDTH // HEADS // 2)
        self.register_buffer("angles", attention.position_ids(SEQ)[:, None, None] * speeds, persistent=False)

    def forward(self, x):  # backward recomputes the layer, but not attention, so that nothing is sent again
        return checkpoint(self.run, x, use_reentrant=False, context_fn=saved_attention)

    def run(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (-1, WIDTH // HEADS)).split((HEADS, KV_HEADS, KV_HEADS), 2)
        cos, sin = self.angles.cos(), self.angles.sin()
        q, k = (torch.cat([a * cos - b * sin, a * sin + b * cos], -1) for a, b in (q.chunk(2, -1), k.chunk(2, -1)))
        x = x + self.out(self.attention(q, k, v, causal=True, seq_len=SEQ).flatten(2))
        return x + self.mlp(self.norms[1](x))


def make_model(attention):
    torch.manual_seed(0)  # the same weights on every rank
    layers = Layer(attention), Layer(attention), nn.RMSNorm(WIDTH)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY)).double()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    parser = argparse.ArgumentParser()
    parser.add_argument("--cp", type=int, default=dist.get_world_size(), help="ranks that share a sequence")
    parser.add_argument("--compile", metavar="BACKEND", help="compile each layer: inductor, aot_eager")
    args, report = parser.parse_args(), print if dist.get_rank() == 0 else str
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size() // args.cp, args.cp), mesh_dim_names=("dp", "cp"))
    attention, dp, tokens_mesh = MeshAttention(mesh["cp"]), mesh["dp"].size(), mesh._flatten("tokens")
    model = make_model(attention)
    for layer in model[1:3]:
        layer.compile(backend=args.compile or "eager", disable=args.compile is None)
        fully_shard(layer, mesh=tokens_mesh)
    fully_shard(model, mesh=tokens_mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    sampler = DistributedSampler(DATA, num_replicas=dp, rank=mesh.get_local_rank("dp"))  # the same for all of cp
    for ids, labels in DataLoader(DATA, batch_size=BATCH // dp, sampler=sampler):
        local = shard_batch(attention, {"input_ids": ids, "labels": labels})
        logits, targets = model(local["input_ids"]).flatten(0, 1), local["shift_labels"].flatten()
        loss = reduce_loss(cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum(), group=mesh)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.34)
        optimizer.step()
        report(f"loss {loss:.12f}")
    norm = torch.stack([p.full_tensor().norm() for p in model.parameters()]).norm()
    report(f"weights {norm:.12f}")
    dist.destroy_process_group()
    time.sleep(0.5)  # Gloo's threads must let go of tensors before Python exits
