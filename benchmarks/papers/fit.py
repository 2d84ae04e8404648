"""The cluster of the Mesh-Attention paper, which names neither its GPUs nor its network, fitted to its published times.

Unknown are the rates of kernels and of links inside and between nodes, how many NICs a node of eight has, whether links
carry both directions at once, and whether times are of forward alone or of forward and backward. There is one value of
each for all figures: the one with the least squares of log ratios over all of them. "Fastest on 64 GPUs" counts as the
log of how much longer 64 take than the best number.

Latency is not fitted: free, it grows to milliseconds a message, which no link has. All else is that of the preset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import exp, log, sqrt

from mesh_attention.clusters import PRESETS
from mesh_attention.plan.steps import DIRECTIONS, Direction
from mesh_attention.topology import Topology
from papers.figures import PUBLISHED, QUANTITIES, Quantity
from papers.scaling import Contender, Progress, Scaling, run_experiments

Passes = tuple[Direction, ...]
PASSES: Passes = DIRECTIONS
"""What the published times are taken to be of: it fits a little better than forward alone."""
BACKWARD_SHARE = 0.85
"""Of the forward rate, that a backward kernel reaches; usual for attention."""
NICS, DUPLEX = (1, 2, 4, 8), (True, False)
COARSE_TFLOPS, COARSE_INSIDE = (60.0, 120.0, 240.0), (1.5, 3.0, 6.0)
"""With 1.4 GB/s between nodes. All rates are then scaled together: only their ratios need a search."""
FINER = (1.2, 1.1, 1.05, 1.02)
WORTH_A_FINE_SEARCH = 1.3
"""How much worse than the best a coarse fit may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A cluster, the passes that are taken to be timed, and log(ours / published) of each quantity."""

    cluster: Topology
    passes: Passes
    residuals: dict[Quantity, float]

    @property
    def rms(self) -> float:
        return sqrt(sum(r * r for r in self.residuals.values()) / len(self.residuals))


def fitted() -> Topology:
    return PRESETS["paper"]


def with_rates(cluster: Topology, *, tflops: float, inside: float, between: float) -> Topology:
    device = cluster.device
    device = replace(
        device,
        forward=replace(device.forward, tflops=tflops),
        backward=replace(device.backward, tflops=tflops * BACKWARD_SHARE),
    )
    return replace(
        cluster,
        device=device,
        inside=replace(cluster.inside, gb_per_s=inside),
        between=replace(cluster.between, gb_per_s=between),
    )


def with_latency(cluster: Topology, latency_us: float) -> Topology:
    inside, between = (replace(link, latency_us=latency_us) for link in (cluster.inside, cluster.between))
    return replace(cluster, inside=inside, between=between)


# How good a cluster is


def residuals(scaling: Scaling) -> dict[Quantity, float]:
    values = scaling.values()
    return {quantity: _residual(quantity, values[quantity], scaling) for quantity in QUANTITIES}


_BEST: dict[Quantity, Contender] = {"ring best": "ring", "mesh best": "mesh"}


def _residual(quantity: Quantity, ours: float, scaling: Scaling) -> float:
    published = PUBLISHED[quantity]
    if quantity in _BEST:
        return log(1 + scaling.excess(_BEST[quantity], round(published)))
    # Nothing at all is infinitely far off; so is less than nothing, such as waiting that was added.
    return log(max(ours, 1e-9) / published)


def scaled_fits(cluster: Topology, all_passes: Iterable[Passes]) -> Iterator[Fit]:
    """The cluster with all rates made faster or slower alike, so that both published times are met as well as can be.

    What is a ratio of times stays as it is, but for latencies and the costs of calls, which are small here.
    """
    measured = run_experiments(cluster)
    for passes in all_passes:
        found = residuals(Scaling.of(measured, passes))
        off = (found["ring time"] + found["mesh time"]) / 2
        at = {**found, "ring time": found["ring time"] - off, "mesh time": found["mesh time"] - off}
        yield Fit(cluster=_faster(cluster, exp(off)), passes=passes, residuals=at)


def _faster(cluster: Topology, factor: float) -> Topology:
    return with_rates(
        cluster,
        tflops=cluster.device.forward.tflops * factor,
        inside=cluster.inside.gb_per_s * factor,
        between=cluster.between.gb_per_s * factor,
    )


# The search


def fit(*, on_progress: Progress | None = None) -> tuple[Fit, ...]:
    """The best for each number of NICs, kind of link and passes, best first; those near the best searched more finely.

    Takes minutes.
    """
    report = on_progress or (lambda activity, fraction: None)
    hypotheses = list(product(NICS, DUPLEX))
    coarse: list[Fit] = []
    for index, (nics, full_duplex) in enumerate(hypotheses):
        report("fitting", index / len(hypotheses) / 2)
        cluster = replace(fitted(), nics_per_node=nics, full_duplex=full_duplex)
        coarse += best_of(cluster, product(COARSE_TFLOPS, COARSE_INSIDE), (DIRECTIONS, DIRECTIONS[:1]))
    limit = WORTH_A_FINE_SEARCH * min(fit.rms for fit in coarse)
    found: list[Fit] = []
    for index, at in enumerate(coarse):
        report("fitting more finely", 0.5 + index / len(coarse) / 2)
        found.append(refined(at, FINER) if at.rms <= limit else at)
    return tuple(sorted(found, key=lambda fit: fit.rms))


def best_of(cluster: Topology, rates: Iterable[tuple[float, float]], all_passes: tuple[Passes, ...]) -> list[Fit]:
    """For each choice of passes, the best of these kernel rates and rates inside nodes."""
    tried = [
        list(scaled_fits(with_rates(cluster, tflops=tflops, inside=inside, between=1.4), all_passes))
        for tflops, inside in rates
    ]
    return [min(fits, key=lambda fit: fit.rms) for fits in zip(*tried, strict=True)]


def refined(start: Fit, factors: Iterable[float]) -> Fit:
    """As long as a neighbour is better, to it; then with the next factor between neighbours."""
    best = start
    for factor in factors:
        while (near := min(_neighbours(best, factor), key=lambda fit: fit.rms)).rms < best.rms:
            best = near
    return best


def _neighbours(at: Fit, factor: float) -> Iterator[Fit]:
    cluster = at.cluster
    tflops, inside = cluster.device.forward.tflops, cluster.inside.gb_per_s
    for kernel, link in ((factor, 1.0), (1 / factor, 1.0), (1.0, factor), (1.0, 1 / factor)):
        near = with_rates(cluster, tflops=tflops * kernel, inside=inside * link, between=cluster.between.gb_per_s)
        yield from scaled_fits(near, (at.passes,))
