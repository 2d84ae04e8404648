"""The flash-attn packages, where one is installed: 3 for Hopper, 4 for Blackwell, 2 from Ampere on.

Nothing is imported until a kernel for CUDA is chosen. A package is used if its forward and backward have the parameters
used here, regardless of its version. Their backward adds up dQ in the order in which blocks finish.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesh_attention.kernels.base import Demand, Gradients, aligned
from mesh_attention.kernels.torch_attention import TorchFlashOp
from mesh_attention.kernels.windowed import FlashRow, Window, WindowedKernel, fix_empty_row_lse


@dataclass(frozen=True, slots=True)
class Release:
    """The functions of a package, and the compute capabilities and head sizes it is used for.

    `takes_windows`: backward takes any window, not only causal ones.
    """

    name: str
    module: str
    forward: str
    backward: str
    capabilities: tuple[int, ...]
    head_dims: range
    takes_windows: bool = True


_NAMES = ("_flash_attn_forward", "_flash_attn_backward")
_ANY_HEAD_DIM = range(8, 257, 8)
FLASH_ATTN_2 = Release("flash-attn 2", "flash_attn.flash_attn_interface", *_NAMES, (8, 9, 10, 11, 12), _ANY_HEAD_DIM)
FLASH_ATTN_3 = Release("flash-attn 3", "flash_attn_interface", *_NAMES, (9,), _ANY_HEAD_DIM)
FLASH_ATTN_4 = Release(
    name="flash-attn 4",
    module="flash_attn.cute.interface",
    forward="_flash_attn_fwd",
    backward="_flash_attn_bwd",
    capabilities=(10,),
    head_dims=range(64, 129, 64),
    takes_windows=False,
)

_FORWARD_NEEDS = ("q", "k", "v", "softmax_scale", "window_size_left", "window_size_right")
_BACKWARD_NEEDS = (*_FORWARD_NEEDS, "dout", "out", "dq", "dk", "dv")
_LSE_NAMES = ("softmax_lse", "lse")
_DEFAULTS: dict[str, Any] = {
    "dropout_p": 0.0,
    "causal": False,
    "is_causal": False,
    "softcap": 0.0,
    "alibi_slopes": None,
    "return_softmax": False,
    "return_lse": True,
    "deterministic": False,
}
"""Arguments of every call, for functions that have such a parameter."""


@dataclass(frozen=True, slots=True)
class FlashFunction:
    """A function, called with those arguments that it has parameters for."""

    call: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]

    def __call__(self, window: Window, **arguments: Any) -> Any:
        kwargs = _DEFAULTS | arguments
        kwargs |= {"window_size_left": self._window_side("left", window.left)}
        kwargs |= {"window_size_right": self._window_side("right", window.right)}
        return self.call(**{name: value for name, value in kwargs.items() if name in self.parameters})

    def _window_side(self, side: str, reach: int | None) -> int | None:
        """The reach, with unbounded as None where None is the default, else -1."""
        if reach is None and self.parameters[f"window_size_{side}"].default is not None:
            return -1
        return reach


def _is_surplus(parameter: inspect.Parameter, needs: Collection[str]) -> bool:
    """True if a function requires a parameter that we do not pass."""
    is_optional = parameter.default is not parameter.empty or parameter.kind in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )
    return not is_optional and parameter.name not in (*needs, *_DEFAULTS, *_LSE_NAMES)


class Functions(NamedTuple):
    forward: FlashFunction
    backward: FlashFunction


@lru_cache(maxsize=16)
def find_functions(release: Release) -> Functions | str:
    """A package's functions, or the reason why they cannot be used."""
    try:
        module = importlib.import_module(release.module)
    except ImportError as error:
        return f"cannot be imported ({error})"
    functions = []
    for name, needs in ((release.forward, _FORWARD_NEEDS), (release.backward, _BACKWARD_NEEDS)):
        call = getattr(module, name, None)
        if call is None:
            return f"has no {release.module}.{name}"
        # A custom operator of torch hides its parameters behind *args; its original function has them.
        function = FlashFunction(call, inspect.signature(getattr(call, "_init_fn", call)).parameters)
        missing = [parameter for parameter in needs if parameter not in function.parameters]
        if missing:
            return f"has a {name} without {', '.join(missing)}"
        surplus = [parameter.name for parameter in function.parameters.values() if _is_surplus(parameter, needs)]
        if surplus:
            return f"needs {', '.join(surplus)} for its {name}, which this version does not pass"
        functions.append(function)
    return Functions(*functions)


@dataclass(frozen=True, slots=True, eq=False)
class FlashAttnOp:
    """A package's functions."""

    release: Release

    @property
    def functions(self) -> Functions:
        functions = find_functions(self.release)
        assert isinstance(functions, Functions), "asked before unsupported_reason()"
        return functions

    def unsupported_reason(self, window: Window, head_dim_qk: int, head_dim_v: int) -> str | None:
        if self.release.takes_windows or (window.left is None and window.right in (None, 0)):
            return None
        return f"{self.release.name} needs a window without a left reach, and causal or unbounded on the right"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (aligned(x).transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = self.functions.forward(window, q=q, k=k, v=v, softmax_scale=scale)
        return out.transpose(1, 2), fix_empty_row_lse(lse)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, row: FlashRow, window: Window, scale: float) -> Gradients:
        q, k, v, do, out = (aligned(x).transpose(1, 2) for x in (q, k, v, row.do, row.out))
        tensors = {"dout": do, "q": q, "k": k, "v": v, "out": out} | dict.fromkeys(_LSE_NAMES, row.lse.contiguous())
        grads = {f"d{name}": torch.empty_like(tensors[name], memory_format=torch.contiguous_format) for name in "qkv"}
        self.functions.backward(window, softmax_scale=scale, **tensors, **grads)
        return Gradients(*(gradient.transpose(1, 2) for gradient in grads.values()))


class FlashAttnKernel(WindowedKernel):
    """A release of flash-attn, if it is installed."""

    def __init__(self, release: Release) -> None:
        super().__init__(release.name, (FlashAttnOp(release), TorchFlashOp()))
        self._release = release

    def _further_reason(self, demand: Demand) -> str | None:
        dims = demand.head_dim_qk, demand.head_dim_v
        if dims[0] != dims[1] or dims[0] not in self._release.head_dims:
            return f"needs one head size among {_spell(self._release.head_dims)}, not {dims[0]} and {dims[1]}"
        major, minor = torch.cuda.get_device_capability()
        if major not in self._release.capabilities:
            return f"runs on compute capability {_spell(self._release.capabilities)}, not on {major}.{minor}"
        functions = find_functions(self._release)
        return functions if isinstance(functions, str) else None


def _spell(numbers: range | tuple[int, ...]) -> str:
    if isinstance(numbers, range) and len(numbers) > 3:
        return f"{numbers[0]}, {numbers[1]}, …, {numbers[-1]}"
    return ", ".join(map(str, numbers))
