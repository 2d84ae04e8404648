"""Exact attention over long sequences, spread over many ranks: state a problem, plan it, prove it, forecast it, run it.

Importing this package does not import torch; asking it for `MeshAttention`, `mesh_attention`, `LocalGroup`,
`ShardedCache` or `CachedLayer` does.
"""

from typing import TYPE_CHECKING, Any

from mesh_attention.clusters import cluster_named, find_cluster, read_cluster
from mesh_attention.errors import (
    CacheFullError,
    DisagreementError,
    MaskError,
    MemoryLimitError,
    MeshAttentionError,
    ParseError,
    PlanError,
    ProblemError,
    ScheduleError,
    TileError,
    TopologyError,
    TransportError,
    UsageError,
)
from mesh_attention.masks import BlockKind, Mask, causal, documents, full, window
from mesh_attention.plan.assignment import Assignment, Tile
from mesh_attention.plan.counts import RankCosts, flops_by_rank, imbalance, rank_costs
from mesh_attention.plan.layout import (
    Chunks,
    Contiguous,
    Layout,
    Striped,
    Zigzag,
    inverse_permutation,
    permutation,
    position_ids,
)
from mesh_attention.plan.plan import Plan, parse_plan
from mesh_attention.plan.program import Program
from mesh_attention.plan.schedule import Schedule
from mesh_attention.planning.choice import METHODS, Choice
from mesh_attention.planning.costs import Costs, Limits, estimate_costs, limits
from mesh_attention.planning.registry import make_plan
from mesh_attention.problem import Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.timeline import Span, Timeline
from mesh_attention.topology import Device, KernelRate, Link, Topology
from mesh_attention.tuning.result import Trial, Tuning
from mesh_attention.tuning.tune import tune, tuned_plans
from mesh_attention.verification.evidence import Breach
from mesh_attention.verification.rules import BrokenPlanError, check, verify

if TYPE_CHECKING:
    from mesh_attention.api import MeshAttention, mesh_attention
    from mesh_attention.comm.local import LocalGroup
    from mesh_attention.serving import CachedLayer, ShardedCache

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Assignment",
    "BlockKind",
    "Breach",
    "BrokenPlanError",
    "CacheFullError",
    "CachedLayer",
    "Choice",
    "Chunks",
    "Contiguous",
    "Costs",
    "Device",
    "DisagreementError",
    "KernelRate",
    "Layout",
    "Limits",
    "Link",
    "LocalGroup",
    "Mask",
    "MaskError",
    "MemoryLimitError",
    "MeshAttention",
    "MeshAttentionError",
    "ParseError",
    "Plan",
    "PlanError",
    "Problem",
    "ProblemError",
    "Program",
    "RankCosts",
    "Schedule",
    "ScheduleError",
    "ShardedCache",
    "Span",
    "Striped",
    "Tile",
    "TileError",
    "Timeline",
    "Topology",
    "TopologyError",
    "TransportError",
    "Trial",
    "Tuning",
    "UsageError",
    "Zigzag",
    "causal",
    "check",
    "cluster_named",
    "documents",
    "estimate_costs",
    "find_cluster",
    "flops_by_rank",
    "full",
    "imbalance",
    "inverse_permutation",
    "limits",
    "make_plan",
    "mesh_attention",
    "parse_plan",
    "permutation",
    "position_ids",
    "rank_costs",
    "read_cluster",
    "simulate",
    "tune",
    "tuned_plans",
    "verify",
    "window",
]


def __getattr__(name: str) -> Any:
    """The half that needs torch, on first use."""
    if name in ("MeshAttention", "mesh_attention"):
        from mesh_attention import api

        return getattr(api, name)
    if name == "LocalGroup":
        from mesh_attention.comm.local import LocalGroup

        return LocalGroup
    if name in ("CachedLayer", "ShardedCache"):
        from mesh_attention import serving

        return getattr(serving, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
