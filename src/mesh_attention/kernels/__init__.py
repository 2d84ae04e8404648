"""Compute: attention of one rectangle with its log-sum-exp, backward with an external one, and merging partials.

Reading order: base (the protocol), reference (the truth), cpu (torch's flash on CPU), cuda (torch's cuDNN and flash),
flash_attn (the package), alignment (tensors as these load them), windowed and bands (masks as windows that these take),
intervals and interval_kernels (Triton, for softcap, gradients into the LSE and many documents), sliced (the rest, in
slices), merge and rows, fused and triton_kernels (both of these in one pass), launching (Triton's kernels), select.
"""
