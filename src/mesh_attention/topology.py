"""`Topology`, a cluster as a value: ranks in nodes, links inside and between nodes, and the device of a rank.

Values only; presets and files are in `clusters`. Rates are sustained payload rates as a program sees them, not those
of a data sheet. A link serves one transfer at a time, in each direction if it is duplex.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

from mesh_attention.errors import TopologyError
from mesh_attention.problem import MOST_RANKS, Direction, check_whole
from mesh_attention.units import brief

RUN = 128
"""Tokens that one unit of a device's width works on at a time."""
LEAST, MOST = 1e-12, 1e12
"""Rates and times beyond these are taken for typos; a forecast with them would overflow."""
LinkClass = Literal["inside", "between"]
"""The kind of link that a transfer uses: inside a node, or between nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of a link: bytes take ``latency_us + nbytes / gb_per_s``."""

    gb_per_s: float
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        _check_positive(self, "gb_per_s")
        _check_not_negative(self, "latency_us")

    def seconds(self, nbytes: float) -> float:
        return self.latency_us * 1e-6 + nbytes / (self.gb_per_s * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRate:
    """The time of an attention call: ``call_us + flops / tflops``, at full width.

    `masked` is the share of that rate that a partly masked call reaches, counting useful operations only.
    """

    tflops: float
    call_us: float = 0.0
    masked: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self, "tflops", "masked")
        _check_not_negative(self, "call_us")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of a rank.

    `width` is the number of runs of `RUN` tokens of one head that it works on at once (a GPU's multiprocessors): calls
    that fill the last round badly are slower. 1 means a device without such rounds.
    """

    forward: KernelRate
    backward: KernelRate
    memory_gb_per_s: float
    memory_gib: float
    launch_us: float = 0.0
    width: int = 1

    def __post_init__(self) -> None:
        _check_positive(self, "memory_gb_per_s", "memory_gib")
        _check_not_negative(self, "launch_us")
        check_whole(TopologyError, width=self.width)

    def rate(self, direction: Direction) -> KernelRate:
        return self.forward if direction == "forward" else self.backward

    def call_seconds(
        self, direction: Direction, *, heads: int, q_tokens: int, kv_tokens: int, flops: int, is_masked: bool
    ) -> float:
        """An attention call. Forward spreads runs of queries over the device's width, backward runs of keys."""
        rate, tokens = self.rate(direction), q_tokens if direction == "forward" else kv_tokens
        share = (rate.masked if is_masked else 1.0) * filled(self.width, heads=heads, tokens=tokens)
        tflops = rate.tflops * share
        return rate.call_us * 1e-6 + flops / (tflops * 1e12)

    def touch_seconds(self, nbytes: float, *, launches: float = 1) -> float:
        """Small kernels, such as merges, that read and write this many bytes together."""
        return launches * self.launch_us * 1e-6 + nbytes / (self.memory_gb_per_s * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A cluster. Rank r is in node r // ranks_per_node; the last node may be smaller.

    Inside a node every rank has its own port. Between nodes, rank l of a node uses its NIC ``l · nics // ranks``,
    alone or shared. The network between NICs is not a bottleneck.
    """

    name: str
    ranks: int
    ranks_per_node: int
    device: Device
    inside: Link
    between: Link
    nics_per_node: int = 1
    full_duplex: bool = True

    def __post_init__(self) -> None:
        ranks, ranks_per_node, nics = self.ranks, self.ranks_per_node, self.nics_per_node
        check_whole(TopologyError, most=MOST_RANKS, ranks=ranks, ranks_per_node=ranks_per_node, nics_per_node=nics)
        if not (isinstance(self.name, str) and self.name and self.name.isprintable()):
            raise TopologyError(f"name={self.name!r}: expected a text that can be printed, such as 'h100'")
        for name, wanted in (("device", Device), ("inside", Link), ("between", Link)):
            if not isinstance(getattr(self, name), wanted):
                raise TopologyError(f"{name}={getattr(self, name)!r}: expected a {wanted.__name__}(...)")
        if self.nics_per_node > self.ranks_per_node:
            raise TopologyError(
                f"nics_per_node={self.nics_per_node}: expected at most ranks_per_node={self.ranks_per_node}, because a "
                "rank uses one NIC; if a rank can use several, describe them as one NIC with their total rate"
            )
        if not isinstance(self.full_duplex, bool):
            raise TopologyError(f"full_duplex={self.full_duplex!r}: expected True or False")

    @property
    def nodes(self) -> int:
        return ceil(self.ranks / self.ranks_per_node)

    def node(self, rank: Any) -> Any:
        """The node of a rank, or of each rank of an array."""
        return rank // self.ranks_per_node

    def nic(self, rank: Any) -> Any:
        """The NIC of a rank, or of each rank of an array, numbered over the whole cluster."""
        node, local = divmod(rank, self.ranks_per_node)
        return node * self.nics_per_node + local * self.nics_per_node // self.ranks_per_node

    def link_class(self, source: int, dest: int) -> LinkClass:
        return "inside" if self.node(source) == self.node(dest) else "between"

    def link(self, link_class: LinkClass) -> Link:
        return self.inside if link_class == "inside" else self.between

    def with_ranks(self, ranks: int) -> Topology:
        """A cluster of the same machines with this number of ranks."""
        return replace(self, ranks=ranks)


def filled(width: int, *, heads: int, tokens: int) -> float:
    """The share of a device's width that a call keeps busy, on average over its rounds; 1 if it has no rounds."""
    if width == 1:
        return 1.0
    rounds = ceil(heads * ceil(tokens / RUN) / width)
    return heads * tokens / RUN / (rounds * width)


def _check_positive(value: object, *names: str) -> None:
    _check(value, names, LEAST, f"a number above 0, from {LEAST:g} to {MOST:g}")


def _check_not_negative(value: object, *names: str) -> None:
    _check(value, names, 0.0, f"a number, 0 or above, up to {MOST:g}")


def _check(value: object, names: Sequence[str], least: float, expected: str) -> None:
    for name in names:
        number = getattr(value, name)
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not least <= number <= MOST:  # neither is true of a NaN
            raise TopologyError(f"{type(value).__name__} {name}={brief(number)}: expected {expected}")
