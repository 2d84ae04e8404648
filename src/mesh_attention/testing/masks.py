"""The definition of a mask, pair by pair: slow; the faster code is tested against it."""

from __future__ import annotations

from mesh_attention.masks import Mask


def is_unmasked(mask: Mask, x: int, y: int, seq_q: int, seq_kv: int) -> bool:
    """True if the query at position x sees the key at position y."""
    docs = mask.documents
    cuts_q, cuts_kv = (docs.q, docs.kv) if docs else ((0, seq_q), (0, seq_kv))
    for q0, q1, kv0, kv1 in zip(cuts_q, cuts_q[1:], cuts_kv, cuts_kv[1:], strict=False):
        if q0 <= x < q1 and kv0 <= y < kv1:
            distance = (y - kv1) - (x - q1)  # bottom-right: the last query stands at the last key
            return (mask.left is None or distance >= -mask.left) and (mask.right is None or distance <= mask.right)
    return False
