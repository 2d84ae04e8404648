"""Lower bounds on the link time and the total time of a choice, in closed form, without simulation.

They hold if every rank needs every shard of its groups. A mask that makes shards unnecessary reduces traffic: what each
rank needs is then counted, and the results are estimates, not bounds.

Below them, what a mask leaves of every block of a grid, for all places at once. There strided segments count as if they
had no gaps, and windows inside documents as if they had no ends; `plan.blocks` has the exact answers, one block at a
time.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mesh_attention.masks import causal, full
from mesh_attention.plan.assignment import Assignment, Axis, Tile
from mesh_attention.plan.blocks import BlockMatrix, block_matrix
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.schedule import Route
from mesh_attention.plan.steps import AXIS_OF, INPUTS, KINDS, OUTPUTS, Direction, Kind
from mesh_attention.planners.choice import Choice, default_layout
from mesh_attention.planners.costs import Costs
from mesh_attention.planners.make import make_cost_based_plan
from mesh_attention.prices import (
    CALLS_PER_MEET,
    Links,
    ReceiveTimes,
    added_nbytes,
    compute_seconds,
    copy_nbytes,
    finish_nbytes,
    meet_seconds,
    merge_nbytes,
)
from mesh_attention.problem import Problem
from mesh_attention.topology import RUN, Topology

LEFT_EXPOSED = 0.05
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Traffic(NamedTuple):
    """`bound_s`: no schedule of a choice takes less, if the plan is uniform. `estimate_s`: a first estimate, not a
    bound, because compute never hides links completely."""

    bound_s: float
    estimate_s: float


class Busy(NamedTuple):
    """Seconds that the busiest NIC and port receive, and that transfers take which compute cannot hide."""

    nic_s: float
    port_s: float
    unhidden_s: float


@lru_cache(maxsize=4096)
def _busy(
    problem: Problem,
    topology: Topology,
    assignment: Assignment,
    routes: tuple[tuple[Kind, Route], ...],
    layout: Layout,
    is_collective: bool,
) -> Busy:
    links = _links(problem, topology, assignment)
    crossing, inside, held = links.none, links.none, links.none
    needed = _needs(problem, layout, assignment)
    for kind, route in routes:
        if needed is None:
            group = links.group_s(kind, route)
        else:
            group = links.needed_s(kind, needed.members[AXIS_OF[kind]], needed.is_needed[AXIS_OF[kind]])
        exchange = links.exchange_s(kind) if assignment.ulysses_degree > 1 else ReceiveTimes(links.none, links.none)
        crossing = crossing + group.crossing_s + exchange.crossing_s
        inside = inside + group.inside_s + exchange.inside_s
        held = held + np.maximum(*exchange) + (np.maximum(*group) if is_collective else 0.0)
    return Busy(links.nic_s(crossing), float(inside.max()), float(held.max()))


def _needs(problem: Problem, layout: Layout, assignment: Assignment) -> Needs | None:
    """What each place needs; None if it is everything."""
    if BlockMatrix(problem, layout, assignment).is_uniform:
        return None
    place_needs = needs(problem, layout, assignment)
    return None if all(needed.all() for needed in place_needs.is_needed.values()) else place_needs


def traffic(choice: Choice, problem: Problem, topology: Topology, direction: Direction) -> Traffic:
    fetched = [kind for kind in INPUTS[direction] if not (direction == "backward" and kind in choice.keep)]
    routes = tuple(
        (kind, choice.route if kind in fetched else choice.partials) for kind in (*fetched, *OUTPUTS[direction])
    )
    layout = choice.layout or default_layout(problem)
    extent = _extent(problem, layout, choice.assignment)
    nic, port, unhidden = _busy(problem, topology, choice.assignment, routes, layout, choice.is_collective)
    links_s = max(nic, port)
    transfers = max(1, choice.assignment.tile.rows + choice.assignment.tile.cols - 2)
    # How long the first call waits. Along a ring the sender waits for the shard first, so the wait counts twice.
    fill_s = (2 if choice.route == "ring" else 1) * ((choice.blocks_per_call or 1) - 1) / transfers * links_s
    computes_s = (
        _busy_s(problem, topology, layout, choice.assignment, direction)
        + _calls_s(choice, problem, topology, direction, extent)
        + _copies_s(choice, problem, topology, direction, extent)
    )
    ways = 1 if topology.full_duplex else 2  # what a link sends and what it receives may use it in turn
    least_s = max(ways * nic, ways * port, ways * unhidden + computes_s)
    return Traffic(
        bound_s=max(nic, port, unhidden + compute_seconds(problem, topology.device, direction)),
        estimate_s=least_s + fill_s + LEFT_EXPOSED * (ways * nic + ways * port),
    )


@lru_cache(maxsize=16)  # of 100,000 ranks, each takes megabytes
def _links(problem: Problem, topology: Topology, assignment: Assignment) -> Links:
    return Links(problem, topology, assignment)


def costs_on(topology: Topology, problem: Problem, choice: Choice, direction: Direction) -> Costs:
    """Costs on a cluster, in blocks of compute; those of calls only if the choice leaves `blocks_per_call` open."""
    links, tile = _links(problem, topology, choice.assignment), choice.assignment.tile
    block_s = compute_seconds(problem, topology.device, direction) / (tile.rows * tile.cols)
    transfer_costs: dict[str, float] = {}
    for kind in KINDS:
        route = choice.route if kind in INPUTS[direction] else choice.partials
        transfers = max(1, choice.assignment.size(AXIS_OF[kind]) - 1)
        busy = links.group_s(kind, route)
        transfer_costs[kind] = max(1e-6, links.nic_s(busy.crossing_s), float(busy.inside_s.max())) / transfers / block_s
    is_cost_based = choice.blocks_per_call is None
    return Costs(**transfer_costs, **(_call_costs(problem, topology, direction, block_s) if is_cost_based else {}))


def plan_on(topology: Topology, problem: Problem, choice: Choice, direction: Direction) -> Plan:
    """The plan of one pass in the order that suits a cluster's links."""
    return make_cost_based_plan(problem, choice, direction, partial(costs_on, topology))


def _call_costs(problem: Problem, topology: Topology, direction: Direction, block_s: float) -> dict[str, float]:
    """Prices of a meet besides its blocks: for its calls, and for the memory it touches per row and per column."""
    device = topology.device
    memory_s = device.touch_seconds(1, launches=0)
    row_nbytes, col_nbytes = _added_nbytes(problem, direction)
    return {
        "call": meet_seconds(device, direction) / block_s,
        "row": row_nbytes * memory_s / block_s,
        "col": col_nbytes * memory_s / block_s + _unfilled(problem, topology, direction),
    }


def _added_nbytes(problem: Problem, direction: Direction) -> tuple[float, float]:
    """Bytes touched to add a partial result of a row, and of a column, to its running sum."""
    row, col = added_nbytes(problem, direction)
    return row * (problem.seq_q / problem.ranks), col * (problem.seq_kv / problem.ranks)


def _unfilled(problem: Problem, topology: Topology, direction: Direction) -> float:
    """Rows of a forward call, for each of its columns, that would fit into the last round of the device: half a round
    on average, if a row alone does not fill one. 0 where rows are long."""
    if topology.device.width == 1 or direction == "backward":
        return 0.0
    # A row of a place with a Ulysses degree has as many more tokens as it has fewer heads.
    row = problem.batch * problem.heads * problem.seq_q / problem.ranks / RUN
    return topology.device.width / row / 2 if row < topology.device.width else 0.0


class Extent(NamedTuple):
    """Blocks, rows and columns that a place attends: the most of any place, for each."""

    blocks: float
    rows: float
    cols: float


@lru_cache(maxsize=1024)
def _extent(problem: Problem, layout: Layout, assignment: Assignment) -> Extent:
    tile = assignment.tile
    place_needs = _needs(problem, layout, assignment)
    if place_needs is None:
        return Extent(tile.rows * tile.cols, tile.rows, tile.cols)
    rows, cols = (float(place_needs.is_needed[axis].sum(axis=1).max()) for axis in ("row", "col"))
    return Extent(float(place_needs.live_blocks.max()), rows, cols)


def _calls_s(choice: Choice, problem: Problem, topology: Topology, direction: Direction, extent: Extent) -> float:
    """Seconds for the fixed costs of kernel calls and for the memory traffic of adding up partials."""
    device = topology.device
    rate = device.rate(direction)
    is_whole = choice.is_collective
    meetings = 1.0 if is_whole else extent.blocks / min(choice.blocks_per_call or 1, max(extent.rows, extent.cols))
    rows, cols = (extent.rows, extent.cols) if is_whole else (meetings, extent.blocks)
    row_nbytes, col_nbytes = _added_nbytes(problem, direction)
    touched = rows * row_nbytes + cols * col_nbytes
    return CALLS_PER_MEET * meetings * rate.call_us * 1e-6 + device.touch_seconds(touched, launches=0)


def _copies_s(choice: Choice, problem: Problem, topology: Topology, direction: Direction, extent: Extent) -> float:
    """Seconds to pack or exchange inputs, to finish sums, and to merge the partials that come home."""
    links, assignment = _links(problem, topology, choice.assignment), choice.assignment
    nbytes = steps = 0.0
    for kind in (*INPUTS[direction], *OUTPUTS[direction]):
        size = links.shard_nbytes(kind)
        running = size * problem.accumulator_itemsize / problem.itemsize
        shards = extent.rows if AXIS_OF[kind] == "row" else extent.cols
        if assignment.ulysses_degree > 1 or (kind in INPUTS[direction] and shards > 1):
            nbytes, steps = nbytes + copy_nbytes(size), steps + 1
        if kind in OUTPUTS[direction]:
            nbytes += shards * finish_nbytes(running, size) + (shards - 1) * merge_nbytes(size, running)
            steps += 2 * shards - 1
    return topology.device.touch_seconds(nbytes, launches=steps)


@lru_cache(maxsize=1024)
def _busy_s(
    problem: Problem, topology: Topology, layout: Layout, assignment: Assignment, direction: Direction
) -> float:
    """Seconds that the busiest rank computes."""
    rate = topology.device.rate(direction)
    if problem.mask == full():
        return compute_seconds(problem, topology.device, direction)
    if BlockMatrix(problem, layout, assignment).is_uniform:
        # Layouts under which every place needs every shard of its groups spread the work evenly: one represents all.
        whole, masked = pairs_of(problem, layout, assignment, assignment.places - 1)
        pairs = whole + masked / rate.masked
    else:
        place_needs = needs(problem, layout, assignment)
        pairs = float((place_needs.whole_pairs + place_needs.masked_pairs / rate.masked).max())
    return problem.flops(direction, pairs=1) / assignment.ulysses_degree * pairs / (rate.tflops * 1e12)


# What a mask leaves


def pairs_of(problem: Problem, layout: Layout, assignment: Assignment, place: int) -> tuple[float, float]:
    """Pairs of one place's calls without a mask, and with one. For masks without documents; as `needs` counts them."""
    matrix = _of_degree(problem, layout, assignment.ulysses_degree)
    q, kv = (_segments(matrix, axis, assignment.group(axis, place)) for axis in ("row", "col"))
    return tuple(float(part.sum()) for part in _cut(problem, q, kv))  # type: ignore[return-value]


class Needs(NamedTuple):
    """For each place, the members of its groups, and whether it needs the shard of each."""

    members: dict[Axis, NDArray[np.int64]]
    is_needed: dict[Axis, Flags]
    whole_pairs: Floats
    masked_pairs: Floats
    live_blocks: Floats


class Segments(NamedTuple):
    """The place, and the start and length, of every segment."""

    place: NDArray[np.int64]
    spans: Floats


@lru_cache(maxsize=64)
def _work(problem: Problem, layout: Layout, ulysses: int) -> tuple[Floats, Floats]:
    """Pairs of every block, query place by key/value place: of calls without a mask, and of calls with one."""
    places = problem.ranks // ulysses
    matrix = _of_degree(problem, layout, ulysses)
    q, kv = (_segments(matrix, axis, range(places)) for axis in ("row", "col"))
    whole, masked = (_by_place(part, q.place, kv.place, places) for part in _cut(problem, q, kv))
    return whole, masked


def _of_degree(problem: Problem, layout: Layout, ulysses: int) -> BlockMatrix:
    """A matrix with the shards of every tile of a Ulysses degree."""
    return block_matrix(problem, layout, Assignment(Tile(1, problem.ranks // ulysses), ulysses))


def _cut(problem: Problem, q: Segments, kv: Segments) -> tuple[Floats, Floats]:
    """Pairs of every two segments: of those that the mask leaves whole, and of the others."""
    whole: Floats = q.spans[:, 1, None] * kv.spans[None, :, 1]
    docs = problem.mask.documents
    if docs is not None and docs.q == docs.kv:
        left = _pairs_in_documents(q.spans, docs.q, is_causal=problem.mask.right is not None)
    else:
        left = _pairs_in_band(q.spans, kv.spans, problem, whole)
    is_whole = left == whole
    if problem.mask == causal() and problem.seq_q == problem.seq_kv:  # a place attends its own block in one masked call
        is_whole &= q.place[:, None] != kv.place[None, :]
    return left * is_whole, left * ~is_whole


def _pairs_in_band(q: Floats, kv: Floats, problem: Problem, whole: Floats) -> Floats:
    mask = problem.mask
    lead: Floats = q[:, None, 0] + problem.seq_kv - problem.seq_q - kv[None, :, 0]
    lengths: tuple[Floats, Floats] = q[:, 1, None], kv[None, :, 1]
    pairs = whole if mask.right is None else _pairs_up_to(lead + mask.right, *lengths)
    if mask.left is not None:
        pairs = np.maximum(0.0, pairs - _pairs_up_to(lead - mask.left - 1, *lengths))
    return pairs


def _pairs_in_documents(segments: Floats, boundaries: tuple[int, ...], *, is_causal: bool) -> Floats:
    """Pairs of every two segments of the same tokens. Two that differ share at most the document between them."""
    cuts = np.unique(np.array(boundaries, dtype=float))
    start, stop = segments[:, 0], segments[:, 0] + segments[:, 1]
    first, last = (np.searchsorted(cuts, at, side="right") - 1 for at in (start, stop - 1))
    head = np.minimum(stop, cuts[first + 1]) - start  # tokens in the segment's first document, and in its last
    tail = stop - np.maximum(start, cuts[last])
    pairs: Floats = (
        head[:, None] * tail[None, :] * (first[:, None] == last[None, :]) * (start[:, None] > start[None, :])
    )
    if not is_causal:
        pairs = pairs + pairs.T
    for index, (low, high) in enumerate(zip(start, stop, strict=True)):
        lengths = np.diff(np.clip(cuts[first[index] : last[index] + 2], low, high))
        pairs[index, index] = float((lengths * (lengths + 1) / 2 if is_causal else lengths**2).sum())
    return pairs


def _segments(matrix: BlockMatrix, axis: Axis, places: Iterable[int]) -> Segments:
    rows = [(place, s[0], s[-1] + 1 - s[0]) for place in places for s in matrix.segments(axis, place)]
    table = np.array(rows, dtype=float).reshape(-1, 3)
    return Segments(table[:, 0].astype(int), table[:, 1:])


def _pairs_up_to(lead: Floats, queries: Floats, keys: Floats) -> Floats:
    """Number of pairs (u, w) with ``w <= lead + u``, for u below queries and w below keys."""
    pairs: Floats = _triangle(lead + queries, keys) - _triangle(lead, keys)
    return pairs


def _triangle(top: Floats, keys: Floats) -> Floats:
    """``sum(min(t, keys) for t in range(1, top + 1))``, 0 for a top below 1."""
    inside = np.clip(top, 0.0, keys)
    total: Floats = inside * (inside + 1) / 2 + np.maximum(0.0, top - keys) * keys
    return total


def _by_place(pairs: Floats, q_place: Any, kv_place: Any, places: int) -> Floats:
    flat = (q_place[:, None] * places + kv_place[None, :]).ravel()
    summed: Any = np.bincount(flat, weights=pairs.ravel(), minlength=places * places)
    by_place: Floats = summed.reshape(places, places)
    return by_place


@lru_cache(maxsize=256)
def needs(problem: Problem, layout: Layout, assignment: Assignment) -> Needs:
    places = np.arange(assignment.places)
    rows, cols = (
        np.stack([np.asarray(assignment.peer(axis, places, k)) for k in range(assignment.size(axis))], axis=1)  # type: ignore[arg-type]
        for axis in ("row", "col")
    )
    blocks = rows[:, :, None], cols[:, None, :]
    whole, masked = (part[blocks] for part in _work(problem, layout, assignment.ulysses_degree))
    is_live = (whole + masked) > 0
    return Needs(
        members={"row": rows, "col": cols},
        is_needed={"row": is_live.any(axis=2), "col": is_live.any(axis=1)},
        whole_pairs=whole.sum(axis=(1, 2)),
        masked_pairs=masked.sum(axis=(1, 2)),
        live_blocks=is_live.sum(axis=(1, 2)).astype(float),
    )
