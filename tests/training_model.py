"""A small language model trained on a sharded sequence, or on a whole one: the losses must be the same."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as functional
from torch import Tensor, nn

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
