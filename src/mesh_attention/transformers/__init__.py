"""transformers models over a sharded sequence: ``parallelize(model, attention)`` changes one model, and no other.

To train, each rank runs the model on its own tokens, from `shard_batch`. To generate, every rank calls
``model.generate`` with the same arguments.
"""

from mesh_attention.transformers.generation_cache import GenerationCache
from mesh_attention.transformers.parallelize import parallelize, unparallelize

__all__ = ["GenerationCache", "parallelize", "unparallelize"]
