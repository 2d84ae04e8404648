"""Mutated files: plans and clusters. Each is read, or refused by one clear error, within seconds.

    PYTHONPATH=src python tests/campaign/files.py 30000 --seed 1

The last line counts the files that were refused, and those that are still valid after the mutation.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mesh_attention import Problem, causal, make_plan
from mesh_attention.clusters import cluster_named, cluster_to_toml
from mesh_attention.errors import MeshAttentionError
from mesh_attention_lab.cli.files import checked_plan

LIMIT_S = 10.0
"""Of CPU time: far more than a file takes, far less than a loop over 10^15 numbers."""
PROBLEM = Problem.self_attention(seq_len=512, heads=4, head_dim=16, ranks=4, mask=causal())
TOPOLOGY = cluster_named("h100x4")
CLUSTER = cluster_to_toml(TOPOLOGY)

# Mutations

NUMBERS = ["0", "-1", "3", "1048576", "999999999", "1" + "0" * 30, "9" * 5000, "1.5", "nan", "x", "", "0-999999999"]


def mutated(rng: random.Random, text: str) -> bytes:
    """One to three mutations of a file, of its values or of its characters."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        text = rng.choice((of_numbers, of_lines, of_characters))(rng, text)
    data = text.encode("utf-8", errors="surrogatepass")
    if rng.random() < 0.03:
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.choice((b"\xff\xfe", b"\x00", b"\x80", b"\xed\xa0\x80")) + data[at:]
    return data


def of_numbers(rng: random.Random, text: str) -> str:
    found = list(re.finditer(r"\d+", text))
    if not found:
        return text
    one = rng.choice(found)
    return text[: one.start()] + rng.choice(NUMBERS) + text[one.end() :]


def of_lines(rng: random.Random, text: str) -> str:
    lines = text.splitlines() or [""]
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            del lines[one]
        case 1:
            lines.insert(other, lines[one])
        case 2:
            lines[one], lines[other] = lines[other], lines[one]
        case 3:
            lines[one] = lines[one] * (3000 if len(lines[one]) < 1000 and rng.random() < 0.5 else 2)
        case _:
            lines = lines[:one]
    return "\n".join(lines) + "\n"


def of_characters(rng: random.Random, text: str) -> str:
    one, other = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    odd = rng.choice(
        ('"', "{", "]", ",", ":", "\n", "\t", "  ", "é", "\u2028", "٣", "²", "-", "x", " & causal", "\ud800")
    )
    return rng.choice((text[:one], text[other:], text[:one] + text[other:], text[:one] + odd + text[one:]))


# Judges: the answer is "" for a file that is still valid, else the error; anything but our own errors is raised


def judge_plan(path: Path) -> str:
    try:
        checked_plan(path, lambda activity, fraction: None)
    except MeshAttentionError as error:
        return str(error)
    return ""


def judge_cluster(path: Path) -> str:
    try:
        cluster_named(str(path)).with_ranks(4)
    except MeshAttentionError as error:
        return str(error)
    return ""


class Judging:
    """Keeps the valid files of a folder, by kind, and judges mutated ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.valid: list[tuple[str, str, Callable[[Path], str]]] = []
        for name, plan in {
            "moves": make_plan(PROBLEM),
            "programs": make_plan(PROBLEM, "ulysses 2 + mesh 1x2", direction="backward").unrolled(),
        }.items():
            path = folder / f"{name}.txt"
            path.write_text(str(plan))
            self.valid += [(path.name, path.read_text(), judge_plan)] * 2
        self.valid.append(("cluster.toml", CLUSTER, judge_cluster))

    def run(self, rng: random.Random) -> str:
        """Mutate a file and judge it: "valid" or "refused"."""
        name, text, judge = rng.choice(self.valid)
        path = self.folder / name
        path.write_bytes(mutated(rng, text))
        with within(LIMIT_S):
            answer = judge(path)
        assert len(answer) < 2000, answer[:2000]
        assert "Traceback" not in answer
        return "refused" if answer else "valid"


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes more CPU time. (On the main thread.)"""

    def ring(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def campaign(count: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """Judge that many files. Failures are kept in the folder, and told with their traceback."""
    judging, answers, failures = Judging(folder), Counter[str](), []
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        try:
            answers[judging.run(rng)] += 1
        except Exception:
            answers["failed"] += 1
            failures.append(f"seed {seed}, file {number}:\n{traceback.format_exc(limit=-4)}")
    return answers, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mesh-attention-files-") as folder:
        answers, failures = campaign(given.count, given.seed, Path(folder))
    seen = {failure.splitlines()[-1][:120]: failure for failure in failures}
    for failure in list(seen.values())[:10]:
        print(failure)
    print(json.dumps({"files": given.count, "seed": given.seed, **answers, "s": round(time.perf_counter() - start)}))
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
