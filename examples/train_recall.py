"""Train a transformers Llama on sharded sequences: each rank holds a part of the tokens and a part of the weights.

The model learns to recall which value a key was given thousands of tokens earlier (recall/task.py).

torchrun --nproc-per-node 4 examples/train_recall.py                    (or alone: python examples/train_recall.py)

The losses equal those of one process. With ``--checkpoint DIR``, ``--resume`` continues an interrupted run on any
number of ranks. `main` and `Trainer` contain everything about ranks; the rest is in recall/.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from threading import Event

import torch
import torch.distributed as dist
from recall.checkpoints import find_checkpoint, load_checkpoint, refuse_used, save_checkpoint
from recall.display import Display
from recall.flags import Flags, read_flags
from recall.model import make_model
from recall.task import IGNORED, lesson_seq, make_batch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from mesh_attention import MeshAttention
from mesh_attention.batches import reduce_loss, shard_batch
from mesh_attention.errors import MeshAttentionError, UsageError
from mesh_attention.transformers import parallelize

LEARNING_RATE, WARM_UP, LARGEST_GRADIENT = 2e-3, 20, 1.0
TEST_SEQUENCES = 8
INTERRUPTED = 130


class Trainer:
    def __init__(self, flags: Flags, interruption: Event) -> None:
        self.flags, self.interruption = flags, interruption
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
        self.attention = MeshAttention(self.mesh, method=flags.method, tile=flags.tile or "auto")
        self.model = parallelize(make_model(seed=flags.seed, seq=flags.seq, dtype=flags.dtype), self.attention)
        for part in (*self.model.model.layers, self.model):
            fully_shard(part, mesh=self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)

    def train_step(self, step: int) -> tuple[float, float]:
        """Train one step on new sequences; returns the loss and the recall over all ranks."""
        seq = lesson_seq(step, seq=self.flags.seq, lessons=self.flags.lessons)
        batch = make_batch(self.flags.seed, step, rows=self.flags.seq // seq, seq=seq)
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP)
        loss, recall = self.evaluate(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), recall

    def evaluate(self, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
        """The mean loss over the whole batch, differentiable, and the share of correct answers."""
        local = shard_batch(self.attention, batch)
        targets = local.pop("shift_labels")
        del local["labels"], local["num_items_in_batch"]  # without the model's own loss, which is in float32
        logits, labels = self.model(**local).logits.flatten(0, 1), targets.flatten()
        loss_sum = cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        is_asked = labels != IGNORED
        loss = reduce_loss(loss_sum, is_asked.sum(), group=self.mesh, gradients="averaged")  # FSDP averages
        counts = torch.stack([(logits.argmax(-1) == labels)[is_asked].sum(), is_asked.sum()])
        dist.all_reduce(counts, group=self.mesh.get_group())
        return loss, (counts[0] / counts[1]).item()

    @torch.no_grad()
    def test(self) -> tuple[float, float]:
        """Mean loss and recall on full-length sequences that no step trains on."""
        seed, seq = self.flags.seed, self.flags.seq
        batches = (make_batch(seed, index, rows=1, seq=seq, stream="test") for index in range(TEST_SEQUENCES))
        results = [(loss.item(), recall) for loss, recall in map(self.evaluate, batches)]
        losses, recalls = zip(*results, strict=True)
        return sum(losses) / len(losses), sum(recalls) / len(recalls)

    def should_stop(self) -> bool:
        """True if any rank was interrupted; all ranks stop after the same step."""
        asked = torch.tensor(self.interruption.is_set(), dtype=torch.int32)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self.mesh.get_group())
        return bool(asked)

    def save(self, step: int) -> None:
        if self.flags.checkpoint is not None:
            settings = self.flags.settings
            save_checkpoint(self.flags.checkpoint, self.model, self.optimizer, step=step, settings=settings)

    def restore(self) -> int:
        """Load the newest checkpoint, if asked to; returns the step to continue with."""
        flags = self.flags
        if flags.checkpoint is None or not flags.resume:
            if flags.checkpoint is not None:
                refuse_used(flags.checkpoint)
            return 0
        path, step = find_checkpoint(flags.checkpoint, settings=flags.settings)
        if step > flags.steps:
            raise UsageError(f"{path} is at step {step}, but --steps is {flags.steps}; give --steps {step} or more")
        load_checkpoint(path, self.model, self.optimizer)
        return step


def main(flags: Flags, interruption: Event) -> int:
    """Train and test; returns the exit code. An interruption ends training after the current step."""
    trainer = Trainer(flags, interruption)
    is_first, begun_s, step = dist.get_rank() == 0, time.monotonic(), trainer.restore()
    start, is_interrupted = step, False
    with Display(start=start, steps=flags.steps, is_shown=is_first, curve=flags.curve) as display:
        while step < flags.steps and not (is_interrupted := trainer.should_stop()):
            loss, recall = trainer.train_step(step)
            seq = lesson_seq(step, seq=flags.seq, lessons=flags.lessons)
            display.show(step, seq=seq, loss=loss, recall=recall)
            step += 1
            if step % flags.save_every == 0 and step < flags.steps:
                trainer.save(step)
    if step > start:
        trainer.save(step)
    if is_interrupted:
        if is_first:
            kept = f"; continue with --resume --checkpoint {flags.checkpoint}" if flags.checkpoint and step else ""
            print(f"interrupted after step {step}{kept}", file=sys.stderr)
        return INTERRUPTED
    trained_s = time.monotonic() - begun_s
    loss, recall = trainer.test()
    if is_first:
        report(flags, step - start, trained_s, loss, recall)
    return 0


def report(flags: Flags, steps: int, trained_s: float, loss: float, recall: float) -> None:
    ranks = dist.get_world_size()
    if flags.json:
        result = {"ranks": ranks, "steps": flags.steps, "trained_s": trained_s, "loss": loss, "recall": recall}
        print(json.dumps(result | flags.settings))
        return
    print(f"{steps} steps on {ranks} ranks in {trained_s:.0f} s")
    print(f"{TEST_SEQUENCES} new sequences of {flags.seq} tokens: loss {loss:.4f}, recall {recall:.1%}")


if __name__ == "__main__":
    flags, interruption = read_flags(), Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interruption.set())
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    try:
        code = main(flags, interruption)
    except MeshAttentionError as error:
        code = 2
        if dist.get_rank() == 0:
            print(f"train_recall.py: error: {error}", file=sys.stderr)
    dist.destroy_process_group()
    time.sleep(0.5)  # Gloo's threads may still hold tensors; Python must not exit before they let go
    sys.exit(code)
