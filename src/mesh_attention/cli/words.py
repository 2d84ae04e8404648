"""Problems and clusters in words, for headlines."""

from __future__ import annotations

from mesh_attention.plan.assignment import Assignment
from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.units import count, format_size

LONGEST_MASK = 40
"""Characters of a mask in a headline; one of documents may have thousands."""


def mask_words(problem: Problem) -> str:
    mask = str(problem.mask)
    return mask if len(mask) <= LONGEST_MASK else mask[:LONGEST_MASK] + "…"


def size_words(problem: Problem) -> str:
    """Lengths, heads and dtype."""
    return f"{token_words(problem)}, {head_words(problem)}"


def token_words(problem: Problem) -> str:
    tokens = f"{problem.batch} x " if problem.batch > 1 else ""
    tokens += format_size(problem.seq_q)
    if problem.seq_kv != problem.seq_q:
        tokens += f" on {format_size(problem.seq_kv)}"
    return f"{tokens} tokens"


def head_words(problem: Problem) -> str:
    heads = count(problem.heads, "head") + (f" ({problem.kv_heads} KV)" if problem.kv_heads != problem.heads else "")
    size = f"{problem.head_dim_qk}"
    if problem.head_dim_v != problem.head_dim_qk:
        size += f" and {problem.head_dim_v}"
    return f"{heads} of {size}, {problem.dtype}"


def tile_reason(assignment: Assignment) -> str:
    """Why a tile moves fewer bytes than ring."""
    tile, others = assignment.tile, assignment.ulysses * assignment.places - 1
    shards = [(tile.rows - 1, "query shard"), (tile.cols - 1, "KV shard")]
    received = " and ".join(count(number, noun) for number, noun in shards if number)
    returned = f" and returns {count(tile.rows - 1, 'partial result')}" if tile.rows > 1 else ""
    traded = f", once {assignment.ulysses} ranks have traded heads for tokens," if assignment.ulysses > 1 else ""
    return (
        f"with ring, a rank receives the K and V of all {others} others; with a {tile} tile{traded} it receives "
        f"{received or 'no shards'}{returned}."
    )


def cluster_words(topology: Topology) -> str:
    """Ranks, nodes and rates."""
    ranks, device = count(topology.ranks, "rank"), topology.device
    rates = f"{device.forward.tflops:g} and {device.backward.tflops:g} TFLOP/s per rank forward and backward"
    if topology.nodes == 1:
        return f"{topology.name}: {ranks} in one node, {topology.inside.gb_per_s:g} GB/s per rank; {rates}"
    return (
        f"{topology.name}: {ranks} in {topology.nodes:,} nodes of {topology.ranks_per_node}, "
        f"{topology.inside.gb_per_s:g} GB/s per rank inside a node, {topology.between.gb_per_s:g} GB/s per NIC "
        f"between nodes ({count(topology.nics_per_node, 'NIC')} per node); {rates}"
    )


def cluster_name(topology: Topology) -> str:
    """Its name with its number of ranks, as --cluster takes it."""
    return f"{topology.name.removesuffix('x')}x{topology.ranks}"
