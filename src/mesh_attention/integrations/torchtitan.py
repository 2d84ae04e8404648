"""torchtitan's context parallelism, over a mesh: one line in the function that makes a config.

    config = llama3_8b()
    config.model_spec = with_mesh_attention(config.model_spec)
    config.parallelism.context_parallel_degree = 8
    config.parallelism.spmd_backend = "partial_dtensor"
    config.training.disable_cuda_graphs = True

torchtitan keeps its loaders, its sharding of tokens (headtail, which is our zigzag), its loss and its parallelisms.
Packed documents are found in the positions of its loaders, wherever they restart from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import BaseAttention, FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

import mesh_attention.execution.operators  # noqa: F401 -- registers what SavedAttention names
from mesh_attention.api import MeshAttention
from mesh_attention.arguments import describe, refuse_decided
from mesh_attention.comm.local import LocalGroup
from mesh_attention.errors import MaskError, UsageError
from mesh_attention.sequences import cuts_of_restarts

Documents = tuple[Tensor, ...]
"""Boundaries of packed documents in the whole sequence: of each row, or of all rows alike; none for one document."""


def with_mesh_attention(spec: ModelSpec, **options: Any) -> ModelSpec:
    """The same model with mesh attention. `options` are those of `MeshAttention`: method, tile, cluster, …

    The model must be a decoder whose layers attend causally within documents, which is what torchtitan's backends
    flex, flex_flash and varlen compute. Call it before the Trainer is made.
    """
    refuse_decided(options, "torchtitan's mesh and its sharding of tokens decide it")
    return replace(spec, model=_replaced(spec.model), parallelize_fn=_Parallelize(spec.parallelize_fn, options))


def _replaced(model: Any) -> Any:
    """The model's config with mesh attention in every layer."""
    if not isinstance(model, Decoder.Config):
        raise UsageError(f"the model's config is a {type(model).__qualname__}: expected one of a torchtitan Decoder")
    if model._owner.get_attention_masks is not Decoder.get_attention_masks:
        raise UsageError(
            f"{model._owner.__name__} makes masks of its own, such as sliding windows, which are not supported here; "
            "expected a model that attends causally within documents"
        )
    layers = []
    for number, layer in enumerate(model.layers):
        inner = getattr(layer.attention, "inner_attention", None)
        is_causal = isinstance(inner, FlexAttention.Config) or (
            isinstance(inner, VarlenAttention.Config) and tuple(inner.window_size) == (-1, 0)
        )
        if not isinstance(layer.attention, BaseAttention.Config) or not is_causal:
            raise UsageError(
                f"layer {number} attends with {inner!r}, which cannot be replaced: expected FlexAttention, "
                "or VarlenAttention without a window"
            )
        layers.append(replace(layer, attention=replace(layer.attention, inner_attention=InnerAttention.Config())))
    return replace(model, layers=layers)


class InnerAttention(Module):  # type: ignore[misc]
    """Causal attention within documents, over the tokens of all cp ranks. torchtitan gives it this rank's."""

    attention: MeshAttention | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: Tensor,  # noqa: N803 -- torchtitan shards by these names
        k_BLNH: Tensor,  # noqa: N803
        v_BLNH: Tensor,  # noqa: N803
        *,
        attention_masks: Documents | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        **others: Any,
    ) -> Tensor:
        unknown = sorted(name for name, value in others.items() if value is not None)
        if unknown:
            raise UsageError(f"the model's attention asks for {', '.join(unknown)}, which is not supported")
        if self.attention is None or not isinstance(attention_masks, tuple):
            raise UsageError(
                f"mesh attention was called with masks {describe(attention_masks)}, outside of the model's forward or "
                "before its parallelize_fn; build the model with torchtitan's Trainer, or call both"
            )
        attend = partial(self.attention, causal=True, softmax_scale=scale)
        tensors = (q_BLNH, k_BLNH, v_BLNH)
        if len(attention_masks) < 2:
            out: Tensor = attend(*tensors, cu_seqlens_q=attention_masks[0] if attention_masks else None)
            return out
        rows = enumerate(attention_masks)
        return torch.cat([attend(*(t[row : row + 1] for t in tensors), cu_seqlens_q=cuts) for row, cuts in rows])


@dataclass(frozen=True)
class _Parallelize:
    """A model's parallelize_fn, after mesh attention was given its group."""

    inner: Callable[..., nn.Module]
    options: dict[str, Any]

    def __call__(
        self, model: nn.Module, *, parallel_dims: Any, training: Any, parallelism: Any, ac_config: Any, **others: Any
    ) -> nn.Module:
        _check(training, parallelism)
        group = parallel_dims.get_mesh("cp") if parallel_dims.cp_enabled else LocalGroup(1).comm(0)
        attention = MeshAttention(group, **self.options)
        for module in model.modules():
            if isinstance(module, InnerAttention):
                module.attention = attention
        model.register_forward_pre_hook(_FindDocuments(attention), with_kwargs=True)
        if type(ac_config) is SelectiveAC.Config:
            settings = {field.name: getattr(ac_config, field.name) for field in fields(ac_config)}
            ac_config = SavedAttention.Config(**settings)
        without_cp = copy(parallel_dims)  # its meshes stay, FSDP's over cp among them
        without_cp.cp = 1  # so that torchtitan does not also apply its own context parallelism to attention
        others |= {"training": training, "parallelism": parallelism, "ac_config": ac_config}
        return self.inner(model, parallel_dims=without_cp, **others)


def _check(training: Any, parallelism: Any) -> None:
    if not training.disable_cuda_graphs and torch.cuda.is_available():
        raise UsageError("torchtitan cannot capture mesh attention in CUDA graphs; set training.disable_cuda_graphs")
    if parallelism.spmd_backend != "partial_dtensor":
        raise UsageError(
            f"parallelism.spmd_backend={parallelism.spmd_backend!r} is not supported with mesh attention; expected "
            "partial_dtensor"
        )
    if parallelism.expert_parallel_degree > 1:
        raise UsageError(
            f"parallelism.expert_parallel_degree={parallelism.expert_parallel_degree} is not supported with mesh "
            "attention; expected 1"
        )
    balancer = parallelism.context_parallel_load_balancer
    if parallelism.context_parallel_degree > 1 and balancer != "headtail":
        raise UsageError(
            f"parallelism.context_parallel_load_balancer={balancer!r}; expected headtail, which shards tokens as "
            "zigzag does"
        )


@dataclass(frozen=True)
class _FindDocuments:
    """Gives the model's layers the documents of the whole sequence, in place of a mask."""

    attention: MeshAttention

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = ("tokens", "positions", "attention_masks")
        inputs = dict(zip(names, args, strict=False)) | kwargs
        if inputs.get("attention_masks") is not None:
            raise UsageError(
                f"the model was given masks {describe(inputs['attention_masks'])}; expected none: mesh attention finds "
                "documents in the positions"
            )
        positions = inputs.get("positions")
        if positions is None and self.attention.ranks > 1:
            raise UsageError("the model was given no positions; expected those of this rank's tokens")
        documents = () if positions is None else self.read(positions)
        return args, kwargs | {"attention_masks": documents}

    def read(self, positions: Tensor) -> Documents:
        """The documents, from this rank's positions. Ranks gather those of all: a few bytes per token, per forward."""
        whole = self.attention.unshard(positions.contiguous())
        if ((whole.diff(dim=1) != 1) & (whole[:, 1:] != 0)).any():
            raise MaskError(
                "positions of the whole sequence neither count on nor restart from 0; expected those of packed "
                "documents, sharded over cp by torchtitan's headtail"
            )
        rows = cuts_of_restarts(whole)
        rows = rows[:1] if len(set(rows)) == 1 else rows
        return () if rows == ((0, whole.shape[1]),) else tuple(torch.tensor(row, device="cpu") for row in rows)


class SavedAttention(SelectiveAC):  # type: ignore[misc]
    """torchtitan's selective checkpointing, which also keeps the output of mesh attention: nothing is sent again."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):  # type: ignore[misc]
        pass

    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() | {torch.ops.mesh_attention.attend.default}  # type: ignore[no-any-return]
