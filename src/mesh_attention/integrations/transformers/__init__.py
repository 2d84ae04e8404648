"""transformers models over a sharded sequence: ``register(attention)``, then ``attn_implementation="mesh_attention"``.

Nothing is registered with transformers at import. Each rank runs the model on its own tokens, from
`shard_batch`.
"""

from mesh_attention.integrations.transformers.register import register, unregister

__all__ = ["register", "unregister"]
