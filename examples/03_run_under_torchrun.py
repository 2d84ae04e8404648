"""Run attention on several processes, forward and backward, and compare it with attention in one process.

torchrun --nproc-per-node 4 examples/03_run_under_torchrun.py
"""

import time

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from mesh_attention.api import MeshAttention

SEQ, HEADS, KV_HEADS, HEAD_DIM = 1024, 8, 2, 32


def main() -> None:
    attention = MeshAttention()  # over the default group

    # Every rank makes the whole sequence, to compare with; a real program loads only its own tokens.
    torch.manual_seed(0)
    q = torch.randn(1, SEQ, HEADS, HEAD_DIM)
    k, v = (torch.randn(1, SEQ, KV_HEADS, HEAD_DIM) for _ in range(2))

    mine = [attention.shard(tensor).requires_grad_() for tensor in (q, k, v)]
    out = attention(*mine, causal=True, seq_len=SEQ)
    out.square().sum().backward()
    ours = [attention.unshard(tensor) for tensor in (out, *(tensor.grad for tensor in mine))]

    if dist.get_rank() == 0:
        for name, a, b in zip(("out", "dq", "dk", "dv"), ours, attention_alone(q, k, v), strict=True):
            print(f"{name}: largest difference from one process {(a - b).abs().max():.1e}")
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        print(f"{dist.get_world_size()} processes agree with one")


def attention_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of Q, K and V."""
    q, k, v = (tensor.clone().requires_grad_() for tensor in (q, k, v))
    bhsd = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out = scaled_dot_product_attention(*bhsd, is_causal=True, enable_gqa=True).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
    time.sleep(0.5)  # Gloo's threads may still hold tensors; Python must not exit before they let go
