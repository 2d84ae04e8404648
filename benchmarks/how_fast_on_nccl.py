"""How fast are other libraries and this one over NCCL? Side by side, in one run, all ranks on one GPU.

    python benchmarks/how_fast_on_nccl.py PEERS_FOLDER                         # 4, 8 and 16 ranks, MHA and GQA; minutes
    python benchmarks/how_fast_on_nccl.py PEERS_FOLDER --ranks 8 --seq 16384 --heads 16 --store FILE
    python benchmarks/how_fast_on_nccl.py PEERS_FOLDER --device cpu --ranks 4 --seq 256 --heads 4 --head-dim 32

PEERS_FOLDER holds clones of zhuzilin/ring-flash-attention and feifeibear/long-context-attention (yunchang: USP), which
run over a stand-in for flash-attn on torch's own flash operators. Torch's context_parallel uses the same operators, and
this library the kernels that it chooses. Causal, bfloat16.

Every contender first runs both passes once and is compared with one process in float32; one that is wrong, raises or
hangs is reported and not timed. Then all our choices (every method, Ulysses degree and tile) are timed, and after that
the best of them, the default and all other libraries in turns. Times are medians of the slowest rank's; the device is
idle and all ranks have met before each call. Every rank is a host of its own to NCCL, with links of 1 to 2 GB/s over
sockets, so this tells which method moves less and waits less, not what NVLink does.

Prints a table for each problem, then how our default compares; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from run_facts import start_result
from side_by_side.contenders import (
    DEFAULT,
    MEASURED,
    USP,
    choice_names,
    digest_of,
    find_packages,
    is_choice,
    is_ring,
    kind_of,
    peer_names,
)
from side_by_side.ranks import FailedError, Ranks
from side_by_side.worker import Task

NAME = "how_fast_on_nccl"
TASKS = (
    Task(seq=16384, heads=16, kv_heads=16, head_dim=128),
    Task(seq=32768, heads=16, kv_heads=4, head_dim=128),
)
LARGEST_ERROR = 0.05
"""Of bfloat16, relative, by norm; a missing block or a wrong gradient is off by far more."""
FIRST_ROUNDS = 2
FINALISTS = 4
CLOSE, FAR = 1.3, 2.0
"""A choice this many times as slow as the best is not timed again, nor is another library as the best of its kind."""
RING_AIM, USP_AIM, CHOICE_AIM = 1.5, 1.0, 1.05


@dataclass
class Entry:
    """One contender in one problem. Seconds of forward and of both passes, of the slowest rank, by round."""

    name: str
    error: float | None = None
    """The largest of O, dQ, dK, dV and of all ranks."""
    plan: str = ""
    failure: str = ""
    first: list[tuple[float, float]] = field(default_factory=list)
    """Of the rounds in which all our choices are timed."""
    final: list[tuple[float, float]] = field(default_factory=list)
    """Of the rounds in turns with all others."""

    @property
    def times(self) -> list[tuple[float, float]]:
        return self.final or self.first

    @property
    def forward_s(self) -> float:
        return median(forward for forward, _ in self.times)

    @property
    def both_s(self) -> float:
        return median(both for _, both in self.times)


class Contest:
    """All contenders on one problem."""

    def __init__(self, ranks: Ranks, task: Task, given: argparse.Namespace) -> None:
        self.ranks, self.task, self.given = ranks, task, given
        self.start = time.monotonic()
        wanted = re.compile(given.only)
        names = [DEFAULT, MEASURED, *choice_names(ranks.size, task.kv_heads), *peer_names(ranks.size, task.kv_heads)]
        self.entries = {name: Entry(name) for name in names if wanted.search(name)}
        self.log: list[str] = []

    def run(self) -> None:
        self.ranks.pose(self.task)
        for name in self.entries:
            self._check(name)
        checked = time.monotonic()
        self._say(f"checked {len(self.entries)} contenders in {checked - self.start:.0f} s")
        choices = [name for name in self._fit() if is_choice(name)]
        for _ in range(FIRST_ROUNDS):
            self._round(choices, "first")
            choices = self._near(choices, CLOSE)
        for number in range(self.given.rounds):
            if number and time.monotonic() - self.start > self.given.budget:
                self._say(f"{number} rounds of {self.given.rounds}: {self.given.budget:.0f} s are over")
                break
            names = self._finalists()
            first = number % max(1, len(names))
            self._round(names[first:] + names[:first], "final")
        self._say(f"timed in {time.monotonic() - checked:.0f} s")

    def _check(self, name: str) -> None:
        entry = self.entries[name]
        try:
            answers = self.ranks.ask("check", name)
        except FailedError as error:
            self._failed(name, str(error))
            return
        entry.error = max(max(answer["errors"]) for answer in answers)
        entry.plan = answers[0]["plan"]
        self.log += [f"{name}: {line}" for line in answers[0]["log"]]
        if not all(error <= LARGEST_ERROR for answer in answers for error in answer["errors"]):  # or NaN
            worst = (max(found) for found in zip(*(answer["errors"] for answer in answers), strict=True))
            what = ", ".join(f"{item} {error:.1e}" for item, error in zip(("O", "dQ", "dK", "dV"), worst, strict=True))
            self._failed(name, f"wrong: relative errors {what}")

    def _round(self, names: Iterable[str], stage: str) -> None:
        for name in names:
            try:
                times = self.ranks.ask("time", name)
            except FailedError as error:
                self._failed(name, str(error))
                continue
            forward, both = zip(*times, strict=True)
            getattr(self.entries[name], stage).append((max(forward), max(both)))

    def _failed(self, name: str, why: str) -> None:
        self.entries[name].failure = " ".join(why.split())[:300]
        self._say(f"{name}: {self.entries[name].failure}")

    def _fit(self) -> list[str]:
        return [name for name, entry in self.entries.items() if not entry.failure]

    def _near(self, names: Sequence[str], factor: float) -> list[str]:
        """Those that are not much slower than the fastest of them."""
        fit = [name for name in names if name in self._fit() and self.entries[name].times]
        best = min((self.entries[name].both_s for name in fit), default=0.0)
        return [name for name in fit if self.entries[name].both_s <= factor * best]

    def _finalists(self) -> list[str]:
        """The defaults, our best choices, and other libraries; of these, after one round, those near their best."""
        fit = self._fit()
        choices = sorted(
            (name for name in fit if is_choice(name)), key=lambda name: median_both(self.entries[name].first)
        )
        others = [name for name in fit if not is_choice(name)]
        kinds: dict[str, list[str]] = {}
        for name in others:
            kinds.setdefault(kind_of(name), []).append(name)
        found = choices[:FINALISTS]
        for names in kinds.values():
            timed = [name for name in names if self.entries[name].final]
            found += self._near(timed, FAR) if timed else names
        return found

    def _say(self, text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)

    # Results

    @property
    def title(self) -> str:
        return f"{self.ranks.size} ranks, {self.task}"

    def table(self) -> list[str]:
        entries = sorted(self.entries.values(), key=lambda entry: entry.both_s if entry.times else float("inf"))
        default = self.entries.get(DEFAULT)
        base = default.both_s if default is not None and default.times else None
        lines = [
            f"{'contender':40} {'rounds':>6} {'forward ms':>10} {'both ms':>8} {'× default':>9} {'error':>7}  plan"
        ]
        for entry in entries:
            error = "" if entry.error is None else f"{entry.error:.1e}"
            if entry.failure or not entry.times:
                lines.append(f"{entry.name:40} {error:>43}  {entry.failure}".rstrip())
                continue
            times = f"{1e3 * entry.forward_s:10.1f} {1e3 * entry.both_s:8.1f}"
            ratio = f"{entry.both_s / base:9.2f}" if base else f"{'':9}"
            rounds = f"{len(entry.final)}" if entry.final else f"({len(entry.first)})"
            plan = entry.plan if not is_choice(entry.name) else ""
            lines.append(f"{entry.name:40} {rounds:>6} {times} {ratio} {error:>7}  {plan}".rstrip())
        return lines

    def claims(self) -> list[dict[str, Any]]:
        """How each default compares, both passes: "times" is the rival's time over the default's."""
        rivals = {
            ("best ring of another library", RING_AIM): is_ring,
            ("best degree of USP", USP_AIM): lambda name: name.startswith(USP),
            ("best of all other libraries", None): lambda name: not name.startswith("ours"),
            ("best choice of ours", 1 / CHOICE_AIM): is_choice,
        }
        found = []
        for default in (DEFAULT, MEASURED):
            for (what, aim), belongs in rivals.items():
                entries = [self.entries[name] for name in self._fit() if belongs(name) and self.entries[name].final]
                own = self.entries.get(default)
                if own is None or own.failure or not own.final or not entries:
                    continue
                best = min(entries, key=lambda entry: entry.both_s)
                times = best.both_s / own.both_s
                claim = {"default": default, "against": what, "rival": best.name, "times": round(times, 3), "aim": aim}
                found.append({**claim, "holds": None if aim is None else times >= aim})
        return found

    def facts(self) -> dict[str, Any]:
        return {
            "ranks": self.ranks.size,
            **asdict(self.task),
            "mps": self.ranks.has_mps,
            "restarts": self.ranks.restarts,
            "seconds": round(time.monotonic() - self.start, 1),
            "contenders": [asdict(entry) for entry in self.entries.values()],
            "claims": self.claims(),
            "log": self.log,
        }


def median_both(times: Sequence[tuple[float, float]]) -> float:
    return median(both for _, both in times) if times else float("inf")


def claim_line(title: str, claim: dict[str, Any]) -> str:
    verdict = {True: "holds", False: "DOES NOT HOLD", None: ""}[claim["holds"]]
    aim = "" if claim["aim"] is None else f"aim {claim['aim']:.2f}"
    speed = f"{claim['times']:.2f} times as fast as the {claim['against']} ({claim['rival']})"
    return f"{title}: {claim['default']}: {speed}; {aim} {verdict}".rstrip("; ")


def main() -> int:
    given = _arguments()
    folders = find_packages(given.peers)
    tasks: tuple[Task, ...] = TASKS
    if any(value is not None for value in (given.seq, given.heads, given.kv_heads, given.head_dim)):
        heads = given.heads or 16
        tasks = (
            Task(seq=given.seq or 16384, heads=heads, kv_heads=given.kv_heads or heads, head_dim=given.head_dim or 128),
        )
    header: dict[str, Any] = {}
    results, summary = [], []
    for size in given.ranks:
        with Ranks(size, kind=given.device, folders=folders, timeout_s=given.timeout) as ranks:
            if not header:
                header = start_result(NAME, device=ranks.device)
                header["command"] = shlex.join(["python", *sys.argv])
                header["peers"] = {package: digest_of(package, folder) for package, folder in folders.items()}
            for task in tasks:
                contest = Contest(ranks, task, given)
                try:
                    contest.run()
                except FailedError as error:
                    print(f"{contest.title}: gave up: {error}", flush=True)
                claims = [claim_line(contest.title, claim) for claim in contest.claims()]
                print("", contest.title, *contest.table(), *contest.log, *claims, sep="\n", flush=True)
                summary += claims
                results.append({**header, **contest.facts()})
                if given.store is not None:
                    _store(given.store, results)
    print("", *summary, sep="\n")
    brief = [{key: fact[key] for key in ("ranks", "seq", "heads", "kv_heads", "seconds", "claims")} for fact in results]
    print(json.dumps({**header, "problems": brief}))
    return 0


def _store(file: Path, results: Sequence[dict[str, Any]]) -> None:
    """Write the results beside those of other problems that the file holds."""
    keys = ("ranks", "seq", "heads", "kv_heads", "head_dim")
    known = json.loads(file.read_text()) if file.exists() else []
    new = {tuple(result[key] for key in keys) for result in results}
    kept = [result for result in known if tuple(result[key] for key in keys) not in new]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([*kept, *results], indent=1, ensure_ascii=False) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="?", type=Path, metavar="PEERS_FOLDER", help="clones of the other libraries")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--seq", type=int, help="tokens in the whole sequence; by default two problems, MHA and GQA")
    parser.add_argument("--heads", type=int)
    parser.add_argument("--kv-heads", type=int, help="by default as many as heads")
    parser.add_argument("--head-dim", type=int)
    parser.add_argument("--rounds", type=int, default=5, help="of the defaults, our best choices and other libraries")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds a problem, after which no round begins")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds after which a call counts as hanging")
    parser.add_argument("--only", default="", metavar="REGEX", help="contenders whose name this finds")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--store", type=Path, metavar="FILE", help="write JSON, and keep the file's other problems")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
