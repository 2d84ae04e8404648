"""Megatron-core: a core attention for its layer specs, over the ranks of its context-parallel group.

    spec = get_gpt_layer_with_transformer_engine_spec()
    spec.submodules.self_attention.submodules.core_attention = MeshCoreAttention

It takes the place of TEDotProductAttention. Tokens come in Megatron's own order, which its data code and its rotary
embeddings share: of 2·cp equal chunks, rank r has chunks r and 2·cp - 1 - r. Packed documents are cut one by one.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

from mesh_attention.api import attention_of
from mesh_attention.arguments import NO_WINDOW, CallOptions, describe, refuse_decided
from mesh_attention.errors import MaskError, ProblemError, UsageError
from mesh_attention.execution.autograd import attend
from mesh_attention.integrations.pytorch import with_sinks
from mesh_attention.masks import boundaries
from mesh_attention.plan.layout import Listed, Zigzag, join, position_ids, shifted

CAUSAL = (AttnMaskType.causal, AttnMaskType.causal_bottom_right)
PACKED_CAUSAL = (*CAUSAL, AttnMaskType.padding_causal)
PACKED = (*PACKED_CAUSAL, AttnMaskType.no_mask, AttnMaskType.padding)
UNPACKED = (*CAUSAL, AttnMaskType.no_mask)


class MeshCoreAttention(MegatronModule):  # type: ignore[misc] # Megatron has no types here
    """Core attention of a self-attention layer; Megatron builds it. `options` are those of `MeshAttention`.

    To pass options: ``core_attention=ModuleSpec(MeshCoreAttention, params={"cluster": "h100x64"})``. Layers with the
    same options share one MeshAttention. `cp_comm_type` is not used: the plan decides what is sent, and the result is
    the same. `apply_query_key_layer_scaling` changes nothing, because scores are float32 or wider.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _check_config(config, attention_type, dropout, groups.cp.size(), options)
        self.attn_mask_type, self.softmax_scale, self.tp_group = attn_mask_type, softmax_scale, groups.tp
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window_size = tuple(config.window_size) if has_window else NO_WINDOW
        self._make_softmax_offset(heads=config.num_attention_heads // groups.tp.size())
        self.attention = attention_of(groups.cp, **options)
        if not isinstance(self.attention.layout, Zigzag):  # by layout=, or in a choice
            raise UsageError(
                f"the layout is {self.attention.layout.name}: expected zigzag, the order in which Megatron cuts "
                "sequences; leave it out"
            )

    def _make_softmax_offset(self, *, heads: int) -> None:
        """Make the scores of attention sinks, one for each head of this tensor-parallel rank."""
        config, kind = self.config, self.config.softmax_type
        if kind == "vanilla":
            self.softmax_offset = None
            return
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        scores = torch.zeros(heads, device=device, dtype=config.params_dtype)
        if kind == "learnable":
            self.softmax_offset = torch.nn.Parameter(scores)
            if config.perform_initialization:
                config.init_method(self.softmax_offset)
        else:
            self.register_buffer("softmax_offset", scores, persistent=False)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """From this rank's (tokens, batch, heads, dim), the output (tokens, batch, heads · dim); packed, no batch."""
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        with self.attention.session.telling():
            _check_call(query, key, mask_type, attention_mask, attention_bias, packed_seq_params)
            packed = None if packed_seq_params is None else self._packed(packed_seq_params, tokens=query.shape[0])
            if packed is None:
                _check_chunks(query.shape[0], self.attention.ranks)
        options = CallOptions(
            causal=mask_type in PACKED_CAUSAL,
            softmax_scale=self.softmax_scale,
            window_size=self.window_size,
            deterministic=self.config.deterministic_mode,
        )
        if packed is None:
            tensors = [tensor.transpose(0, 1) for tensor in (query, key, value)]
            out, lse = self.attention(*tensors, return_lse=True, **options._asdict())
        else:
            out, lse = self._attend_packed((query[None], key[None], value[None]), options, packed)
        if self.softmax_offset is not None:
            out = with_sinks(out, lse, self.softmax_offset)
        flat: Tensor = out.flatten(2)
        return flat.transpose(0, 1).contiguous() if packed is None else flat[0]

    def _packed(self, params: PackedSeqParams, *, tokens: int) -> Packed:
        packed = read_packed(params, ranks=self.attention.ranks)
        if packed.tokens != tokens * self.attention.ranks:
            raise ProblemError(
                f"cu_seqlens end at {packed.tokens}, but {self.attention.ranks} context-parallel ranks with {tokens} "
                f"tokens each have {tokens * self.attention.ranks}; give boundaries of the whole sequence, padded"
            )
        return packed

    # The operator that compilers see takes no layout.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attend_packed(self, tensors: tuple[Tensor, ...], options: CallOptions, packed: Packed) -> tuple[Tensor, ...]:
        options = options._replace(cu_seqlens_q=packed.cuts)
        engine = self.attention.calls.engine([tensors], options, layout=packed.layout)
        return attend(engine, tensors)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """The learnable softmax offset, split over the tensor-parallel ranks; empty without one."""
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)


# Packed documents


class Packed(NamedTuple):
    """A packed batch: where documents and their padding begin and end, and which rank has which tokens."""

    tokens: int
    cuts: tuple[int, ...]
    layout: Listed


def packed_indices(cu_seqlens: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """This rank's tokens of a packed sequence, in Megatron's order: ``tokens.index_select(1, packed_indices(…))``.

    `cu_seqlens` are the boundaries in memory: cu_seqlens_q_padded, where documents are padded. Transformer Engine's
    `thd_get_partitioned_indices` gives the same. The default group is Megatron's context-parallel group.
    """
    group = parallel_state.get_context_parallel_group() if group is None else group
    layout = _packed_layout(_numbers("cu_seqlens", cu_seqlens), group.size())
    ids = position_ids(layout, group.rank(), seq_len=layout.seq_len, ranks=group.size())
    return torch.tensor(ids, device=cu_seqlens.device)


def read_packed(params: PackedSeqParams, *, ranks: int) -> Packed:
    """The documents of a packed batch, checked."""
    if params.cp_group is not None or params.local_cp_size is not None:
        raise UsageError(
            "packed_seq_params has a cp_group or local_cp_size of its own, but hybrid context parallelism is not "
            "supported; leave them out"
        )
    real, padded = (_both(params, end) for end in ("", "_padded"))
    if real is None:
        raise UsageError("packed_seq_params has no cu_seqlens_q; give the boundaries of the documents")
    padded = real if padded is None else padded
    lengths, spaces = ([b - a for a, b in pairwise(cuts)] for cuts in (real, padded))
    if len(lengths) != len(spaces) or any(length > space for length, space in zip(lengths, spaces, strict=True)):
        raise MaskError(
            f"cu_seqlens_q has documents of {_brief(lengths)} tokens, but cu_seqlens_q_padded of {_brief(spaces)}; "
            "expected as many documents, none of them longer than with its padding"
        )
    # Padding becomes documents of its own, which no real token sees.
    ends = (start + length for start, length in zip(padded, lengths, strict=False))
    return Packed(padded[-1], tuple(sorted({*padded, *ends})), _packed_layout(padded, ranks))


@lru_cache(maxsize=16)
def _packed_layout(cuts: tuple[int, ...], ranks: int) -> Listed:
    """Each document cut in 2·ranks equal chunks, of which rank r has the r-th from the front and from the back."""
    uneven = [b - a for a, b in pairwise(cuts) if ranks > 1 and (b - a) % (2 * ranks)]
    if uneven:
        raise ProblemError(
            f"a packed document has {uneven[0]} tokens: expected a multiple of {2 * ranks}, because Megatron cuts each "
            f"document in {2 * ranks} equal chunks; pad the documents and give cu_seqlens_q_padded"
        )

    def shard(rank: int) -> Any:
        documents = (shifted(Zigzag().segments(rank, seq_len=b - a, ranks=ranks), a) for a, b in pairwise(cuts))
        return join(chain.from_iterable(documents))

    return Listed(tuple(map(shard, range(ranks))))


def _both(params: PackedSeqParams, end: str) -> tuple[int, ...] | None:
    """Boundaries of queries, which must be those of keys."""
    q, kv = (f"cu_seqlens_{side}{end}" for side in ("q", "kv"))
    cuts = [None if getattr(params, name) is None else _numbers(name, getattr(params, name)) for name in (q, kv)]
    if cuts[0] != cuts[1]:
        raise UsageError(f"{q} and {kv} differ; expected the same, because each token is both query and key")
    return cuts[0]


_READ = WeakTensorKeyDictionary()
"""Boundaries as numbers, by tensor, with the version of the tensor."""


def _numbers(name: str, cuts: Tensor) -> tuple[int, ...]:
    """Boundaries as numbers. Reading them waits for the device, so the layers of a model share one reading."""
    version = 0 if cuts.is_inference() else cuts._version
    reading: tuple[int, tuple[int, ...]] | None = _READ.get(cuts)  # type: ignore[no-untyped-call]
    if reading is None or reading[0] != version:
        reading = _READ[cuts] = version, boundaries(name, cuts)
    return reading[1]


def _brief(lengths: list[int]) -> str:
    return ", ".join(map(str, lengths[:8])) + (", …" if len(lengths) > 8 else "")


# Checks


def _check_config(
    config: TransformerConfig, attention_type: str, dropout: float, ranks: int, options: dict[str, Any]
) -> None:
    if attention_type != "self":
        raise UsageError(
            f"attention_type={attention_type!r}: expected self; give cross attention another core_attention"
        )
    if dropout > 0:
        raise UsageError(
            f"attention_dropout={dropout} is not supported; set attention_dropout=0.0 (TransformerConfig's default "
            "is 0.1)"
        )
    if config.context_parallel_size != ranks:
        raise UsageError(
            f"context_parallel_size={config.context_parallel_size}, but the context-parallel group has {ranks} ranks; "
            "expected the same in TransformerConfig and in initialize_model_parallel"
        )
    for name in ("fp8_dot_product_attention", "fp8_multi_head_attention", "qk_clip", "log_max_attention_logit"):
        if getattr(config, name):
            raise UsageError(f"{name}=True is not supported; set it to False, or use TEDotProductAttention")
    if config.batch_invariant_mode:
        raise UsageError("batch_invariant_mode=True is not supported: plans depend on the batch; set it to False")
    if config.cuda_graph_impl != "none":
        raise UsageError(
            f"cuda_graph_impl={config.cuda_graph_impl!r} is not supported: ranks talk about new calls, which a graph "
            "of the layer cannot capture; leave it out, or give MeshCoreAttention cuda_graphs=True"
        )
    refuse_decided(options, "Megatron decides it; leave it out", decided=("group", "tensor_format"))


def _check_call(
    query: Tensor,
    key: Tensor,
    mask_type: AttnMaskType,
    attention_mask: Tensor | None,
    attention_bias: Tensor | None,
    packed_seq_params: PackedSeqParams | None,
) -> None:
    if attention_mask is not None:
        raise UsageError(
            f"attention_mask is {describe(attention_mask)}: expected None, because the mask is known from "
            "attn_mask_type and packed_seq_params; in Megatron-LM, use --no-create-attention-mask-in-dataloader"
        )
    if attention_bias is not None:
        raise UsageError("attention_bias was given, but an attention bias is not supported; leave it out")
    if packed_seq_params is not None and packed_seq_params.qkv_format != "thd":
        raise UsageError(
            f"packed_seq_params.qkv_format={packed_seq_params.qkv_format!r}: expected thd; leave out packed_seq_params "
            "for unpacked sequences"
        )
    supported, kind = (UNPACKED, "unpacked") if packed_seq_params is None else (PACKED, "packed")
    if mask_type not in supported:
        names = ", ".join(mask.name for mask in supported)
        raise UsageError(f"attn_mask_type={mask_type.name} for {kind} sequences: expected one of {names}")
    dims = 4 if packed_seq_params is None else 3
    if query.dim() != dims:
        form = "(tokens, batch, heads, dim)" if dims == 4 else "(tokens, heads, dim)"
        raise ProblemError(f"query is {describe(query)}: expected {form} for {kind} sequences")
    if query.shape[0] != key.shape[0]:
        raise UsageError(
            f"query has {query.shape[0]} tokens and key has {key.shape[0]}: expected the same; inference with a KV "
            "cache is not supported, use mesh_attention.ShardedCache"
        )


def _check_chunks(tokens: int, ranks: int) -> None:
    if ranks > 1 and tokens % 2:
        raise ProblemError(
            f"this rank has {tokens} tokens: expected an even number, because Megatron cuts the sequence in "
            f"{2 * ranks} equal chunks and gives each rank two; pad it to a multiple of {2 * ranks}"
        )
