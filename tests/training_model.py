"""A small language model trained on a sharded sequence, or on a whole one: the losses must be the same."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor, nn

from mesh_attention.api import MeshAttention

VOCABULARY, WIDTH, HEADS, KV_HEADS, TOKENS = 17, 16, 4, 2, 45


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * size) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])

    def forward(self, x: Tensor, attend: Any) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (f(y).unflatten(-1, (-1, WIDTH // HEADS)) for f in (self.q, self.k, self.v))
        x = x + self.out(attend(q, k, v).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, position_ids: Tensor, attend: Any) -> Tensor:
        x = self.tokens(ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, attend)
        return self.head(x)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def train_small_model(group: Any, options: dict[str, Any] | None, steps: int) -> list[float]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        ids = torch.randint(VOCABULARY, (2, TOKENS + 1))
        inputs, labels, positions, attend = ids[:, :-1], ids[:, 1:], torch.arange(TOKENS), plain_attention
        if options is not None:
            attention = MeshAttention(group, **options)
            # Labels are shifted before sharding: the next token may live on another rank.
            inputs, labels = attention.shard(inputs), attention.shard(labels)
            positions = attention.position_ids(TOKENS)

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return attention(q, k, v, causal=True, seq_len=TOKENS)

        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            logits = model(inputs, positions, attend)
            # Summed here, divided by the whole count: shards may differ by a token.
            loss = (
                functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / ids[:, 1:].numel()
            )
            loss.backward()
            total = loss.detach().clone()
            if options is not None:
                dist.all_reduce(total, group=group)
                gradients = [parameter.grad for parameter in model.parameters()]
                together = nn.utils.parameters_to_vector(gradients)
                dist.all_reduce(together, group=group)
                nn.utils.vector_to_parameters(together, gradients)
            optimizer.step()
            losses.append(float(total))
        return losses
    finally:
        torch.set_default_dtype(torch.float32)
