"""torchtitan's Trainer with mesh attention, in any product of its FSDP2, context and tensor parallelism.

torchrun --nproc-per-node 4 examples/recipes/torchtitan_train.py [--cp 2] [--tp 2] [--ac full] [--backend inductor]
"""

import argparse
import os
import time
from types import SimpleNamespace

import torch
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.tools import utils

if not torch.cuda.is_available():  # torchtitan has no name for this device, and asks it for more than torch.cpu has
    absent = dict.fromkeys(("reset_peak_memory_stats", "empty_cache", "get_device_name"), str)
    absent |= {"current_device": int, "memory_stats": lambda device: {}}
    absent |= {"get_device_properties": lambda device: SimpleNamespace(total_memory=1)}
    utils.device_type, utils.device_module = "cpu", SimpleNamespace(**vars(torch.cpu) | absent)

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from mesh_attention.integrations.torchtitan import with_mesh_attention

SEQ, ROWS, STEPS = 256, 4, 3


def make_batches(rows):
    for step in range(STEPS):
        text = torch.randint(2048, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(step))[rows]
        cuts = [50 + 20 * row + step for row in rows]  # two packed documents in each row
        positions = torch.stack([torch.cat([torch.arange(cut), torch.arange(SEQ - cut)]) for cut in cuts])
        yield {"input": text[:, :-1], "positions": positions}, text[:, 1:]


def make_config(cp=1, tp=1, ac="selective", backend=None):
    config = llama3_debugmodel()  # put your model here
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.parallelism.context_parallel_degree, config.parallelism.tensor_parallel_degree = cp, tp
    config.parallelism.spmd_backend, config.training.disable_cuda_graphs = "partial_dtensor", True
    config.training.seq_len, config.training.steps, config.training.global_batch_size = SEQ, STEPS, ROWS
    config.training.local_batch_size = rows = ROWS * cp * tp // int(os.environ["WORLD_SIZE"])
    config.activation_checkpoint = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}[ac]
    config.compile.enable, config.compile.backend = backend is not None, backend or "inductor"
    loader = SimpleNamespace(build=lambda dp_rank, **_: make_batches(range(dp_rank * rows, (dp_rank + 1) * rows)))
    config.dataloader, config.tokenizer = loader, SimpleNamespace(build=lambda **_: None)  # put torchtitan's here
    config.checkpoint.enable = config.validator.enable = config.debug.enable_structured_logging = False
    if not torch.cuda.is_available():  # for Gloo, which has no PREMUL_SUM, as torch's FSDP2 reduces float32
        TORCH_DTYPE_MAP["float64"], double = torch.float64, "float64"
        config.training.dtype = config.training.mixed_precision_param = config.training.mixed_precision_reduce = double
    return config


def train(config):
    trainer = config.build()
    model, report = trainer.model_parts[0], print if torch.distributed.get_rank() == 0 else str
    for number, weight in enumerate(model.parameters()):  # the same for any number of ranks, as from a checkpoint
        whole = (weight.dim() == 1) + 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
        weight.data.copy_(DTensor.from_local(whole, mesh := weight.device_mesh, [Replicate()] * mesh.ndim))
    trainer.metrics_processor.log = lambda step, loss, *_, **__: report(f"loss {loss:.9f}")
    batches = trainer.batch_generator(trainer.dataloader)
    for trainer.step in range(1, STEPS + 1):
        trainer.train_step(batches)
    report(f"weights {torch.stack([weight.full_tensor().norm() for weight in model.parameters()]).norm():.9f}")
    torch.distributed.destroy_process_group()
    time.sleep(0.5)  # Gloo's threads must let go of tensors before Python exits


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag, kind in {"--cp": int, "--tp": int, "--ac": str, "--backend": str}.items():
        parser.add_argument(flag, type=kind, default=argparse.SUPPRESS)
    config = make_config(**vars(parser.parse_args()))
    config.model_spec = with_mesh_attention(config.model_spec)
    train(config)
