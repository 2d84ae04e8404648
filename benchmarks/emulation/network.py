"""Ranks on an emulated slow network: namespaces, limited links, one process a rank. Standard library only.

Every emulated *node* is a network namespace with one veth link to a switch (a bridge in a namespace of its own). Both
directions of every link are limited with `tc … tbf`:

    node 0                 switch                   node 1
    ┌───────┐              ┌───────┐                ┌───────┐
    │ eth0  │══════════════│ p0    │                │       │
    │  tbf  │ up: limited  │  tbf  │ down: limited  │       │
    └───────┘ by eth0      │  br0  │ by p0          │       │
                           │    p1 │════════════════│ eth0  │
                           └───────┘                └───────┘

Ranks of one node share its namespace and speak over its loopback, unlimited. Nothing is made in the caller's own
namespace, and deleting the namespaces deletes every link, queue and address with them. Needs root, iproute2 and the
kernel's veth, bridge and sch_tbf; `why_not` asks.

    python benchmarks/emulation/network.py --nodes 4 --rate 200mbit -- python my_rank.py
    python benchmarks/emulation/network.py --remove-leftovers

No latency is added. What fits the bucket (128 KiB, or 1 ms at the rate) passes at full speed after a pause. All bytes
are copied by the same cores that compute: with 2 cores, keep nodes × rate below about 5 Gbit/s.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

NIC = "eth0"
"""The limited interface inside every node."""
PREFIX = "meshnet"
"""Namespaces are called PREFIX-(process id of the launcher)-(serial number)-(sw or node number)."""
SUBNET = "10.77"
MASTER_PORT = 29500
TIME_LIMIT_CODE = 124
TOOLS = ("ip", "tc", "sysctl")

# Fixed inside every node, so that nothing depends on the host's TCP settings. With BBR, short messages between changing
# peers got as little as half of the link; with the usual 4 MiB of unsent data a socket, the acknowledgements of one
# connection wait behind the data of another. Both bias comparisons.
SYSCTLS = (
    "net.ipv4.tcp_congestion_control=reno",  # the one every kernel has and allows
    "net.ipv4.tcp_slow_start_after_idle=0",  # computing between messages is not idleness
    "net.ipv4.tcp_limit_output_bytes=262144",  # a socket, waiting before the limiter
    "net.ipv4.tcp_no_metrics_save=1",  # no memory of earlier connections
    "net.ipv6.conf.all.disable_ipv6=1",  # its housekeeping would blur the byte counters
)

_serials = itertools.count()
_STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class EmulationError(RuntimeError):
    """A namespace, link or limit could not be made or read."""


def why_not() -> str | None:
    """None where a network can be emulated; otherwise why not. Asks by making a small one."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, and this is {sys.platform}"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} on the path; iproute2 and procps have them"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Cluster(nodes=1, rate="1mbit"):
            return None
    except (EmulationError, OSError, subprocess.TimeoutExpired) as error:
        return f"a network namespace could not be made: {error}"


def parse_rate(text: str) -> int:
    """Bits a second of '200mbit', '2.5gbit' or '0' (unlimited)."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmg]?)(bit)?(/s|ps)?\s*", text.lower())
    if match is None:
        raise ValueError(f"rate {text!r}: expected a number such as 200mbit or 1gbit, or 0 for no limit")
    return int(float(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[match[2]])


def remove_leftovers() -> list[str]:
    """Delete namespaces of launchers that no longer run, as after a SIGKILL; their names."""
    gone = []
    for name in namespaces():
        match = re.match(rf"{PREFIX}-(\d+)-", name)
        if match is not None and not Path("/proc", match[1]).exists():
            _run_tool("ip", "netns", "del", name, must_work=False)
            gone.append(name)
    return gone


def namespaces() -> list[str]:
    return [line.split()[0] for line in _run_tool("ip", "netns", "list").splitlines() if line.strip()]


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Being stopped is an exception inside this, so that teardown runs; a second signal does not interrupt that."""

    def stop(number: int, _frame: FrameType | None) -> None:
        for other in _STOPPING:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = [signal.signal(number, stop) for number in _STOPPING]
    try:
        yield
    finally:
        for number, handler in zip(_STOPPING, before, strict=True):
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One run of all ranks. Bytes and dropped packets are of this run, by node, at the limited interface."""

    returncode: int
    """0, the exit code of the first rank that failed by itself, or 124 at the time limit."""
    seconds: float
    rank_codes: list[int | None]
    """Negative: the signal that ended the rank."""
    sent_nbytes: list[int]
    received_nbytes: list[int]
    dropped_packets: int
    """By the limiters; each is sent again, and then counted again."""
    log_dir: Path | None
    """Kept after a failure, or where the caller named it."""


class Cluster:
    """Nodes around one switch, while its `with` block lasts. `rate` is bits a second each way, 0 for no limit."""

    def __init__(
        self,
        *,
        nodes: int,
        ranks_per_node: int = 1,
        rate: str = "0",
        burst_ms: float = 1.0,
        queue_ms: float = 200.0,
        mtu: int = 1500,
    ) -> None:
        if nodes < 1 or ranks_per_node < 1:
            raise ValueError(f"{nodes} nodes of {ranks_per_node} ranks: expected at least 1 of both")
        self.nodes, self.ranks_per_node, self.mtu = nodes, ranks_per_node, mtu
        self.burst_ms, self.queue_ms = burst_ms, queue_ms
        self.rate_bits = parse_rate(rate)
        self._is_limited = False
        base = f"{PREFIX}-{os.getpid()}-{next(_serials)}"
        self.switch = f"{base}-sw"
        self.names = [f"{base}-{node}" for node in range(nodes)]
        self._processes: list[subprocess.Popen[bytes]] = []

    # Made and taken down

    def __enter__(self) -> Cluster:
        remove_leftovers()
        try:
            self._create()
            self._limit(self.rate_bits)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks that still run and delete every namespace. Not interrupted by signals, raises nothing."""
        with _signals_held():
            self._end_ranks()
            for name in (*self.names, self.switch):
                try:
                    _end_inhabitants(name)
                    _run_tool("ip", "netns", "del", name, must_work=False)
                except (OSError, subprocess.SubprocessError) as error:  # go on with the others
                    print(f"{name} could not be deleted: {error}", file=sys.stderr)

    def _create(self) -> None:
        _run_ip([f"netns add {name}" for name in (self.switch, *self.names)])
        _run_ip(["link add br0 type bridge stp_state 0 forward_delay 0", "link set br0 up"], within=self.switch)
        ports = []
        for node, name in enumerate(self.names):
            # Made inside the switch, so that no end ever shows up in the caller's namespace.
            ports += [
                f"link add p{node} mtu {self.mtu} type veth peer name {NIC} mtu {self.mtu} netns {name}",
                f"link set p{node} master br0",
                f"link set p{node} up",
            ]
        _run_ip(ports, within=self.switch)
        for node, name in enumerate(self.names):
            _run_tool("ip", "netns", "exec", name, "sysctl", "-qw", *SYSCTLS)
            address = f"addr add {_address(node)}/16 dev {NIC}"
            _run_ip([address, f"link set {NIC} up", "link set lo up"], within=name)

    def set_rate(self, rate: str) -> None:
        """Limit every link, each way."""
        self.rate_bits = parse_rate(rate)
        self._limit(self.rate_bits)

    def _limit(self, bits: int) -> None:
        if not bits and not self._is_limited:
            return
        spec = ["root"]
        if bits:
            # The bucket holds at least one 64 KiB segmentation-offload packet, or tbf splits it in software, which
            # costs far more than the rest of the emulation. The queue makes many senders into one node wait, not lose.
            burst = max(128 * 1024, int(bits / 8 * self.burst_ms / 1e3))
            limit = burst + max(4 * 1024 * 1024, int(bits / 8 * self.queue_ms / 1e3))
            spec += ["tbf", "rate", f"{bits}bit", "burst", str(burst), "limit", str(limit)]
        for node, name in enumerate(self.names):
            for namespace, link in ((name, NIC), (self.switch, f"p{node}")):
                _run_tool("tc", "-n", namespace, "qdisc", "replace" if bits else "del", "dev", link, *spec)
        self._is_limited = bool(bits)

    # Counters

    def nbytes(self) -> tuple[list[int], list[int]]:
        """Bytes sent and received so far by every node over its limited link, headers among them."""
        sent, received = [], []
        for name in self.names:
            text = _run_tool("ip", "-n", name, "-s", "-j", "link", "show", "dev", NIC)
            counters = json.loads(text)[0]["stats64"]
            sent.append(int(counters["tx"]["bytes"]))
            received.append(int(counters["rx"]["bytes"]))
        return sent, received

    def dropped_packets(self) -> int:
        """By all limiters so far; should stay at or near 0."""
        total = 0
        for name in (self.switch, *self.names):
            for queue in json.loads(_run_tool("tc", "-n", name, "-s", "-j", "qdisc", "show") or "[]"):
                total += int(queue.get("drops", 0)) if queue.get("kind") == "tbf" else 0
        return total

    # Ranks

    def environment(self, rank: int) -> dict[str, str]:
        """What a rank finds in its environment, beside the caller's own."""
        a_node = self.ranks_per_node
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.nodes * a_node),
            "LOCAL_RANK": str(rank % a_node),
            "LOCAL_WORLD_SIZE": str(a_node),
            "NODE_RANK": str(rank // a_node),
            "NNODES": str(self.nodes),
            "MASTER_ADDR": _address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": NIC,
            "NETNS_NIC": NIC,
            "NETNS_RATE_BITS": str(self.rate_bits),
        }

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        log_dir: Path | None = None,
        grace_s: float = 10.0,
    ) -> RunResult:
        """Run the command once a rank. Rank 0 writes to our output, the others to files in `log_dir`.

        Ends when all ranks have, `grace_s` after the first failed, or at the time limit; what runs then is killed.
        """
        logs = Path(tempfile.mkdtemp(prefix="emulation-")) if log_dir is None else log_dir
        logs.mkdir(parents=True, exist_ok=True)
        (sent, received), dropped = self.nbytes(), self.dropped_packets()
        start = time.monotonic()
        try:
            for rank in range(self.nodes * self.ranks_per_node):
                self._processes.append(self._start(rank, command, env or {}, logs))
            timed_out = _wait(self._processes, until=start + timeout_s, grace_s=grace_s)
            seconds = time.monotonic() - start
        finally:
            codes = self._end_ranks()
        returncode = TIME_LIMIT_CODE if timed_out else _first_failure(codes)
        if returncode:
            _report_failure(returncode, codes, logs)
        elif log_dir is None:
            shutil.rmtree(logs, ignore_errors=True)
        sent_now, received_now = self.nbytes()
        return RunResult(
            returncode=returncode,
            seconds=seconds,
            rank_codes=codes,
            sent_nbytes=[after - before for before, after in zip(sent, sent_now, strict=True)],
            received_nbytes=[after - before for before, after in zip(received, received_now, strict=True)],
            dropped_packets=self.dropped_packets() - dropped,
            log_dir=logs if returncode or log_dir is not None else None,
        )

    def _end_ranks(self) -> list[int | None]:
        codes = _end(self._processes)
        self._processes = []
        return codes

    def _start(self, rank: int, command: Sequence[str], env: Mapping[str, str], logs: Path) -> subprocess.Popen[bytes]:
        node = self.names[rank // self.ranks_per_node]
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(_log(logs, rank).open("wb")) if rank else None
            return subprocess.Popen(
                ["ip", "netns", "exec", node, *command],
                env={"OMP_NUM_THREADS": "1", **os.environ, **env, **self.environment(rank)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT if log else None,
                start_new_session=True,
                preexec_fn=functools.partial(_die_with, os.getpid(), ctypes.CDLL(None, use_errno=True)),
            )


def _address(node: int) -> str:
    return f"{SUBNET}.{node // 250}.{node % 250 + 1}"


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


# Processes


def _die_with(launcher: int, libc: ctypes.CDLL) -> None:
    """In the child: be killed when the launcher dies, even by SIGKILL. Survives exec."""
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != launcher:  # it died before we asked
        os._exit(1)


def _wait(processes: Sequence[subprocess.Popen[bytes]], *, until: float, grace_s: float) -> bool:
    """Until all have ended, or some while after one has failed; whether the time limit came first."""
    failing = False
    while True:
        codes = [process.poll() for process in processes]  # all of them: polling is what refreshes them
        if None not in codes:
            return False
        if any(codes) and not failing:
            failing, until = True, min(until, time.monotonic() + grace_s)
        if time.monotonic() >= until:
            return not failing
        time.sleep(0.02)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Kill those that still run; exit codes of all. Each leads a session of its own, so its children go with it."""
    for number, wait_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        alive = [process for process in processes if process.poll() is None]
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        until = time.monotonic() + wait_s
        while time.monotonic() < until and any(process.poll() is None for process in alive):
            time.sleep(0.02)
    return [process.returncode for process in processes]


def _end_inhabitants(namespace: str) -> None:
    """Kill what ranks started and left behind in a namespace of ours."""
    for process in _run_tool("ip", "netns", "pids", namespace, must_work=False).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


def _first_failure(codes: Sequence[int | None]) -> int:
    """A rank that failed by itself names the result; one that was killed only if there is no other."""
    killed = (-signal.SIGKILL, -signal.SIGTERM)
    failures = [code for code in codes if code]
    return next((code for code in failures if code not in killed), failures[0] if failures else 0)


def _report_failure(returncode: int, codes: Sequence[int | None], logs: Path) -> None:
    what = "time limit reached" if returncode == TIME_LIMIT_CODE else f"failed with {returncode}"
    print(f"{what}; exit codes by rank: {codes}; logs: {logs}", file=sys.stderr)
    logged = [rank for rank, code in enumerate(codes) if code and _log(logs, rank).exists()]
    for rank in sorted(logged, key=lambda rank: codes[rank] != returncode)[:1]:
        tail = _log(logs, rank).read_text(errors="replace").splitlines()[-15:]
        print(f"rank {rank}:", *tail, sep="\n", file=sys.stderr)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# Tools


def _run_tool(*arguments: str, must_work: bool = True) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    if must_work and done.returncode:
        raise EmulationError(f"{' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _run_ip(commands: Sequence[str], *, within: str | None = None) -> None:
    """Many commands in one process: 16 nodes are made in well under a second."""
    arguments = ["ip", *(["-n", within] if within else []), "-batch", "-"]
    text = "".join(f"{command}\n" for command in commands)
    done = subprocess.run(arguments, input=text, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise EmulationError(f"{' '.join(arguments)}: {done.stderr.strip()}")


# Command line


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, default=1, help="unlimited among them")
    parser.add_argument("--rate", default="1gbit", help="a node, each way: 200mbit, 1gbit; 0 for no limit")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds, then everything is killed")
    parser.add_argument("--log-dir", type=Path, help="keep the output of ranks 1 and up here")
    parser.add_argument("--remove-leftovers", action="store_true", help="of launchers that died, and nothing else")
    parser.add_argument("command", nargs="*", help="what each rank runs; write -- before it")
    given = parser.parse_args()
    reason = why_not()
    if reason is not None:
        parser.error(reason)
    if given.remove_leftovers:
        return 0  # asking why_not has removed them
    if not given.command:
        parser.error("no command for the ranks was given; write it after --")
    cluster = Cluster(nodes=given.nodes, ranks_per_node=given.ranks_per_node, rate=given.rate)
    with exit_on_signals(), cluster:
        result = cluster.run(given.command, timeout_s=given.timeout, log_dir=given.log_dir)
    sent = " ".join(f"{nbytes / 1e6:.1f}" for nbytes in result.sent_nbytes)
    print(
        f"{result.seconds:.1f} s; MB sent by node: {sent}; dropped packets: {result.dropped_packets}", file=sys.stderr
    )
    return result.returncode if result.returncode >= 0 else 128 - result.returncode


if __name__ == "__main__":
    sys.exit(main())
