"""Batches over ranks: a rank's part of a whole batch, and one loss from those of all ranks.

    local = shard_batch(attention, batch)
    loss = batch_loss(model(**local).loss, local, group=mesh)
    loss.backward()

Every rank of the attention's group gets the same whole batch. Labels are shifted, position ids made and boundaries
found before anything is cut, because the next token may be on another rank. It imports no model library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from mesh_attention.api import MeshAttention
from mesh_attention.arguments import describe
from mesh_attention.comm.torch_dist import Group, process_group
from mesh_attention.errors import UsageError
from mesh_attention.sequences import (
    CUTS,
    LENGTHS,
    BatchRow,
    cuts_of_restarts,
    find_misplaced,
    join_rows,
    longest_document,
    read_documents,
    real_tokens,
)
from mesh_attention.session.agreement import Statement, summary_of

IGNORED = -100
"""The label of a token without a label, as in transformers and torch."""
ACCEPTED = (
    "input_ids",
    "inputs_embeds",
    "labels",
    "shift_labels",
    "position_ids",
    "attention_mask",
    *CUTS,
    *LENGTHS,
)
Gradients = Literal["averaged", "summed"]


class LocalBatch(dict[str, Any]):
    """This rank's part of a batch. It remembers how often its attention had run when it was made."""

    def __init__(self, entries: Mapping[str, Any], attention: MeshAttention) -> None:
        super().__init__(entries)
        self._calls, self._passes = attention.calls, attention.calls.forward_passes

    def check_that_attention_ran(self) -> None:
        """Raise if the model did not call mesh attention: it would silently attend to this rank's tokens alone."""
        if self._calls.session.size > 1 and self._calls.forward_passes == self._passes:
            raise UsageError(
                "the model was given a sharded batch and did not call mesh attention, so every rank attended to its "
                "own tokens only; call parallelize(model, attention) before the model"
            )


def shard_batch(
    attention: MeshAttention,
    batch: Mapping[str, Any],
    *,
    shift_labels: bool = True,
    is_compared: bool = True,
    may_lack_labels: bool = False,
) -> LocalBatch:
    """The arguments of ``model(**local)`` on this rank, from the whole batch that every rank of the group has.

    `batch` holds ``input_ids`` or ``inputs_embeds`` (batch, tokens, …), and may hold ``labels`` (as transformers has
    them: not shifted, -100 for none) or ``shift_labels``, ``position_ids``, a 2D ``attention_mask``, and
    ``cu_seq_lens_q/k`` with ``max_length_q/k``. Position ids that restart, without an attention mask, mark
    packed documents, as in transformers. Anything else is refused. Padding predicts nothing, and the last token of a
    packed document does not predict the first of the next.

    The result has this rank's tokens, position ids and labels, and for the whole sequence the boundaries, the attention
    mask and ``num_items_in_batch``, so that the model's loss is this rank's sum over the labelled tokens of the whole
    batch. A label belongs to the token before it, as causal language models have it: the result holds ``shift_labels``,
    and its ``labels`` are all -100, because models compute no loss without labels, and a model that shifts labels
    itself cannot get these wrong. With `shift_labels=False`, for masked language models, labels are those of the tokens
    themselves and remain ``labels``. A parallelized model refuses labels of the other kind. A batch
    whose labels are all -100 is refused, unless `may_lack_labels`: use that if the loss is divided by the labels of
    several batches (`total_items` of `batch_loss`).

    Ranks compare their batches (a few hundred bytes per rank), unless `is_compared` is False.
    """
    if attention.is_local:
        raise UsageError(
            "shard_batch needs one rank per process, but all ranks of a local group are in this process; use a "
            "torch.distributed group, which may have one process"
        )
    with attention.session.telling() if is_compared else nullcontext():
        tokens, whole = _read(batch, attention.ranks, shift_labels=shift_labels, may_lack_labels=may_lack_labels)
    if is_compared:
        _compare(attention, batch)
    local: dict[str, Any] = {name: attention.shard(tensor) for name, tensor in tokens.items()}
    if "shift_labels" in local:
        local["labels"] = torch.full_like(local["shift_labels"], IGNORED)
    # A cache would keep every layer's keys, but decoding with it is not supported.
    return LocalBatch({**local, **whole, "use_cache": False}, attention)


def batch_loss(
    loss: Tensor,
    local: Mapping[str, Any],
    *,
    group: Group | None,
    gradients: Gradients = "averaged",
    total_items: int | Tensor | None = None,
) -> Tensor:
    """`reduce_loss` for the model's loss on a batch of `shard_batch`: the mean over all labelled tokens.

    It refuses a loss that was computed without calling the batch's attention. To accumulate gradients over several
    batches, pass the `total_items` of all of them, from `count_items`.
    """
    labels = _labels(local)
    if labels is None:
        raise UsageError("batch_loss needs labels, and this batch has none; pass labels to shard_batch")
    if isinstance(local, LocalBatch):
        local.check_that_attention_ran()
    num_items = (labels != IGNORED).sum()
    loss_sum = loss * local["num_items_in_batch"]
    return reduce_loss(loss_sum, num_items, group=group, gradients=gradients, total_items=total_items)


def count_items(batches: Iterable[Mapping[str, Any]], *, group: Group | None) -> Tensor:
    """Number of labelled tokens in batches of `shard_batch`, over all ranks of `group`."""
    count = sum((labels != IGNORED).sum() for batch in batches if (labels := _labels(batch)) is not None)
    if not isinstance(count, Tensor):
        raise UsageError(
            "count_items needs at least one batch with labels; pass all batches whose gradients are accumulated"
        )
    for axis_group in _groups(group):
        dist.all_reduce(count, group=axis_group)
    return count


def _labels(local: Mapping[str, Any]) -> Tensor | None:
    """The labels of a sharded batch that count: those of the next tokens, or of the tokens themselves."""
    labels: Tensor | None = local.get("shift_labels", local.get("labels"))
    return labels


def reduce_loss(
    loss_sum: Tensor,
    num_items: int | Tensor,
    *,
    group: Group | None,
    gradients: Gradients = "averaged",
    total_items: int | Tensor | None = None,
) -> Tensor:
    """The mean loss over all tokens of all ranks of `group`, with the gradient of this rank's part.

    `loss_sum` is the sum of this rank's token losses, `num_items` the number of its labelled tokens. `group` is a
    process group, or a DeviceMesh of any number of axes (all ranks that hold different tokens: dp × cp), or None for
    all ranks.

    The mean is L = (Σ sums) / N over the labelled tokens N of all ranks, so its gradient is the *sum* over ranks of
    ∇(own sum) / N. FSDP2 and DDP average gradients over these ranks and so divide by their number W; the loss is
    therefore multiplied by W first, unless `gradients="summed"`. Ranks may have any number of labelled tokens,
    including none. If no rank has any, the mean is nan and the gradient zero: visible in the log, harmless to the
    weights.

    To accumulate gradients over several calls, pass `total_items`: N, the labelled tokens of all ranks in all calls.
    The values of these calls then add up to the mean.
    """
    if gradients not in ("averaged", "summed"):
        raise UsageError(f"gradients={gradients!r}: expected averaged (FSDP2, DDP) or summed")
    if not isinstance(loss_sum, Tensor) or loss_sum.dim() != 0:
        raise UsageError(f"loss_sum is {describe(loss_sum)}: expected the sum of this rank's losses, a scalar tensor")
    items = torch.as_tensor(num_items, device=loss_sum.device)
    if items.dim() != 0 or items.is_floating_point() or items.dtype == torch.bool:
        raise UsageError(f"num_items={num_items!r}: expected this rank's number of labelled tokens as a whole number")
    groups = _groups(group)
    sums = torch.stack([loss_sum.detach().double(), items.double()])
    for axis_group in groups:  # over each axis in turn: the sum of all ranks
        dist.all_reduce(sums, group=axis_group)
    total, count = sums
    if total_items is not None:
        count = torch.as_tensor(total_items, device=sums.device).double()
    factor = prod(map(dist.get_world_size, groups)) if gradients == "averaged" else 1
    scale = torch.where(count > 0, factor / count, 0.0)
    mean: Tensor = _Mean.apply(loss_sum, (total / count).to(loss_sum.dtype), scale.to(loss_sum.dtype))  # type: ignore[no-untyped-call]
    return mean


class _Mean(torch.autograd.Function):
    """A precomputed value, with the gradient of `loss_sum` times `scale`."""

    @staticmethod
    def forward(ctx: Any, loss_sum: Tensor, value: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.saved_tensors[0], None, None


def _groups(group: Group | None) -> list[ProcessGroup]:
    return group.get_all_groups() if isinstance(group, DeviceMesh) else [process_group(group)]


def _read(
    batch: Mapping[str, Any], ranks: int, *, shift_labels: bool, may_lack_labels: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A whole batch, checked: tensors to shard and what every rank gets whole, by the model's argument names."""
    if not isinstance(batch, Mapping):
        raise UsageError(f"the batch is {describe(batch)}: expected a dict of tensors, with input_ids or inputs_embeds")
    batch = {name: value for name, value in batch.items() if value is not None}
    for name in batch:
        if name not in ACCEPTED:
            raise UsageError(
                f"shard_batch does not know how to cut {name!r}; expected some of {', '.join(ACCEPTED)}; pass other "
                "arguments to the model directly; if one has a value for each token, pass attention.shard(value)"
            )
    inputs = [name for name in ("input_ids", "inputs_embeds") if name in batch]
    if len(inputs) != 1:
        raise UsageError(f"the batch holds {', '.join(inputs) or 'no tokens'}: expected input_ids or inputs_embeds")
    rows, seq_len = _sizes(batch, inputs[0], ranks)
    tokens: dict[str, Tensor] = {inputs[0]: batch[inputs[0]]}
    mask = _per_token(batch, "attention_mask", (rows, seq_len))
    positions = _per_token(batch, "position_ids", (rows, seq_len), may_be_one_row=True)
    documents = _rows(batch, positions, mask, (rows, seq_len))
    labels = _read_labels(batch, mask, documents, shift_labels=shift_labels)
    if labels is not None:
        tokens["shift_labels" if shift_labels else "labels"] = labels
    plain = torch.arange(seq_len, device=tokens[inputs[0]].device)
    if positions is not None and find_misplaced(positions, plain.to(positions.device), documents) is not None:
        raise UsageError(
            "position_ids must count 0, 1, 2, … over the whole row or over each of its documents, so that a rank can "
            "check its own; leave them out, or give cu_seq_lens with them"
        )
    counted = None if labels is None else (labels != IGNORED).sum()
    if counted is not None and not may_lack_labels and not counted:
        raise UsageError(
            "every label is -100 or padding (or of the first token of a row or document, which nothing predicts); "
            "check how labels are made, skip such batches, or leave labels out"
        )
    tokens["position_ids"] = plain[None] if positions is None else positions
    # Boundaries state the whole length as well: a rank cannot derive it from its own tokens when ranks differ by one.
    cuts = join_rows([row.cuts for row in documents])
    whole: dict[str, Any] = {"num_items_in_batch": counted, "attention_mask": mask}
    whole |= dict.fromkeys(CUTS, cuts) | dict.fromkeys(LENGTHS, longest_document(cuts))
    return tokens, {name: value for name, value in whole.items() if value is not None}


def _sizes(batch: Mapping[str, Any], name: str, ranks: int) -> tuple[int, int]:
    tensor, dims = batch[name], 2 if name == "input_ids" else 3
    if not isinstance(tensor, Tensor) or tensor.dim() != dims:
        raise UsageError(f"{name} is {describe(tensor)}: expected (batch, tokens{', width' if dims == 3 else ''})")
    if tensor.shape[0] < 1 or tensor.shape[1] < ranks:
        raise UsageError(
            f"{name} is {describe(tensor)} for {ranks} ranks: expected at least one row, and at least one token a rank"
        )
    return tensor.shape[0], tensor.shape[1]


def _per_token(
    batch: Mapping[str, Any], name: str, shape: tuple[int, int], *, may_be_one_row: bool = False
) -> Tensor | None:
    tensor = batch.get(name)
    if tensor is None:
        return None
    shapes = [shape, (1, shape[1])] if may_be_one_row else [shape]
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) not in shapes:
        raise UsageError(f"{name} is {describe(tensor)}: expected {' or '.join(map(str, shapes))}, the whole sequence")
    return tensor


def _read_labels(
    batch: Mapping[str, Any], mask: Tensor | None, documents: Sequence[BatchRow], *, shift_labels: bool
) -> Tensor | None:
    """Labels that count: shifted to the token before, in its document, and none of padding.

    Labels that are shifted already say themselves what each token predicts.
    """
    shape = len(documents), documents[0].cuts[-1]
    labels, shifted = (_per_token(batch, name, shape) for name in ("labels", "shift_labels"))
    if labels is not None and shifted is not None:
        raise UsageError("the batch has both labels and shift_labels; leave one out")
    if shifted is not None and not shift_labels:
        raise UsageError("the batch has shift_labels, but shift_labels=False asks for labels; give those instead")
    if labels is not None and shift_labels:
        shifted = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].contiguous()
        for row, document in enumerate(documents):
            shifted[row, [cut - 1 for cut in document.cuts[1:-1]]] = IGNORED
    labels = shifted if shift_labels else labels
    if labels is None or mask is None:
        return labels
    return labels.masked_fill(mask.to(labels.device) == 0, IGNORED)


def _rows(
    batch: Mapping[str, Any], positions: Tensor | None, mask: Tensor | None, shape: tuple[int, int]
) -> tuple[BatchRow, ...]:
    rows, seq_len = shape
    documents = read_documents(batch, batch=rows, seq_len=seq_len)
    if documents is None and any(name in batch for name in LENGTHS):
        raise UsageError("max_length needs cu_seq_lens_q and cu_seq_lens_k; give all of them or none")
    if documents is None and positions is not None and mask is None:
        documents = cuts_of_restarts(positions) * (rows // positions.shape[0])
    real = ((0, seq_len),) * rows if mask is None else real_tokens(mask)
    return tuple(map(BatchRow, documents or ((0, seq_len),) * rows, real))


def _compare(attention: MeshAttention, batch: Mapping[str, Any]) -> None:
    summary = {"operation": "shard_batch", **{name: summary_of(value) for name, value in sorted(batch.items())}}
    advice = (
        "Every rank of the attention's group must get the same whole batch: a data sampler must distinguish "
        "data-parallel ranks only, and shuffle the same way on all others"
    )
    attention.session.agree(Statement(must_match=summary, advice=advice))
