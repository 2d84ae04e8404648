"""How exact is bfloat16 on n ranks? Prints the error against float64, relative to that of one bfloat16 kernel.

All ranks run in one process, on the production path. Prints a table and a JSON line; exits with 1 if any ratio on 16
ranks is above 1.5.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from run_facts import start_result
from torch import Tensor

from mesh_attention import LocalGroup, MeshAttention

TOKENS, HEADS, KV_HEADS, DIM = 2048, 8, 4, 64
PLANNERS: dict[str, dict[str, Any]] = {
    "ring": {"method": "ring"},
    "pass-q": {"method": "pass-q"},
    "mesh": {"method": "mesh"},
    "mesh, grouped": {"method": "mesh", "blocks_per_call": 4},
    "mesh, partials by ring": {"method": "mesh", "partials": "ring"},
    "attention2d": {"method": "attention2d"},
    "ulysses 2 x mesh": {"method": "mesh", "ulysses_degree": 2},
}
LIMIT = 1.5


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(1, TOKENS, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [torch.randn(shape).bfloat16() for shape in shapes]


def spread(ranks: int, options: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients on this number of ranks; one rank makes one kernel call."""
    attention = MeshAttention(LocalGroup(ranks), **options)
    q, k, v, d_out = (t.to(dtype) for t in inputs())
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = attention.unshard(attention(*(attention.shard(t) for t in leaves), causal=True))
    return [out.detach(), *torch.autograd.grad((out * d_out).sum(), leaves)]


def errors(ours: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Root mean square error of O, dQ, dK, dV."""
    return [float((a.double() - b).square().mean().sqrt()) for a, b in zip(ours, truth, strict=True)]


def main() -> None:
    facts = start_result("how_exact_is_bfloat16")
    truth = spread(1, {}, torch.float64)
    single = errors(spread(1, {}, torch.bfloat16), truth)
    grid = [(name, ranks) for ranks in (2, 4, 8, 16) for name in PLANNERS]
    rows = []
    for name, ranks in track(grid, console=Console(stderr=True), transient=True):
        ratios = [
            e / s for e, s in zip(errors(spread(ranks, PLANNERS[name], torch.bfloat16), truth), single, strict=True)
        ]
        rows.append({"ranks": ranks, "planner": name, **dict(zip(("O", "dQ", "dK", "dV"), ratios, strict=True))})
    table = Table("ranks", "planner", "O", "dQ", "dK", "dV", title="error / error of one bfloat16 kernel")
    for row in rows:
        table.add_row(str(row["ranks"]), str(row["planner"]), *(f"{row[name]:.2f}" for name in ("O", "dQ", "dK", "dV")))
    Console().print(table)
    worst = max(row[name] for row in rows if row["ranks"] == 16 for name in ("O", "dQ", "dK", "dV"))
    print(f"worst ratio at 16 ranks: {worst:.2f} (limit {LIMIT})")
    rounded = [{k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    print(json.dumps({**facts, "single": single, "rows": rounded}))
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
