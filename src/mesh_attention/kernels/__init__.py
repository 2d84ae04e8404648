"""Compute: attention of one rectangle with its log-sum-exp, backward with an external one, and merging partials.

Reading order: base (the protocol), reference (the truth), cpu (torch's own flash kernels), merge, select.
"""
