"""Network: how items travel between ranks.

Reading order: base (the protocol), torch_dist, staged (CUDA tensors over Gloo), local, replay, marked (ranks notice
different calls), reports and watch (who is waited for, on NCCL), wrappers, launch (processes on this machine).
"""
