"""transformers' Trainer, with sequences spread over ranks: ``class MeshTrainer(MeshTrainerMixin, Trainer)``.

    model = parallelize(AutoModelForCausalLM.from_pretrained(…), MeshAttention(mesh["cp"]))
    MeshTrainer(model=model, args=…, train_dataset=…).train()

The mixin also goes before subclasses of Trainer, such as TRL's SFTTrainer. Ranks of the attention's group get the same
batches, and each runs the model on its own tokens; groups get different batches, as ranks of data parallelism do. Loss
and gradients are those of Trainer on whole batches. It needs accelerate, as Trainer does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn
from transformers import Trainer

from mesh_attention.api import MeshAttention
from mesh_attention.arguments import describe
from mesh_attention.batches import IGNORED, count_items, shard_batch
from mesh_attention.errors import UsageError
from mesh_attention.integrations.accelerate import batches_of, make_mesh, refuse_parallelism
from mesh_attention.transformers.parallelize import find_parallel

Base: Any = object
"""In use, the Trainer class that follows the mixin."""
DOCUMENTS = ("cu_seq_lens_q", "position_ids")
"""Arguments that state the documents of a packed batch."""
DOCUMENTS_FOR_RECURRENCE = ("seq_idx",)
"""What TRL adds to packed batches for recurrent layers; redundant next to `DOCUMENTS`."""


class MeshTrainerMixin(Base):  # type: ignore[misc]
    """Makes a Trainer run a model with mesh attention. Write it before the Trainer class, and give it no arguments."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(MeshTrainerMixin):
            raise UsageError(
                f"{cls.__name__} has MeshTrainerMixin after its trainer, which would hide it; write "
                f"class {cls.__name__}(MeshTrainerMixin, {cls.__bases__[0].__name__})"
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_parallelism(self.accelerator)
        for reason in unsupported_reasons(self):
            raise UsageError(reason)
        parallel = find_parallel(self.model)
        if parallel is None:
            raise UsageError(
                f"{type(self.model).__name__} does not use mesh attention; call parallelize(model, attention) "
                "before you make the trainer"
            )
        self.mesh_attention: MeshAttention = parallel.attention
        self._dp_cp = make_mesh(self.mesh_attention, self.args.device.type)

    # Data

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """A loader that gives the ranks of a group the same batches."""
        with batches_of(self.accelerator, self._dp_cp):
            return super()._get_dataloader(*args, **kwargs)

    def get_cp_size(self) -> int:
        return self.mesh_attention.ranks

    def get_batch_samples(self, *args: Any) -> tuple[list[Any], Tensor | None]:
        """This rank's parts of the batches of a step, and the number that Trainer divides their losses by."""
        batches, _ = super().get_batch_samples(*args)
        local = [self._shard(batch, is_newest=batch is batches[-1]) for batch in batches]
        return local, _count(local) if local else None

    def _shard(self, batch: Mapping[str, Any], *, is_newest: bool = True) -> dict[str, Any]:
        dropped = DOCUMENTS_FOR_RECURRENCE if any(batch.get(name) is not None for name in DOCUMENTS) else ()
        whole = {name: value for name, value in batch.items() if name not in dropped}
        if is_newest:
            whole |= self._without_repeated(whole)
        attention, shift = self.mesh_attention, self._loss_shifts_labels
        local = dict(shard_batch(attention, whole, shift_labels=shift, may_lack_labels=True))
        # TRL counts tokens by the attention mask, and divides by this. Every rank has the mask of the whole sequence.
        self._tp_size = attention.ranks if "attention_mask" in local else 1
        return local

    def _without_repeated(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The labels of the loader's newest batch, without those of rows that it repeats to fill up the last batch."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return {}
        new = {name: batch[name].clone() for name in ("labels", "shift_labels") if batch.get(name) is not None}
        for labels in new.values():
            labels[max(0, state.remainder - self._dp_cp.get_local_rank(0) * len(labels)) :] = IGNORED
        return new

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        """Counts this rank's tokens, as Trainer adds up the counts of all ranks."""
        mask = inputs.get("attention_mask")
        own = {} if mask is None else {"attention_mask": self.mesh_attention.shard(mask)}
        super()._track_num_input_tokens({**inputs, **own})

    # Evaluation

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.gather_for_metrics = self.gather_function = self._gather_for_metrics

    def _gather_for_metrics(self, values: Any, use_gather_object: bool = False) -> Any:
        """Rows of all batches in order, once for each group, whose ranks all have them; single numbers of all ranks."""
        if use_gather_object:
            raise UsageError("use_gather_object=True is not supported; leave it out: rows are gathered as tensors")
        state = self.accelerator.gradient_state
        kept = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

        def gather(tensor: Tensor) -> Tensor:
            gathered: Tensor = self.accelerator.gather(tensor)
            if tensor.dim() == 0:
                return gathered
            return gathered.reshape(*self._dp_cp.shape, *tensor.shape)[:, 0].flatten(0, 1)[:kept]

        return recursively_apply(gather, values, error_on_other_type=True)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """The loss of all groups' batches, and logits and labels of this group's whole batch."""
        inputs = self._prepare_inputs(inputs)
        labels, local = inputs.get("labels"), self._shard(inputs)
        loss, outputs = None, None
        with torch.no_grad(), self.compute_loss_context_manager():
            if "labels" in local:
                with_outputs, count = not prediction_loss_only, _count([local])
                result = self.compute_loss(model, dict(local), return_outputs=with_outputs, num_items_in_batch=count)
                loss, outputs = result if with_outputs else (result, None)
                loss = loss.detach().clone()
                dist.all_reduce(loss)
                loss /= dist.get_world_size()
            elif not prediction_loss_only:
                outputs = model(**local)
        if prediction_loss_only:
            return loss, None, None
        ignored = ignore_keys if ignore_keys is not None else self.model.config.keys_to_ignore_at_inference
        logits = tuple(self._whole(outputs, ["loss", *ignored], local["position_ids"].shape[1]))
        return loss, logits[0] if len(logits) == 1 else logits, labels

    def _whole(self, outputs: Any, ignored: Sequence[str], tokens: int) -> Iterator[Tensor]:
        """The outputs of all tokens, in their order."""
        if not isinstance(outputs, Mapping):
            raise UsageError(f"the model returned a {type(outputs).__name__}; expected names: set return_dict=True")
        for name, value in outputs.items():
            if name in ignored or value is None:
                continue
            if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != tokens:
                raise UsageError(
                    f"the output {name} is {describe(value)}, so it cannot be gathered; expected (rows, {tokens}, …): "
                    f"a value for each token of this rank; use ignore_keys=[{name!r}]"
                )
            yield self.mesh_attention.unshard(value.detach())

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        is_prepared = getattr(self.model, "_is_accelerate_prepared", False)
        if is_prepared and self.model_wrapped is self.model and not self.is_fsdp_enabled and dist.get_world_size() > 1:
            raise UsageError(
                "train was called after evaluate or predict: accelerate has prepared the model already, without DDP, "
                "and ranks would not share gradients; call train first, use eval_on_start=True, or make a new trainer "
                "with a new model"
            )
        return super()._prepare_for_training(*args, **kwargs)


def _count(local: Sequence[Mapping[str, Any]]) -> Tensor:
    """The labels of all ranks: Trainer divides losses by it, and multiplies them by the ranks, as DDP averages."""
    count = count_items(local, group=None)
    if not count:
        raise UsageError(
            "every label of this step is -100 or padding; check how labels are made (a prompt may fill max_length), or "
            "leave such rows out"
        )
    return count


# Settings


def unsupported_reasons(trainer: Any) -> Iterator[str]:
    """Why a trainer's settings would go wrong, or have not been tried, and what to do instead."""
    args, config = trainer.args, trainer.args.accelerator_config
    if trainer.is_deepspeed_enabled:
        yield "DeepSpeed has not been tried with MeshTrainerMixin; use DDP, or FSDP with fsdp_version=2"
    if trainer.is_distributed_loading_by_transformers or trainer.is_model_parallel:
        yield "a model that was loaded in parts (device_map, distributed_config) is not supported; load it whole"
    if args.n_gpu > 1:
        yield f"one process has {args.n_gpu} GPUs; start one process per GPU with torchrun"
    if not trainer.model_accepts_loss_kwargs:
        yield (
            f"{type(trainer.model).__name__} takes no num_items_in_batch, so its loss would be a mean over each rank's "
            "labels; use a model whose forward takes loss arguments (**kwargs)"
        )
    if not args.average_tokens_across_devices:
        yield "average_tokens_across_devices=False is not supported: the loss is a mean over all ranks; leave it out"
    if trainer.label_smoother is not None:
        yield f"label_smoothing_factor={args.label_smoothing_factor} is not supported; leave it at 0"
    if trainer.compute_loss_func is not None:
        yield (
            "compute_loss_func is not supported: it would get the labels of whole sequences and the logits of this "
            "rank's tokens; override compute_loss instead, whose inputs hold this rank's tokens and shift_labels"
        )
    if args.neftune_noise_alpha is not None:
        yield "neftune_noise_alpha is not supported: the noise depends on the length, and a rank has only a part"
    if args.auto_find_batch_size:
        yield "auto_find_batch_size is not supported: if one rank runs out of memory, the others wait for it"
    if args.train_sampling_strategy in ("group_by_length", "batch_rebalance"):
        yield (
            f"train_sampling_strategy={args.train_sampling_strategy!r} is not supported: ranks that share a sequence "
            'would get different batches; use "random" or "sequential"'
        )
    if not config.use_seedable_sampler:
        yield (
            "use_seedable_sampler=False is not supported: ranks that share a sequence would shuffle differently once "
            "their random numbers differ; leave it out"
        )
    if config.split_batches:
        yield "split_batches=True is not supported; leave it out: per_device_…_batch_size are the rows of each group"
    if args.eval_use_gather_object:
        yield "eval_use_gather_object=True is not supported; leave it out: rows are gathered as tensors"
    if getattr(args, "predict_with_generate", False):
        yield "predict_with_generate=True is not supported; call model.generate on every rank after training"
