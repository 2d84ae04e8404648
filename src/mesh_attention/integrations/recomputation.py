"""Activation checkpointing under a mode: functions that are recomputed in backward run under the mode again.

Inside the context this happens anyway. Outside of it, torch would recompute the checkpointed function without the mode,
and attend to a rank's tokens alone. So an attention call that is being checkpointed wraps the function that will be
recomputed in the mode. Both kinds of torch.utils.checkpoint are supported; other implementations are not, nor is one
whose saved tensors other hooks take (`save_on_cpu` inside of it).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import CheckpointFunction

from mesh_attention.errors import UsageError


class Mode(Protocol):
    def entered(self) -> AbstractContextManager[None]: ...


class RunUnderMode:
    """The function, always run under the mode."""

    def __init__(self, mode: Mode, function: Callable[..., Any]) -> None:
        self.mode, self.function = mode, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.mode.entered():
            return self.function(*args, **kwargs)


def recompute_under(mode: Mode) -> None:
    """If this call is being checkpointed, make its recomputation run under the mode."""
    if torch.compiler.is_compiling():
        return
    _follow_saved_tensors(mode)
    _follow_callers(mode, sys._getframe(1))


def _follow_saved_tensors(mode: Mode) -> None:
    """use_reentrant=False: saved tensors go to a hook that holds the function to recompute."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or "_checkpoint_hook" not in hooks[0].__qualname__:
        return
    cells = (cell.cell_contents for cell in hooks[0].__closure__ or ())
    region = next((content for content in cells if hasattr(content, "recompute_fn")), None)
    if region is None:
        raise UsageError(
            f"torch.utils.checkpoint of torch {torch.__version__} is not supported; call attention outside of it"
        )
    _wrap(region, "recompute_fn", mode)


def _follow_callers(mode: Mode, frame: FrameType | None) -> None:
    """use_reentrant=True: the function runs without gradients first; one of our callers holds it."""
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            _wrap(frame.f_locals["ctx"], "run_function", mode)
        frame = frame.f_back


def _wrap(holder: Any, name: str, mode: Mode) -> None:
    function = getattr(holder, name)
    if not (isinstance(function, RunUnderMode) and function.mode is mode):
        setattr(holder, name, RunUnderMode(mode, function))
