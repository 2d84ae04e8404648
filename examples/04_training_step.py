"""Train a small model on a sharded sequence: token ids, labels and positions. The losses equal those of one process.

torchrun --nproc-per-node 4 examples/04_training_step.py      (or alone: python examples/04_training_step.py)
"""

import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mesh_attention.api import MeshAttention

VOCABULARY, WIDTH, HEADS, SEQ = 32, 32, 4, 250
STEPS, LEARNING_RATE = 5, 0.3


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
    model = Model(attention := MeshAttention())
    text = torch.randint(VOCABULARY, (1, SEQ + 1))
    # Shift labels before sharding: the next token may be on another rank.
    ids, labels = attention.shard(text[:, :-1]), attention.shard(text[:, 1:])
    position_ids = attention.position_ids(SEQ)
    for step in range(STEPS):
        logits = model(ids, position_ids)
        # Sum and divide by the whole count, because shards may differ by a token.
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / SEQ
        model.zero_grad()
        loss.backward()
        dist.all_reduce(total := loss.detach().clone())
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= LEARNING_RATE * parameter.grad
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total:.4f}")


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    main()
    dist.destroy_process_group()
    time.sleep(0.5)  # Gloo's threads may still hold tensors; Python must not exit before they let go
