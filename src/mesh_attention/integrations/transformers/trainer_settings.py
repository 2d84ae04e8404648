"""Settings of Trainer that would go wrong, or that nobody has tried, when ranks share a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def refusals(trainer: Any) -> Iterator[str]:
    """What is wrong with a trainer's settings, and what to do instead."""
    args, config = trainer.args, trainer.args.accelerator_config
    yield from _refusals_of_stacks(trainer)
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


def _refusals_of_stacks(trainer: Any) -> Iterator[str]:
    if trainer.is_deepspeed_enabled:
        yield "DeepSpeed has not been tried with MeshTrainerMixin; use DDP, or FSDP with fsdp_version=2"
    if trainer.is_distributed_loading_by_transformers or trainer.is_model_parallel:
        yield "a model that was loaded in parts (device_map, distributed_config) is not supported; load it whole"
    if trainer.args.n_gpu > 1:
        yield f"one process has {trainer.args.n_gpu} GPUs; start one process per GPU with torchrun"
