"""The problem: lengths, heads, head sizes, dtype, mask and number of ranks of an attention call, as a value."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Literal

from mesh_attention.errors import MaskError, ProblemError, UsageError
from mesh_attention.masks import Mask, full
from mesh_attention.units import brief

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element, for every dtype a problem may have."""

RUNNING_LSE_NBYTES = 8
"""Bytes of the LSE of a running sum, which is a float64 for every dtype: merge by merge, the LSE grows by less than a
float32 of its size can tell apart."""

MOST, MOST_RANKS = 1 << 40, 1 << 20
"""Larger numbers are taken for typos: planning with them, or listing the numbers that would fit, would never end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One attention call over a group of ranks. Lengths are of the whole sequence, not of a shard."""

    seq_q: int
    seq_kv: int
    heads: int
    kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    ranks: int
    batch: int = 1
    dtype: str = "bfloat16"
    mask: Mask = field(default_factory=full)

    @classmethod
    def self_attention(
        cls,
        *,
        seq_len: int,
        heads: int,
        head_dim: int,
        ranks: int,
        kv_heads: int | None = None,
        batch: int = 1,
        dtype: str = "bfloat16",
        mask: Mask | None = None,
    ) -> Problem:
        """The usual case: queries and keys of one sequence, one head size."""
        return cls(
            seq_q=seq_len,
            seq_kv=seq_len,
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim_qk=head_dim,
            head_dim_v=head_dim,
            ranks=ranks,
            batch=batch,
            dtype=dtype,
            mask=full() if mask is None else mask,
        )

    def __post_init__(self) -> None:
        sizes = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("dtype", "mask")}
        check_whole(ProblemError, most=MOST_RANKS, ranks=sizes.pop("ranks"))
        check_whole(ProblemError, most=MOST, **sizes)
        if not isinstance(self.dtype, str) or self.dtype not in ITEMSIZE:
            raise ProblemError(f"dtype={brief(self.dtype)}: expected one of {', '.join(ITEMSIZE)}")
        if self.heads % self.kv_heads:
            raise ProblemError(
                f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly; heads must be a multiple of kv_heads"
            )
        if not isinstance(self.mask, Mask):
            raise ProblemError(f"mask={self.mask!r}: expected a mask, such as causal() or window(4096, 0)")
        _check_documents(self)

    @property
    def itemsize(self) -> int:
        """Bytes of an element that travels."""
        return ITEMSIZE[self.dtype]

    @property
    def accumulator_itemsize(self) -> int:
        """Bytes of an element of a running sum, of delta, of an LSE that travels: float32, or float64 for float64."""
        return max(4, self.itemsize)

    @property
    def pairs(self) -> int:
        """Query-key pairs of the whole sequence that the mask leaves, for one head of one batch entry."""
        return _pairs(self.mask, self.seq_q, self.seq_kv)

    def flops(self, direction: Direction, *, pairs: int | None = None) -> int:
        """Floating-point operations of `pairs` pairs (default: all of them), over all heads and batch entries."""
        per_pair = flops_per_pair(direction, qk=self.head_dim_qk, v=self.head_dim_v)
        return (self.pairs if pairs is None else pairs) * self.batch * self.heads * per_pair


def check_whole(error: type[UsageError], least: int = 1, most: int | None = None, **values: object) -> None:
    """Raise this error for the first value, by name, that is not a whole number of at least `least`, at most `most`."""
    for name, value in values.items():
        if type(value) is not int or value < least:
            raise error(f"{name}={brief(value)}: expected a whole number of at least {least}")
        if most is not None and value > most:
            raise error(f"{name}={brief(value)}: expected at most {most:,}")


def flops_per_pair(direction: Direction, *, qk: int, v: int) -> int:
    """Floating-point operations of one query with one key, in one head with head sizes `qk` and `v`."""
    # Forward: QKᵀ and PV. Backward: QKᵀ again, dO·Vᵀ, Pᵀ·dO, dS·K, dSᵀ·Q. Two operations a multiply-add.
    return 2 * (qk + v if direction == "forward" else 3 * qk + 2 * v)


@lru_cache(maxsize=64)
def _pairs(mask: Mask, seq_q: int, seq_kv: int) -> int:
    return mask.pairs(range(seq_q), range(seq_kv), seq_q=seq_q, seq_kv=seq_kv)


def _check_documents(problem: Problem) -> None:
    docs = problem.mask.documents
    if docs is None:
        return
    for name, cuts, length in (("cu_seqlens_q", docs.q, problem.seq_q), ("cu_seqlens_k", docs.kv, problem.seq_kv)):
        if cuts[-1] != length:
            raise MaskError(
                f"{name} ends at {cuts[-1]} but the sequence has {length} tokens; "
                "the documents must cover the whole sequence"
            )
