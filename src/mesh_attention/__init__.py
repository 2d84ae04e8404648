"""Exact attention over long sequences, spread over many ranks: describe a problem, plan it, prove it, run it.

Importing this package does not import torch; asking it for `MeshAttention`, `mesh_attention` or `LocalGroup` does.
"""

from typing import TYPE_CHECKING, Any

from mesh_attention.errors import (
    DisagreementError,
    MaskError,
    MeshAttentionError,
    ParseError,
    PlanError,
    ProblemError,
    ScheduleError,
    TileError,
    TransportError,
    UsageError,
)
from mesh_attention.masks import BlockKind, Mask, causal, documents, full, window
from mesh_attention.plan.assignment import Assignment, Tile
from mesh_attention.plan.codec import parse_plan, plan_from_json, plan_to_json, read_plan
from mesh_attention.plan.layout import (
    Contiguous,
    Layout,
    Striped,
    Zigzag,
    inverse_permutation,
    permutation,
    position_ids,
)
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.program import Program
from mesh_attention.plan.queries import RankCosts, flops_by_rank, imbalance, rank_costs
from mesh_attention.plan.schedule import Schedule
from mesh_attention.planning.costs import Costs, estimate_costs
from mesh_attention.planning.registry import METHODS, make_plan
from mesh_attention.problem import Problem
from mesh_attention.verification.check import BrokenPlanError, check, verify
from mesh_attention.verification.evidence import Breach

if TYPE_CHECKING:
    from mesh_attention.api import MeshAttention, mesh_attention
    from mesh_attention.comm.local import LocalGroup

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Assignment",
    "BlockKind",
    "Breach",
    "BrokenPlanError",
    "Contiguous",
    "Costs",
    "DisagreementError",
    "Layout",
    "LocalGroup",
    "Mask",
    "MaskError",
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
    "Striped",
    "Tile",
    "TileError",
    "TransportError",
    "UsageError",
    "Zigzag",
    "causal",
    "check",
    "documents",
    "estimate_costs",
    "flops_by_rank",
    "full",
    "imbalance",
    "inverse_permutation",
    "make_plan",
    "mesh_attention",
    "parse_plan",
    "permutation",
    "plan_from_json",
    "plan_to_json",
    "position_ids",
    "rank_costs",
    "read_plan",
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
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
