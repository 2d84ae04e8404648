"""Exact attention over long sequences, spread over many ranks: state a problem, plan it, prove it, forecast it, run it.

Importing this package does not import torch; asking it for `MeshAttention`, `mesh_attention`, `LocalGroup`,
`ShardedCache` or `CachedLayer` does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mesh_attention.clusters import cluster_named
from mesh_attention.errors import DisagreementError, MeshAttentionError, PlanError, TransportError, UsageError
from mesh_attention.masks import causal, documents, full, window
from mesh_attention.plan.assignment import Tile
from mesh_attention.plan.layout import Chunks, Contiguous, Striped, Zigzag
from mesh_attention.plan.parse import parse_plan
from mesh_attention.plan.plan import Plan, rank_costs
from mesh_attention.planners.choice import Choice
from mesh_attention.planners.make import make_plan
from mesh_attention.problem import Problem
from mesh_attention.simulation.simulate import simulate
from mesh_attention.topology import Topology
from mesh_attention.tuning.tune import tune
from mesh_attention.verification.rules import verify

if TYPE_CHECKING:
    from mesh_attention.api import MeshAttention, mesh_attention
    from mesh_attention.comm.local import LocalGroup
    from mesh_attention.serving import CachedLayer, ShardedCache

__version__ = "0.1.0"

__all__ = [
    "CachedLayer",
    "Choice",
    "Chunks",
    "Contiguous",
    "DisagreementError",
    "LocalGroup",
    "MeshAttention",
    "MeshAttentionError",
    "Plan",
    "PlanError",
    "Problem",
    "ShardedCache",
    "Striped",
    "Tile",
    "Topology",
    "TransportError",
    "UsageError",
    "Zigzag",
    "causal",
    "cluster_named",
    "documents",
    "full",
    "make_plan",
    "mesh_attention",
    "parse_plan",
    "rank_costs",
    "simulate",
    "tune",
    "verify",
    "window",
]


_WITH_TORCH = {
    **dict.fromkeys(("MeshAttention", "mesh_attention"), "api"),
    **dict.fromkeys(("CachedLayer", "ShardedCache"), "serving"),
    "LocalGroup": "comm.local",
}


def __getattr__(name: str) -> Any:
    """The half that needs torch, on first use."""
    if name in _WITH_TORCH:
        return getattr(import_module(f"mesh_attention.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
