"""The recipe's training by torchtitan alone. Its masks are made dense: FlexAttention has no backward on CPU.

It changes FlexAttention, so it runs in a process of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples" / "recipes"))

import torchtitan_train as recipe
from torchtitan.models.common import attention, decoder


def attend(self: object, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: BlockMask, **arguments: object) -> Tensor:
    mask = create_mask(attention_masks.mask_mod, q.shape[0], None, q.shape[1], k.shape[1], device="cpu")
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True).transpose(1, 2)


if __name__ == "__main__":
    attention.FlexAttention.forward = attend
    decoder.create_attention_mask = attention.create_block_mask  # not compiled
    recipe.train(recipe.make_config(ac="none"))
