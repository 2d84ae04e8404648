"""transformers models over a sharded sequence: ``register(attention)``, then ``attn_implementation="mesh_attention"``.

Nothing is registered with transformers at import. To train, each rank runs the model on its own tokens, from
`shard_batch`. To generate, every rank calls ``model.generate`` with the same arguments.
"""

from mesh_attention.transformers.cache import GenerationCache
from mesh_attention.transformers.register import register, unregister

__all__ = ["GenerationCache", "register", "unregister"]
