"""Train a small model on a sharded sequence: ids, labels and position ids; the losses are those of one process.

torchrun --nproc-per-node 4 examples/04_training_step.py      (or alone: python examples/04_training_step.py)
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mesh_attention.api import MeshAttention

VOCABULARY, WIDTH, HEADS, SEQ, STEPS = 32, 32, 4, 250, 5


class Model(nn.Module):
    def __init__(self, attention: MeshAttention) -> None:
        super().__init__()
        self.attention = attention
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(position_ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        return self.head(x + self.attention(q, k, v, causal=True, seq_len=SEQ).flatten(2))


def main() -> None:
    torch.manual_seed(0)  # the same weights and the same text on every rank
    attention = MeshAttention()
    model = Model(attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.randint(VOCABULARY, (1, SEQ + 1))
    # Labels are shifted before sharding: the next token may live on another rank.
    ids, labels = attention.shard(text[:, :-1]), attention.shard(text[:, 1:])
    position_ids = attention.position_ids(SEQ)

    for step in range(STEPS):
        logits = model(ids, position_ids)
        # Summed here and divided by the whole count, because shards may differ by a token.
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / SEQ
        optimizer.zero_grad()
        loss.backward()
        for shared in (loss.detach(), *(parameter.grad for parameter in model.parameters())):
            dist.all_reduce(shared)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    main()
    dist.destroy_process_group()
