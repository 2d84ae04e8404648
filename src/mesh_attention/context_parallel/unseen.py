"""Attention that a mode does not see: inside a context, torch's attention operators refuse every call that is not ours.

A mode sees calls from Python. It does not see calls from TorchScript and C++, calls inside functions that torch runs
without the mode, and what a compiler has put into its code; they would attend to this rank's tokens alone. All of these
reach torch's dispatcher. So inside a context this thread, and the threads that run its backward, turn on a dispatch key
that every operator passes on, except attention. Dynamo compiles separately for threads that have the key on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from types import FrameType
from typing import Any, Protocol

import torch
from torch import _ops
from torch.library import Library, fallthrough_kernel
from torch.utils.checkpoint import CheckpointFunction

from mesh_attention.errors import UsageError

KEY = "DeferredInit"
"""A key that torch reserves for packages outside of it, and does not use itself."""
SDPA = "aten::scaled_dot_product_attention"
OTHER_NAMES = ("_transformer_encoder_layer_fwd",)
"""Functions of torch that attend, without "attention" in their name."""


def attends(name: str) -> bool:
    """True if a function of this name computes attention. Backward functions do not count: they follow forward."""
    return ("attention" in name or "attn" in name or name in OTHER_NAMES) and "backward" not in name


def refusal(name: str) -> UsageError:
    return UsageError(
        f"{name} was called under context_parallel, where it would attend to this rank's tokens alone; call "
        "torch.nn.functional.scaled_dot_product_attention from Python, outside of TorchScript and exported programs"
    )


def is_called_by_us() -> bool:
    """True inside one of our kernels: a MeshAttention may also be called in a context."""
    frame = None if torch.compiler.is_compiling() else sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("mesh_attention.kernels."):
            return True
        frame = frame.f_back
    return False


@contextmanager
def refusing_unseen(mode: Mode) -> Iterator[None]:
    """Inside, attention that the mode does not see is refused. What a checkpoint recomputes runs under the mode."""
    _register()
    _THREAD.modes.append(mode)
    try:
        with torch._C._IncludeDispatchKeyGuard(_key()):
            yield
    finally:
        _THREAD.modes.pop()


@contextmanager
def answered_by(attend: Callable[..., Any]) -> Iterator[None]:
    """Inside, calls of scaled_dot_product_attention that the mode does not see go to `attend`."""
    before, _THREAD.attend = _THREAD.attend, attend
    try:
        yield
    finally:
        _THREAD.attend = before


@contextmanager
def passed_on() -> Iterator[None]:
    """Inside, attention operators work as usual: our own kernels are made of them."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_key())):
        yield


class _Thread(threading.local):
    """The modes that this thread is in, and what answers attention that they do not see; None refuses it."""

    def __init__(self) -> None:
        self.modes: list[Mode] = []
        self.attend: Callable[..., Any] | None = None


_THREAD = _Thread()


@lru_cache(maxsize=1)
def _key() -> torch._C.DispatchKey:
    return torch._C._dispatch_key_parse(KEY)


@lru_cache(maxsize=1)
def _register() -> list[Library]:
    """Once in a process, by its first context. The registrations last as long as the libraries returned."""
    everything = Library("_", "IMPL", KEY)  # type: ignore[no-untyped-call]
    everything.fallback(fallthrough_kernel, KEY)  # type: ignore[no-untyped-call]
    # Operators of functions have tables of their own: those that exist, and those to come.
    _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_key())
    for operator in _ops._higher_order_ops.values():
        operator.fallthrough(_key())  # type: ignore[no-untyped-call]
    libraries = {"_": everything}
    for full_name in torch._C._dispatch_get_all_op_names():
        space, _, name = full_name.partition("::")
        is_ours = full_name == "mesh_attention::attend"
        if is_ours or (space != "mesh_attention" and attends(name.partition(".")[0])):
            if space not in libraries:
                libraries[space] = Library(space, "IMPL", KEY)  # type: ignore[no-untyped-call]
            stand_in = partial(_ours if is_ours else _others, full_name)
            libraries[space].impl(name, stand_in)  # type: ignore[no-untyped-call]
    return list(libraries.values())


def _others(full_name: str, *args: Any, **kwargs: Any) -> Any:
    """Stands for an attention operator of torch, or of anybody else, inside a context."""
    if is_called_by_us():
        return _pass_on(full_name, *args, **kwargs)
    if _THREAD.attend is not None and full_name == SDPA:
        return _THREAD.attend(*args, **kwargs)
    raise refusal(full_name.partition("::")[2])


def _ours(full_name: str, *args: Any, **kwargs: Any) -> Any:
    """Stands for our operator inside a context: what a compiled call becomes."""
    if _THREAD.modes:
        recompute_under(_THREAD.modes[-1])
    return _pass_on(full_name, *args, **kwargs)


def _pass_on(full_name: str, *args: Any, **kwargs: Any) -> Any:
    with passed_on(), torch._C.DisableTorchFunction():
        return _overload(full_name)(*args, **kwargs)


@cache
def _overload(full_name: str) -> Callable[..., Any]:
    space, _, name = full_name.partition("::")
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")  # type: ignore[no-any-return]


# Activation checkpointing: what is recomputed in backward runs under the mode again
#
# Inside the context this happens anyway. Outside of it, torch would recompute the checkpointed function without the
# mode, and attend to a rank's tokens alone. So an attention call that is being checkpointed wraps the function that
# will be recomputed in the mode. Both kinds of torch.utils.checkpoint are supported; other implementations are not, nor
# is one whose saved tensors other hooks take (`save_on_cpu` inside of it).


class Mode(Protocol):
    def entered(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, eq=False)
class RunUnderMode:
    """The function, always run under the mode."""

    mode: Mode
    function: Callable[..., Any]

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
