"""Network: how items travel between ranks.

Reading order: base (the protocol), torch_dist, staged (CUDA tensors over Gloo), local (all ranks in one process).
"""
