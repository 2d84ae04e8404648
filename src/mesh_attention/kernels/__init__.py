"""Compute: attention of one rectangle with its log-sum-exp, backward with an external one, and merging partials.

Reading order: base (the protocol), reference (the truth), cpu (torch's flash on CPU), windowed (masks
as windows that flash kernels take), cuda (torch's cuDNN and flash), flash_attn (the packages), intervals (Triton, for
softcap, gradients into the LSE and many documents), merging (partials, and the row sums of backward), decode (a few
queries over a cache), select. Triton's code is in interval_kernels, merging_kernels and decode_kernels; launching
launches it.
"""
