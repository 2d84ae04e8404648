"""Activation checkpointing that does not repeat communication: O and LSE are kept, the rest is computed again."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import mesh_attention.execution.operators  # noqa: F401 -- registers what is named below


def saved_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of ``checkpoint(layer, x, use_reentrant=False, context_fn=saved_attention)``.

    A layer then holds its input and, for each attention call in it, O and LSE; when backward comes, everything but
    attention is computed again. With ``checkpoint`` alone attention is computed again too, and all its transfers
    are made once more.
    """
    saved = [torch.ops.mesh_attention.attend.default]
    forward, again = create_selective_checkpoint_contexts(saved)  # type: ignore[no-untyped-call]
    return forward, again
