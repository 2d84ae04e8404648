"""torch's context_parallel with another import: real processes over Gloo, float64, against one process."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import said, same_on_all
from run_ranks import RankPool
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention  # by name, before any context
from torch.overrides import TorchFunctionMode, wrap_torch_function
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from mesh_attention import MeshAttention
from mesh_attention.context_parallel import context_parallel, context_parallel_unshard
from mesh_attention.integrations.pytorch import saved_attention

F64 = torch.float64


def mesh_of(group: Any, device: str = "cpu") -> DeviceMesh:
    return DeviceMesh.from_group(group, device, mesh_dim_names=("cp",))


def error(ours: Tensor, due: Tensor) -> float:
    assert ours.shape == due.shape
    return ((ours - due).abs().max() / due.abs().max()).item()


def inside_error(
    mesh: DeviceMesh,
    function: Callable[[Tensor], Tensor],
    whole: Tensor,
    dim: int = 2,
    *,
    way: Callable[[Tensor], Tensor] | None = None,
    has_gradient: bool = True,
    **options: Any,
) -> float:
    """Of the output and the gradient of a function of a buffer, called inside, perhaps in another way than outside."""
    inputs = whole.clone().requires_grad_(has_gradient)
    due = function(inputs)
    mine = whole.clone()
    with context_parallel(mesh, buffers=[mine], buffer_seq_dims=[dim], **options):
        part = mine.clone().requires_grad_(has_gradient)
        out = (way or function)(part)
        if not has_gradient:
            return error(context_parallel_unshard(mesh, [out], [dim], **options)[0], due)
        (gradient,) = torch.autograd.grad(out.square().sum(), part)
        ours = context_parallel_unshard(mesh, [out, gradient], [dim, dim], **options)
    (due_gradient,) = torch.autograd.grad(due.square().sum(), inputs)
    return max(map(error, ours, (due.detach(), due_gradient)))


# What scaled_dot_product_attention can be asked for


def sdpa_cases() -> dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]]:
    whole, short, long = (2, 4, 19, 8), (2, 4, 7, 8), (2, 4, 31, 8)
    return {
        "scale": ([whole] * 3, {"scale": 0.3, "is_causal": True}),
        "two head sizes": ([whole, whole, (2, 4, 19, 5)], {}),
        "no heads": ([(3, 19, 8)] * 3, {"is_causal": True}),
        "tokens alone": ([(19, 8)] * 3, {"is_causal": True}),
        "two batch dims": ([(2, 3, 4, 19, 8)] * 3, {"is_causal": True}),
        "grouped heads": ([whole, (2, 2, 19, 8), (2, 2, 19, 8)], {"enable_gqa": True}),
        "cross": ([whole, long, long], {}),
        "causal, more queries": ([whole, short, short], {"is_causal": True}),
        "causal, more keys": ([whole, long, long], {"is_causal": True}),
        "fewer tokens than ranks": ([(2, 4, 2, 8)] * 3, {"is_causal": True}),
    }


def sdpa_errors(group: Any, device: str = "cpu") -> dict[str, list[float]]:
    mesh, errors = mesh_of(group, device), {}
    for name, (shapes, call) in sdpa_cases().items():
        torch.manual_seed(1)
        wholes = [torch.randn(shape, dtype=F64).to(device) for shape in shapes]
        due_inputs = [t.clone().requires_grad_() for t in wholes]
        due = scaled_dot_product_attention(*due_inputs, **call)
        weights = torch.randn_like(due)
        due_gradients = torch.autograd.grad((due * weights).sum(), due_inputs)
        with context_parallel(mesh, buffers=[*wholes, weights], buffer_seq_dims=[-2] * 4):
            inputs = [t.clone().requires_grad_() for t in wholes]
            out = scaled_dot_product_attention(*inputs, **call)
            gradients = torch.autograd.grad((out * weights).sum(), inputs)
            ours = context_parallel_unshard(mesh, [out, *gradients], [-2] * 4)
        errors[name] = [error(one, other) for one, other in zip(ours, (due, *due_gradients), strict=True)]
    return errors


def test_every_argument_of_sdpa_means_what_it_means_in_torch(pool: RankPool) -> None:
    for errors in pool.run(3, sdpa_errors):
        assert {name for name, found in errors.items() if max(found) > 1e-12} == set()


def autocast_dtypes(group: Any) -> list[Any]:
    mesh, answers = mesh_of(group), []
    for given in (torch.float32, F64):
        x = torch.randn(1, 2, 8, 4, dtype=given)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            due = scaled_dot_product_attention(x, x, x).dtype
            with context_parallel(mesh):
                answers.append((scaled_dot_product_attention(x, x, x).dtype, due))
    return answers


def test_autocast_does_to_sdpa_what_it_does_without_the_context(pool: RankPool) -> None:
    for answers in pool.run(2, autocast_dtypes):
        assert answers == [(torch.bfloat16, torch.bfloat16), (F64, F64)]


# Modules of torch that attend


def module_errors(group: Any) -> dict[str, float]:
    mesh, errors = mesh_of(group), {}
    torch.manual_seed(2)
    attend = nn.MultiheadAttention(16, 4, batch_first=True, dtype=F64)
    layer = nn.TransformerEncoderLayer(16, 4, dropout=0.0, batch_first=True, dtype=F64)

    def heads(x: Tensor) -> Tensor:
        return attend(x, x, x, need_weights=False)[0]

    def causal_heads(x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=F64)
        return attend(x, x, x, need_weights=False, attn_mask=mask, is_causal=True)[0]

    for name, function, is_training in (
        ("heads", heads, True),
        ("causal heads", causal_heads, True),
        ("heads, fast path", heads, False),
        ("layer", layer, True),
        ("layer, fast path", layer, False),
    ):
        attend.train(is_training)
        layer.train(is_training)
        x = torch.randn(2, 21, 16, dtype=F64)
        with nullcontext() if is_training else torch.no_grad():
            errors[name] = inside_error(mesh, function, x, 1, has_gradient=is_training)
    return errors


def test_torchs_own_modules_attend_to_the_whole_sequence(pool: RankPool) -> None:
    for errors in pool.run(2, module_errors):
        assert {name for name, found in errors.items() if found > 1e-12} == set()


# Buffers


def use_buffers(group: Any) -> None:
    mesh = mesh_of(group)
    base = torch.arange(60.0).reshape(10, 6)
    view, copy = base.t()[1:5], base.clone()
    ids = torch.arange(20).reshape(2, 10)
    form = (view.shape, view.stride(), view.data_ptr())
    for raises in (False, True):
        kept = torch.arange(10)
        given = {"buffers": [view, ids, ids, kept], "buffer_seq_dims": [1, 1, -1, 0], "no_restore_buffers": {kept}}
        with pytest.raises(KeyError) if raises else nullcontext(), context_parallel(mesh, **given):
            positions = MeshAttention(group).position_ids(10)
            assert torch.equal(kept, positions)
            assert torch.equal(ids, torch.stack([positions, positions + 10]))
            assert torch.equal(view, copy.t()[1:5, positions])
            assert torch.equal(base, copy)  # whoever shares the memory sees nothing of it
            (whole,) = context_parallel_unshard(mesh, [view], [1])
            assert torch.equal(whole, copy.t()[1:5])
            view.zero_()
            ids.add_(7)
            if raises:
                raise KeyError
        assert (view.shape, view.stride(), view.data_ptr()) == form
        assert torch.equal(base, copy)
        assert torch.equal(ids, torch.arange(20).reshape(2, 10))
        assert torch.equal(kept, positions)


def test_buffers_are_sharded_in_place_and_come_back_as_they_were(pool: RankPool) -> None:
    pool.run(3, use_buffers)


def go_backward_too_late(group: Any) -> str:
    x, weight = torch.randn(4, 3), torch.ones(3, requires_grad=True)
    with context_parallel(mesh_of(group), buffers=[x], buffer_seq_dims=[0]):
        loss = (x * weight).sum()
    return said(loss.backward)


def test_a_graph_that_saved_a_buffer_does_not_read_it_after_it_was_restored(pool: RankPool) -> None:
    for answer in pool.run(2, go_backward_too_late):
        assert "modified by an inplace operation" in answer


# When the mode is there, and when not


class Watching(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def watch_from_outside(group: Any) -> list[Any]:
    x = torch.randn(1, 2, 4, 8)
    with Watching() as watching, context_parallel(mesh_of(group)):
        watching.seen.clear()
        scaled_dot_product_attention(x, x, x)
        return [func.__name__ for func in watching.seen]


def test_modes_further_out_do_not_meet_what_runs_inside_attention(pool: RankPool) -> None:
    assert pool.run(2, watch_from_outside) == [["scaled_dot_product_attention"]] * 2


def run_around(group: Any) -> None:
    mesh = mesh_of(group)
    torch.manual_seed(3)
    x = torch.randn(1, 2, 12, 4, dtype=F64)
    due = scaled_dot_product_attention(x, x, x)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        mine = x.clone()
        spread = scaled_dot_product_attention(mine, mine, mine)
        direct = MeshAttention(group, tensor_format="bhsd")(mine, mine, mine)
        assert torch.equal(direct, spread)
        elsewhere: list[Tensor] = []
        thread = threading.Thread(target=lambda: elsewhere.append(scaled_dot_product_attention(mine, mine, mine)))
        thread.start()
        thread.join()
        assert error(context_parallel_unshard(mesh, [spread], [2])[0], due) <= 1e-12
    alone = scaled_dot_product_attention(mine, mine, mine)
    assert torch.equal(elsewhere[0], alone)
    assert error(spread, alone) > 0.01
    with pytest.raises(KeyError), context_parallel(mesh):
        raise KeyError
    assert torch.equal(scaled_dot_product_attention(mine, mine, mine), alone)


def test_only_this_thread_attends_across_ranks_and_only_inside(pool: RankPool) -> None:
    pool.run(2, run_around)


def errors_with_a_cache_on_disk(group: Any) -> list[float]:
    """A function that is compiled in turn outside and inside, as new processes would, with the same cache on disk."""
    mesh, errors = mesh_of(group), []
    whole = torch.linspace(-1, 1, 96).sin().view(1, 2, 12, 4)

    def attend(x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x.sin(), x, x, is_causal=True)

    torch._inductor.config.cpp.simdlen = 1  # which vectors the machine has is found by compiling
    for is_inside in (False, True, False):
        torch._dynamo.reset()
        layer, x = torch.compile(attend), whole.clone()
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]) if is_inside else nullcontext():
            if not is_inside:
                x = x[:, :, :6].clone()  # the same shape as inside
            out, due = layer(x), attend(x)
            errors.append(error(out, due))
    return errors


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler for inductor")
def test_a_compilers_cache_on_disk_tells_inside_from_outside(pool: RankPool) -> None:
    assert max(map(max, pool.run(2, errors_with_a_cache_on_disk))) <= 1e-6


# torch.compile and activation checkpointing, in the orders people use


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48, dtype=F64), nn.Linear(16, 16, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        return x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)).tanh()


def saving_products() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


WRAPPED = {
    "every activation": partial(checkpoint_wrapper, preserve_rng_state=False),
    "reentrant": partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "saving products": partial(checkpoint_wrapper, context_fn=saving_products),
    "saving attention": partial(checkpoint_wrapper, context_fn=saved_attention),
}
ORDERS: dict[str, Callable[[Callable[..., Any], nn.Module, Any], Any]] = {
    "compile": lambda compiled, block, wrap: compiled(block),
    "checkpoint": lambda compiled, block, wrap: wrap(block),
    "compile(checkpoint)": lambda compiled, block, wrap: compiled(wrap(block)),  # as torchtitan does it
    "checkpoint(compile)": lambda compiled, block, wrap: wrap(compiled(block)),
    "compile(function)": lambda compiled, block, wrap: compiled(
        lambda x: checkpoint(block, x, use_reentrant=wrap is WRAPPED["reentrant"])
    ),
}


def compiled_checkpoint_errors(group: Any, backend: str, cases: list[tuple[str, str, bool, bool]]) -> dict[str, float]:
    """The largest error of output and gradients in two steps and outside again, with `warm` compiled outside first.

    Backward is inside the context or after it.
    """
    mesh, errors = mesh_of(group), {}
    warnings.simplefilter("ignore")
    for order, kind, warm, inside in cases:
        torch._dynamo.reset()
        torch.manual_seed(6)
        block, x = Block(), torch.randn(2, 14, 16, dtype=F64)
        due = block(x)
        due_gradients = torch.autograd.grad(due.square().sum(), list(block.parameters()))
        layer = ORDERS[order](partial(torch.compile, backend=backend, fullgraph=True), block, WRAPPED[kind])
        found = []
        if warm:
            layer(x[:, :7]).sum().backward()
        for _ in range(2):
            block.zero_grad()
            mine = x.clone()
            with context_parallel(mesh, buffers=[mine], buffer_seq_dims=[1], no_restore_buffers={mine}):
                out = layer(mine.requires_grad_())
                loss = out.square().sum()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            found.append(error(context_parallel_unshard(mesh, [out], [1])[0], due.detach()))
            for parameter, gradient in zip(block.parameters(), due_gradients, strict=True):
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=group)
                found.append(error(parameter.grad, gradient))
        found.append(error(layer(x).detach(), due.detach()))
        errors[f"{order}, {kind}, {warm=}, {inside=}"] = max(found)
    return errors


def test_compiled_checkpoints_attend_across_ranks_in_every_order(pool: RankPool) -> None:
    """A share of all combinations, with each value of each."""
    cases = [
        ("compile(checkpoint)", "every activation", False, True),
        ("compile(checkpoint)", "saving attention", True, False),
        ("checkpoint(compile)", "every activation", True, True),
        ("checkpoint(compile)", "reentrant", False, False),
        ("checkpoint(compile)", "saving products", False, True),
        ("compile(function)", "reentrant", False, True),
        ("checkpoint", "saving products", False, False),
        ("checkpoint", "reentrant", False, True),
        ("checkpoint", "reentrant", False, False),
        ("checkpoint", "every activation", False, True),
        ("compile", "every activation", True, True),
    ]
    for errors in pool.run(2, compiled_checkpoint_errors, "aot_eager", cases):
        assert {case: found for case, found in errors.items() if found > 1e-12} == {}


def compile_again(group: Any) -> list[int]:
    """How often a layer was compiled after each context; and errors where only the whole length changes."""
    mesh, counts = mesh_of(group), []
    counter = CompileCounterWithBackend("aot_eager")

    layer = torch.compile(lambda x: checkpoint(attend_causally, x, use_reentrant=False), backend=counter, dynamic=False)
    torch._dynamo.reset()
    for tokens in (14, 14, 14, 13, 14):  # 13 tokens are 7 and 6: one of two ranks has as many as of 14
        torch.manual_seed(tokens)
        x = torch.randn(1, 2, tokens, 4, dtype=F64)
        assert inside_error(mesh, attend_causally, x, way=layer, has_gradient=False) <= 1e-12
        counts.append(counter.frame_count)
    return counts


def test_a_layer_is_compiled_again_only_for_other_lengths(pool: RankPool) -> None:
    for counts in pool.run(2, compile_again):
        assert counts == [1, 1, 1, 2, 2]


# Attention that is not called from Python as usual


def hidden_calls_errors(group: Any) -> dict[str, float]:
    mesh, x = mesh_of(group), torch.randn(1, 2, 12, 4, generator=torch.Generator().manual_seed(8), dtype=F64)
    sdpa = scaled_dot_product_attention

    def without_modes(x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return sdpa(x, x, x)

    def as_a_whole(x: Tensor) -> Tensor:
        return sdpa(x, x, x)

    def attend(x: Tensor) -> Tensor:
        return sdpa(x.sin(), x, x).cos()

    class Recomputing(torch.autograd.Function):
        """A checkpoint that is not torch's."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return attend(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            again = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                return torch.autograd.grad(attend(again), again, gradient)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted, traced = torch.jit.script(attend), torch.jit.trace(attend, x)
    twice = torch.compile(twice_checkpointed, backend="aot_eager", fullgraph=True)
    ways: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "no modes": (without_modes, as_a_whole),
        "as a whole": (wrap_torch_function(lambda x: (x,))(as_a_whole), as_a_whole),
        "TorchScript": (scripted, attend),
        "traced": (traced, attend),
        "other checkpoint": (Recomputing.apply, attend),
        "nested checkpoints": (twice, attend),
    }
    return {name: inside_error(mesh, function, x, way=way) for name, (way, function) in ways.items()}


class Attending(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x.sin(), x, x).cos()


def twice_checkpointed(x: Tensor) -> Tensor:
    inner = partial(checkpoint, Attending(), use_reentrant=False)
    return checkpoint(lambda x: inner(x), x, use_reentrant=False)


def test_calls_that_no_mode_sees_attend_across_ranks(pool: RankPool) -> None:
    for errors in pool.run(2, hidden_calls_errors):
        assert {name: found for name, found in errors.items() if found > 1e-12} == {}


def other_ways_errors(group: Any) -> list[float]:
    mesh, x = mesh_of(group), torch.randn(1, 2, 12, 4, generator=torch.Generator().manual_seed(7), dtype=F64)
    attend = Attending()

    def contiguous(x: Tensor) -> Tensor:
        return attend(x).contiguous()  # torch.cond expects branches of the same strides

    ways = (
        torch.export.export(attend, (x[:, :, :6],)).module(),
        torch.compile(lambda x: torch.cond(x.sum() > -1e9, contiguous, torch.sin, (x,)), backend="aot_eager"),
    )
    with context_parallel(mesh):
        assert torch.equal(torch.cond(x.sum() > -1e9, torch.sin, torch.cos, (x,)), x.sin())  # no attention inside
    return [inside_error(mesh, attend, x, way=way, has_gradient=False) for way in ways]


def test_exported_programs_and_branches_attend_across_ranks(pool: RankPool) -> None:
    for errors in pool.run(2, other_ways_errors):
        assert max(errors) <= 1e-12


# Meshes and methods


@lru_cache(maxsize=1)
def two_axes() -> DeviceMesh:
    return init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "cp"))


def attend_causally(x: Tensor) -> Tensor:
    return scaled_dot_product_attention(x, x, x, is_causal=True)


def use_one_axis(group: Any) -> tuple[float, str]:
    """And what is said of a mesh of two."""
    torch.manual_seed(two_axes().get_local_rank("dp"))
    x = torch.randn(1, 2, 9, 4, dtype=F64)  # each replica has its own
    refusal = said(lambda: context(two_axes()).__enter__())
    return inside_error(two_axes()["cp"], attend_causally, x), refusal


def test_one_axis_of_a_larger_mesh_attends_by_itself(pool: RankPool) -> None:
    for error, refusal in pool.run(8, use_one_axis):
        assert error <= 1e-12
        assert refusal == "ProblemError: got a DeviceMesh with 2 axes; expected one axis, such as device_mesh['cp']"


def option_errors(group: Any) -> list[float]:
    mesh, errors = mesh_of(group), []
    for options in ({"method": "ring", "layout": "striped"}, {"tile": (2, 2), "tensor_format": "bhsd"}):
        attention = MeshAttention(group, **options)  # type: ignore[arg-type]
        x = torch.linspace(-1, 1, 2 * 18 * 4, dtype=F64).reshape(1, 2, 18, 4)
        errors.append(inside_error(mesh, attend_causally, x, attention=attention))
        mine, due = (attention.shard(whole, dim=2) for whole in (x, attend_causally(x)))
        with context_parallel(mesh, attention=attention, seq_lens=[18]):
            errors.append(error(attend_causally(mine), due))
    return errors


def test_a_mesh_attention_chooses_method_and_layout(pool: RankPool) -> None:
    assert max(map(max, pool.run(4, option_errors))) <= 1e-12


# Masks


def all_masks(shape: tuple[int, ...], is_masking: bool) -> list[Tensor]:
    """Masks of every type and of every shape that broadcasts to this one; `is_masking` with one element masked."""
    masks = []
    for dims in itertools.product((False, True), repeat=4):
        sizes = [size if is_whole else 1 for size, is_whole in zip(shape, dims, strict=True)]
        allowed = torch.ones(sizes, dtype=torch.bool)
        allowed.view(-1)[-1] = not is_masking
        masks += [allowed, torch.zeros(sizes, dtype=F64).masked_fill(~allowed, -torch.inf)]
    return [*masks, masks[-1][-1, -1:], masks[-1][-1, -1]]


def use_masks(group: Any) -> tuple[list[float], list[str]]:
    mesh, rank, errors = mesh_of(group), dist.get_rank(group), []
    generator = torch.Generator().manual_seed(9)
    whole = torch.randn(2, 4, 13, 8, dtype=F64, generator=generator)
    due = scaled_dot_product_attention(whole, whole, whole)
    heads = nn.MultiheadAttention(8, 2, batch_first=True, dtype=F64)
    tokens = torch.randn(2, 13, 8, dtype=F64, generator=generator)
    for parameter in heads.parameters():
        dist.broadcast(parameter.detach(), group=group, group_src=0)
    due_tokens = heads(tokens, tokens, tokens, need_weights=False)[0].detach()
    mine, mine_tokens = whole.clone(), tokens.clone()
    with context_parallel(mesh, buffers=[mine, mine_tokens], buffer_seq_dims=[2, 1]):
        parts, local = (2, 4, mine.shape[2], mine.shape[2]), mine_tokens
        for mask in (*all_masks(parts, False), torch.ones(1, 1, 1, 13, dtype=torch.bool)):
            out = scaled_dot_product_attention(mine, mine, mine, attn_mask=mask if rank != 1 else None)
            errors.append(error(context_parallel_unshard(mesh, [out], [2])[0], due))
        unpadded = torch.zeros(local.shape[:2], dtype=torch.bool)
        out = heads(local, local, local, need_weights=False, key_padding_mask=unpadded)[0]
        errors.append(error(context_parallel_unshard(mesh, [out.detach()], [1])[0], due_tokens))
        learned = torch.zeros(1, 4, *parts[2:], dtype=F64, requires_grad=True)
        refused = [*all_masks(parts, True), learned, torch.full(parts, torch.nan), torch.zeros(parts, dtype=torch.long)]
        answers = [said(lambda mask=mask: scaled_dot_product_attention(mine, mine, mine, mask)) for mask in refused]
        answers.append(said(lambda: heads(*[local] * 3, need_weights=False, key_padding_mask=~unpadded)))
    return errors, answers


def test_a_mask_that_masks_nothing_counts_as_none_and_any_other_is_refused(pool: RankPool) -> None:
    for errors, answers in pool.run(3, use_masks):
        assert max(errors) <= 1e-12
        assert {answer.partition(":")[0] for answer in answers} == {"UsageError"}
        assert all("attn_mask masks tokens" in answer for answer in answers if "gradient" not in answer)


def mask_one_rank(group: Any, is_known: bool) -> str:
    mesh, x = mesh_of(group), torch.randn(1, 2, 6, 8)
    padding = torch.ones(1, 1, 1, 6, dtype=torch.bool)
    with context_parallel(mesh):
        if is_known:
            scaled_dot_product_attention(x, x, x)
        padding[..., -1] = dist.get_rank(group) != 0
        start = time.monotonic()
        answer = said(lambda: scaled_dot_product_attention(x, x, x, attn_mask=padding))
    assert time.monotonic() - start < 25
    return answer


@pytest.mark.parametrize("is_known", [False, True])
def test_all_ranks_raise_where_the_mask_of_one_masks_tokens(is_known: bool) -> None:
    with RankPool(3, sizes=(3,)) as pool:
        ours, *theirs = pool.run(3, mask_one_rank, is_known)
    assert ours.startswith("UsageError: attn_mask masks tokens")
    assert all("rank 0 refused" in answer and "attn_mask masks tokens" in answer for answer in theirs)


def compile_with_a_mask(group: Any) -> str:
    x, mask = torch.randn(1, 2, 6, 8), torch.ones(1, 1, 1, 6, dtype=torch.bool)
    attend = torch.compile(partial(scaled_dot_product_attention, attn_mask=mask), backend="aot_eager")
    with context_parallel(mesh_of(group)):
        return said(lambda: attend(x, x, x))


def test_a_mask_in_compiled_code_is_refused(pool: RankPool) -> None:
    for answer in pool.run(2, compile_with_a_mask):
        assert "attn_mask cannot be read while a compiler traces" in answer


# Tokens that all ranks hold


def attend_to_text(group: Any, tokens: int, text_tokens: int, is_known: bool) -> tuple[float | None, str]:
    """What all ranks hold, but as keys that are as many as some rank's part of the queries."""
    mesh, generator = mesh_of(group), torch.Generator().manual_seed(0)
    x, text = (torch.randn(1, 2, n, 8, dtype=F64, generator=generator) for n in (tokens, text_tokens))
    due, mine, found = scaled_dot_product_attention(x, text, text), x.clone(), []
    with context_parallel(mesh, buffers=[mine], buffer_seq_dims=[2]):
        if is_known:
            scaled_dot_product_attention(mine, mine, mine)
        answer = said(lambda: found.append(scaled_dot_product_attention(mine, text, text)))
    return (error(found[0], MeshAttention(group).shard(due, dim=2)) if found else None), answer


@pytest.mark.parametrize("tokens", [63, 64, 61])
def test_tokens_that_all_ranks_hold_are_right_or_refused_on_all(pool: RankPool, tokens: int) -> None:
    for text_tokens in (14, 15, 16, 17):
        results = pool.run(4, attend_to_text, tokens, text_tokens, False)
        assert len({answer == "nothing was raised" for _, answer in results}) == 1, results
        for found, answer in results:
            assert found is None or found <= 1e-12
            assert found is not None or "buffers=" in answer, answer


def test_a_rank_that_finds_its_tokens_ambiguous_names_the_argument_to_all_in_a_known_call() -> None:
    with RankPool(4, sizes=(4,)) as pool:
        for _, answer in pool.run(4, attend_to_text, 63, 16, True):
            assert "buffers=" in answer


def shard_the_text(group: Any) -> float:
    mesh, generator = mesh_of(group), torch.Generator().manual_seed(0)
    x, text = (torch.randn(1, 2, n, 8, dtype=F64, generator=generator) for n in (63, 16))
    due, mine, mine_text = scaled_dot_product_attention(x, text, text), x.clone(), text.clone()
    with context_parallel(mesh, buffers=[mine, mine_text], buffer_seq_dims=[2, 2]):
        out = scaled_dot_product_attention(mine, mine_text, mine_text)
    return error(out, MeshAttention(group).shard(due, dim=2))


def test_such_tokens_may_be_buffers_too(pool: RankPool) -> None:
    assert max(pool.run(4, shard_the_text)) <= 1e-12


# What is refused


@contextmanager
def context(mesh: DeviceMesh, **given: Any) -> Any:
    with context_parallel(mesh, **given):
        yield


def refusals(group: Any) -> dict[str, str]:
    mesh = mesh_of(group)
    x, half = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    heads = nn.MultiheadAttention(8, 2, batch_first=True)
    odd = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)
    layer = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.5)
    ops, sdpa, tokens = torch.ops.aten, scaled_dot_product_attention, x[0]
    other = MeshAttention(dist.new_group([dist.get_rank()], use_local_synchronization=True))

    def enter(**given: Any) -> Callable[[], Any]:
        return lambda: context(**{"mesh": mesh, **given}).__enter__()

    def inside(function: Callable[[], Any], **given: Any) -> Callable[[], Any]:
        def run() -> None:
            with context(mesh, **given):
                function()

        return run

    a, b = torch.zeros(9), torch.zeros(10)
    trials = {
        "nested": inside(enter()),
        "mask": inside(lambda: sdpa(x, x, x, attn_mask=torch.ones(6, 6))),
        "learned mask": inside(lambda: sdpa(x, x, x, attn_mask=torch.zeros(6, 6, requires_grad=True))),
        "dropout": inside(lambda: sdpa(x, x, x, dropout_p=0.1)),
        "heads": inside(lambda: sdpa(x, half, half)),
        "broadcast": inside(lambda: sdpa(torch.cat([x, x]), x, x)),
        "one dim": inside(lambda: sdpa(x[0, 0, 0], x, x)),
        "operator": inside(lambda: ops._scaled_dot_product_flash_attention_for_cpu(x, x, x)),
        "native": inside(
            lambda: torch._native_multi_head_attention(
                *[tokens] * 3, 8, 2, torch.randn(24, 8), torch.randn(24), torch.randn(8, 8), torch.randn(8)
            )
        ),
        "flex": inside(lambda: flex_attention(x, x, x)),
        "weights": inside(lambda: heads(tokens, tokens, tokens)),
        "bias": inside(lambda: odd(tokens, tokens, tokens, need_weights=False)),
        "padding": inside(
            lambda: heads(*[tokens] * 3, need_weights=False, key_padding_mask=torch.ones(4, 6, dtype=torch.bool))
        ),
        "training dropout": inside(lambda: layer(*[tokens] * 3, need_weights=False)),
        "lengths": inside(lambda: sdpa(x, x, x), buffers=[torch.zeros(12), torch.zeros(11)], buffer_seq_dims=[0, 0]),
        "dims": enter(buffers=[a]),
        "no dim": enter(buffers=[a], buffer_seq_dims=[1]),
        "twice": enter(buffers=[x, x], buffer_seq_dims=[1, 2]),
        "not among": enter(buffers=[a], buffer_seq_dims=[0], no_restore_buffers={b}),
        "gradient": enter(buffers=[nn.Parameter(torch.zeros(4))], buffer_seq_dims=[0]),
        "list": enter(buffers=[[1, 2]], buffer_seq_dims=[0]),
        "sparse": enter(buffers=[torch.eye(3).to_sparse()], buffer_seq_dims=[0]),
        "group": enter(attention=other),
        "length": enter(seq_lens=[0]),
        "mesh": lambda: context(group).__enter__(),
        "balancer": lambda: context_parallel_unshard(mesh, [a], [0], object()),  # type: ignore[arg-type]
        "seq_dims": lambda: context_parallel_unshard(mesh, [a], []),
        "unshard dim": lambda: context_parallel_unshard(mesh, [a], [1]),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of flex_attention that is not compiled
        answers = {name: said(trial).partition("\n\nfrom user code")[0] for name, trial in trials.items()}  # its path
    assert torch.equal(sdpa(x, x, x), sdpa(x, x, x))  # nothing is left behind
    return answers


def test_what_cannot_be_done_right_is_refused(pool: RankPool, golden: Callable[[str, str], None]) -> None:
    by_rank = pool.run(2, refusals)
    for answers in by_rank:  # told by dynamo, in many words of its own
        assert "flex_attention was called under context_parallel, where it would attend" in answers.pop("flex")
    golden("context-parallel-refusals.txt", same_on_all(by_rank))


def refuse_on_one_rank(group: Any) -> list[str]:
    """Rank 0 refuses; the others are inside a call, and would wait for it."""
    mesh, is_odd = mesh_of(group), dist.get_rank(group) == 0
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    heads = nn.MultiheadAttention(8, 2, batch_first=True)
    q = torch.randn(1, 2, 6, 8)
    trials: list[Callable[[], object]] = [
        lambda: scaled_dot_product_attention(q, q, q, dropout_p=0.5 if is_odd else 0.0),
        lambda: heads(q[0], q[0], q[0], need_weights=is_odd),
        lambda: flash(q, q, q) if is_odd else scaled_dot_product_attention(q, q, q, scale=0.7),
    ]

    def enter() -> None:
        with context_parallel(mesh, buffers=[torch.zeros(6)], buffer_seq_dims=[5 if is_odd else 0]):
            scaled_dot_product_attention(q, q, q, scale=0.6)

    heard = []
    for trial in trials:
        with context_parallel(mesh):
            heard.append(said(trial))
    return [*heard, said(enter)]


def test_what_one_rank_refuses_in_a_context_is_told_to_all(pool: RankPool) -> None:
    ours, theirs = pool.run(2, refuse_on_one_rank)
    for own, told in zip(ours, theirs, strict=True):
        assert own.startswith("UsageError: ")
        assert told == f"DisagreementError: rank 0 refused the call: {own[12:]}; nothing was sent"
