"""MeshCoreAttention on real ranks, next to Megatron's own attention on the whole sequence: one line for each case.

Run by test_megatron_core.py, because Megatron warns when it is imported, and keeps its groups in global variables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

from mesh_attention import Zigzag
from mesh_attention.integrations.megatron import MeshCoreAttention, packed_indices
from mesh_attention.plan.layout import position_ids

HEADS, KV_HEADS, HEAD_DIM, SEQ, BATCH = 4, 2, 8, 48, 2
REAL, PADDED = (0, 11, 27, 32), (0, 16, 32, 40)
"""Documents of 11, 16 and 5 tokens; with cp 4 each is padded to a multiple of 8."""


class OnCpu(torch.overrides.TorchFunctionMode):
    """Gives Megatron CPU tensors where it asks for CUDA tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        kwargs |= {"device": "cpu"} if "cuda" in str(kwargs.get("device")) else {}
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


def config_of(cp: int | None = None, **settings: Any) -> TransformerConfig:
    common = {
        "num_layers": 2,
        "hidden_size": HEADS * HEAD_DIM,
        "num_attention_heads": HEADS,
        "num_query_groups": KV_HEADS,
        "params_dtype": torch.float64,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "context_parallel_size": dist.get_world_size() if cp is None else cp,
    }
    return TransformerConfig(**(common | settings))


def mesh_of(config: TransformerConfig, mask: AttnMaskType = AttnMaskType.causal, **settings: Any) -> MeshCoreAttention:
    return MeshCoreAttention(
        **{"config": config, "layer_number": 2, "attn_mask_type": mask, "attention_type": "self"} | settings
    )


def inputs(seq: int, *shape: int, v_dim: int = HEAD_DIM) -> list[Tensor]:
    """Q, K, V of the whole sequence and the gradient of the output, the same on every rank."""
    made = torch.Generator().manual_seed(0)
    sizes = [(HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, v_dim), (HEADS * v_dim,)]
    return [torch.randn(seq, *shape, *size, generator=made, dtype=torch.float64) for size in sizes]


def passes(attend: Callable[..., Tensor], tensors: list[Tensor], offset: Tensor | None = None) -> list[Tensor]:
    """The output, and the gradients of q, k, v and the softmax offset."""
    *given, gradient = [tensor.clone() for tensor in tensors]
    leaves = [tensor.requires_grad_() for tensor in given] + ([] if offset is None else [offset])
    out = attend(*given)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def compare(name: str, ours: list[Tensor], theirs: list[Tensor], ids: Tensor) -> None:
    """Print the largest difference between this rank's tokens and the same tokens of the whole sequence."""
    wholes = [tensor.index_select(0, ids) for tensor in theirs[:4]]
    if len(theirs) > 4:  # of the softmax offset: a sum over ranks
        dist.all_reduce(ours[4])
        wholes.append(theirs[4])
    difference = max(float((a - b).abs().max()) for a, b in zip(ours, wholes, strict=True))
    report = torch.tensor(difference, dtype=torch.float64)
    dist.all_reduce(report, op=dist.ReduceOp.MAX)
    say(f"{name}: {float(report):.1e}")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def compare_unpacked(
    name: str, *, mask: AttnMaskType = AttnMaskType.causal, scale: float | None = None, **settings: Any
) -> None:
    torch.manual_seed(5)
    ours = mesh_of(config_of(**settings), mask, softmax_scale=scale)
    theirs = DotProductAttention(config_of(1, **settings), 2, mask, "self", softmax_scale=scale)
    offset = {"ours": None, "theirs": None}
    if settings.get("softmax_type") == "learnable":
        assert isinstance(ours.softmax_offset, torch.nn.Parameter)
        ours.softmax_offset.data.copy_(torch.arange(HEADS) / 3)
        theirs.softmax_offset.data.copy_(torch.arange(HEADS) / 3)
        offset = {"ours": ours.softmax_offset, "theirs": theirs.softmax_offset}
    whole = inputs(SEQ, BATCH)
    ids = cp_ids(SEQ)
    mine = [tensor.index_select(0, ids) for tensor in whole]
    compare(
        name,
        passes(lambda q, k, v: ours(q, k, v, None, attn_mask_type=mask), mine, offset["ours"]),
        passes(lambda q, k, v: theirs(q, k, v, None), whole, offset["theirs"]),
        ids,
    )


def cp_ids(seq: int) -> Tensor:
    """This rank's positions, by Megatron's own function."""
    ids: Tensor = get_batch_on_this_cp_rank({"ids": torch.arange(seq)[None]})["ids"][0]
    return ids


def compare_two_head_sizes() -> None:
    """As multi-latent attention has them. Megatron's own CPU attention supports one size only."""
    whole, ids = inputs(SEQ, BATCH, v_dim=12), cp_ids(SEQ)
    ours = mesh_of(config_of(), k_channels=HEAD_DIM, v_channels=12)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (tensor.permute(1, 2, 0, 3) for tensor in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)

    mine = [tensor.index_select(0, ids) for tensor in whole]
    compare("two head sizes", passes(ours, mine), passes(plain, whole), ids)


def packed_params(real: tuple[int, ...] = REAL, padded: tuple[int, ...] | None = PADDED, **other: Any) -> Any:
    cuts, spaces = (None if one is None else torch.tensor(one, dtype=torch.int32) for one in (real, padded))
    longest = max(b - a for a, b in pairwise(padded or real))
    fields = {"qkv_format": "thd", "cu_seqlens_q": cuts, "cu_seqlens_kv": cuts, "max_seqlen_q": longest}
    fields |= {"cu_seqlens_q_padded": spaces, "cu_seqlens_kv_padded": spaces, "max_seqlen_kv": longest}
    return PackedSeqParams(**(fields | other))


def compare_packed(name: str, mask: AttnMaskType) -> None:
    """Each document by itself in Megatron's attention, without padding."""
    whole = inputs(PADDED[-1])
    real = torch.cat([torch.arange(a, a + d - c) for a, (c, d) in zip(PADDED, pairwise(REAL), strict=False)])
    is_real = torch.zeros(PADDED[-1], dtype=torch.bool).index_fill(0, real, True)
    whole[3] = whole[3] * is_real[:, None]  # no loss on padding
    ids = packed_indices(torch.tensor(PADDED))
    ours = mesh_of(config_of(), mask)
    mine = [tensor.index_select(0, ids) for tensor in whole]
    found = passes(lambda q, k, v: ours(q, k, v, None, packed_seq_params=packed_params()), mine)
    theirs = DotProductAttention(config_of(1), 1, mask, "self")
    due = [torch.zeros(PADDED[-1], *tensor.shape[1:], dtype=torch.float64) for tensor in found]
    for start, (first, stop) in zip(PADDED, pairwise(REAL), strict=False):
        one = slice(start, start + stop - first)
        parts = passes(lambda q, k, v: theirs(q, k, v, None), [tensor[one][:, None] for tensor in whole])
        for result, part in zip(due, parts, strict=True):
            result[one] = part[:, 0]
    found[0] = found[0] * is_real[ids][:, None]
    compare(name, found, due, ids)


def gpt(config: TransformerConfig, *, ours: bool) -> GPTModel:
    spec = get_gpt_layer_local_spec()
    if ours:
        spec.submodules.self_attention.submodules.core_attention = MeshCoreAttention
    torch.manual_seed(0)
    return GPTModel(config, spec, 32, PADDED[-1], position_embedding_type="rope", parallel_output=False).double()


def run_gpt(name: str, **settings: Any) -> None:
    """A whole model, packed, with Megatron's rotary embeddings: the sum over real tokens, and its gradients."""
    is_alone = dist.get_world_size() == 1
    model = gpt(config_of(**settings), ours=not is_alone)
    text = torch.randint(32, (1, PADDED[-1]), generator=torch.Generator().manual_seed(3))
    spans = [(a, a + d - c) for a, (c, d) in zip(PADDED, pairwise(REAL), strict=False)]
    if is_alone:
        total = sum(logits_of(model(text[:, a:b], None, None)) for a, b in spans)
    else:
        ids = packed_indices(torch.tensor(PADDED))
        is_real = sum(((ids >= a) & (ids < b)).double() for a, b in spans)
        given = packed_params()
        total = logits_of(model(text[:, ids], None, None, packed_seq_params=given), is_real)
    total.backward()
    report = torch.stack([total.detach()])
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    dist.all_reduce(report)
    dist.all_reduce(gradients)
    say(f"{name}: {float(report[0]):.12f} {float(gradients.norm()):.12f}")


def logits_of(logits: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """A number that depends on every logit."""
    return (logits.double().logsumexp(2)[0] * weight).sum() + (logits.double().square().mean(2)[0] * weight).sum()


@contextmanager
def random_states_on_cpu() -> Iterator[None]:
    """Megatron's checkpoints save the state of CUDA's generator, which this machine does not have."""
    saved = torch.cuda.random.get_rng_state
    torch.cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    try:
        yield
    finally:
        torch.cuda.random.get_rng_state = saved


def check_order() -> None:
    for ranks in (2, 3, 4):
        for rank in range(ranks):
            group = SimpleNamespace(size=lambda ranks=ranks: ranks, rank=lambda rank=rank: rank)
            seq = 2 * ranks * 5
            theirs = get_batch_on_this_cp_rank({"ids": torch.arange(seq)[None]}, group)["ids"][0]
            assert theirs.tolist() == position_ids(Zigzag(), rank, seq_len=seq, ranks=ranks)
            cuts = torch.tensor([0, 4 * ranks, 10 * ranks, 10 * ranks, 12 * ranks])
            positions = torch.arange(12 * ranks)
            due = [
                _get_thd_freqs_on_this_cp_rank(rank, ranks, positions[: (b - a) // ranks], positions, a)
                for a, b in pairwise(cuts.tolist())
            ]
            assert packed_indices(cuts, group).tolist() == torch.cat(due).tolist()
    say("order: the same")


def refusals() -> None:
    q, k, v = (tensor[: SEQ // dist.get_world_size()] for tensor in inputs(SEQ, BATCH)[:3])
    attention = mesh_of(config_of())
    thd = [tensor[:10, 0] for tensor in (q, k, v)]
    calls: dict[str, Callable[[], Any]] = {
        "cross": lambda: mesh_of(config_of(), attention_type="cross"),
        "dropout": lambda: mesh_of(config_of(attention_dropout=0.1)),
        "group": lambda: mesh_of(config_of(2)),
        "fp8": lambda: mesh_of(config_of(fp8="e4m3", fp8_dot_product_attention=True)),
        "clip": lambda: mesh_of(config_of(qk_clip=True)),
        "graph": lambda: mesh_of(config_of(cuda_graph_impl="local")),
        "group of its own": lambda: mesh_of(config_of(), group=None),
        "format of tensors": lambda: mesh_of(config_of(), tensor_format="bhsd"),
        "layout": lambda: mesh_of(config_of(), layout="contiguous"),
        "layout of a choice": lambda: mesh_of(config_of(), choice="ring 1x4, striped"),
        "option": lambda: mesh_of(config_of(), clustr="h100x4"),
        "mask": lambda: attention(q, k, v, torch.zeros(1, 1, SEQ, SEQ, dtype=torch.bool)),
        "bias": lambda: attention(q, k, v, None, attention_bias=torch.zeros(1, HEADS, SEQ, SEQ)),
        "padding": lambda: attention(q, k, v, None, attn_mask_type=AttnMaskType.padding),
        "arbitrary": lambda: attention(*thd, None, AttnMaskType.arbitrary, packed_seq_params=packed_params()),
        "odd": lambda: attention(q[:11], k[:11], v[:11], None),
        "cache": lambda: attention(q[:2], k, v, None),
        "dims": lambda: attention(*thd, None),
        "format": lambda: attention(q, k, v, None, packed_seq_params=packed_params(qkv_format="sbhd")),
        "hybrid": lambda: attention(*thd, None, packed_seq_params=packed_params(local_cp_size=1)),
        "nothing": lambda: attention(*thd, None, packed_seq_params=PackedSeqParams(qkv_format="thd")),
        "uneven": lambda: attention(*thd, None, packed_seq_params=packed_params((0, 11, 40), None)),
        "ends": lambda: attention(*thd, None, packed_seq_params=packed_params((0, 16, 32), None)),
        "longer": lambda: attention(*thd, None, packed_seq_params=packed_params((0, 20, 40), (0, 16, 40))),
        "sides": lambda: attention(*thd, None, packed_seq_params=packed_params(cu_seqlens_kv=torch.tensor([0, 40]))),
    }
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            say(f"refused {name}: {type(error).__name__}: {error}")
        else:
            raise AssertionError(f"{name} was not refused")


def main() -> None:
    torch.cuda.current_device = lambda: "cpu"
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    with OnCpu():
        if dist.get_world_size() > 1 and "gpt" not in sys.argv:
            check_order()
            compare_unpacked("causal")
            compare_unpacked("no mask", mask=AttnMaskType.no_mask)
            compare_unpacked("scale", scale=0.3, apply_query_key_layer_scaling=True)
            compare_unpacked("window", window_size=(5, 0))
            compare_unpacked("window of other layers", window_size=(5, 0), window_attn_skip_freq=2)
            compare_unpacked("off by one", softmax_type="off-by-one")
            compare_unpacked("learnable offset", softmax_type="learnable")
            compare_unpacked("deterministic", deterministic_mode=True)
            compare_two_head_sizes()
            compare_packed("packed, causal", AttnMaskType.causal)
            compare_packed("packed, no mask", AttnMaskType.no_mask)
            refusals()
        run_gpt("gpt, packed")
        if dist.get_world_size() > 1:
            with random_states_on_cpu():
                run_gpt("gpt, recomputed", recompute_granularity="selective", recompute_modules=["core_attn"])


if __name__ == "__main__":
    main()
