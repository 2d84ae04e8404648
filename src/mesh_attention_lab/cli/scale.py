"""What commands refuse on many ranks, at once, with what to ask instead."""

from __future__ import annotations

from mesh_attention.errors import UsageError
from mesh_attention.plan.assignment import Assignment, Tile
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.counts import MANY_RANKS
from mesh_attention.plan.layout import Layout
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.tuning.coarse import part_of
from mesh_attention_lab.cli.tables import mask_words


def refuse_uneven(problem: Problem, layout: Layout, topology: Topology) -> None:
    """Raise where each of many ranks would have to be simulated, because a mask gives each its own steps."""
    if problem.ranks < MANY_RANKS or BlockMatrix(problem, layout, Assignment(Tile(1, problem.ranks))).is_uniform:
        return
    part, _ = part_of(problem, topology)
    hint = (
        f"a part takes as long as the whole: use --ranks {part.ranks} --seq {part.seq_q}"
        if part.ranks < MANY_RANKS
        else f"use fewer than {MANY_RANKS:,} ranks"
    )
    raise UsageError(
        f"{problem.ranks:,} ranks with the mask {mask_words(problem)} on the layout {layout.name}: each rank has its "
        f"own steps, and simulating all of them takes hours; {hint}"
    )
