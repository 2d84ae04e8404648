"""The arguments of a call, checked: `CallOptions` is everything a call asks for besides its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mesh_attention.errors import ProblemError, UsageError
from mesh_attention.masks import Mask, boundaries, causal, documents, full, window
from mesh_attention.problem import ITEMSIZE, Problem

NO_WINDOW = (-1, -1)
SMALLEST_FACTOR, LARGEST_FACTOR = 1e-30, 1e30
"""Range of softmax_scale and softcap. Kernels take them as float32, multiply masked scores of -inf by the scale, and
divide by the softcap."""
FACTOR_RANGE = f"a number from {SMALLEST_FACTOR:.0e} to {LARGEST_FACTOR:.0e}"
REFUSED_ARGUMENTS = {
    "dropout_p": "dropout",
    "attn_mask": "a dense mask",
    "attn_bias": "an attention bias",
    "alibi_slopes": "ALiBi",
    "block_table": "a paged KV cache",
    "q_descale": "scaled low-precision input",
}
"""Arguments of other attention functions for features that are not supported."""
Boundaries = Sequence[int] | Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """Scale and cap of the scores."""

    scale: float
    softcap: float = 0.0


class TensorKind(NamedTuple):
    """What a call's problem depends on in a tensor (batch, tokens, heads, dim)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorKind:
        return cls(tensor.shape, tensor.dtype, tensor.device)


class CallOptions(NamedTuple):
    """Everything a call asks for besides its tensors; the names are flash-attn's.

    A tuple, so that it is made and hashed quickly. Its fields are also arguments of the operators, in this order.
    """

    causal: bool = False
    softmax_scale: float | None = None
    window_size: tuple[int, int] = NO_WINDOW
    cu_seqlens_q: Boundaries = None
    cu_seqlens_k: Boundaries = None
    softcap: float = 0.0
    deterministic: bool = False
    seq_len: int | None = None
    seq_len_k: int | None = None

    def checked(self) -> CallOptions:
        """The same call with every value checked and in one form, so that equal calls are equal values."""
        return self._checked(_boundaries)

    def as_operands(self) -> CallOptions:
        """The same call, checked, with boundaries as tensors: a compiler sees that they exist, not their values."""
        return self._checked(_boundary_tensor)

    def _checked(self, boundaries: Callable[[str, Boundaries], Boundaries]) -> CallOptions:
        return CallOptions(
            causal=flag("causal", self.causal),
            softmax_scale=None if self.softmax_scale is None else _number("softmax_scale", self.softmax_scale),
            window_size=_window(self.window_size),
            cu_seqlens_q=boundaries("cu_seqlens_q", self.cu_seqlens_q),
            cu_seqlens_k=boundaries("cu_seqlens_k", self.cu_seqlens_k),
            softcap=_number("softcap", self.softcap),
            deterministic=flag("deterministic", self.deterministic),
            seq_len=_length("seq_len", self.seq_len),
            seq_len_k=_length("seq_len_k", self.seq_len_k),
        )

    def mask(self) -> Mask:
        mask = full() if self.window_size == NO_WINDOW else window(*self.window_size)
        if self.causal:
            mask &= causal()
        if self.cu_seqlens_q is not None:
            mask &= documents(self.cu_seqlens_q, self.cu_seqlens_k)  # type: ignore[arg-type] # numbers once checked
        elif self.cu_seqlens_k is not None:
            raise UsageError(
                "cu_seqlens_k was given without cu_seqlens_q; give both, or only cu_seqlens_q for one sequence"
            )
        return mask

    def softmax(self, head_dim: int) -> Softmax:
        scale = head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale
        if not SMALLEST_FACTOR <= scale <= LARGEST_FACTOR:
            raise UsageError(
                f"softmax_scale={scale}: expected {FACTOR_RANGE}; to get the effect of this one, "
                "multiply q by it and pass softmax_scale=1.0"
            )
        if self.softcap != 0 and not SMALLEST_FACTOR <= self.softcap <= LARGEST_FACTOR:
            raise UsageError(f"softcap={self.softcap}: expected 0 (off) or {FACTOR_RANGE}")
        return Softmax(scale=float(scale), softcap=float(self.softcap))

    def problem(self, q: TensorKind, k: TensorKind, v: TensorKind, *, ranks: int) -> Problem:
        """The problem this call poses, judged by one rank's tensors."""
        check_fit(q, k, v)
        seq_k = self.seq_len if self.seq_len_k is None else self.seq_len_k
        cuts_k = self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k
        problem = Problem(
            seq_q=_whole_length(self.seq_len, self.cu_seqlens_q, q, ranks),
            seq_kv=_whole_length(seq_k, cuts_k, k, ranks),
            heads=q.shape[2],
            kv_heads=k.shape[2],
            head_dim_qk=q.shape[3],
            head_dim_v=v.shape[3],
            ranks=ranks,
            batch=q.shape[0],
            dtype=_dtype_name(q),
            mask=self.mask(),
        )
        return replace(problem, mask=problem.mask.within(problem.seq_q, problem.seq_kv))


CALL_ARGUMENTS = (*CallOptions._fields, "return_lse")


def call_key(options: CallOptions, q: object, k: object, v: object) -> tuple[object, ...] | None:
    """Cache key of a call on one rank; None if boundaries are given, an option has an unusual type, or torch
    transforms the call.

    Equal keys stand for equal calls: types are checked, since True == 1. Written out in full, because a small call
    takes hardly longer than this.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return None
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    scale, sides, length, length_k = options.softmax_scale, options.window_size, options.seq_len, options.seq_len_k
    if not (
        (options.cu_seqlens_q is None and options.cu_seqlens_k is None)
        and (type(options.causal) is bool and type(options.deterministic) is bool and type(options.softcap) is float)
        and (scale is None or type(scale) is float)
        and (sides is NO_WINDOW or (type(sides) is tuple and tuple(map(type, sides)) == (int, int)))
        and (length is None or type(length) is int)
        and (length_k is None or type(length_k) is int)
    ):
        return None
    return (
        options,
        type(q),
        type(k),
        type(v),
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"),
        torch.are_deterministic_algorithms_enabled(),
    )


def needs_gradient(tensors: Iterable[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


# Checks


def check_plain(tensors: Iterable[Tensor]) -> None:
    """Refuse tensors that are more than numbers in memory, since only those travel."""
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_nested:
            layout = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
            raise ProblemError(f"got {layout}; expected a dense tensor")
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not is_arriving(tensor):
            raise UsageError(
                f"got a {type(tensor).__name__}, which holds no numbers of its own; expected a plain tensor"
            )
        refuse_transforms(tensor)


def refuse_transforms(tensor: Tensor) -> None:
    if is_transformed(tensor):
        raise UsageError(
            "mesh attention supports neither forward-mode derivatives nor torch.func's transforms (vmap, grad, jvp, "
            "…); use torch.autograd.grad or backward, and the batch dimension instead of vmap"
        )


def is_transformed(tensor: Tensor) -> bool:
    """True if torch may have attached a tangent or several values to the tensor, which would not travel with it."""
    if torch._C._are_functorch_transforms_active():
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def is_arriving(tensor: Tensor) -> bool:
    """True for what a functional collective of torch returns: a tensor without memory of its own, until waited for."""
    return hasattr(tensor, "trigger_wait")


def arrived(tensor: Tensor) -> Tensor:
    """The tensor, waited for if it is arriving: our own kernels read its memory."""
    return tensor.trigger_wait() if is_arriving(tensor) else tensor  # type: ignore[attr-defined]


def check_dimensions(ranks: Sequence[Sequence[Tensor]]) -> None:
    dimensions = {tensor.dim() for rank in ranks for tensor in rank}
    if len(dimensions) > 1:
        raise ProblemError(f"q, k and v have {sorted(dimensions)} dimensions: expected the same, 3 or 4")


def check_fit(q: TensorKind, k: TensorKind, v: TensorKind) -> None:
    """Refuse tensors that do not fit each other."""
    for name, ours, theirs in (("k", q, k), ("v", q, v)):
        if ours.dtype != theirs.dtype or ours.device != theirs.device:
            raise ProblemError(
                f"q is {ours.dtype} on {ours.device} and {name} is {theirs.dtype} on {theirs.device}; expected the same"
            )
    if q.device.type == "meta":
        raise ProblemError("got tensors on meta, which have no numbers; expected dense tensors on another device")
    if k.shape[:3] != v.shape[:3]:
        raise ProblemError(f"k is {tuple(k.shape)} and v is {tuple(v.shape)}: batch, tokens and heads must be the same")
    if q.shape[0] != k.shape[0]:
        raise ProblemError(f"q has batch {q.shape[0]} and k has batch {k.shape[0]}: expected the same")
    if q.shape[3] != k.shape[3]:
        raise ProblemError(f"q has head size {q.shape[3]} and k has {k.shape[3]}: expected the same (v may differ)")


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name}={value!r}: expected True or False")
    return value


def describe(tensor: object) -> str:
    if not isinstance(tensor, Tensor):
        return f"{type(tensor).__name__}"
    if torch.compiler.is_compiling():  # sizes may be symbols, of which a compiler makes no text
        return f"a tensor of {tensor.dim()} dimensions"
    return f"a tensor of shape {tuple(tensor.shape)}"


def refuse_others(others: dict[str, Any]) -> None:
    """Refuse arguments that a call does not have; those of unsupported features may be given if they are off."""
    for name, meaning in REFUSED_ARGUMENTS.items():
        value = others.get(name)
        if value is not None and not (isinstance(value, int | float) and value == 0):
            raise UsageError(f"{name} was given, but {meaning} is not supported; leave {name} out")
    refuse_unknown(
        {name: value for name, value in others.items() if name not in REFUSED_ARGUMENTS}, CALL_ARGUMENTS, of="attention"
    )


DECIDED = ("group", "tensor_format", "choice", "layout")


def refuse_decided(options: Collection[str], why: str, *, decided: Sequence[str] = DECIDED) -> None:
    """Refuse options of MeshAttention that the stack of an adapter decides."""
    for name in decided:
        if name in options:
            raise UsageError(f"{name}= cannot be given here: {why}")


def refuse_unknown(given: Iterable[str], known: Sequence[str], *, of: str) -> None:
    for name in given:
        if name not in known:
            # A compiler cannot trace the search.
            near = [] if torch.compiler.is_compiling() else get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"unknown argument {name!r} of {of}; {hint}expected some of {', '.join(known)}")


def _whole_length(seq_len: int | None, cuts: Boundaries, tensor: TensorKind, ranks: int) -> int:
    if seq_len is not None:
        return seq_len
    return int(cuts[-1]) if cuts is not None else int(tensor.shape[1]) * ranks


def _dtype_name(tensor: TensorKind) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise ProblemError(f"q is {tensor.dtype}: expected one of {', '.join(ITEMSIZE)}")
    return name


def _boundaries(name: str, cuts: Boundaries) -> tuple[int, ...] | None:
    return None if cuts is None else boundaries(name, cuts)


def _boundary_tensor(name: str, cuts: Boundaries) -> Tensor | None:
    return cuts if cuts is None or isinstance(cuts, Tensor) else torch.tensor(_boundaries(name, cuts), device="cpu")


def _window(sides: object) -> tuple[int, int]:
    if isinstance(sides, tuple | list) and len(sides) == 2 and all(type(side) is int for side in sides):
        return sides[0], sides[1]
    raise UsageError(f"window_size={sides!r}: expected (left, right) in tokens, -1 for unbounded")


def _length(name: str, value: Any) -> int | None:
    """Checked for each call and not only for a new problem: 8.0 is equal to the 8 of an earlier call."""
    if value is None or (isinstance(value, int | torch.SymInt) and not isinstance(value, bool)):
        return value  # type: ignore[return-value] # a compiler's symbol stands for a number
    raise UsageError(f"{name}={value!r}: expected a whole number of tokens")


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{name}={value!r}: expected a number")
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf if value > 0 else -math.inf
