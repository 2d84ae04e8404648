"""Tries a model on a few tokens of one process, before it runs on shards: does everything but attention treat tokens
one by one, at the positions it is given?

The model runs on a short whole sequence as usual, and then on some of its tokens, with their position ids, while
attention gets the keys and values of the whole sequence from the first run. Queries, keys, values and outputs must be
those of the first run. They are not if the model counts positions itself, or mixes tokens outside of attention.
Nothing is sent, except by a model whose parameters are sharded. Every rank tries the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from mesh_attention.batches import IGNORED
from mesh_attention.errors import MaskError, UsageError
from mesh_attention.integrations.pytorch import as_autocast
from mesh_attention.sequences import CUTS, LENGTHS
from mesh_attention.serving import CachedLayer
from mesh_attention.session.agreement import Statement
from mesh_attention.transformers.generation_cache import GenerationCache, Observed
from mesh_attention.transformers.masks import DECODING, BatchMask, read_band
from mesh_attention.transformers.models import refuse_call

if TYPE_CHECKING:
    from mesh_attention.transformers.attention import Implementation, ModelAttention

TOKENS = 12
"""Tokens of the whole sequence."""
OWN = (3, 5, 8, 10)
"""Tokens of the second run: no two are neighbours, and none has the position that it would get by counting."""
ROWS = 8
"""Rows of equal tokens: kernels in FP8 demand multiples of 16 or 32 tokens, and get 8 × 12 and 8 × 4."""
PADDING = 2
"""Tokens of padding at the start, if the batch has padding there."""
ITEMS = 7
"""The number of labelled tokens that the loss is divided by."""
NOT_TRIED = ("use_cache", "output_hidden_states", "return_dict", "num_items_in_batch")
"""Arguments that need no trial of their own, so that ranks may differ in them."""
LABELS = ("labels", "shift_labels", "num_items_in_batch")
FUSED = "fused_lm_head"
"""An argument of models that TRL changed: compute the loss without logits, which needs labels."""


def try_once(model: Any, inputs: Mapping[str, Any], parallel: ModelAttention) -> None:
    """Try a model with the kinds of arguments that it is given, unless that was done before.

    The kind must not depend on values: ranks with other batches (data parallelism) may share parameters, which a trial
    gathers. So padding on the left is tried in any case, and refused once a batch has it.
    """
    kind = frozenset(name for name, value in inputs.items() if value is not None and name not in NOT_TRIED)
    mask, session = inputs.get("attention_mask"), parallel.attention.session
    is_new = kind not in parallel.tried
    with session.telling():
        refuse_call(model, inputs)
        _refuse_other_attention(model, parallel.implementation)
        if is_new:
            reason = _try_model(model, inputs, parallel.implementation)
    if is_new:
        session.agree(Statement(must_match={"operation": f"a model's first call with {', '.join(sorted(kind))}"}))
        parallel.tried[kind] = reason
    reason = parallel.tried[kind]
    if reason is not None and mask is not None and bool((mask[:, 0] == 0).any()):
        raise UsageError(reason)


def _refuse_other_attention(model: Any, implementation: Implementation) -> None:
    name = model.config.get_text_config()._attn_implementation
    if name != implementation.name:
        raise UsageError(
            f"the attention implementation of a parallelized model was changed, to {name!r}; call unparallelize(model) "
            "first"
        )


def _try_model(model: nn.Module, inputs: Mapping[str, Any], implementation: Implementation) -> str | None:
    """Raise unless `model` gives a rank's tokens the results that they have in the whole sequence, and say why it does
    not take padding on the left, if so. `inputs` are the arguments of its first call."""
    with undisturbed(model):
        _Attempt(model, inputs, implementation, padding=0).check()
        if isinstance(inputs.get("attention_mask"), Tensor):
            try:
                _Attempt(model, inputs, implementation, padding=PADDING).check()
            except UsageError as refusal:
                return str(refusal)
    return None


@dataclass
class TrialAttention:
    """Attention during a trial: stores tensors of the whole sequence, then compares those of some of its tokens."""

    own: Tensor | None = None
    """The tokens of the second run; None in the first."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    later: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def make_mask(self, *, batch_size: int, q_length: int, kv_length: int, **request: Any) -> BatchMask:
        request.pop("attention_mask", None)  # padding is of no importance here: attention sees all tokens
        return BatchMask(band=read_band(**request), call=self)

    def attend(self, tensors: Sequence[Tensor], mask: BatchMask, arguments: Mapping[str, Any]) -> Tensor:
        query, key, value = tensors
        if query.shape[2] != key.shape[2]:
            raise UsageError(DECODING)
        if self.own is None:
            self.seen.append((query, key, value))
        else:
            if len(self.later) == len(self.seen):
                raise RuntimeError("attention ran more often than for the whole sequence")
            self.later.append((query, key, value))
            _, key, value = self.seen[len(self.later) - 1]
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        out = functional.scaled_dot_product_attention(query, key, value, scale=arguments.get("scaling"))
        return out.transpose(1, 2)

    def differs(self) -> bool:
        return len(self.seen) != len(self.later) or any(
            _is_other(first, second, self.own)
            for tensors in zip(self.seen, self.later, strict=True)
            for first, second in zip(*tensors, strict=True)
        )


class _Attempt:
    def __init__(
        self, model: nn.Module, inputs: Mapping[str, Any], implementation: Implementation, padding: int
    ) -> None:
        self.model, self.inputs, self.implementation, self.padding = model, inputs, implementation, padding
        self.name = type(model).__name__.removeprefix("FSDP")
        tokens = inputs.get("input_ids") if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")
        if not isinstance(tokens, Tensor):
            raise UsageError(
                f"{self.name} was called without input_ids or inputs_embeds; mesh attention runs models of one "
                "sequence of tokens only; run it without parallelize"
            )
        self.tokens = tokens
        self.whole = torch.arange(TOKENS, device=tokens.device)
        self.own = torch.tensor(OWN, device=tokens.device)

    def check(self) -> None:
        trial = TrialAttention()
        whole = self._run_first(trial, self.whole, where="")
        if not trial.seen:
            raise UsageError(
                f"{self.name} does not call the attention function of transformers' interface, so every rank would "
                "attend to its own tokens only; run it on whole sequences, without parallelize, or use another model"
            )
        if get_output(whole, "loss") is not None:
            raise UsageError(
                f"{self.name} computes a loss from arguments other than labels, and each rank would compute it from "
                "its own tokens; leave these arguments out, and compute the loss from its outputs (reduce_loss)"
            )
        trial.own = self.own
        where = " on a part of the sequence"
        if "attention_mask" in self.inputs:
            where += ", perhaps because its own code uses attention_mask, which is of the whole sequence"
        own = self._run_first(trial, self.own, where=where, position_ids=self.own.repeat(ROWS, 1))
        other = _find_other(whole, own, self.own)
        if trial.differs() or other is not None:
            raise UsageError(self._why(whole, trial, other))
        if self.inputs.get("labels") is not None:
            self._check_loss(own, trial)

    def _run_first(self, trial: TrialAttention, places: Tensor, *, where: str, **more: Any) -> Any:
        try:
            return self._run(trial, places, **more)
        except (UsageError, torch.OutOfMemoryError):
            raise
        except ERRORS as error:
            first_line = str(error).strip().partition("\n")[0][:200]
            raise UsageError(
                f"{self.name} cannot run with mesh attention: it raised {type(error).__name__}{where} "
                f"({first_line}); run it on whole sequences, without parallelize, or use another model"
            ) from error

    def _run(self, trial: TrialAttention, places: Tensor, **more: Any) -> Any:
        with self.implementation.calling(trial):
            return nn.Module.__call__(self.model, **self._arguments(places), **more)

    def _arguments(self, places: Tensor) -> dict[str, Any]:
        """The call's arguments for these tokens, without labels, positions and boundaries."""
        arguments: dict[str, Any] = {}
        for name, argument in self.inputs.items():
            if name in (*LABELS, *CUTS, *LENGTHS, "position_ids", FUSED) or not isinstance(argument, HARMLESS):
                continue
            value: Any = argument
            if name == "input_ids":
                value = usual_ids(self.model, self.tokens)[:, places].repeat(ROWS, 1)
            elif name == "inputs_embeds":
                value = _random(TOKENS, value.shape[-1]).to(value)[places].repeat(ROWS, 1, 1)
            elif name == "attention_mask" and isinstance(value, Tensor):
                value = (self.whole >= self.padding).to(value.dtype).repeat(ROWS, 1)  # whole, on every rank
            elif isinstance(value, Tensor) and value.shape[:2] == self.tokens.shape[:2]:
                value = value[:1, :1].expand(ROWS, len(places), *value.shape[2:])
            elif isinstance(value, Tensor) and value.shape[:1] == self.tokens.shape[:1]:
                value = value[:1].expand(ROWS, *value.shape[1:])
            arguments[name] = value
        if "return_dict" in arguments:
            arguments["return_dict"] = True  # outputs are told apart by name
        return arguments

    # What to say

    def _why(self, whole: Any, trial: TrialAttention, other: tuple[str, bool] | None) -> str:
        if not trial.differs() and other is not None and not other[1]:
            return (
                f"{self.name} returns {other[0]}, which it computes from all tokens or from one (a pooled output); "
                "each rank would compute it from its own tokens; use a model without it (add_pooling_layer=False, or "
                "another head)"
            )
        counted, moved = (self._again(trial, whole, shift) for shift in (0, 1))
        if counted or not moved:
            how = "without position_ids it does not count 0, 1, 2, …" if counted else "it ignores position_ids"
            also = " when the batch has padding on the left" if self.padding else ""
            return (
                f"{self.name} computes its own positions{also} ({how}), which would be those of this rank's tokens "
                "alone; run it on whole sequences, without parallelize, or use a model that uses position_ids as they "
                "are given (Llama, Qwen, Gemma, …)" + (", or pad on the right" if self.padding else "")
            )
        return (
            f"{self.name} mixes tokens outside of plain attention: its results for some tokens of a sequence depend on "
            "the others, where each rank would silently treat its own tokens as the whole sequence; run it on "
            "whole sequences, without parallelize, or use another model"
        )

    def _again(self, trial: TrialAttention, whole: Any, shift: int) -> bool:
        """True if position ids of the whole sequence, moved by `shift`, make a difference to it."""
        again = TrialAttention(own=self.whole, seen=trial.seen)
        try:
            out = self._run(again, self.whole, position_ids=self.whole.repeat(ROWS, 1) + shift)
        except ERRORS:
            return True
        return again.differs() or _find_other(whole, out, self.whole) is not None

    def _check_loss(self, own: Any, trial: TrialAttention) -> None:
        """Refuse a loss that is not the sum over this rank's labels, divided by the given number of labels."""
        logits = get_output(own, "logits")
        if not isinstance(logits, Tensor) or isinstance(logits, DTensor):
            what = "DTensor logits" if isinstance(logits, DTensor) else "no logits"
            raise UsageError(f"{self.name} returns {what}, so its loss cannot be checked; {WITHOUT_LABELS}")
        is_shifted = self.inputs.get("shift_labels") is not None
        if self._has_loss(logits, trial, is_shifted=is_shifted):
            return
        if self._has_loss(logits, trial, is_shifted=not is_shifted):
            what = "predicts the next token, and needs shifted labels; call shard_batch without shift_labels=False"
            if is_shifted:
                what = "predicts the labelled tokens themselves; call shard_batch(…, shift_labels=False)"
            raise UsageError(f"{self.name} {what}")
        raise UsageError(
            f"{self.name} computes its loss in its own way, which does not add up over the ranks (expected the sum "
            f"over labels or shift_labels, divided by num_items_in_batch); {WITHOUT_LABELS}"
        )

    def _has_loss(self, logits: Tensor, trial: TrialAttention, *, is_shifted: bool) -> bool:
        labels = (torch.arange(len(OWN), device=logits.device) % logits.shape[-1]).repeat(ROWS, 1)
        labels[:, 0] = IGNORED
        due = functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="sum") / ITEMS
        named: dict[str, Any] = {"labels": labels, "num_items_in_batch": torch.tensor(ITEMS, device=labels.device)}
        if is_shifted:
            named |= {"labels": torch.full_like(labels, IGNORED), "shift_labels": labels}
        if FUSED in self.inputs:
            named[FUSED] = self.inputs[FUSED]
        again = TrialAttention(own=self.own, seen=trial.seen)
        try:
            loss = get_output(self._run(again, self.own, position_ids=self.own.repeat(ROWS, 1), **named), "loss")
        except ERRORS:
            return False
        return isinstance(loss, Tensor) and bool((loss - due).abs() <= _tolerance(logits) * due.abs())


WITHOUT_LABELS = "call it without labels, and compute the loss from its outputs and shard_batch's labels (reduce_loss)"
HARMLESS = (Tensor, bool, int, float, str, list, tuple)
"""Arguments that a model does not change; a KV cache, which it does, is left out of a trial."""
ERRORS = ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError
"""Errors of a model's own code."""


def get_output(out: Any, name: str) -> Any:
    return out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)


def usual_ids(model: Any, like: Tensor) -> Tensor:
    """Different ids that have no special meaning to the model."""
    config = model.config.get_text_config()
    special: set[int] = set()
    for name, value in (*vars(model.config).items(), *vars(config).items()):
        if "token" in name:
            values = value if isinstance(value, list | tuple) else [value]
            special |= {number for number in values if isinstance(number, int)}
    size = getattr(config, "vocab_size", None) or TOKENS + len(special)
    ids = [number for number in range(size) if number not in special] or [0]
    chosen = [ids[place * len(ids) // TOKENS] for place in range(TOKENS)]
    return torch.tensor([chosen], dtype=like.dtype, device=like.device)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")


def _tolerance(tensor: Tensor) -> float:
    """What rounding may change: results for some of the tokens are computed in other shapes, and so in other orders."""
    is_narrow = torch.finfo(tensor.dtype).bits < 32 or torch.is_autocast_enabled(tensor.device.type)
    return 0.15 if is_narrow else 0.02


def _is_other(whole: Tensor, own: Tensor, places: Tensor | None, dim: int = 2) -> bool:
    """True if most tokens differ. A few may: a router can choose otherwise after rounding."""
    due = whole if places is None else whole.index_select(dim, places.to(whole.device))
    if due.shape != own.shape:
        return True
    due, own = (
        torch.nan_to_num(tensor.detach().float()).movedim(dim, 0)[..., None].flatten(1) for tensor in (due, own)
    )
    error = (due - own).norm(dim=1) / due.norm(dim=1).clamp(min=1e-30)
    return bool(error.median() > _tolerance(whole))


def _find_other(whole: Any, own: Any, places: Tensor) -> tuple[str, bool] | None:
    """The first output that differs, and whether it has a value per token."""
    own_outputs = dict(_tensors(own))
    for name, output in _tensors(whole):
        other = own_outputs.get(name)
        if other is None or other.dim() != output.dim():
            return name, True
        dims = [dim for dim in range(output.dim()) if output.shape[dim] != other.shape[dim]]
        if len(dims) > 1 or _is_other(output, other, places if dims else None, dims[0] if dims else 0):
            return name, bool(dims)
    return None


def _tensors(out: Any, name: str = "its output") -> Iterator[tuple[str, Tensor]]:
    out = out.to_local() if isinstance(out, DTensor) else out
    if isinstance(out, Tensor) and out.is_floating_point():
        yield name, out if out.dim() else out[None]
    elif isinstance(out, Mapping):
        for key, value in out.items():
            yield from _tensors(value, str(key))
    elif isinstance(out, list | tuple):
        for number, value in enumerate(out):
            yield from _tensors(value, f"{name}[{number}]")


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Without gradients, dropout, compilation, or a trace in the random numbers."""
    training = [module for module in model.modules() if module.training]
    devices = sorted(
        {parameter.device.index or 0 for parameter in model.parameters() if parameter.device.type == "cuda"}
    )
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True


# What a model puts into a cache, seen by running it on a few tokens, instead of reading its config


def observe(model: Any, parallel: ModelAttention, device: torch.device) -> Observed:
    """The layers of a model as a cache sees them; looked at once for each dtype and device."""
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    key = model.dtype, device, autocast
    if key not in parallel.observed:
        parallel.observed[key] = _look(model, parallel, device)
    return parallel.observed[key]


def _look(model: Any, parallel: ModelAttention, device: torch.device) -> Observed:
    cache = GenerationCache(parallel.attention)
    trial = _NotingTrial(cache)
    ids = usual_ids(model, torch.zeros(1, dtype=torch.long, device=device)).repeat(ROWS, 1)
    positions = torch.arange(TOKENS, device=device).repeat(ROWS, 1)
    try:
        with undisturbed(model), parallel.implementation.calling(trial), cache.called():
            nn.Module.__call__(model, input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
    except UsageError:
        raise
    except ERRORS as error:
        raise UsageError(
            f"{type(model).__name__} cannot generate with mesh attention: it raised {type(error).__name__} with a "
            f"cache ({error}); generate in one process: unparallelize(model)"
        ) from error
    if not trial.layers or trial.key is None:
        raise UsageError(f"{type(model).__name__} puts nothing into its cache, so it cannot generate on ranks")
    return Observed(trial.layers, trial.key.dtype, trial.key.device)


class _NotingTrial(TrialAttention):
    """A trial that notes the heads, sizes and window of each layer that attends."""

    def __init__(self, cache: GenerationCache) -> None:
        super().__init__()
        self.cache = cache
        self.layers: dict[int, CachedLayer] = {}
        self.key: Tensor | None = None

    def attend(self, tensors: Sequence[Tensor], mask: BatchMask, arguments: Mapping[str, Any]) -> Tensor:
        index = self.cache.updated_layer()
        if not mask.is_causal:
            raise MaskError(f"generation needs causal attention, but layer {index} has the mask {mask.band}")
        _, key, value = tensors
        self.layers[index] = CachedLayer(
            kv_heads=key.shape[1], head_dim=key.shape[3], head_dim_v=value.shape[3], window=mask.band.left
        )
        self.key = as_autocast(key)[0]
        return super().attend(tensors, mask, arguments)
