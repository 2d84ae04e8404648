"""The table of faults and moments: what every rank does when one of them fails, on four fresh processes over Gloo.

    python tests/campaign/faults.py                              # the whole table, in about ten minutes
    python tests/campaign/faults.py --fault die stop --moment "in forward"
    python tests/campaign/faults.py --write docs/faults.md       # and write it into the page

One cell is one run: rank 1 has the fault at the moment, the others do nothing wrong. Every rank that is alive must
raise an error of this library within `LIMIT_S` of the fault, long before the group's timeout, and no rank may return a
number, except where nothing is wrong (late, lock held, other spelling): there every rank must be right. Afterwards all
ranks that are alive make one more call. All of them are right, or all of them raise.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._dynamo  # checkpointing imports it, which takes longer than the group's timeout; so it is loaded before
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent.parent))

from attending import Attended, Call
from campaign.nccl_faults import write
from run_ranks import end_ranks, process_context, start_ranks
from serving_cases import Model

import mesh_attention
from mesh_attention import MeshAttention, MeshAttentionError
from mesh_attention.comm.torch_dist import TorchComm
from mesh_attention.execution.call import Calls
from mesh_attention.kernels.decode import TorchDecode
from mesh_attention.kernels.torch_attention import CpuFlashKernel
from mesh_attention.serving import CachedLayer, ShardedCache

RANKS = 4
LIMIT_S, LATE_S = 5.0, {"late": 4.0, "late by a minute": 60.0}
HELD_S = 10
"""For so long a rank holds Python's global lock, so that none of its threads answers."""
START_S = 60.0
"""Seconds that processes may take to start and to warm up."""
SETTLE_S = 1.0
"""Seconds after the start in which ranks learn each other's process ids."""
MOST_S = 90.0
"""After so long without an answer, a rank counts as silent for ever."""
SEQ, HEADS, DIM = 48, 2, 8
FAULTS = (
    *("die", "stop", "late", "late by a minute", "lock held", "raise", "out of memory"),
    *("other call", "other dtype", "other spelling", "other version", "wrong argument"),
)
HARMLESS = (*LATE_S, "lock held", "other spelling")


class Setting(NamedTuple):
    """How a cell is run: which rank has the fault, and who keeps the store of the group.

    A launcher such as torchrun keeps it, or rank 0 if there is none.
    """

    victim: int = 1
    store_on_rank_0: bool = False
    method: str = "ring"


class MadeToFailError(Exception):
    """The error of a rank that is made to raise."""


# One rank


@dataclass
class Rank:
    """One process: makes its calls, and has the fault if it is the victim."""

    number: int
    fault: str
    setting: Setting

    def __post_init__(self) -> None:
        self.attention = MeshAttention(choice=self.setting.method)
        self.is_victim = self.number == self.setting.victim

    def fail(self) -> None:
        """Have the fault now, if it is one that happens at a moment."""
        if not self.is_victim:
            return
        match self.fault:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "late" | "late by a minute":
                time.sleep(LATE_S[self.fault])
            case "lock held":
                ctypes.PyDLL(None).sleep(HELD_S)
            case "raise":
                raise MadeToFailError("made to fail")
            case "out of memory":
                raise torch.OutOfMemoryError("made to run out of memory")

    @contextmanager
    def failing_in(self, owner: type, name: str, *, after: bool = False) -> Iterator[None]:
        """Have the fault in the next call of a method, before or after it does its work."""
        method, is_due = getattr(owner, name), [True]

        def wrapped(*given: Any, **named: Any) -> Any:
            due = is_due and is_due.pop()
            if due and not after:
                self.fail()
            result = method(*given, **named)
            if due and after:
                self.fail()
            return result

        with mock.patch.object(owner, name, wrapped):
            yield

    @property
    def kernel(self) -> type:
        """The class of the kernel of earlier calls."""
        (engine, *_) = self.attention.calls.engines.values()
        return type(next(iter(engine.kernels.values())))

    @property
    def differs(self) -> bool:
        return self.is_victim and self.fault.startswith(("other", "wrong"))

    @property
    def has_twin(self) -> bool:
        """True if the victim's other call is one that all ranks made before."""
        return self.fault in ("other call", "other dtype")

    def question(self, *, other: bool = False, **arguments: Any) -> Call:
        """What this rank asks: the same on all ranks, except that the victim's may be the other one."""
        asked = replace(CALL, arguments=CALL.arguments | arguments)
        if not (other or self.differs):
            return asked
        if self.fault == "other dtype":
            return replace(asked, dtype="float32")
        different: dict[str, dict[str, Any]] = {
            "other call": {"causal": False},
            "other spelling": {"softmax_scale": DIM**-0.5, "seq_len": SEQ},
            "wrong argument": {"casual": True},
        }
        return replace(asked, arguments=asked.arguments | different.get(self.fault, {}))

    def attend(self, asked: Call, **how: Any) -> Attended:
        return Attended(self.attention, asked, **how)

    def forward(self, asked: Call) -> bool:
        return not self.attend(replace(asked, needs=(False, False, False))).wrong_results()

    def step(self, asked: Call) -> bool:
        return self.backward(self.attend(asked))

    def backward(self, attended: Attended) -> bool:
        torch.autograd.backward(*zip(*attended.ends(), strict=True))
        return not attended.wrong_gradients()


CALL = Call(seq_q=SEQ, seq_k=SEQ, heads=HEADS, kv_heads=HEADS, dim=DIM, dim_v=DIM, arguments={"causal": True})


# Moments. Each warms up, without the fault, and returns the part that has it; that returns whether the result is right.

Attack = Callable[[], bool]


def before_the_first_call(rank: Rank) -> Attack:
    def attack() -> bool:
        rank.fail()
        return rank.forward(rank.question())

    return attack


def in_agreement(rank: Rank) -> Attack:
    """On a new call. The victim's other call is not new to it, so it does not agree on anything."""
    rank.forward(_questions(rank)[-1])
    new = {} if rank.differs and rank.has_twin else {"window_size": (9, 0)}
    raises = rank.fault in ("raise", "out of memory")

    def attack() -> bool:
        where = (Calls, "_check_graphs") if raises else (TorchComm, "share")
        with rank.failing_in(*where, after=not raises):
            return rank.forward(rank.question(**new))

    return attack


def in_forward(rank: Rank) -> Attack:
    _warm_up(rank, rank.forward)

    def attack() -> bool:
        with rank.failing_in(rank.kernel, "forward"):
            return rank.forward(rank.question())

    return attack


def in_backward(rank: Rank) -> Attack:
    _warm_up(rank, rank.step)
    answers = [rank.attend(asked) for asked in _spelled(rank)]
    answer = answers[-1] if rank.differs else answers[0]

    def attack() -> bool:
        with rank.failing_in(rank.kernel, "backward"):
            return rank.backward(answer)

    return attack


def between_calls(rank: Rank) -> Attack:
    _warm_up(rank, rank.step)

    def attack() -> bool:
        rank.fail()
        return rank.step(rank.question())

    return attack


def in_unshard(rank: Rank) -> Attack:
    attended, dim = rank.attend(CALL), 1
    (due, _), local = attended.truth.out, attended.outs[0].detach()
    if rank.differs:
        local = local.float() if rank.fault == "other dtype" else local
        dim = {"other spelling": -3, "wrong argument": 7}.get(rank.fault, 1)

    def attack() -> bool:
        with rank.failing_in(TorchComm, "post"):
            if rank.differs and rank.fault == "other call":
                return rank.forward(CALL)
            return torch.allclose(rank.attention.unshard(local, dim=dim).double(), due, rtol=0.0, atol=1e-6)

    return attack


def in_a_checkpoint(rank: Rank) -> Attack:
    """While backward computes forward again."""
    _warm_up(rank, rank.step)

    def attend(*given: Tensor, **arguments: Any) -> Any:
        return checkpoint(partial(rank.attention, **arguments), *given, use_reentrant=False)

    answers = [rank.attend(asked, attend=attend) for asked in _spelled(rank)]
    answer = answers[-1] if rank.differs else answers[0]

    def attack() -> bool:
        with rank.failing_in(rank.kernel, "forward"):
            return rank.backward(answer)

    return attack


def in_a_turn(rank: Rank) -> Attack:
    return _serving(rank, CpuFlashKernel, "forward", lambda model, chat: model.prefill({chat: 8}))


def in_a_decoded_step(rank: Rank) -> Attack:
    return _serving(rank, TorchDecode, "attend", lambda model, chat: model.decode([chat]))


def _serving(rank: Rank, kernel: type, method: str, act: Callable[[Model, int], None]) -> Attack:
    """A turn or a step like earlier ones; another call has the layers in another order."""
    layers = [CachedLayer(kv_heads=HEADS, head_dim=DIM)] * 2
    model = Model(ShardedCache(rank.attention, layers, tokens=99, dtype=torch.float64))
    chat = model.new()
    for tokens in (24, 8):
        model.prefill({chat: tokens})
    act(model, chat)
    different: dict[str, dict[str, Any]] = {
        "other spelling": {"softmax_scale": DIM**-0.5},
        "wrong argument": {"softcap": "none"},
    }

    def attack() -> bool:
        if rank.differs:
            model.order = (1, 0) if rank.fault == "other call" else ()
            model.options = different.get(rank.fault, {})
        cast = torch.float32 if rank.differs and rank.fault == "other dtype" else torch.float64
        with rank.failing_in(kernel, method), mock.patch.object(Model, "_given", lambda _, whole: whole.to(cast)):
            act(model, chat)
        return model.error < 1e-12

    return attack


def _questions(rank: Rank) -> list[Call]:
    """The question of all ranks and, if the victim asks another one, that one too."""
    return [CALL, rank.question(other=True)] if rank.has_twin else [CALL]


def _spelled(rank: Rank) -> list[Call]:
    """The same, spelled as this rank spells it."""
    return _questions(rank) if rank.has_twin else [rank.question()]


def _warm_up(rank: Rank, make: Callable[[Call], bool]) -> None:
    for asked in _questions(rank):
        assert make(asked)


MOMENTS: dict[str, Callable[[Rank], Attack]] = {
    "before the first call": before_the_first_call,
    "in agreement": in_agreement,
    "in forward": in_forward,
    "in backward": in_backward,
    "between calls": between_calls,
    "in unshard": in_unshard,
    "in a checkpoint": in_a_checkpoint,
    "in a turn": in_a_turn,
    "in a decoded step": in_a_decoded_step,
}
IMPOSSIBLE = {
    *(
        ("other version", moment)
        for moment in ("in forward", "in backward", "between calls", "in a checkpoint", "in a decoded step")
    ),
    *(("wrong argument", moment) for moment in ("in backward", "in a checkpoint")),
    *((error, moment) for error in ("raise", "out of memory") for moment in ("before the first call", "between calls")),
}
"""A library does not change its version in mid-run, and the first call compares it. Backward has no arguments. A rank
that raises outside of this library, and goes on, is late."""


def cells() -> list[tuple[str, str]]:
    return [(fault, moment) for fault in FAULTS for moment in MOMENTS if (fault, moment) not in IMPOSSIBLE]


def work(connection: Connection, number: int, port: int, fault: str, moment: str, setting: Setting) -> None:
    torch.set_num_threads(1)
    is_keeper = setting.store_on_rank_0 and number == 0
    store = TCPStore("localhost", port, is_master=is_keeper, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=number, world_size=RANKS)
    rank = Rank(number, fault, setting)
    attack = MOMENTS[moment](rank)
    dist.barrier()
    time.sleep(SETTLE_S)
    connection.send("ready")
    if rank.is_victim and fault == "other version":
        mesh_attention.__version__ = "0.0.0"
    silent = os.open(os.devnull, os.O_WRONLY)
    for part in (attack, lambda: rank.step(CALL)):
        connection.recv()  # the others are ready too
        os.dup2(silent, sys.stderr.fileno())  # torch prints stacks of its own when a store or a peer is gone
        start = time.monotonic()
        try:
            said = "right" if part() else "WRONG"
        except BaseException as error:
            kind = "library" if isinstance(error, MeshAttentionError) else type(error).__name__
            said = f"{kind}|{type(error).__name__}: {error}"
        connection.send((said, time.monotonic() - start))


# The table


@dataclass(frozen=True)
class Outcome:
    """What one rank did: an answer that is right or not, an error, or nothing."""

    said: str
    seconds: float = 0.0

    @property
    def is_library_error(self) -> bool:
        return self.said.startswith("library|")

    @property
    def name(self) -> str:
        return self.said.split("|")[-1].split(":")[0]


DEAD, SILENT = Outcome("dead"), Outcome("SILENT")


@dataclass(frozen=True)
class Cell:
    fault: str
    moment: str
    ranks: tuple[Outcome, ...]
    afterwards: tuple[Outcome, ...]
    setting: Setting

    @property
    def breaches(self) -> list[str]:
        """What is wrong with it."""
        found = []
        for rank, outcome in enumerate(self.ranks):
            if why := self._breach(rank, outcome):
                found.append(f"rank {rank}: {why}: {outcome.said} ({outcome.seconds:.1f} s)")
        alive = [outcome for outcome in self.afterwards if outcome != DEAD]
        late = any(outcome.seconds > LIMIT_S for outcome in alive)
        if late or not (
            all(outcome.said == "right" for outcome in alive) or all(one.is_library_error for one in alive)
        ):
            found.append(f"afterwards: {[(outcome.said, round(outcome.seconds, 1)) for outcome in self.afterwards]}")
        return found

    def _breach(self, rank: int, outcome: Outcome) -> str | None:
        is_victim = rank == self.setting.victim
        if self.fault in HARMLESS:
            return None if outcome.said == "right" else "expected the right result"
        if is_victim and self.fault == "die":
            return None if outcome == DEAD else "expected it to be dead"
        if is_victim and outcome.name in ("MadeToFailError", "OutOfMemoryError"):
            return None
        if not outcome.is_library_error:
            return "expected an error of this library"
        # A stopped rank raises some time after it goes on.
        limit = LIMIT_S * (2 if is_victim and self.fault == "stop" else 1)
        return f"expected it within {limit:g} s" if outcome.seconds > limit else None

    @property
    def summary(self) -> str:
        if self.breaches:
            return "BROKEN"
        if self.fault in HARMLESS:
            return "right"
        others = [outcome for rank, outcome in enumerate(self.ranks) if rank != self.setting.victim]
        slowest = max(outcome.seconds for outcome in others)
        return f"{', '.join(sorted({outcome.name for outcome in others}))} after {slowest:.1f} s"


def run_cell(fault: str, moment: str, setting: Setting = Setting()) -> Cell:  # noqa: B008  (a value)
    with _started(fault, moment, setting) as workers:
        if not all(_is_ready(connection) for _, connection in workers):
            raise RuntimeError(f"{fault}, {moment}: the ranks did not get ready")
        ranks = _outcomes(workers, setting)
        return Cell(fault, moment, ranks, _outcomes(workers, setting), setting)


@contextmanager
def _started(fault: str, moment: str, setting: Setting) -> Iterator[list[tuple[Any, Connection]]]:
    context = process_context()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if setting.store_on_rank_0:
        del store  # its port is free again
    workers = start_ranks(context, RANKS, work, port, fault, moment, setting)
    try:
        yield workers
    finally:
        end_ranks(workers)


def _is_ready(connection: Connection) -> bool:
    try:
        return connection.poll(START_S) and connection.recv() == "ready"
    except (EOFError, OSError):
        return False


def _outcomes(workers: Sequence[tuple[Any, Connection]], setting: Setting) -> tuple[Outcome, ...]:
    """Let all ranks go on, and collect what they do. A rank that stopped goes on when all others have answered."""
    found = {}
    for rank, (_, connection) in enumerate(workers):
        try:
            connection.send("go on")
        except OSError:
            found[rank] = DEAD
    victim = workers[setting.victim][0].pid
    for _ in range(2):
        end = time.monotonic() + MOST_S
        while len(found) < len(workers) and time.monotonic() < end:
            for rank, (_, connection) in enumerate(workers):
                if rank not in found and (answer := _answer(connection)):
                    found[rank] = answer
            if len(found) == len(workers) - 1 and _is_stopped(victim):
                break
        if _is_stopped(victim):
            os.kill(victim, signal.SIGCONT)
    return tuple(found.get(rank, SILENT) for rank in range(len(workers)))


def _answer(connection: Connection) -> Outcome | None:
    try:
        if connection.poll(0.02):
            return Outcome(*connection.recv())
    except (EOFError, OSError):
        return DEAD
    return None


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def table(found: Sequence[Cell]) -> str:
    by_place = {(cell.fault, cell.moment): cell for cell in found}
    lines = ["| fault | " + " | ".join(MOMENTS) + " |", "| --- |" + " --- |" * len(MOMENTS)]
    for fault in FAULTS:
        row = [by_place[fault, moment].summary if (fault, moment) in by_place else "—" for moment in MOMENTS]
        lines.append(f"| {fault} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--moment", nargs="+", choices=tuple(MOMENTS), default=tuple(MOMENTS))
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    parser.add_argument("--victim", type=int, choices=range(RANKS), default=1, help="the rank that has the fault")
    parser.add_argument("--store-on-rank-0", action="store_true", help="as without a launcher")
    parser.add_argument("--method", default="ring", help="how to plan, such as 'mesh 2x2'")
    parser.add_argument("--write", type=Path, help="the page to write the table into")
    given = parser.parse_args(arguments)
    chosen = [(fault, moment) for fault, moment in cells() if fault in given.fault and moment in given.moment]
    setting = Setting(given.victim, store_on_rank_0=given.store_on_rank_0, method=given.method)
    found = []
    with ThreadPoolExecutor(given.jobs) as pool:
        for cell in pool.map(lambda place: run_cell(*place, setting), chosen):
            found.append(cell)
            print(f"{cell.fault:15} {cell.moment:22} {cell.summary}", flush=True)
            for breach in cell.breaches:
                print(f"    {breach}", flush=True)
    if given.write is not None:
        write(given.write, "gloo", table(found))
    broken = sum(bool(cell.breaches) for cell in found)
    print(f"{len(found)} cells, {broken} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
