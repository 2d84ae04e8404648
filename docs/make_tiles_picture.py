"""Draws docs/tiles.svg: which rank computes which block, as a ring and as a mesh. Run it to update the picture."""

from __future__ import annotations

from pathlib import Path

from mesh_attention import Plan, Problem, make_plan, rank_costs
from mesh_attention.plan.steps import Attend, Item

RANKS, MARKED, CELL, GAP, TOP = 16, 5, 18, 90, 64
PICTURE = Path(__file__).with_name("tiles.svg")


def picture() -> str:
    problem = Problem.self_attention(seq_len=RANKS * 4096, heads=32, head_dim=128, ranks=RANKS)
    ring, mesh = make_plan(problem, method="ring"), make_plan(problem, tile=(4, 4))
    side = RANKS * CELL
    width, height = 2 * side + GAP + 60, side + TOP + 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *matrix(ring, f"Ring 1×16: rank {MARKED} computes one row", left=40),
        *matrix(mesh, f"Mesh 4×4: rank {MARKED} computes one tile", left=40 + side + GAP),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def matrix(plan: Plan, title: str, *, left: int) -> list[str]:
    owner = {
        (row.shard, col.shard): program.rank
        for program in plan.all_programs()
        for step in program.steps
        if isinstance(step, Attend)
        for row in step.rows
        for col in step.cols
    }
    costs = rank_costs(plan, MARKED)
    units = sum(size.payload for size in costs.received.values()) / plan.matrix.nbytes(Item("q", 0)).payload
    side = RANKS * CELL
    parts = [
        text(left, 24, title, size=15),
        text(left, TOP - 10, "key/value shards →", size=11),
        text(left, TOP + side + 22, f"receives {units:.0f} shards' worth in {costs.messages} messages", size=13),
    ]
    for (row, col), rank in owner.items():
        hue = rank * 360 // RANKS
        fill = f"hsl({hue},75%,45%)" if rank == MARKED else f"hsl({hue},45%,86%)"
        x, y = left + col * CELL, TOP + row * CELL
        parts.append(f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="{fill}"/>')
        colour = "#ffffff" if rank == MARKED else "#555555"
        place = f'x="{x + CELL / 2 - 0.5}" y="{y + 12.5}" font-size="9" text-anchor="middle"'
        parts.append(f'<text {place} fill="{colour}">{rank}</text>')
    return parts


def text(x: float, y: float, words: str, *, size: int) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="#222222">{words}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture())
