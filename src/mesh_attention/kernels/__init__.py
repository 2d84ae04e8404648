"""Compute: attention of one rectangle with its log-sum-exp, backward with an external one, and merging partials."""
