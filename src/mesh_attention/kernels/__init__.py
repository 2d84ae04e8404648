"""Compute: attention of one rectangle with its log-sum-exp, backward with an external one, and merging partials.

Reading order: base (the protocol), reference (the truth), cpu (torch's flash on CPU), cuda (torch's cuDNN and flash),
flash_attn (the package), windowed and bands (masks as windows that these take), sliced (the rest, in slices), merge and
rows, fused and triton_kernels (both of these in one pass), select.
"""
