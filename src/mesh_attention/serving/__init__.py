"""Serving: attention over a KV cache that is spread over ranks; prompts in chunks and turns, and decoding."""

from mesh_attention.serving.cache import ShardedCache
from mesh_attention.serving.decode import Step
from mesh_attention.serving.memory import CachedLayer
from mesh_attention.serving.prefill import Turn

__all__ = ["CachedLayer", "ShardedCache", "Step", "Turn"]
