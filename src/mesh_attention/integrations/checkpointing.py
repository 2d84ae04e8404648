"""Activation checkpointing that does not repeat communication: it keeps O and LSE and recomputes the rest."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import mesh_attention.execution.operators  # noqa: F401 -- registers what is named below


def saved_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of ``checkpoint(layer, x, use_reentrant=False, context_fn=saved_attention)``.

    A layer then holds its input and, for each of its attention calls, O and LSE; backward recomputes everything except
    attention. Plain ``checkpoint`` recomputes attention too, and repeats all its transfers.
    """
    saved = [torch.ops.mesh_attention.attend.default]
    forward, again = create_selective_checkpoint_contexts(saved)  # type: ignore[no-untyped-call]
    return forward, again
