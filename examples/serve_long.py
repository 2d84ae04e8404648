"""Serve a long prompt: each rank computes and caches its own part of it, and `generate` works as on one process.

torchrun --nproc-per-node 4 examples/train_recall.py --checkpoint recall-model       (three minutes)
torchrun --nproc-per-node 4 examples/serve_long.py --checkpoint recall-model

The prompt tells the model the values of keys, over and over, in tens of thousands of tokens. Then come turns of
questions: each is a key, and the answer streams in. `ask` contains everything about generating; nothing in it knows of
ranks. At the end, one process serves the same prompt alone, for comparison.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from recall.checkpoints import load_weights
from recall.model import make_model
from recall.task import KEYS, make_batch
from torch import Tensor
from transformers import LlamaForCausalLM, LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from mesh_attention import MeshAttention, MeshAttentionError
from mesh_attention.transformers import parallelize, unparallelize

STRETCHED = 1e7
"""Rotary base of serving. The model was trained on 4096 tokens; a larger base lets it find keys much farther away."""


@dataclass
class Questions(LogitsProcessor):
    """Puts the next question after each answer: every second new token is a key."""

    keys: Tensor
    start: int

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        new = input_ids.shape[1] - self.start
        if new % 2 == 0:
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.keys[new // 2 + 1]] = 0.0
        return forced


@dataclass
class Answers(BaseStreamer):
    """Prints questions and answers as they come, and notes when."""

    is_shown: bool
    times: list[float] = field(default_factory=list)
    is_prompt: bool = True

    def put(self, value: Tensor) -> None:
        if self.is_prompt:  # generate hands over the prompt first
            self.is_prompt = False
            return
        self.times.append(time.perf_counter())
        token = int(value)
        text = f" key {token:3} is" if token < KEYS else f" {token - KEYS:2};"
        if self.is_shown:
            print(text, end="", flush=True)

    def end(self) -> None:
        if self.is_shown:
            print(flush=True)


@dataclass
class Conversation:
    """A prompt and its turns so far."""

    ids: Tensor
    cache: Any = None
    first_s: float = 0.0
    """Seconds until the first answer: the prompt, or the questions of a later turn, and one token."""
    token_s: list[float] = field(default_factory=list)


def ask(model: LlamaForCausalLM, talk: Conversation, keys: Tensor, *, chunk: int | None, is_shown: bool) -> Tensor:
    """One turn: questions in, answers out."""
    talk.ids = torch.cat([talk.ids, keys[None, :1]], dim=1)
    if is_shown:
        print(f"   key {int(keys[0]):3} is", end="", flush=True)
    answers, begun = Answers(is_shown), time.perf_counter()
    out = model.generate(
        talk.ids,
        attention_mask=torch.ones_like(talk.ids),
        max_new_tokens=2 * len(keys) - 1,
        do_sample=False,
        use_cache=True,  # the model was made for training, without one
        logits_processor=[Questions(keys, talk.ids.shape[1])],
        streamer=answers,
        past_key_values=talk.cache,
        prefill_chunk_size=chunk,
        return_dict_in_generate=True,
    )
    found = out.sequences[0, talk.ids.shape[1] :: 2] - KEYS
    talk.ids, talk.cache = out.sequences, out.past_key_values
    talk.first_s = answers.times[0] - begun
    talk.token_s += [b - a for a, b in zip(answers.times, answers.times[1:], strict=False)]
    return found


def serve(model: LlamaForCausalLM, given: argparse.Namespace, *, is_shown: bool) -> dict[str, float]:
    """All turns; what they took, and the share of right answers."""
    batch = make_batch(given.seed, 0, rows=1, seq=2 * given.prompt, stream="test")
    told, asked = batch["input_ids"].split(given.prompt, dim=1)
    due = batch["shift_labels"][0, given.prompt :] - KEYS
    talk, right, times = Conversation(told), 0, []
    for turn in range(given.turns):
        at = slice(turn * given.questions, (turn + 1) * given.questions)
        found = ask(model, talk, asked[0, at], chunk=given.chunk, is_shown=is_shown)
        right += int((found == due[at]).sum())
        times.append(talk.first_s)
    store = getattr(talk.cache, "store", None)
    whole = sum(layer.keys.nbytes + layer.values.nbytes for layer in talk.cache.layers) if store is None else 0
    return {
        "first token of the prompt, s": times[0],
        "first token of a later turn, ms": 1e3 * sum(times[1:]) / max(1, len(times) - 1),
        "tokens per second": len(talk.token_s) / sum(talk.token_s),
        "cache of a rank, MiB": (whole if store is None else store.nbytes) / 2**20,
        "answers right, %": 100 * right / (given.turns * given.questions),
    }


def main(given: argparse.Namespace) -> None:
    ranks, is_first = dist.get_world_size(), dist.get_rank() == 0
    model = make_model(seed=0, seq=2 * given.prompt, rope_theta=STRETCHED).eval()
    parallelize(model, MeshAttention())
    step = load_weights(given.checkpoint, model)
    if is_first:
        print(f"a prompt of {given.prompt} tokens on {ranks} ranks, by the model of step {step}; answers:")
    rows = {f"{ranks} ranks": serve(model, given, is_shown=is_first)}
    if is_first and not given.only_ranks:
        unparallelize(model)
        rows["one process"] = serve(model, given, is_shown=False)
    dist.barrier()
    if is_first:
        print(f"{'':32}" + "".join(f"{name:>14}" for name in rows))
        for name in rows[f"{ranks} ranks"]:
            print(f"{name:32}" + "".join(f"{row[name]:14.2f}" for row in rows.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="from train_recall.py")
    parser.add_argument("--prompt", type=int, default=32768, help="tokens (%(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="turns of questions (%(default)s)")
    parser.add_argument("--questions", type=int, default=8, help="questions in a turn (%(default)s)")
    parser.add_argument("--chunk", type=int, help="prefill in chunks of so many tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the prompt (%(default)s)")
    parser.add_argument("--only-ranks", action="store_true", help="do not compare with one process")
    given = parser.parse_args()
    if given.turns < 1 or given.questions < 2:
        parser.error(f"{given.turns} turns of {given.questions} questions; expected at least 1 turn of 2 questions")
    if given.prompt < 2 or given.prompt % 2:
        parser.error(f"argument --prompt: {given.prompt} tokens; expected an even number, because it consists of pairs")
    return given


if __name__ == "__main__":
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    code = 0
    try:
        main(_arguments())
    except MeshAttentionError as error:
        code = 2
        if dist.get_rank() == 0:
            print(f"serve_long.py: error: {error}", file=sys.stderr)
    dist.destroy_process_group()
    time.sleep(0.5)  # Gloo's threads may still hold tensors; Python must not exit before they let go
    sys.exit(code)
