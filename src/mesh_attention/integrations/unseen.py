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
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import _ops
from torch.library import Library, fallthrough_kernel

from mesh_attention.errors import UsageError
from mesh_attention.integrations.recomputation import Mode, recompute_under

KEY = "DeferredInit"
"""A key that torch reserves for packages outside of it, and does not use itself."""
WITHOUT_THE_WORD = ("_transformer_encoder_layer_fwd",)
"""Attention functions without "attention" in their name."""


def attends(name: str) -> bool:
    """True if a function of this name computes attention. Backward functions do not count: they follow forward."""
    return ("attention" in name or "attn" in name or name in WITHOUT_THE_WORD) and "backward" not in name


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
    _modes.stack.append(mode)
    try:
        with torch._C._IncludeDispatchKeyGuard(_key()):
            yield
    finally:
        _modes.stack.pop()


@contextmanager
def passed_on() -> Iterator[None]:
    """Inside, attention operators work as usual: our own kernels are made of them."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_key())):
        yield


class _Modes(threading.local):
    """The modes of the contexts that this thread is in."""

    def __init__(self) -> None:
        self.stack: list[Mode] = []


_modes = _Modes()


@lru_cache(maxsize=1)
def _key() -> torch._C.DispatchKey:
    return torch._C._dispatch_key_parse(KEY)


@lru_cache(maxsize=1)
def _register() -> list[Library]:
    """Once in a process, by its first context. The registrations last as long as the libraries returned."""
    made = Library("_", "IMPL", KEY)  # type: ignore[no-untyped-call]
    made.fallback(fallthrough_kernel, KEY)  # type: ignore[no-untyped-call]
    # Operators of functions have tables of their own: those that exist, and those to come.
    _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_key())
    for operator in _ops._higher_order_ops.values():
        operator.fallthrough(_key())  # type: ignore[no-untyped-call]
    libraries = {"_": made}
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
    if not is_called_by_us():
        raise refusal(full_name.partition("::")[2])
    return _pass_on(full_name, *args, **kwargs)


def _ours(full_name: str, *args: Any, **kwargs: Any) -> Any:
    """Stands for our operator inside a context: what a compiled call becomes."""
    if _modes.stack:
        recompute_under(_modes.stack[-1])
    return _pass_on(full_name, *args, **kwargs)


def _pass_on(full_name: str, *args: Any, **kwargs: Any) -> Any:
    with passed_on(), torch._C.DisableTorchFunction():
        return _overload(full_name)(*args, **kwargs)


@cache
def _overload(full_name: str) -> Callable[..., Any]:
    space, _, name = full_name.partition("::")
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")  # type: ignore[no-any-return]
