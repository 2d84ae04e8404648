"""What every rank does when one of them fails over NCCL: four fresh processes a fault, all faults at once on one GPU.

    python tests/campaign/nccl_faults.py                          # the table, in less than a minute
    python tests/campaign/nccl_faults.py --fault killed late
    python tests/campaign/nccl_faults.py --write docs/faults.md   # and write it into the page
    python tests/campaign/nccl_faults.py --json found.json        # and all that ranks said

One rank has the fault between two calls. Every other rank must raise an error of this library that names what is wrong,
within the group's timeout and `SLACK_S`, and no rank may return a number, except where nothing is wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

from run_ranks import end_ranks, start_ranks

RANKS = 4
TIMEOUT_S, SLACK_S, LATE_S, WARM_TIMEOUT_S = 10.0, 3.0, 4.0, 60.0
START_S = 60.0
"""Seconds that processes may take to start and to warm up."""
END_S = 6.0
"""Seconds in which destroy_process_group is done, or something holds it up."""
DIFFERENT = r"rank 2 makes a different call from ranks? \d(, \d)* in pass \d+; every rank must make the same calls"
"""It names the ranks that have begun the pass by then."""
SILENT = "rank 2 does not answer: its process has ended or stopped"
LATE = r"rank 2 has not begun pass \d+"
STEP = r"Rank \d waits in forward pass \d+, (.*step \d+ '.*'|at its end)"


class Fault(NamedTuple):
    """What is done to a rank, and what the others must say: a reason, and where they wait.

    An empty reason means that nothing is wrong.
    """

    what: str
    reason: str = ""
    where: str = STEP
    victim: int = 2
    options: dict[str, Any] = {}  # noqa: RUF012
    by_torch: bool = False
    """NCCL notices it as well, and torch then holds up the end of a process for a minute."""


FAULTS = {
    "killed": Fault("it is killed", SILENT, by_torch=True),
    "stopped": Fault("it is stopped", SILENT),
    "late": Fault("it comes after the timeout", LATE),
    "late in time": Fault(f"it comes {LATE_S:g} s late"),
    "late, with graphs": Fault(
        "it comes after the timeout, CUDA graphs", LATE, r"Rank \d waits in forward pass \d+", options={"graphs": True}
    ),
    "other shape": Fault("it makes a call of another shape", DIFFERENT, by_torch=True),
    "other call": Fault("it makes another call of the same shape", DIFFERENT, "Rank "),
    "error": Fault(
        "it raises inside a pass", "rank 2 failed: MadeToFailError: made to fail", r"Rank \d waits in forward pass \d+"
    ),
    "new call": Fault(
        "it makes a call that is new", r"rank 2 is agreeing on a new call, but rank \d is running one that it"
    ),
    "late, then a first launch": Fault("it comes late; the others launch a kernel for the first time", LATE),
    "killed, with the store": Fault("it is killed; it is rank 0 and keeps the store", "the group's store", victim=0,
                                    by_torch=True),
}  # fmt: skip
TESTED = ("killed", "stopped", "late", "late in time", "late, with graphs", "other shape", "other call", "error")


class MadeToFailError(Exception):
    """The error of a rank that is made to raise."""


# One rank


def work(connection: Connection, rank: int, name: str, port: int, folder: str) -> None:
    quiet = os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from one_gpu import share_one_gpu

    share_one_gpu(rank)
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = folder  # no MPS there: a killed client would end those of others
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    fault = FAULTS[name]
    torch.cuda.set_device(0)
    is_keeper = rank == fault.victim == 0
    store = dist.TCPStore("localhost", port, is_master=is_keeper, wait_for_workers=False)
    timeout = timedelta(seconds=WARM_TIMEOUT_S)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=RANKS, timeout=timeout)
    calls = Calls(rank, fault)
    calls.warm_up()
    _set_pg_timeout(timedelta(seconds=TIMEOUT_S), dist.group.WORLD)
    calls.attend()
    torch.cuda.synchronize()
    connection.send("ready")
    connection.recv()  # the others are ready too
    start = time.monotonic()
    try:
        found = calls.with_fault(name) if rank == fault.victim else calls.without()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    connection.send((found, time.monotonic() - start))
    if rank == fault.victim and fault.reason:
        time.sleep(TIMEOUT_S + 2 * SLACK_S)  # it is the others that are looked at
    del calls  # NCCL would wait for its graphs
    start = time.monotonic()
    dist.destroy_process_group()
    connection.send(("ended", time.monotonic() - start))
    os._exit(0)


class Calls:
    """The calls of one rank."""

    def __init__(self, rank: int, fault: Fault) -> None:
        import torch

        from mesh_attention import MeshAttention

        self.rank, self.fault = rank, fault
        self.attention = MeshAttention(method="ring", cuda_graphs=bool(fault.options.get("graphs")))
        generator = torch.Generator("cuda").manual_seed(rank)
        self.inputs = {
            tokens: [torch.randn(1, tokens, 4, 32, generator=generator, device="cuda", dtype=torch.bfloat16)
                     for _ in range(3)]
            for tokens in (256, 512)
        }  # fmt: skip

    def attend(self, tokens: int = 256, **named: Any) -> Any:
        import torch

        with torch.no_grad():
            return self.attention(*self.inputs[tokens], causal=True, **named)

    def warm_up(self) -> None:
        for _ in range(3):
            self.due = self.attend()
            self.attend(512)
            self.attend(softmax_scale=0.5)
            self.answer(self.due)

    def answer(self, out: Any) -> str:
        import torch

        torch.cuda.synchronize()
        if bool(out.isnan().all().item()):
            return "NaN"
        return "right" if bool(torch.allclose(out, self.due, atol=1e-2)) else "WRONG"

    def without(self, **named: Any) -> str:
        """Two calls: the first may return NaN, and then the second raises."""
        import torch

        time.sleep(0.3)
        out = self.attend(**named)
        if self.fault is FAULTS["late, then a first launch"]:
            torch.special.bessel_j0(out.float())
        found = self.answer(out)
        return found if found != "NaN" else self.answer(self.attend(**named))

    def with_fault(self, name: str) -> str:
        from mesh_attention.session.pass_ids import CheckedComm

        if name.startswith("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if name.startswith("late"):
            time.sleep(LATE_S if name == "late in time" else TIMEOUT_S + SLACK_S)
        if name == "error":
            with mock.patch.object(CheckedComm, "close", side_effect=MadeToFailError("made to fail")):
                return self.without()
        named = {
            "other shape": {"tokens": 512}, "other call": {"softmax_scale": 0.5}, "new call": {"softmax_scale": 0.25},
        }  # fmt: skip
        return self.without(**named.get(name, {}))


# The table


@dataclass
class Found:
    """What the ranks of one fault did: what each said and after how many seconds, and how long it took to destroy its
    group, unless that was held up."""

    fault: str
    said: dict[int, tuple[str, float]] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    problem: str = ""

    @property
    def breaches(self) -> list[str]:
        """What is wrong with it."""
        fault = FAULTS[self.fault]
        if self.problem:
            return [self.problem]
        found = []
        for rank in range(RANKS):
            if rank == fault.victim and fault.reason:
                continue
            said, seconds = self.said.get(rank, ("nothing", 0.0))
            is_right = said == "right"
            if fault.reason:
                is_right = all(re.search(part, said) for part in ("^TransportError: ", fault.reason, fault.where))
            if not is_right or seconds > TIMEOUT_S + SLACK_S:
                found.append(f"rank {rank} after {seconds:.1f} s: {said}")
            if rank not in self.ended and not fault.by_torch:
                found.append(f"rank {rank}: destroy_process_group did not return")
        return found

    @property
    def row(self) -> str:
        fault = FAULTS[self.fault]
        others = [rank for rank in sorted(self.said) if rank != fault.victim]
        times = [self.said[rank][1] for rank in others]
        span = f"{min(times):.1f} to {max(times):.1f} s" if times else "—"
        words = self.said[others[0]][0] if others else "nothing"
        words = re.sub(
            r"an earlier call on this group failed: |\. Its messages may still.*|; read the logs.*", "", words
        )
        who = ", ".join(map(str, others)) if fault.reason else "nobody"
        ended = sum(rank in self.ended for rank in others)
        return f"| {fault.what} | {who} | {span} | {words} | {ended} of {len(others)} |"


def run_fault(name: str) -> Found:
    from torch.distributed import TCPStore

    context, found = multiprocessing.get_context("forkserver"), Found(name)
    store: Any = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if FAULTS[name].victim == 0:
        store = None  # its port is free again
    with tempfile.TemporaryDirectory(prefix="mesh-attention-faults-") as folder:
        workers = start_ranks(context, RANKS, work, name, port, folder)
        try:
            _listen(found, [connection for _, connection in workers])
        finally:
            end_ranks(workers)
        if found.problem:
            found.problem += "".join(f"\nrank {rank}: {_tail(folder, rank)}" for rank in range(RANKS))
    return found


def _tail(folder: str, rank: int) -> str:
    path = Path(folder, str(rank))
    return path.read_text(errors="replace")[-600:] if path.exists() else ""


def _listen(found: Found, connections: Sequence[Connection]) -> None:
    for rank, connection in enumerate(connections):
        if _next(connection, START_S) != "ready":
            found.problem = f"rank {rank} did not get ready"
            return
    for connection in connections:
        connection.send("go on")
    victim = FAULTS[found.fault].victim
    survivors = [rank for rank in range(RANKS) if rank != victim or not FAULTS[found.fault].reason]
    end = time.monotonic() + TIMEOUT_S + 2 * SLACK_S
    while not all(rank in found.said for rank in survivors) and time.monotonic() < end:
        for rank, connection in enumerate(connections):
            if rank not in found.said and (said := _next(connection, 0.01)) is not None:
                found.said[rank] = said
    end = time.monotonic() + END_S
    while not all(rank in found.ended for rank in survivors) and time.monotonic() < end:
        for rank in survivors:
            if rank not in found.ended and rank in found.said and (said := _next(connections[rank], 0.01)) is not None:
                found.ended[rank] = said[1]


def _next(connection: Connection, within_s: float) -> Any:
    try:
        return connection.recv() if connection.poll(within_s) else None
    except (EOFError, OSError):
        time.sleep(0.01)
        return None


HEAD = "| one rank of four | who raises | after | what the first of them says | can be destroyed |"


def table(found: Sequence[Found]) -> str:
    return "\n".join([HEAD, "| --- | --- | --- | --- | --- |", *(one.row for one in found)])


def write(path: Path, name: str, text: str) -> None:
    """Put a table between its two marks in a page."""
    page, begin, end = path.read_text(), f"<!-- {name} -->", f"<!-- end of {name} -->"
    path.write_text(f"{page[: page.index(begin)]}{begin}\n\n{text}\n\n{page[page.index(end) :]}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", nargs="+", choices=tuple(FAULTS), default=tuple(FAULTS))
    parser.add_argument("--write", type=Path, help="the page to write the table into")
    parser.add_argument("--json", type=Path, help="a file for all that was found")
    given = parser.parse_args(arguments)
    multiprocessing.set_forkserver_preload(["torch.distributed", "mesh_attention.api"])
    with ThreadPoolExecutor(len(given.fault)) as pool:
        found = list(pool.map(run_fault, given.fault))
    print(table(found))
    for one in found:
        for breach in one.breaches:
            print(f"{one.fault}: {breach}")
    if given.write is not None:
        write(given.write, "nccl", table(found))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(one) for one in found]))
    broken = sum(bool(one.breaches) for one in found)
    print(f"{len(found)} faults, {broken} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
