"""Serving: attention over a KV cache that is spread over ranks; prompts in chunks and turns, and decoding."""

from mesh_attention.serving.cache import ShardedCache
from mesh_attention.serving.decoded_step import Step
from mesh_attention.serving.memory import CachedLayer
from mesh_attention.serving.turn import Turn

__all__ = ["CachedLayer", "ShardedCache", "Step", "Turn"]
