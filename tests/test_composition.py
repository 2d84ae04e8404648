"""Context ranks beside other kinds of parallelism, as axes of one DeviceMesh: training gives the same parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from pool import shared_pool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training_model import TOKENS, VOCABULARY, Block, Model, plain_attention

from mesh_attention.api import MeshAttention
from mesh_attention.batches import batch_loss, count_items, shard_batch
from mesh_attention.integrations.pytorch import saved_attention

ROWS, STEPS = 4, 5


def data(step: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Ids and shifted labels of a whole batch. Rows have unequal numbers of labels, the first hardly any."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=generator)
    labels = ids[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : TOKENS - 1 - 13 * row] = -100
    return ids[:, :-1].to(device), labels.to(device)


def new_model(device: str = "cpu") -> Model:
    torch.manual_seed(0)
    return Model().double().to(device)


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)  # unlike Adam, it minds the scale of gradients


def clip(model: nn.Module, max_norm: float | None) -> None:
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def single_process(max_norm: float | None) -> dict[str, Tensor]:
    model = new_model()
    optimizer = new_optimizer(model)
    for step in range(STEPS):
        ids, labels = data(step)
        optimizer.zero_grad()
        (loss_sum(model(ids, torch.arange(TOKENS), plain_attention), labels) / (labels != -100).sum()).backward()
        clip(model, max_norm)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def on_a_mesh(axes: dict[str, int], device: str) -> DeviceMesh:
    """A mesh over the first ranks. The others have to help to make it, and have no part in it."""
    size = torch.Size(axes.values())
    if size.numel() == 8:
        return init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
    return DeviceMesh(device, torch.arange(size.numel()).view(size), mesh_dim_names=tuple(axes))


def train(
    _: Any, axes: dict[str, int], how: str, options: dict[str, Any], device: str = "cpu"
) -> list[tuple[str, float]]:
    """How far each parameter is from the single process's after some steps."""
    mesh = on_a_mesh(axes, device)
    data_mesh = mesh["dp", "cp"]._flatten("dp_cp") if how != "replicated and sharded" else None
    if mesh.get_coordinate() is None:
        return []
    attention = MeshAttention(mesh["cp"], **options)
    model = spread(new_model(device), mesh, data_mesh, how)
    optimizer = new_optimizer(model)
    max_norm = None if "tp" in axes else 0.5  # torch does not clip parameters of several meshes together
    rank, rows = mesh.get_local_rank("dp"), ROWS // axes["dp"]
    group, is_by_hand = mesh["dp", "cp"], how == "by hand"

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, seq_len=TOKENS)

    for step in range(STEPS):
        mine = (whole[rank * rows :][:rows].chunk(1 + (how == "accumulated")) for whole in data(step, device))
        parts = zip(*mine, strict=True)
        batches = [shard_batch(attention, {"input_ids": ids, "shift_labels": labels}) for ids, labels in parts]
        options: dict[str, Any] = {"gradients": "summed" if is_by_hand else "averaged"}
        if how == "accumulated":
            options["total_items"] = count_items(batches, group=group)
        optimizer.zero_grad()
        for batch in batches:
            logits = model(batch["input_ids"], batch["position_ids"], attend)
            mean = loss_sum(logits, batch["shift_labels"]) / batch["num_items_in_batch"]
            batch_loss(mean, batch, group=group, **options).backward()
        for parameter in model.parameters() if is_by_hand else ():
            dist.all_reduce(parameter.grad, group=data_mesh.get_group())  # type: ignore[union-attr]
        clip(model, max_norm)
        optimizer.step()
    truth = single_process(max_norm)
    return [(name, distance(ours, truth[name.removeprefix("module.")])) for name, ours in model.named_parameters()]


def spread(model: Model, mesh: DeviceMesh, data_mesh: DeviceMesh | None, how: str) -> nn.Module:
    if "tp" in mesh.mesh_dim_names:  # type: ignore[operator]
        for block in model.blocks:
            columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
            parallelize_module(block, mesh["tp"], columns | dict.fromkeys(("out", "down"), RowwiseParallel()))
    if how == "by hand":
        return model
    if how == "DDP":
        return DistributedDataParallel(model, process_group=data_mesh.get_group())  # type: ignore[union-attr]
    if how == "checkpointed":
        for block in model.blocks:
            block.forward = checkpointed(block)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["dp", "cp"] if data_mesh is None else data_mesh)
    return model


def checkpointed(block: Block) -> Any:
    plain = block.forward
    return lambda *given: checkpoint(plain, *given, use_reentrant=False, context_fn=saved_attention)


def distance(ours: Tensor, truth: Tensor) -> float:
    whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
    return float((whole.detach().cpu() - truth).norm() / truth.norm())


FOUR = {"dp": 2, "cp": 2}
CASES: dict[str, tuple[dict[str, int], str, dict[str, Any]]] = {
    "FSDP2 over dp × cp": (FOUR, "sharded", {"tile": (2, 1)}),
    "FSDP2, four context ranks": ({"dp": 1, "cp": 4}, "sharded", {"tile": (2, 2)}),
    "HSDP, replicated over dp and sharded over cp": (FOUR, "replicated and sharded", {"method": "ring"}),
    "FSDP2 with checkpointing that saves attention": (FOUR, "checkpointed", {}),
    "DDP over dp × cp": (FOUR, "DDP", {"ulysses_degree": 2}),
    "gradients summed by hand": (FOUR, "by hand", {}),
    "FSDP2 over two batches a step": (FOUR, "accumulated", {}),
    "FSDP2 × context × tensor parallel": ({"dp": 2, "cp": 2, "tp": 2}, "sharded", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_parameters_after_training_are_those_of_a_single_process(case: str) -> None:
    seen = 0
    for errors in shared_pool().run(8, train, *CASES[case]):
        seen += bool(errors)
        for name, error in errors:
            assert error <= 1e-9, (name, error)
    axes = CASES[case][0]
    assert seen == torch.Size(axes.values()).numel()
