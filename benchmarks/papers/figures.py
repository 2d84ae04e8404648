"""The published figures, as values: of what, the number, and from which plan or simulation ours comes.

Nothing is worked out here but the papers' own formulas, which are published numbers for every n. Volumes are of a rank,
in elements; N is the tokens of the sequence, d all heads together, a unit N·d / n.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal, get_args

from typing_extensions import assert_never

from mesh_attention.plan.assignment import Tile
from mesh_attention.plan.steps import Direction
from mesh_attention.planners.choice import Method

Paper = Literal["Mesh-Attention", "ATTENTION2D", "derived"]
"""derived: follows from a paper's formulas, in no paper itself."""
Unit = Literal["N·d", "units", "tiles", "%", "s", "×", "GB/s", "GPUs"]

Quantity = Literal[
    "ring time",
    "mesh time",
    "ring best",
    "mesh best",
    "most speedup",
    "average speedup",
    "ring growth",
    "mesh growth",
    "most wait cut",
    "wait share",
]
"""What is read off the simulated experiments of the Mesh-Attention paper; see `scaling`."""
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)


# Where ours comes from


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanVolume:
    """What a rank receives by one plan; without a tile, by the one that the planner takes."""

    method: Method
    ranks: int
    tile: Tile | None = None
    ulysses_degree: int = 1
    direction: Direction = "forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class StarTrailVolume:
    ranks: int
    degree: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeCut:
    """Mesh against Ring, over `SCALING_TILES`."""

    of: Literal["most", "average"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeDrop:
    """How much less a rank receives by one plan than by another."""

    before: PlanVolume
    after: PlanVolume


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeRatio:
    before: PlanVolume
    after: PlanVolume


@dataclass(frozen=True, slots=True)
class LeastVolumeTiles:
    """How many of `BEST_TILES` the planner finds."""


@dataclass(frozen=True, slots=True)
class Simulated:
    quantity: Quantity


@dataclass(frozen=True, slots=True)
class EffectiveLink:
    """What a rank of Ring receives on 64 GPUs, over its simulated time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention2dSpeedup:
    """The most, over a range of lengths, on 64 GPUs of a preset."""

    cluster: str
    ranks_per_node: int


Source = (
    PlanVolume
    | StarTrailVolume
    | VolumeCut
    | VolumeDrop
    | VolumeRatio
    | LeastVolumeTiles
    | Simulated
    | EffectiveLink
    | Attention2dSpeedup
)


def how(source: Source) -> str:
    """How ours is obtained, in words."""
    match source:
        case PlanVolume() | VolumeCut() | VolumeDrop() | VolumeRatio() | LeastVolumeTiles():
            return "counted in plans"
        case StarTrailVolume():
            return "cost model"
        case Simulated() | EffectiveLink():
            return "simulated on the fitted cluster"
        case Attention2dSpeedup(cluster=cluster):
            return f"simulated on {cluster}"
        case _:
            assert_never(source)


# Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """`note` says what must be known to read the deviation; if it `is_explained` by no honest setting, why."""

    what: str
    paper: Paper
    published: float
    unit: Unit
    ours: Source
    note: str = ""
    is_explained: bool = True

    @property
    def is_volume(self) -> bool:
        return not isinstance(self.ours, Simulated | EffectiveLink | Attention2dSpeedup)


SCALING_TILES = {32: Tile(4, 8), 64: Tile(8, 8), 128: Tile(8, 16), 256: Tile(8, 32)}
"""The tiles of the Mesh-Attention paper's scaling experiments, by GPUs, as its volumes give them away."""

BEST_TILES = {
    (16, 1): Tile(4, 4),
    (16, 4): Tile(2, 8),
    (32, 1): Tile(4, 8),
    (32, 4): Tile(2, 16),
    (64, 1): Tile(8, 8),
    (64, 4): Tile(4, 16),
    (64, 8): Tile(2, 32),
    (128, 1): Tile(8, 16),
    (128, 4): Tile(4, 32),
    (256, 1): Tile(16, 16),
    (256, 4): Tile(8, 32),
    (256, 8): Tile(4, 64),
}
"""The tile with the least volume, by ranks and query heads a KV head."""

UNKNOWN_SET = (
    "Published over all experiments of the paper, whose set is not known; ours is over 1M tokens on 32, 64, 128 and "
    "256 GPUs."
)
GRADIENTS = (
    "Forward, as the formulas. Forward and backward together, with O sent along in backward and gradients in float32, "
    "give 51.8 and, at most, 85.4: so the paper seems to count."
)
COST_MODEL = "StarTrail has no plan here: this is the cost model that the tuner compares with."
ASYMPTOTIC = "Published as O(B·N·M·H / √P), so 2 for four times the GPUs; what it leaves out is the rank's own shard."


def _volume(what: str, published: float, ours: Source, *, note: str = "") -> Figure:
    return Figure(what=what, paper="Mesh-Attention", published=published, unit="N·d", ours=ours, note=note)


def _mesh_formula(tile: Tile) -> Figure:
    n, a = tile.rows * tile.cols, tile.rows
    ours = PlanVolume(method="mesh", ranks=n, tile=tile)
    return _volume(f"volume of Mesh {tile}, {n} GPUs", 2 * a / n + 2 / a - 4 / n, ours)


FORMULAS = (
    *(_volume(f"volume of Ring, {n} GPUs", 2 - 2 / n, PlanVolume(method="ring", ranks=n)) for n in (32, 256)),
    *(
        _volume(f"volume of Ulysses, {n} GPUs", 4 * (n - 1) / n**2, PlanVolume(method="ulysses", ranks=n))
        for n in (8, 32)
    ),
    *(
        _volume(
            f"volume of StarTrail, C = {c}, {n} GPUs",
            (4 * c - 1) / n + 2 / c,
            StarTrailVolume(ranks=n, degree=c),
            note=COST_MODEL,
        )
        for n, c in ((64, 4), (256, 8))
    ),
    *map(_mesh_formula, (*SCALING_TILES.values(), Tile(4, 64), Tile(2, 16))),
    *(
        _volume(f"least volume of any tile, {n} GPUs", 4 / sqrt(n) - 4 / n, PlanVolume(method="mesh", ranks=n))
        for n in (16, 64, 256)
    ),
)

MESH_VOLUMES = (
    Figure(
        what="volume cut against Ring, at most, all experiments",
        paper="Mesh-Attention",
        published=85.4,
        unit="%",
        ours=VolumeCut(of="most"),
        note=UNKNOWN_SET,
    ),
    Figure(
        what="volume cut against Ring, average, all experiments",
        paper="Mesh-Attention",
        published=79.0,
        unit="%",
        ours=VolumeCut(of="average"),
        note=UNKNOWN_SET,
    ),
    Figure(
        what="volume cut against Ring, at most, 1M tokens",
        paper="Mesh-Attention",
        published=85.5,
        unit="%",
        ours=VolumeCut(of="most"),
    ),
    Figure(
        what="volume cut against Ring, average, 1M tokens",
        paper="Mesh-Attention",
        published=78.2,
        unit="%",
        ours=VolumeCut(of="average"),
    ),
    Figure(
        what="volume cut of Mesh, 32 to 256 GPUs",
        paper="Mesh-Attention",
        published=51.8,
        unit="%",
        ours=VolumeDrop(
            before=PlanVolume(method="mesh", ranks=32, tile=SCALING_TILES[32]),
            after=PlanVolume(method="mesh", ranks=256, tile=SCALING_TILES[256]),
        ),
        note=GRADIENTS,
    ),
)


def _units(what: str, published: float, ours: Source) -> Figure:
    return Figure(what=what, paper="derived", published=published, unit="units", ours=ours)


DERIVED_VOLUMES = (
    _units("USP, 8 · 32, 256 GPUs", 65.5, PlanVolume(method="ring", ranks=256, ulysses_degree=8)),
    _units("Mesh 8x32, 256 GPUs", 76, PlanVolume(method="mesh", ranks=256, tile=Tile(8, 32))),
    _units(
        "Mesh 8x32, 256 GPUs, backward",
        3 * 7 + 4 * 31,
        PlanVolume(method="mesh", ranks=256, tile=Tile(8, 32), direction="backward"),
    ),
    _units(
        "Ulysses × Mesh, 8 · 4x8, 256 GPUs",
        23.5,
        PlanVolume(method="mesh", ranks=256, tile=Tile(4, 8), ulysses_degree=8),
    ),
    Figure(
        what="tiles with the least volume that the planner finds",
        paper="derived",
        published=len(BEST_TILES),
        unit="tiles",
        ours=LeastVolumeTiles(),
    ),
)

ATTENTION2D_VOLUMES = (
    Figure(
        what="volume, 4096 GPUs against 16384",
        paper="ATTENTION2D",
        published=2,
        unit="×",
        ours=VolumeRatio(
            before=PlanVolume(method="attention2d", ranks=4096, tile=Tile(64, 64)),
            after=PlanVolume(method="attention2d", ranks=16384, tile=Tile(128, 128)),
        ),
        note=ASYMPTOTIC,
    ),
)

RING_BEST = (
    "Ring's compute hides behind its communication, which grows by 2 % from 32 to 64 GPUs. With kernels of 40 TFLOP/s "
    "64 are fastest; but then Mesh waits for 69 % of its time at 256 and is 2.3 times faster on average."
)
MESH_BEST = (
    "From 64 to 256 GPUs Mesh's time hardly changes here: what a NIC carries grows by a tenth, what stays inside nodes "
    "and compute shrink. A few percent decide."
)
RING_GROWTH = (
    "Ring's volume grows 2.91 times, and nothing else does in the simulation: no rank is late, no link "
    "between switches full. 15 ms lost with every message, which no link takes, would make it 3.6; but then 32 GPUs "
    "would be fastest for both, by about a tenth."
)
_SETTING_2D = "Forward and backward, causal, 96 heads of 128, 4K to 128K tokens, rates as the preset has them."
SPEEDUP_A100 = (
    f"{_SETTING_2D} Collectives are simulated as transfers from every rank to every other, in an order in which NICs "
    "wait for each other; NCCL sends a shard to another node once and passes it on inside."
)
SPEEDUP_H100 = (
    f"{_SETTING_2D} With one GPU a node, volume is what differs: Ring moves 4.9 times as much, and "
    "hides compute behind it. Much more than that needs a Ring that reaches less of the link than collectives do."
)


def _time(
    what: str, published: float, unit: Unit, quantity: Quantity, *, note: str = "", is_explained: bool = True
) -> Figure:
    return Figure(
        what=what,
        paper="Mesh-Attention",
        published=published,
        unit=unit,
        ours=Simulated(quantity),
        note=note,
        is_explained=is_explained,
    )


MESH_TIMES = (
    _time("time of Ring, 1M tokens, 64 GPUs", 37.5, "s", "ring time"),
    _time("time of Mesh, 1M tokens, 128 GPUs", 11.9, "s", "mesh time"),
    _time("Ring is fastest on", 64, "GPUs", "ring best", note=RING_BEST, is_explained=False),
    _time("Mesh is fastest on", 128, "GPUs", "mesh best", note=MESH_BEST, is_explained=False),
    _time("speedup over Ring, at most", 3.4, "×", "most speedup", note=UNKNOWN_SET),
    _time("speedup over Ring, average", 2.9, "×", "average speedup", note=UNKNOWN_SET),
    _time("growth of Ring's time, weak scaling", 3.74, "×", "ring growth", note=RING_GROWTH, is_explained=False),
    _time("growth of Mesh's time, weak scaling", 2.83, "×", "mesh growth"),
    _time("cut of waiting, at most", 74.9, "%", "most wait cut"),
    _time("waiting in Mesh's time, 256 GPUs", 86.6, "%", "wait share"),
)

OTHER_TIMES = (
    Figure(what="effective link of a GPU", paper="derived", published=1.4, unit="GB/s", ours=EffectiveLink()),
    Figure(
        what="speedup over Ring, at most, 64 A100 in 16 nodes",
        paper="ATTENTION2D",
        published=5,
        unit="×",
        ours=Attention2dSpeedup(cluster="a100", ranks_per_node=4),
        note=SPEEDUP_A100,
        is_explained=False,
    ),
    Figure(
        what="speedup over Ring, at most, 64 H100 in 64 nodes",
        paper="ATTENTION2D",
        published=9.4,
        unit="×",
        ours=Attention2dSpeedup(cluster="h100", ranks_per_node=1),
        note=SPEEDUP_H100,
        is_explained=False,
    ),
)

FIGURES: tuple[Figure, ...] = (
    *FORMULAS,
    *MESH_VOLUMES,
    *DERIVED_VOLUMES,
    *ATTENTION2D_VOLUMES,
    *MESH_TIMES,
    *OTHER_TIMES,
)
PUBLISHED: dict[Quantity, float] = {
    figure.ours.quantity: figure.published for figure in MESH_TIMES if isinstance(figure.ours, Simulated)
}
"""What the cluster is fitted to."""
