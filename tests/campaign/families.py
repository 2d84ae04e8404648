"""Every family of the installed transformers that builds from a tiny config: right on 4 ranks, or refused clearly.

    make families
    python tests/campaign/families.py --only llama bart

Each family runs in a process of its own: a tiny model with its ordinary attention on whole batches, then the same
model on four ranks (processes with a Gloo group) through mesh attention. Logits, loss and all gradients are compared,
and what it generates, with tokens and logits of one process that has no cache.
A family is right, refused (by an error of this library, on every rank), wrong, unclear (another error), or not built.
Exit code 1 if one is wrong or unclear.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from families_page import ORDER, page
from tiny_families import TRIED, build, families, tokens
from torch import Tensor
from torch.nn import functional

from mesh_attention.api import MeshAttention
from mesh_attention.batches import batch_loss, shard_batch
from mesh_attention.errors import DisagreementError, MeshAttentionError, TransportError
from mesh_attention.transformers import parallelize

FORKING = get_context("fork")
RANKS = 4
LIMIT_S = 300
TOLERANCE = 2e-3
"""Relative, of float32 results; a wrong position or a missing token makes a difference of about 1."""
COMMAND = "make families"


def batches(kind: str) -> dict[str, dict[str, Any]]:
    """Whole batches by name: plain, of odd length, padded on each side, and with packed documents."""
    mask = torch.ones(3, 16, dtype=torch.long)
    mask[1, 11:] = 0
    left = torch.ones(2, 16, dtype=torch.long)
    left[1, :3] = 0
    restarts = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
    found: dict[str, dict[str, Any]] = {
        "plain": {"input_ids": tokens(2, 16)},
        "odd": {"input_ids": tokens(1, 15)},
        "padded right": {"input_ids": tokens(3, 16), "attention_mask": mask},
        "padded left": {"input_ids": tokens(2, 16), "attention_mask": left},
        "packed": {"input_ids": tokens(1, 16), "position_ids": restarts},
    }
    if kind != "encoder":
        found["plain"]["labels"] = tokens(2, 16).masked_fill(torch.arange(16) % 5 == 2, -100)
    return found


DOCUMENTS = (7, 9)


def ordinary(model: Any, name: str, batch: Mapping[str, Any]) -> Tensor:
    """The output for a whole batch, (batch, tokens, …). Documents are run one by one."""
    if name != "packed":
        call = {key: value for key, value in batch.items() if key != "labels" or model.config.is_encoder_decoder}
        return first_output(model(**call, use_cache=False))
    cuts = torch.tensor([0, *DOCUMENTS]).cumsum(0).tolist()
    parts = [first_output(model(input_ids=batch["input_ids"][:, a:b], use_cache=False)) for a, b in pairwise(cuts)]
    return torch.cat(parts, dim=1)


def first_output(out: Any) -> Tensor:
    found = out.get("logits")
    found = out.get("last_hidden_state") if found is None else found
    return found if found is not None else next(value for value in out.values() if isinstance(value, Tensor))


def mean_loss(logits: Tensor, labels: Tensor, kind: str) -> Tensor:
    if kind in ("causal", "multimodal"):
        logits, labels = logits[:, :-1], labels[:, 1:]
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def error_of(ours: Tensor, due: Tensor, *, least: float = 1e-30) -> float:
    """The largest error, relative to the largest value; to `least`, if all values are smaller."""
    if ours.shape != due.shape:
        return float("inf")
    error = float((ours.detach() - due.detach()).abs().max() / due.detach().abs().max().clamp(min=least))
    return error if error == error else float("inf")


# Texts


PROMPT = tokens(2, 21)  # each rank runs its part; of fewer, all run all
LEFT = (torch.arange(21) >= torch.tensor([[0], [3]])).long()
PROMPTS: dict[str, dict[str, Any]] = {
    "generate": {"inputs": PROMPT},
    "generate padded": {"inputs": PROMPT, "attention_mask": LEFT},
    "generate short": {"inputs": tokens(2, 2)},
    "generate beams": {"inputs": PROMPT, "attention_mask": LEFT, "num_beams": 2, "num_return_sequences": 2},
    "generate chunks": {"inputs": PROMPT, "prefill_chunk_size": 18},
    "generate turns": {"inputs": PROMPT},
}
SETTINGS = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@torch.no_grad()
def text(model: Any, name: str, *, is_whole: bool) -> tuple[Tensor, Tensor]:
    """The tokens that a model generates, and their logits; `is_whole` without a cache, and so without chunks."""
    given = SETTINGS | PROMPTS[name] | {"output_logits": True, "return_dict_in_generate": True}
    given |= {"use_cache": False, "prefill_chunk_size": None} if is_whole else {}
    out = model.generate(**given)
    if name == "generate turns":
        longer = torch.cat([out.sequences, tokens(2, 7)], dim=1)
        given |= {
            "inputs": longer,
            "attention_mask": torch.ones_like(longer),
        }  # a generated token may be that of padding
        out = model.generate(**given, **({} if is_whole else {"past_key_values": out.past_key_values}))
    return out.sequences, torch.stack(out.logits)


def errors_of_text(attention: MeshAttention, family: Any, name: str, due: tuple[Tensor, Tensor]) -> dict[str, float]:
    model_type, kind, sizes = family
    model = parallelize(build(model_type, kind, "eager", sizes), attention)
    sequences, logits = text(model, name, is_whole=False)
    is_same = torch.equal(sequences, due[0])
    return {"logits": error_of(logits, due[1]), "tokens": 0.0 if is_same else float("inf")}


# One family


def find_sizes(model_type: str, kind: str) -> tuple[Any, str]:
    """The first sizes and the ordinary implementation with which a tiny model runs; raises the last error if none."""
    last: Exception | None = None
    for sizes in TRIED:
        for implementation in ("sdpa", "eager"):
            try:
                with torch.no_grad():
                    model = build(model_type, kind, implementation, sizes)
                    out = ordinary(model, "plain", batches(kind)["plain"])
                if out.dim() < 2 or not out.isfinite().all():
                    raise ValueError(f"the output of a tiny model is {tuple(out.shape)}, or not finite")
                return sizes, implementation
            except Exception as error:
                last = error
    assert last is not None
    raise last


def judge(model_type: str, kind: str, folder: Path) -> dict[str, Any]:
    """The verdict on one family, and what was said about each batch."""
    try:
        sizes, implementation = find_sizes(model_type, kind)
    except Exception as error:
        return {"verdict": "not built", "why": brief(error)}
    model = build(model_type, kind, implementation, sizes)
    due: dict[str, Any] = {}
    for name, batch in batches(kind).items():
        try:
            out = ordinary(model, name, batch)
            gradients = {}
            if "labels" in batch and kind != "seq2seq":
                loss = mean_loss(out, batch["labels"], kind)
                loss.backward()
                gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
                gradients["loss"] = loss.detach()
            due[name] = out.detach(), gradients
        except Exception as error:
            due[name] = f"not run by transformers: {brief(error)}"
    for name in PROMPTS if model.can_generate() else ():
        try:
            due[name] = text(model, name, is_whole=True)
        except Exception as error:
            due[name] = f"not run by transformers: {brief(error)}"
    del model
    family = model_type, kind, sizes
    children = [start(partial(run_rank, rank, folder, family, implementation, due)) for rank in range(RANKS)]
    end(children, time.monotonic() + LIMIT_S / 2)
    answers = []
    for rank in range(RANKS):
        path = folder / f"rank{rank}.json"
        answers.append(json.loads(path.read_text()) if path.exists() else {})
    said = {
        name: verdict_of([answer.get(name, ["unclear", "no answer in time"]) for answer in answers])
        for name in (*due, *MISUSES)
    }
    worst = max((verdict for verdict, _ in said.values()), key=RANKING.index)
    return {"verdict": worst, "batches": said}


RANKING = ("not run", "refused", "right", "unclear", "wrong")
"""The verdict on a family is that on the batch furthest to the right."""


def verdict_of(answers: list[list[str]]) -> list[str]:
    """The verdict on a batch from those of all ranks; a refusal must be one on every rank."""
    verdicts = {verdict for verdict, _ in answers}
    if len(verdicts) == 1:
        told = [text for _, text in answers if not text.startswith("DisagreementError")]
        return [answers[0][0], (told or [answers[0][1]])[0]]
    bad = [answer for answer in answers if answer[0] in ("wrong", "unclear")]
    return bad[0] if bad else ["unclear", f"ranks differ: {answers}"]


def run_rank(rank: int, folder: Path, family: Any, implementation: str, due: Mapping[str, Any]) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=20))
    attention = MeshAttention()
    said: dict[str, list[str]] = {}

    def write(said: Mapping[str, Any]) -> None:
        (folder / f"rank{rank}.part").write_text(json.dumps(said))
        (folder / f"rank{rank}.part").rename(folder / f"rank{rank}.json")

    whole = batches(family[1])
    for name, known in due.items():
        run, what = (errors_of_batch, whole[name]) if name in whole else (errors_of_text, name)
        is_run = not isinstance(known, str)
        said[name] = judged(partial(run, attention, family, what, known)) if is_run else ["not run", known]
        write(said)
    for name, misuse in MISUSES.items():
        said[name] = misuse_outcome(misuse, attention, family, implementation)
        write(said)
    dist.barrier()


def generate_from_shards(attention: MeshAttention, family: Any, implementation: str) -> None:
    model_type, kind, sizes = family
    model = parallelize(build(model_type, kind, implementation, sizes), attention)
    if not model.can_generate():
        raise MeshAttentionError("this model cannot generate")
    model.generate(attention.shard(tokens(1, 16)), max_new_tokens=1, do_sample=False)


MISUSES = {"generate from shards": generate_from_shards}


def misuse_outcome(misuse: Any, *arguments: Any) -> list[str]:
    """A misuse must not pass in silence; an error of transformers' own is as good as ours."""
    try:
        misuse(*arguments)
    except Exception as error:
        return ["refused", brief(error)]
    return ["wrong", "nothing was raised"]


def errors_of_batch(attention: MeshAttention, family: Any, batch: Mapping[str, Any], due: Any) -> dict[str, float]:
    """Of this rank's part, by name; `due` is the output and gradients."""
    model_type, kind, sizes = family
    model = parallelize(build(model_type, kind, "eager", sizes), attention)
    local = shard_batch(attention, batch, shift_labels=kind != "masked")
    out = model(**local)
    errors = {"output": error_of(*real(first_output(out), attention.shard(due[0]), attention, batch))}
    if due[1]:
        loss = batch_loss(out.loss, local, group=None, gradients="summed")
        loss.backward()
        errors["loss"] = error_of(loss, due[1]["loss"])
        least = 1e-3 * max(float(one.abs().max()) for one in due[1].values())  # a bias of keys has no effect at all
        for key, parameter in model.named_parameters():
            if key in due[1] and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                errors[key] = error_of(parameter.grad, due[1][key], least=least)
    return errors


def judged(errors_of: Callable[[], dict[str, float]]) -> list[str]:
    """A verdict on this rank's part, and the largest error or what was raised."""
    try:
        errors = errors_of()
    except TransportError as error:
        return ["unclear", brief(error)]
    except MeshAttentionError as error:
        kind_of = "DisagreementError: " if isinstance(error, DisagreementError) else ""
        return ["refused", kind_of + str(error)]
    except Exception as error:
        return ["unclear", brief(error)]
    worst = max(errors, key=lambda key: errors[key])
    return ["right" if errors[worst] <= TOLERANCE else "wrong", f"{worst}: {errors[worst]:.1e}"]


def real(ours: Tensor, due: Tensor, attention: MeshAttention, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Both without padding."""
    mask = batch.get("attention_mask")
    if mask is None or ours.shape != due.shape:
        return ours, due
    kept = attention.shard(mask) == 1
    return ours[kept], due[kept]


def brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# Processes


def start(work: Callable[[], object]) -> BaseProcess:
    process = FORKING.Process(target=run_silently, args=(work,))
    process.start()
    return process


def run_silently(work: Callable[[], object]) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    work()


def end(processes: Sequence[BaseProcess], deadline: float = 0.0) -> None:
    """Wait until the deadline, and kill who is not over then."""
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()
        process.join()


def write_verdict(family: tuple[str, str, str], folder: Path) -> None:
    (folder / "verdict.json").write_text(json.dumps(judge(family[0], family[1], folder)))


def judge_all(chosen: list[tuple[str, str, str]], jobs: int) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Verdicts as they are reached, each from a process of its own."""
    waiting, running = list(chosen), {}
    with tempfile.TemporaryDirectory(prefix="families-") as root:
        while waiting or running:
            while waiting and len(running) < jobs:
                family = waiting.pop(0)
                folder = Path(root) / f"{len(waiting)}"
                folder.mkdir()
                process = start(partial(write_verdict, family, folder))
                running[process] = family, folder, time.monotonic() + LIMIT_S
            for process, (family, folder, deadline) in list(running.items()):
                if process.is_alive() and time.monotonic() < deadline:
                    continue
                end([process])
                del running[process]
                path = folder / "verdict.json"
                none = {"verdict": "not built", "why": "its process ended without a verdict, or took too long"}
                yield *family, json.loads(path.read_text()) if path.exists() else none
            time.sleep(0.01)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", help="model types or class names; others are read from --json")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="store the results here")
    parser.add_argument("--write", type=Path, help="write the page here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    chosen = [one for one in families() if not options.only or one[0] in options.only or one[2] in options.only]
    results, start = [], time.monotonic()
    if options.only and options.json and options.json.exists():  # the other families are as they were
        results = [tuple(one) for one in json.loads(options.json.read_text()) if tuple(one[:3]) not in set(chosen)]
    for done, result in enumerate(judge_all(chosen, options.jobs), start=1):
        results.append(result)
        model_type, kind, name, found = result
        print(f"{done:4}/{len(chosen)} {found['verdict']:9} {model_type} {kind} {name}", flush=True)
        if found["verdict"] in ("wrong", "unclear") or options.only:
            print(json.dumps(found, indent=2), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    if options.write:
        ordered = sorted(results, key=lambda result: result[:3])
        options.write.write_text(page(ordered, version=transformers.__version__, command=COMMAND))
    counts = {verdict: sum(1 for *_, found in results if found["verdict"] == verdict) for verdict in ORDER}
    print(f"{len(results)} classes in {time.monotonic() - start:.0f} s: {json.dumps(counts)}")
    return int(counts["wrong"] + counts["unclear"] > 0)


if __name__ == "__main__":
    sys.exit(main())
