"""Where torch's attention is answered inside a context: a dispatch key that every operator passes on, except attention.

Calls from Python, TorchScript and C++, and calls that a compiler traces, all reach torch's dispatcher. So inside a
context this thread, and the threads that run its backward, turn on that key: scaled_dot_product_attention goes to the
context, and other attention operators, which would attend to this rank's tokens alone, refuse every call that is not
ours. Dynamo compiles separately for threads that have the key on. Kernels that are not operators of torch go unnoticed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config as compiler_config
import torch.nn.functional as F  # noqa: N812
from torch import _ops
from torch.library import Library, fallthrough_kernel
from torch.utils.checkpoint import CheckpointFunction

from mesh_attention.errors import UsageError

if TYPE_CHECKING:
    from mesh_attention.context_parallel.sdpa import MeshSdpa

KEY = "DeferredInit"
"""A key that torch reserves for packages outside of it, and does not use itself."""
SDPA = "scaled_dot_product_attention"
OTHER_NAMES = ("_transformer_encoder_layer_fwd",)
"""Functions of torch that attend, without "attention" in their name."""


def attends(name: str) -> bool:
    """True if a function of this name computes attention. Backward functions do not count: they follow forward."""
    return ("attention" in name or "attn" in name or name in OTHER_NAMES) and "backward" not in name


def is_other_attention(func: Any) -> bool:
    """True for a function that attends and is not answered here, unless our kernels call it."""
    name = getattr(func, "__name__", "").partition(".")[0]
    is_ours = (getattr(func, "__module__", None) or "").endswith(".mesh_attention")
    is_known = name == SDPA or func is F.multi_head_attention_forward
    return attends(name) and not is_known and not is_ours and not _is_called_by_us()


# torch.compile cannot trace function names, so this is evaluated once, while tracing.
is_other_attention._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refusal(name: str) -> UsageError:
    return UsageError(
        f"{name} was called under context_parallel, where it would attend to this rank's tokens alone; call "
        f"torch.nn.functional.{SDPA}"
    )


def _is_called_by_us() -> bool:
    """True inside one of our kernels: a MeshAttention may also be called in a context."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("mesh_attention.kernels."):
            return True
        frame = frame.f_back
    return False


def is_inside() -> bool:
    """True if this thread is in a context."""
    return bool(_THREAD.contexts)


@contextmanager
def answered_by(context: MeshSdpa) -> Iterator[None]:
    """Inside, this thread's scaled_dot_product_attention goes to `context`, and other attention is refused."""
    _register()
    _THREAD.contexts.append(context)
    try:
        # A compiler's cache on disk would take a graph inside a context for the same graph outside.
        with torch._C._IncludeDispatchKeyGuard(_key()), compiler_config.patch(enable_autograd_cache=False):
            yield
    finally:
        _THREAD.contexts.pop()


@contextmanager
def passed_on() -> Iterator[None]:
    """Inside, attention operators work as usual: our own kernels are made of them."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_key())):
        yield


class _Thread(threading.local):
    """The contexts that this thread is in: one, except while a checkpoint recomputes."""

    def __init__(self) -> None:
        self.contexts: list[MeshSdpa] = []


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
    if _is_called_by_us():
        return _pass_on(full_name, *args, **kwargs)
    context, name = _THREAD.contexts[-1] if _THREAD.contexts else None, full_name.partition("::")[2]
    if context is None:  # a thread that runs backward, and recomputes by itself
        raise refusal(name)
    if full_name == f"aten::{SDPA}":
        return context.attend(*args, **kwargs)
    with context.telling():
        raise refusal(name)


def _ours(full_name: str, *args: Any, **kwargs: Any) -> Any:
    """Stands for our operator inside a context: what a compiled call becomes."""
    if _THREAD.contexts:
        recompute_under(_THREAD.contexts[-1].entered)
    return _pass_on(full_name, *args, **kwargs)


def _pass_on(full_name: str, *args: Any, **kwargs: Any) -> Any:
    with passed_on(), torch._C.DisableTorchFunction():
        return _overload(full_name)(*args, **kwargs)


@cache
def _overload(full_name: str) -> Callable[..., Any]:
    space, _, name = full_name.partition("::")
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")  # type: ignore[no-any-return]


# Activation checkpointing: what is recomputed in backward runs in the context again
#
# Inside the context this happens anyway. Outside of it, torch would recompute the checkpointed function without the
# context, and attend to a rank's tokens alone. So an attention call that is being checkpointed wraps the function that
# will be recomputed in the context. Both kinds of torch.utils.checkpoint are supported; other implementations are not,
# nor is one whose saved tensors other hooks take (`save_on_cpu` inside of it).


Entered = Callable[[], AbstractContextManager[None]]
"""Enters a context."""


@dataclass(frozen=True, eq=False)
class RunInContext:
    """The function, always run in the context."""

    entered: Entered
    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.entered():
            return self.function(*args, **kwargs)


def recompute_under(entered: Entered) -> None:
    """If this call is being checkpointed, make its recomputation run in the context."""
    _follow_saved_tensors(entered)
    frame: FrameType | None = sys._getframe(1)
    while (
        frame is not None
    ):  # use_reentrant=True: the function runs without gradients first; one of our callers holds it
        if frame.f_code is CheckpointFunction.forward.__code__:
            _wrap(frame.f_locals["ctx"], "run_function", entered)
        frame = frame.f_back


def _follow_saved_tensors(entered: Entered) -> None:
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
    _wrap(region, "recompute_fn", entered)


def _wrap(holder: Any, name: str, entered: Entered) -> None:
    function = getattr(holder, name)
    if not (isinstance(function, RunInContext) and function.entered == entered):
        setattr(holder, name, RunInContext(entered, function))
