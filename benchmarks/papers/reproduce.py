"""Ours beside every published figure: volumes counted in plans, times simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from typing_extensions import assert_never

from mesh_attention.clusters import PRESETS
from mesh_attention.masks import causal
from mesh_attention.plan.plan import rank_costs
from mesh_attention.plan.steps import DIRECTIONS
from mesh_attention.planners.make import make_plan
from mesh_attention.problem import Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.topology import Topology
from papers.figures import (
    BEST_TILES,
    FIGURES,
    SCALING_TILES,
    Attention2dSpeedup,
    EffectiveLink,
    Figure,
    LeastVolumeTiles,
    PlanVolume,
    Simulated,
    StarTrailVolume,
    VolumeCut,
    VolumeDrop,
    VolumeRatio,
)
from papers.fit import PASSES, fitted
from papers.scaling import Contender, Scaling, run_experiments

Progress = Callable[[str, float], None]
SEQ, HEADS, HEAD_DIM = 1 << 20, 32, 128
"""What volumes are counted at; in N·d and in units they are the same at any length."""
GPT3_HEADS, GPT3_SEQS = 96, tuple(1 << power for power in range(12, 18))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A figure and ours. `deviation` is in points for figures in %; in GPUs, how much longer the published number takes
    than the best; otherwise relative."""

    figure: Figure
    ours: float
    deviation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """A row for each of `FIGURES`, in their order, and the simulated runs behind the times."""

    cluster: Topology
    rows: tuple[Row, ...]
    scaling: Scaling


def reproduce(*, on_progress: Progress | None = None) -> Reproduction:
    """Work out every figure. Takes seconds."""
    report = on_progress or (lambda activity, fraction: None)
    cluster = fitted()
    measured = run_experiments(cluster, on_progress=lambda activity, fraction: report(activity, fraction / 2))
    scaling = Scaling.of(measured, PASSES)
    rows = []
    for index, figure in enumerate(FIGURES):
        report(f"working out the {figure.what}", 0.5 + index / len(FIGURES) / 2)
        rows.append(_row(figure, scaling))
    return Reproduction(cluster=cluster, rows=tuple(rows), scaling=scaling)


def _row(figure: Figure, scaling: Scaling) -> Row:
    ours = _ours(figure, scaling)
    return Row(figure=figure, ours=ours, deviation=_deviation(figure, ours, scaling))


def _deviation(figure: Figure, ours: float, scaling: Scaling) -> float:
    if figure.unit == "%":
        return ours - figure.published
    if figure.unit == "GPUs" and isinstance(figure.ours, Simulated):
        contender: Contender = "ring" if figure.ours.quantity == "ring best" else "mesh"
        return scaling.excess(contender, round(figure.published))
    return ours / figure.published - 1


def _ours(figure: Figure, scaling: Scaling) -> float:
    source = figure.ours
    match source:
        case PlanVolume():
            whole = volume(source)
            return whole * source.ranks if figure.unit == "units" else whole
        case StarTrailVolume(ranks=ranks, degree=degree):
            return startrail_units(ranks, degree) / ranks
        case VolumeCut(of=of):
            cuts = [100 * volume_cut(ranks) for ranks in SCALING_TILES]
            return max(cuts) if of == "most" else sum(cuts) / len(cuts)
        case VolumeDrop(before=before, after=after):
            return 100 * (1 - volume(after) / volume(before))
        case VolumeRatio(before=before, after=after):
            return volume(before) / volume(after)
        case LeastVolumeTiles():
            return sum(_planners_tile(*key) == tile for key, tile in BEST_TILES.items())
        case Simulated(quantity):
            return scaling.values()[quantity]
        case EffectiveLink():
            return _effective_gb_per_s(scaling)
        case Attention2dSpeedup(cluster=name, ranks_per_node=ranks_per_node):
            return attention2d_speedup(name, ranks_per_node)
        case _:
            assert_never(source)


# Volumes


@lru_cache(maxsize=256)
def volume(of: PlanVolume) -> float:
    """Elements that rank 0 receives by the plan, in N·d; statistics are left out, as in the papers."""
    problem = _problem(of.ranks)
    plan = make_plan(
        problem,
        method=of.method,
        tile=of.tile,
        ulysses_degree=of.ulysses_degree if of.method != "ulysses" else None,
        layout="striped",
        direction=of.direction,
    )
    received = rank_costs(plan, 0).received
    return sum(size.payload for size in received.values()) / problem.itemsize / (SEQ * HEADS * HEAD_DIM)


def volume_cut(ranks: int) -> float:
    """How much less Mesh moves than Ring, with the paper's tile for this many GPUs."""
    mesh = volume(PlanVolume(method="mesh", ranks=ranks, tile=SCALING_TILES[ranks]))
    return 1 - mesh / volume(PlanVolume(method="ring", ranks=ranks))


def _planners_tile(ranks: int, group_size: int) -> object:
    return make_plan(_problem(ranks, group_size)).assignment.tile


def _problem(ranks: int, group_size: int = 1) -> Problem:
    return Problem.self_attention(
        seq_len=SEQ, heads=HEADS, kv_heads=HEADS // group_size, head_dim=HEAD_DIM, ranks=ranks, mask=causal()
    )


# Times


def _effective_gb_per_s(scaling: Scaling) -> float:
    plans = [make_plan(_problem(64), method="ring", layout="striped", direction=direction) for direction in PASSES]
    return sum(rank_costs(plan, 0).received_nbytes for plan in plans) / scaling.strong("ring")[64].time_s / 1e9


@lru_cache(maxsize=16)
def attention2d_speedup(name: str, ranks_per_node: int) -> float:
    """Over Ring, the most of `GPT3_SEQS`, forward and backward, on 64 GPUs with a NIC each."""
    preset = PRESETS[name]
    topology = replace(preset, ranks=64, ranks_per_node=ranks_per_node, nics_per_node=ranks_per_node)
    return max(_time_s("ring", seq, topology) / _time_s("attention2d", seq, topology) for seq in GPT3_SEQS)


def _time_s(method: str, seq: int, topology: Topology) -> float:
    problem = Problem.self_attention(seq_len=seq, heads=GPT3_HEADS, head_dim=128, ranks=topology.ranks, mask=causal())
    total = 0.0
    for direction in DIRECTIONS:
        if method == "ring":
            plan = make_plan(problem, method="ring", direction=direction, route="ring")
        else:
            plan = make_plan(problem, method="attention2d", direction=direction, tile=(8, 8))
        total += simulate(plan, topology, priced_ranks=2).time_s
    return total


def startrail_units(ranks: int, degree: int) -> float:
    """Forward volume per rank at g = 1, in units of (tokens per rank × heads × head size), as its paper states it."""
    return 4 * degree - 1 + 2 * ranks / degree
