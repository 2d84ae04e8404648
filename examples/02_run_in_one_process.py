"""Run a plan with all ranks in one process. The code is the same as on a cluster, and there is nothing to set up.

python examples/02_run_in_one_process.py
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention.api import MeshAttention
from mesh_attention.comm.local import LocalGroup

RANKS, SEQ, HEADS, KV_HEADS, HEAD_DIM = 6, 600, 8, 2, 32

torch.manual_seed(0)
q = torch.randn(1, SEQ, HEADS, HEAD_DIM)
k, v = (torch.randn(1, SEQ, KV_HEADS, HEAD_DIM) for _ in range(2))

attention = MeshAttention(LocalGroup(RANKS), tile=(2, 3))
# In a local group, a sharded tensor is a list with one tensor per rank.
outs = attention(attention.shard(q), attention.shard(k), attention.shard(v), causal=True)
ours = attention.unshard(outs)

bhsd = (tensor.transpose(1, 2) for tensor in (q, k, v))
theirs = scaled_dot_product_attention(*bhsd, is_causal=True, enable_gqa=True).transpose(1, 2)

print(f"rank 0 holds {outs[0].shape[1]} of {SEQ} tokens, at {attention.position_ids(SEQ)[0].tolist()[:3]}…")
print(f"largest difference from torch's attention: {(ours - theirs).abs().max():.1e}")
torch.testing.assert_close(ours, theirs)
