"""Every kernel of the GPU against float64, over masks, head sizes, lengths and the strides that buffers have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from kernel_cases import HEADS, MASKS, check, error, exact_backward, exact_forward, make_case, positions
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu.launches import count_launches
from mesh_attention import LocalGroup, MeshAttention, causal, documents, full, window
from mesh_attention.kernels import launching
from mesh_attention.kernels.base import CallMask, Demand, Kernel, RowGradient
from mesh_attention.kernels.intervals import INTERVALS
from mesh_attention.kernels.reference import ReferenceKernel
from mesh_attention.kernels.select import KERNELS, choose_kernel
from mesh_attention_lab.testing import kernel_conformance as conformance
from mesh_attention_lab.testing.kernel_conformance import CHECKS, Check, Setting

DEVICE = "cuda"
FUSED = [kernel for kernel in KERNELS if kernel.name not in ("cpu flash", "reference")]
FEW = (
    conformance.unmasked_calls_are_exact,
    conformance.causal_calls_are_exact,
    conformance.bands_are_exact,
    conformance.large_scores_keep_their_weights,
    conformance.deterministic_kernels_give_the_same_bits,
)
"""The checks for a second dtype, and for the deterministic one of two kernels."""


case = partial(make_case, device=DEVICE)


def need(
    kernel: Kernel, dtype: torch.dtype, dims: tuple[int, int] = (128, 128), *, deterministic: bool = False
) -> None:
    demand = Demand(
        device=DEVICE,
        dtype=dtype,
        head_dim_qk=dims[0],
        head_dim_v=dims[1],
        softcap=0.0,
        lse_gradient=False,
        deterministic=deterministic,
    )
    reason = kernel.unsupported_reason(demand)
    if reason is not None:
        pytest.skip(f"{kernel.name} {reason}")


every_kernel = pytest.mark.parametrize("kernel", FUSED, ids=lambda kernel: kernel.name)
each_kernel = pytest.mark.parametrize(
    "kernel", [kernel for kernel in FUSED if "deterministic" not in kernel.name], ids=lambda kernel: kernel.name
)


@pytest.mark.parametrize(
    ("kernel", "dtype", "conforms"),
    [
        pytest.param(kernel, dtype, check, id=f"{kernel.name}-{name}-{check.__name__}")
        for kernel in FUSED
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"))
        for check in (CHECKS if dtype is torch.bfloat16 and "deterministic" not in kernel.name else FEW)
    ],
)
def test_conformance(kernel: Kernel, dtype: torch.dtype, conforms: Check) -> None:
    need(kernel, dtype, (64, 64))
    conforms(kernel, Setting(device=DEVICE, dtype=dtype, head_dim=64, head_dim_v=128, seq_len=100))


@every_kernel
@pytest.mark.parametrize(("turn", "mask"), list(enumerate(MASKS)))
def test_every_mask_with_grouped_heads(kernel: Kernel, turn: int, mask: str) -> None:
    dtype, kv_heads = ((torch.bfloat16, 4), (torch.float16, 2), (torch.bfloat16, 1))[turn % 3]
    need(kernel, dtype)
    check(kernel, case(MASKS[mask], dtype, kv_heads=kv_heads))


@each_kernel
@pytest.mark.parametrize(
    ("dims", "dtype"),
    [
        ((64, 64), torch.bfloat16),
        ((96, 96), torch.float16),
        ((256, 256), torch.bfloat16),
        ((192, 128), torch.float16),
        ((64, 128), torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", ["causal", "window"])
def test_every_head_size(kernel: Kernel, dtype: torch.dtype, dims: tuple[int, int], mask: str) -> None:
    need(kernel, dtype, dims)
    check(kernel, case(MASKS[mask], dtype, dims=dims, kv_heads=2))


@every_kernel
@pytest.mark.parametrize(("dtype", "heads"), [(torch.bfloat16, 1), (torch.float16, 3)], ids=str)
def test_records_that_are_not_aligned(kernel: Kernel, dtype: torch.dtype, heads: int) -> None:
    need(kernel, dtype)
    given = case(MASKS["causal"], dtype, heads=heads, kv_heads=heads)
    assert any(stride * dtype.itemsize % 16 for stride in given.row.do.stride()[:3])
    check(kernel, given)


@every_kernel
def test_strides_of_do_may_change_between_calls(kernel: Kernel) -> None:
    """torch's cuDNN plans know the strides of Q, K and V only."""
    need(kernel, torch.bfloat16)
    given = case(MASKS["full"], torch.bfloat16)
    for lay in (lambda x: x, lambda x: x.clone(), lambda x: x.contiguous(), lambda x: x.mT.contiguous().mT):
        check(kernel, given._replace(row=given.row._replace(do=lay(given.row.do))))


BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "torch flash": SDPBackend.FLASH_ATTENTION}


LAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads first": lambda x: x.contiguous(),
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "one of three": lambda x: (
        x.new_empty(x.shape[0], x.shape[2], 3, *x.shape[1::2]).unbind(2)[1].transpose(1, 2).copy_(x)
    ),
}


@pytest.mark.parametrize("kernel", [kernel for kernel in FUSED if kernel.name == "cudnn"], ids=["cudnn"])
@pytest.mark.parametrize("lay", LAYS)
def test_torchs_own_attention_beside_ours_changes_neither(kernel: Kernel, lay: str) -> None:
    """torch keeps cuDNN's plans by the strides of Q, K and V alone, whatever those of dO are. Threads have their own:
    both must come through autograd to meet."""
    need(kernel, torch.bfloat16)
    orders = [(of_torch, of_ours) for of_torch in LAYS for of_ours in LAYS]
    for number, order in enumerate(orders):
        first, is_causal = ("torch", "ours")[number % 2], number % 4 < 2
        check_beside(LAYS[lay], is_causal, 200 + 8 * number, *order, first)  # each length has plans of its own


def check_beside(
    lay: Callable[[Tensor], Tensor],
    is_causal: bool,
    tokens: int,
    of_torch: str,
    of_ours: str,
    first: str,
) -> None:
    q, k, v, d_out = (torch.randn(2, 4, tokens, 64, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    q, k, v = map(lay, (q, k, v))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    due = torch.autograd.grad(functional.scaled_dot_product_attention(*wide, is_causal=is_causal), wide, d_out.double())
    calls = {
        "torch": lambda: by_torch(q, k, v, LAYS[of_torch](d_out), is_causal),
        "ours": lambda: by_us(q, k, v, LAYS[of_ours](d_out), is_causal),
    }
    for who in sorted(calls, reverse=first == "torch"):
        for mine, exact in zip(calls[who](), due, strict=True):
            assert (mine.double() - exact).norm() <= 0.02 * exact.norm(), (who, first, of_torch, of_ours)


def by_torch(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, is_causal: bool) -> Sequence[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.autograd.grad(functional.scaled_dot_product_attention(*leaves, is_causal=is_causal), leaves, d_out)


def by_us(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, is_causal: bool) -> Sequence[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    attention = MeshAttention(LocalGroup(1).comm(0), tensor_format="bhsd")
    return torch.autograd.grad(attention(*leaves, causal=is_causal), leaves, d_out)


@pytest.mark.parametrize(
    "kernel", [kernel for kernel in FUSED if kernel.name in BACKENDS], ids=lambda kernel: kernel.name
)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("dtype", "kv_heads"), [(torch.bfloat16, 4), (torch.float16, 1)], ids=str)
def test_no_worse_than_the_operator_itself(kernel: Kernel, dtype: torch.dtype, is_causal: bool, kv_heads: int) -> None:
    """With delta in place of the output, errors stay within 1.5 times those of plain torch."""
    need(kernel, dtype)
    form, mask = ("causal", causal()) if is_causal else ("full", full())
    call = CallMask(form, mask, (range(1024),), (range(1024),), 1024, 1024)  # type: ignore[arg-type]
    given = case(call, dtype, kv_heads=kv_heads)
    out, lse = exact_forward(given.q, given.k, given.v, given.scores)
    row = RowGradient(given.row.do, lse.float(), (out * given.row.do.double()).sum(-1).float())
    given = given._replace(row=row)
    q, k, v = (x.detach().clone().requires_grad_() for x in (given.q, given.k, given.v))
    with sdpa_kernel(BACKENDS[kernel.name]):
        plain = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=kv_heads != HEADS)
        plain_gradients = torch.autograd.grad(plain, (q, k, v), given.row.do)
    ours, _ = kernel.forward(given.q, given.k, given.v, given.scores)
    assert error(ours, out) <= 1.5 * error(plain.detach(), out)
    gradients = kernel.backward(given.q, given.k, given.v, given.row, given.scores)
    for mine, theirs, due in zip(gradients, plain_gradients, exact_backward(given), strict=True):
        assert error(mine, due) <= 1.5 * error(theirs, due)


@pytest.mark.parametrize(
    "kernel", [k for k in FUSED if "deterministic" in k.name or k is INTERVALS], ids=lambda kernel: kernel.name
)
@pytest.mark.parametrize("mask", ["causal", "window"])
def test_deterministic_kernels_give_the_same_bits(kernel: Kernel, mask: str) -> None:
    need(kernel, torch.bfloat16, deterministic=True)
    tokens = range(4096)
    value, form = {"causal": (causal(), "causal"), "window": (window(1000, 0), "positions")}[mask]
    call = CallMask(form, value, (tokens,), (tokens,), 4096, 4096)  # type: ignore[arg-type]
    given = case(call, torch.bfloat16, kv_heads=1)
    first, *others = (kernel.backward(given.q, given.k, given.v, given.row, given.scores) for _ in range(4))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert torch.get_deterministic_debug_mode() == 0


def packed(count: int, each: int) -> CallMask:
    tokens = range(count * each)
    cuts = list(range(0, len(tokens) + 1, each))
    return positions(causal() & documents(cuts), tokens, tokens, len(tokens))


@pytest.mark.parametrize(
    ("dims", "mask"), [((128, 128), "causal"), ((128, 128), "documents"), ((96, 80), "mixed strides"),
                       ((96, 80), "blind rows")], ids=str
)  # fmt: skip
def test_softcap_and_gradients_into_the_lse(dims: tuple[int, int], mask: str) -> None:
    """Also in rows where dO is zero."""
    need(INTERVALS, torch.bfloat16, dims)
    given = case(MASKS[mask], torch.bfloat16, dims=dims, kv_heads=2)
    given.row.do[:, :, ::3] = 0
    check(INTERVALS, given._replace(scores=given.scores._replace(softcap=3.0)))


@pytest.mark.parametrize("deterministic", [False, True])
def test_documents_are_one_launch_a_pass_and_never_compile_again(deterministic: bool) -> None:
    """Two launches backward, by the kernel that is chosen; a new number of documents, and a new length, are cheap."""
    demand = Demand(
        device=DEVICE,
        dtype=torch.bfloat16,
        head_dim_qk=128,
        head_dim_v=128,
        softcap=0.0,
        lse_gradient=False,
        deterministic=deterministic,
    )
    kernel, compiled = choose_kernel(demand), None
    for count, each in ((8, 100), (64, 37), (33, 128), (5, 1000)):
        given = case(packed(count, each), torch.bfloat16, kv_heads=2)
        check(kernel, given)
        assert count_launches(lambda given=given: kernel.forward(*given[:3], given.scores)) == 1  # type: ignore[misc]
        assert count_launches(lambda given=given: kernel.backward(*given)) == 2  # type: ignore[misc]
        now = compiled_forms()
        assert compiled in (None, now), "a new length was compiled"
        compiled = now


def compiled_forms() -> int:
    """How often Triton has compiled a kernel for this device."""
    names = ("forward", "backward_keys", "backward_queries")
    index = torch.cuda.current_device()
    return sum(len(launching.kernel("interval_kernels", name).device_caches[index][0]) for name in names)


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """In bytes, over what was held before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found: list[int] = []
    yield found
    found.append(torch.cuda.max_memory_allocated() - before)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_the_reference_is_exact_in_bounded_memory(softcap: float) -> None:
    kernel, tokens = ReferenceKernel(), range(4096)
    call = CallMask("causal", causal(), (tokens,), (tokens,), 4096, 4096)
    given = case(call, torch.float32, dims=(40, 24), kv_heads=2)
    given = given._replace(scores=given.scores._replace(softcap=softcap))
    with peak_memory() as peak:
        out, lse = kernel.forward(given.q, given.k, given.v, given.scores)
        gradients = kernel.backward(given.q, given.k, given.v, given.row, given.scores)
    assert peak[0] <= 2**30 + 2**27
    exact, exact_lse = exact_forward(given.q, given.k, given.v, given.scores)
    assert max(error(out, exact), error(lse, exact_lse)) <= 1e-5
    assert max(error(*pair) for pair in zip(gradients, exact_backward(given), strict=True)) <= 1e-5


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "cudnn"),
        ({"deterministic": True}, "cudnn, deterministic"),
        ({"lse_gradient": True}, "triton intervals"),
        ({"softcap": 1.0}, "triton intervals"),
        ({"deterministic": True, "head_dim_v": 64}, "triton intervals"),
        ({"softcap": 1.0, "dtype": torch.float32}, "reference"),
        ({"dtype": torch.float32}, "reference"),
        ({"head_dim_qk": 60, "head_dim_v": 60}, "reference"),
    ],
)
def test_the_choice_on_hopper(changes: dict[str, object], name: str) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not on Hopper")
    plain: dict[str, object] = {"device": DEVICE, "dtype": torch.bfloat16, "head_dim_qk": 128, "head_dim_v": 128}
    demand = Demand(**(plain | {"softcap": 0.0, "lse_gradient": False} | changes))  # type: ignore[arg-type]
    choose_kernel.cache_clear()
    chosen = choose_kernel(demand)
    assert chosen.name in (name, "flash-attn 3")
