"""The size of a KV cache on one rank: blocks of tokens, and bytes. For the cache itself and for forecasts."""

from __future__ import annotations

from mesh_attention.problem import Problem

BLOCK_TOKENS = 64
"""Tokens of a block, unless a cache is made with another number."""


def blocks_of_rank(tokens: int, *, sequences: int, ranks: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Blocks of a rank for `tokens` tokens in all. Each sequence may leave one block partly empty."""
    return -(-tokens // (ranks * block_tokens)) + sequences


def layer_nbytes(blocks: int, *, token_nbytes: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Bytes of K and V of one layer on a rank. There is one block more, for tokens that the rank does not keep."""
    return (blocks + 1) * block_tokens * token_nbytes


def kv_token_nbytes(problem: Problem) -> int:
    """Bytes of K and V of one token in one layer."""
    return problem.kv_heads * (problem.head_dim_qk + problem.head_dim_v) * problem.itemsize


def cache_nbytes(problem: Problem, *, layers: int = 1) -> int:
    """Bytes of a cache on one rank that holds the keys and values of a problem in every layer of a model."""
    blocks = blocks_of_rank(problem.batch * problem.seq_kv, sequences=problem.batch, ranks=problem.ranks)
    return layers * layer_nbytes(blocks, token_nbytes=kv_token_nbytes(problem))
