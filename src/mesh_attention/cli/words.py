"""Problems and clusters in words, as headlines have them."""

from __future__ import annotations

from mesh_attention.problem import Problem
from mesh_attention.topology import Topology
from mesh_attention.units import count, format_size

LONGEST_MASK = 40
"""Characters of a mask in a headline; one of documents may have thousands."""


def mask_words(problem: Problem) -> str:
    mask = str(problem.mask)
    return mask if len(mask) <= LONGEST_MASK else mask[:LONGEST_MASK] + "…"


def size_words(problem: Problem) -> str:
    """Lengths, heads and dtype. Of a pair, the second is said where it differs."""
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


def cluster_words(topology: Topology) -> str:
    """Ranks, nodes and rates."""
    ranks = count(topology.ranks, "rank")
    device = topology.device
    rates = f"{device.forward.tflops:g} and {device.backward.tflops:g} TFLOP/s a rank forward and backward"
    if topology.nodes == 1:
        return f"{topology.name}: {ranks} in one node, {topology.inside.gb_per_s:g} GB/s a rank; {rates}"
    return (
        f"{topology.name}: {ranks} in {topology.nodes:,} nodes of {topology.ranks_per_node}, "
        f"{topology.inside.gb_per_s:g} GB/s a rank inside a node, {topology.between.gb_per_s:g} GB/s a NIC between "
        f"({count(topology.nics_per_node, 'NIC')} a node); {rates}"
    )


def cluster_name(given: str, topology: Topology) -> str:
    """What `MeshAttention` takes for it: the file, or the name with all ranks that are meant."""
    return name_with_ranks(topology) if given.strip().isalnum() else given  # a file has a dot or a slash in it


def name_with_ranks(topology: Topology) -> str:
    return f"{topology.name.removesuffix('x')}x{topology.ranks}"
