"""Train with a DeepSpeed engine (ZeRO) and a module in the place of Ulysses's DistributedAttention.

torchrun --nproc-per-node 4 examples/recipes/deepspeed_ulysses.py  # sp 4, ZeRO 2; stage=3 sp=2 for dp 2 × sp 2, ZeRO 3
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from mesh_attention.batches import reduce_loss
from mesh_attention.integrations.deepspeed import MeshDistributedAttention

SEQ, VOCABULARY, HEADS, HEAD_DIM, ROWS = 101, 64, 3, 8, 2  # Ulysses alone could not split 3 heads over 4 ranks evenly


class Model(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.tokens, self.positions = (nn.Embedding(size, HEADS * HEAD_DIM) for size in (VOCABULARY, SEQ))
        self.qkv = nn.ModuleList(nn.Linear(HEADS * HEAD_DIM, 3 * HEADS * HEAD_DIM) for _ in range(2))
        self.head = nn.Linear(HEADS * HEAD_DIM, VOCABULARY)
        self.attend = attend

    def forward(self, ids, positions):
        x = self.tokens(ids) + self.positions(positions)
        for qkv in self.qkv:
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
            x = x + self.attend(q, k, v, 0).flatten(2)  # 0: the batch dim, as DistributedAttention takes it
        return self.head(x)


def attend_alone(q, k, v, batch_dim_idx):
    return scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)


given = dict(argument.split("=") for argument in sys.argv[1:])  # sp=2 stage=3 attention=torch
deepspeed.ops.__compatible_ops__.clear()  # on CPU: compile no C++ for transfers
deepspeed.init_distributed("gloo")
sp = int(given.get("sp", dist.get_world_size()))
mesh = init_device_mesh("cpu", (dist.get_world_size() // sp, sp), mesh_dim_names=("dp", "sp"))
if given.get("attention") == "torch":
    attend, mine = attend_alone, slice(None)
else:
    causal = {"causal": True, "seq_len": SEQ}
    attend = MeshDistributedAttention(None, mesh["sp"].get_group(), scatter_idx=2, gather_idx=1, call=causal)
    mine = attend.attention.position_ids(SEQ)  # a run of tokens, as Ulysses has them; any length
torch.manual_seed(0)
model = Model(attend).double()
settings = {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": {"stage": int(given.get("stage", 2))}}
settings |= {"zero_allow_untested_optimizer": True, "torch_autocast": {"enabled": False}}
sgd = torch.optim.SGD(model.parameters(), lr=0.3)
engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=settings)
text = torch.randint(VOCABULARY, (2 * ROWS, SEQ + 1), generator=torch.Generator().manual_seed(1))
rows = text.chunk(mesh.size(0))[mesh.get_local_rank("dp")]  # split over dp only: sp ranks have the same rows
for step in range(3):
    ids, labels = rows[:, :-1][:, mine], rows[:, 1:][:, mine]  # shifted before they are cut
    summed = cross_entropy(engine(ids, torch.arange(SEQ)[mine]).flatten(0, 1), labels.flatten(), reduction="sum")
    loss = reduce_loss(summed, labels.numel(), group=None)  # the mean over all ranks; DeepSpeed averages gradients
    engine.backward(loss)
    engine.step()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.12f}")
with deepspeed.zero.GatheredParameters(list(model.parameters())):
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm()
if dist.get_rank() == 0:
    print(f"weights {weights:.12f}")
dist.destroy_process_group()
