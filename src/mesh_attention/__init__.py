"""Exact attention over long sequences, spread over many ranks: describe a problem, plan it, prove it, run it.

Importing this package never imports torch.
"""

from mesh_attention.errors import (
    MaskError,
    MeshAttentionError,
    ParseError,
    PlanError,
    ProblemError,
    ScheduleError,
    TileError,
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

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Assignment",
    "BlockKind",
    "Breach",
    "BrokenPlanError",
    "Contiguous",
    "Costs",
    "Layout",
    "Mask",
    "MaskError",
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
