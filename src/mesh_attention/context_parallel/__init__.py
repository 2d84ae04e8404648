"""Attention in torch's style: `context_parallel` for scaled_dot_product_attention, `attend_dtensor` for DTensors."""

from mesh_attention.context_parallel.context import context_parallel, context_parallel_unshard
from mesh_attention.context_parallel.dtensors import attend_dtensor

__all__ = ["attend_dtensor", "context_parallel", "context_parallel_unshard"]
