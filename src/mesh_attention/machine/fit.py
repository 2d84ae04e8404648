"""Fits the rates and latencies of a cluster to measured times, without torch and without a clock.

Every fit minimises relative errors, so that short calls and small messages count as much as long ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mesh_attention.errors import TopologyError
from mesh_attention.problem import Direction
from mesh_attention.topology import Device, KernelRate, Link, LinkClass, Topology, filled

DUPLEX_BELOW = 1.5
"""Between the two: sending both ways takes 1 × the time of one way on a duplex link, and 2 × on any other."""
DIGITS = 4
"""Significant digits of a fitted figure; the noise is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTime:
    """One shape of attention call. `flops` counts what the mask leaves."""

    direction: Direction
    heads: int
    q_tokens: int
    kv_tokens: int
    is_causal: bool
    flops: int
    time_s: float

    def filled(self, width: int) -> float:
        """The share of a device's width that is busy: forward spreads runs of queries over it, backward runs of
        keys."""
        tokens = self.q_tokens if self.direction == "forward" else self.kv_tokens
        return filled(width, heads=self.heads, tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTime:
    """One size of message, sent by `pairs` pairs of ranks at once; `both_ways_s` while each end also receives."""

    link_class: LinkClass
    pairs: int
    nbytes: int
    one_way_s: float
    both_ways_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimes:
    """Merging a large partial, which reads and writes `nbytes`, and the smallest one."""

    nbytes: int
    large_s: float
    tiny_s: float
    memory_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measured times, the same on every rank. `threads` is the number of threads of one rank on a CPU."""

    device: str
    threads: int
    kernel: str
    width: int
    calls: tuple[CallTime, ...]
    memory: MemoryTimes
    messages: tuple[MessageTime, ...]


def fit_topology(
    measurement: Measurement, *, name: str, ranks: int, ranks_per_node: int, unmeasured: Topology | None
) -> Topology:
    """The measured cluster. Links that were not measured come from `unmeasured`, or else equal those that were."""
    links = fit_links(measurement.messages, ranks_per_node=ranks_per_node, unmeasured=unmeasured)
    device = fit_device(measurement)
    return Topology(name=name, ranks=ranks, ranks_per_node=ranks_per_node, device=device, **links._asdict())


def fit_device(measurement: Measurement) -> Device:
    memory = measurement.memory
    forward, backward = (
        fit_kernel_rate([call for call in measurement.calls if call.direction == direction], width=measurement.width)
        for direction in ("forward", "backward")
    )
    return Device(
        forward=forward,
        backward=backward,
        # Without the launch, which is added wherever the figure is used.
        memory_gb_per_s=_rounded(memory.nbytes / max(memory.large_s - memory.tiny_s, 0.1 * memory.large_s) / 1e9),
        memory_gib=_rounded(memory.memory_gib),
        launch_us=_rounded(memory.tiny_s * 1e6),
        width=measurement.width,
    )


# Kernels


def fit_kernel_rate(calls: Sequence[CallTime], *, width: int = 1) -> KernelRate:
    """Rate and fixed cost of a call from full calls, then `masked` from the causal calls, if there are any."""
    line = fit_line([(call.flops / call.filled(width), call.time_s) for call in calls if not call.is_causal])
    share = 1.0
    masked = [call for call in calls if call.is_causal]
    if masked:
        # Least squares of base + flops · slope / share, for 1 / share.
        whole = [call.flops / call.filled(width) * line.slope / call.time_s for call in masked]
        left = [1 - line.base / call.time_s for call in masked]
        inverse = _dot(whole, left) / _dot(whole, whole)
        if inverse <= 0:
            raise TopologyError(_too_noisy("a masked call is faster than an empty one"))
        share = 1 / inverse
    return KernelRate(
        tflops=_rounded(1e-12 / line.slope), call_us=_rounded(line.base * 1e6), masked=_rounded(share, digits=3)
    )


# Links


class Links(NamedTuple):
    inside: Link
    between: Link
    nics_per_node: int
    full_duplex: bool


def fit_links(messages: Sequence[MessageTime], *, ranks_per_node: int, unmeasured: Topology | None) -> Links:
    """Ranks mostly send and receive at once, so a duplex link's rate is that of both ways."""
    full_duplex = is_duplex(messages) if messages else unmeasured is not None and unmeasured.full_duplex
    within, across = ([m for m in messages if m.link_class == of] for of in ("inside", "between"))
    inside, between, nics = None, None, 1
    if within:
        inside = fit_link(within, full_duplex=full_duplex)
    if across:
        between, nics = _fit_nics(across, ranks_per_node, full_duplex=full_duplex)
    elif unmeasured is not None:
        between = unmeasured.between
        nics = max(1, unmeasured.nics_per_node * ranks_per_node // unmeasured.ranks_per_node)
    inside = inside or (unmeasured.inside if unmeasured is not None else between)
    between = between or inside
    if inside is None or between is None:
        raise TopologyError("no link was measured, because one rank has no peer; measure with 2 ranks or more")
    return Links(inside, between, min(nics, ranks_per_node), full_duplex)


def fit_link(messages: Sequence[MessageTime], *, full_duplex: bool) -> Link:
    line = fit_line([(m.nbytes, m.both_ways_s if full_duplex else m.one_way_s) for m in messages])
    return Link(gb_per_s=_rounded(1e-9 / line.slope), latency_us=_rounded(line.base * 1e6))


def is_duplex(messages: Sequence[MessageTime]) -> bool:
    """True if the largest messages of any kind of link take about as long both ways as one way."""
    largest = max(message.nbytes for message in messages)
    ratios = [m.both_ways_s / m.one_way_s for m in messages if m.nbytes == largest]
    return min(ratios) < DUPLEX_BELOW


def _fit_nics(messages: Sequence[MessageTime], ranks_per_node: int, *, full_duplex: bool) -> tuple[Link, int]:
    """Number of NICs: how many times the rate of one pair alone all pairs reach together."""
    pairs = max(message.pairs for message in messages)
    single, all_at_once = (
        fit_link([m for m in messages if m.pairs == count], full_duplex=full_duplex) for count in (1, pairs)
    )
    together = pairs * all_at_once.gb_per_s
    nics = max(1, min(ranks_per_node, round(together / single.gb_per_s)))
    rate = min(single.gb_per_s, together / nics)
    return Link(gb_per_s=_rounded(rate), latency_us=single.latency_us), nics


# Lines


class Line(NamedTuple):
    base: float
    slope: float


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """The line with the least squares of relative errors among those with a base of 0 or above."""
    if len({x for x, _ in points}) < 2:
        raise TopologyError(f"got {len(points)} times of one size; expected at least two sizes")
    xs, ys = [x for x, _ in points], [y for _, y in points]
    weights = [1 / y**2 for y in ys]  # errors are relative to the point
    total = sum(weights)
    middle_x, middle_y = _dot(weights, xs) / total, _dot(weights, ys) / total
    spread = _dot(weights, [(x - middle_x) ** 2 for x in xs])
    slope = _dot(weights, [(x - middle_x) * (y - middle_y) for x, y in points]) / spread
    base = middle_y - slope * middle_x
    if base < 0:
        base, slope = 0.0, _dot(weights, [x * y for x, y in points]) / _dot(weights, [x * x for x in xs])
    if slope <= 0:
        raise TopologyError(_too_noisy("more work takes no longer"))
    return Line(base, slope)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _too_noisy(what: str) -> str:
    return f"the measured times are inconsistent: {what}; measure again when the machine is idle"


def _rounded(value: float, *, digits: int = DIGITS) -> float:
    return float(f"{value:.{digits}g}")
