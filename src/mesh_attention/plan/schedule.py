"""Schedules as data: the moves of all ranks in order (fetch, meet, return, gather, …), and how each travels.

A schedule is written once for all ranks, in *offsets*: row 0 and column 0 are a rank's own shard, row x the shard of
the place x before it in its Q group's ring, column y likewise in its KV group's. All ranks make the same moves in the
same order, so whatever one sends in a move another receives in that move, and no circle of waiting can arise. A mask
only removes: `lowering` turns the moves into one rank's steps and leaves out what that rank and its peers do not need.

    fetch kv 2            get column 2's K and V, and send the shard that others get in this move
    meet 0,1 x 0-3        attend these rows with these columns
    return o 1            row 1 is complete: its partial leaves, another's arrives for row 0; `return o 0` ends row 0
    gather q · reduce o   the same for a whole group at once, as a collective
    exchange q            trade heads for tokens (results: tokens for heads) in the Ulysses group
    unpack o              wait for exchanged results, and put them together

Over a cache, `meet` appends and attends in one (`Decode`), and results are merged all at once:

    combine o             merge all partials of the rows of which this rank has all partials
    gather o              every rank sends its partials to all others, or after `combine` its results

A pass in several waves says of each move which wave it belongs to: 1: fetch kv 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mesh_attention.errors import ScheduleError
from mesh_attention.plan.assignment import Axis
from mesh_attention.plan.steps import Keep, Kind
from mesh_attention.units import brief

Route = Literal["ring", "direct"]
"""ring: passed on from neighbour to neighbour. direct: straight from, or to, the home."""
ROUTES: tuple[Route, ...] = ("ring", "direct")
GroupOp = Literal["gather", "reduce", "exchange", "unpack", "combine"]
GROUP_OPS: tuple[GroupOp, ...] = get_args(GroupOp)


KEEPABLE: tuple[tuple[Keep, ...], ...] = (
    (),
    ("own",),
    ("q",),
    ("kv",),
    ("own", "q"),
    ("own", "kv"),
    ("q", "kv"),
)


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the shard at `offset`; send the one that others get in this move."""

    kind: Kind
    offset: int
    wave: int = 0


@dataclass(frozen=True, slots=True)
class Meet:
    """Attend these rows with these columns, all given as offsets."""

    rows: tuple[int, ...]
    cols: tuple[int, ...]
    wave: int = 0

    def side(self, axis: Axis) -> tuple[int, ...]:
        return self.rows if axis == "row" else self.cols


@dataclass(frozen=True, slots=True)
class Return:
    """Send the complete partial at `offset` home; another rank's partial arrives for this rank's own shard (offset 0).

    A return at offset 0 sends nothing: it finishes this rank's own result.
    """

    kind: Kind
    offset: int
    wave: int = 0


@dataclass(frozen=True, slots=True)
class GroupMove:
    """One move for a whole group."""

    op: GroupOp
    kind: Kind
    wave: int = 0

    def __post_init__(self) -> None:
        if self.op not in GROUP_OPS:
            raise ScheduleError(f"op {self.op!r}: expected {', '.join(GROUP_OPS)}")


Move = Fetch | Meet | Return | GroupMove


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The moves of every rank; `route` is how fetched shards travel, `partials` how partial results do.

    A forward plan leaves the gathered shards of the kinds in `keep` to the backward plan, which then does not fetch
    them; with "own", also the exchanged inputs of its own place, which are then not exchanged again.
    """

    moves: tuple[Move, ...]
    route: Route = "direct"
    partials: Route = "direct"
    keep: tuple[Keep, ...] = ()

    def __post_init__(self) -> None:
        for name, route in (("route", self.route), ("partials", self.partials)):
            if route not in ROUTES:
                raise ScheduleError(f"{name} {brief(route)}: expected one of {', '.join(ROUTES)}")
        if self.keep not in KEEPABLE:
            raise ScheduleError(
                f"keep {brief(self.keep)}: expected a tuple of at most two of 'own', 'q' and 'kv', in this order"
            )
