"""Launching Triton kernels, with little work for the host. Nothing here imports triton until one is launched.

Everything possible is worked out once for each form of the tensors: a small launch takes the host longer than the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

Arguments = Callable[[Sequence[Any]], list[Any]]
"""All arguments of a kernel, from its tensors or their addresses."""
MOST_PREPARED = 8192


class Launch(NamedTuple):
    """A kernel by its file and name, its grid, its arguments, and options of the compiler."""

    file: str
    name: str
    grid: tuple[int, int, int]
    arguments: Arguments
    options: Mapping[str, int] = {}


def launch(key: tuple[Any, ...], tensors: Sequence[Tensor], prepare: Callable[[], Launch]) -> None:
    """Launch what `prepare` says for tensors of this form; `key` names everything else that it depends on."""
    device = tensors[0].device
    if device.type != "cuda":
        spec = prepare()
        kernel(spec.file, spec.name)[spec.grid](*spec.arguments(tensors))
    elif device.index == torch.cuda.current_device():
        _launch_here(key, tensors, prepare)
    else:
        with torch.cuda.device(device):  # Triton launches on the current device
            _launch_here(key, tensors, prepare)


_PREPARED: dict[tuple[Any, ...], tuple[Callable[..., Any], Arguments]] = {}


def _launch_here(key: tuple[Any, ...], tensors: Sequence[Tensor], prepare: Callable[[], Launch]) -> None:
    """Let Triton compile and launch the first time, and launch what it compiled directly from then on: its own lookup
    takes several times as long as the launch. Addresses instead of tensors save a question to the driver for each."""
    index, addresses = tensors[0].device.index, [tensor.data_ptr() for tensor in tensors]
    forms = [(tensor.dtype, tensor.stride(), at % 16) for tensor, at in zip(tensors, addresses, strict=True)]
    key = (*key, index, *forms)
    known = _PREPARED.get(key)
    if known is None:
        spec = prepare()
        compiled = kernel(spec.file, spec.name)[spec.grid](*spec.arguments(tensors), **spec.options)
        if len(_PREPARED) >= MOST_PREPARED:
            _PREPARED.clear()
        _PREPARED[key] = compiled[spec.grid], spec.arguments
    else:
        run, arguments = known
        run(*arguments(addresses), stream=torch._C._cuda_getCurrentRawStream(index))


def with_strides(strides: Sequence[tuple[int, ...]], rest: tuple[Any, ...]) -> Arguments:
    """Each tensor followed by its strides, then the rest."""

    def arguments(tensors: Sequence[Any]) -> list[Any]:
        return [*(x for tensor, own in zip(tensors, strides, strict=True) for x in (tensor, *own)), *rest]

    return arguments


def stride_unit(tensors: Sequence[Tensor]) -> int:
    """Elements in a unit of strides: 16 bytes of the widest dtype if that divides all strides except those of the last
    axis, else the largest power of two that does.

    All tensors share it, so that a thread holds the same elements of each and threads exchange nothing.
    """
    unit = 16 // max(tensor.itemsize for tensor in tensors)
    while any(stride % unit for tensor in tensors for stride in tensor.stride()[:-1]):
        unit //= 2
    return unit


@lru_cache(maxsize=64)
def triton_unsupported_reason(device: torch.device) -> str | None:
    """The reason why Triton's kernels cannot run on a device; None if they can."""
    if find_spec("triton") is None:
        return "needs triton, which is not installed"
    if device.type == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return f"needs compute capability 8.0, not {capability[0]}.{capability[1]}"
    return None


class SharedMemory(NamedTuple):
    """Bytes of shared memory that one program may have, and that a multiprocessor has for all of its programs."""

    program: int
    multiprocessor: int


@lru_cache(maxsize=64)
def shared_nbytes(device: torch.device) -> SharedMemory:
    """The shared memory of a GPU; on a CPU that of an H200."""
    if device.type != "cuda":
        return SharedMemory(232448, 233472)
    properties: Any = torch.cuda.get_device_properties(device)
    return SharedMemory(properties.shared_memory_per_block_optin, properties.shared_memory_per_multiprocessor)


@lru_cache(maxsize=16)
def kernel(file: str, name: str) -> Any:
    return getattr(import_module(f"mesh_attention.kernels.{file}"), name)
