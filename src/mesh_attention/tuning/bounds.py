"""Lower bounds on the link time and the total time of a choice, in closed form, without simulation.

They hold if every rank needs every shard of its groups. A mask that makes shards unnecessary reduces traffic: what each
rank needs is then counted, and the results are estimates, not bounds.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from mesh_attention.masks import full
from mesh_attention.plan.assignment import Assignment
from mesh_attention.plan.blocks import BlockMatrix
from mesh_attention.plan.layout import Layout
from mesh_attention.plan.plan import Plan
from mesh_attention.plan.schedule import Route
from mesh_attention.plan.steps import AXIS_OF, INPUTS, KINDS, OUTPUTS, Direction, Kind
from mesh_attention.planners.choice import Choice, default_layout
from mesh_attention.planners.costs import Costs
from mesh_attention.planners.make import make_priced_plan
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
from mesh_attention.tuning.mask_work import Needs, needs, pairs_of

LEFT_EXPOSED = 0.05


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
    """Costs on a cluster, in blocks of compute; call prices only if the choice leaves `blocks_per_call` open."""
    links, tile = _links(problem, topology, choice.assignment), choice.assignment.tile
    block_s = compute_seconds(problem, topology.device, direction) / (tile.rows * tile.cols)
    transfer_costs: dict[str, float] = {}
    for kind in KINDS:
        route = choice.route if kind in INPUTS[direction] else choice.partials
        transfers = max(1, choice.assignment.size(AXIS_OF[kind]) - 1)
        busy = links.group_s(kind, route)
        transfer_costs[kind] = max(1e-6, links.nic_s(busy.crossing_s), float(busy.inside_s.max())) / transfers / block_s
    is_cost_based = choice.blocks_per_call is None
    return Costs(**transfer_costs, **(_call_prices(problem, topology, direction, block_s) if is_cost_based else {}))


def plan_on(topology: Topology, problem: Problem, choice: Choice, direction: Direction) -> Plan:
    """The plan of one pass in the order that suits a cluster's links."""
    return make_priced_plan(problem, choice, direction, partial(costs_on, topology))


def _call_prices(problem: Problem, topology: Topology, direction: Direction, block_s: float) -> dict[str, float]:
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
