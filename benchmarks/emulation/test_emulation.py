"""The emulated network: ranks really run on it, nothing is left of it, and interfaces count the bytes of the plans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from emulation.contenders import Job, default_methods, plans_of
from emulation.network import (
    PREFIX,
    Cluster,
    exit_on_signals,
    namespaces,
    remove_leftovers,
    why_not,
)
from mesh_attention import rank_costs
from mesh_attention.plan.steps import DIRECTIONS

BENCHMARKS = Path(__file__).resolve().parents[1]
BENCHMARK = BENCHMARKS / "how_fast_on_a_slow_network.py"
JOB = Job(
    seq=4096,
    cached=0,
    heads=2,
    kv_heads=2,
    head_dim=16,
    backward=True,
    rounds=2,
    calibration_s=0.01,
    timeout_s=90,
    methods={"mesh": {"method": "mesh"}},
)


@pytest.fixture(scope="module")
def _network() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


needs_network = pytest.mark.usefixtures("_network")


def namespaces_of(process: int) -> list[str]:
    return [name for name in namespaces() if name.startswith(f"{PREFIX}-{process}-")]


def wait_until(happens: Callable[[], bool], *, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not happens() and time.monotonic() < end:
        time.sleep(0.05)
    return happens()


def is_running(process: int) -> bool:
    """Zombies do not count as running: the process that adopts them may collect them later."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids_in(folder: Path, count: int) -> list[int]:
    """Ranks write their process ids as files' names."""
    assert wait_until(lambda: len(list(folder.iterdir())) == count)
    return [int(path.name) for path in folder.iterdir()]


def sleep_after(first: str, pids: Path) -> list[str]:
    """A rank with a child that is deaf to being asked to stop."""
    child = "(trap '' TERM; exec sleep 600) &"
    return ["sh", "-c", f'touch "{pids}/$$"; {first}; {child} touch "{pids}/$!"; wait']


# What is left


@needs_network
def test_nothing_is_left_when_a_rank_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    with Cluster(nodes=2, ranks_per_node=2, rate="10mbit") as cluster:
        assert len(namespaces_of(os.getpid())) == 3
        # Rank 2 fails once the other three and their children run.
        others = f'while [ $(ls "{pids}" | wc -l) -lt 7 ]; do sleep 0.05; done'
        command = sleep_after(f'if [ "$RANK" = 2 ]; then {others}; echo no such luck; exit 7; fi', pids)
        result = cluster.run(command, timeout_s=60, grace_s=0.5, log_dir=tmp_path / "logs")
    assert result.returncode == 7
    assert result.rank_codes[2] == 7
    assert all(code is not None and code < 0 for rank, code in enumerate(result.rank_codes) if rank != 2)
    assert namespaces_of(os.getpid()) == []
    assert wait_until(lambda: not any(map(is_running, pids_in(pids, 7))))
    said = capfd.readouterr().err
    assert "failed with 7" in said
    assert "rank 2:\nno such luck" in said, "the log of the rank that failed is shown"


@needs_network
def test_nothing_is_left_at_the_time_limit(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    with Cluster(nodes=2) as cluster:
        # A rank that does not listen to being asked to stop is killed.
        result = cluster.run(sleep_after("trap '' TERM", pids), timeout_s=3.0, log_dir=tmp_path / "logs")
    assert result.returncode == 124
    assert result.seconds >= 3.0
    assert result.rank_codes == [-signal.SIGKILL] * 2
    assert namespaces_of(os.getpid()) == []
    assert wait_until(lambda: not any(map(is_running, pids_in(pids, 4))))


@needs_network
def test_nothing_is_left_when_making_the_network_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emulation.network.SYSCTLS", ("net.ipv4.no_such_setting=1",))
    with pytest.raises(RuntimeError, match="no_such_setting"), Cluster(nodes=2):
        pass
    assert namespaces_of(os.getpid()) == []
    assert "no_such_setting" in str(why_not())


@needs_network
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_launcher_that_is_stopped_takes_everything_down(tmp_path: Path, number: signal.Signals) -> None:
    launcher, ranks = start_launcher(tmp_path)
    launcher.send_signal(number)
    assert launcher.wait(timeout=30) == 128 + number
    assert namespaces_of(launcher.pid) == []
    assert wait_until(lambda: not any(map(is_running, ranks)))


@needs_network
def test_ranks_die_with_a_killed_launcher_and_the_next_start_removes_its_namespaces(tmp_path: Path) -> None:
    launcher, ranks = start_launcher(tmp_path)
    launcher.kill()
    launcher.wait(timeout=30)
    assert wait_until(lambda: not any(map(is_running, ranks)))
    assert len(namespaces_of(launcher.pid)) == 3
    with Cluster(nodes=1):
        assert namespaces_of(launcher.pid) == []
        assert remove_leftovers() == []  # those of a launcher that runs stay
        assert len(namespaces_of(os.getpid())) == 2
    assert namespaces_of(os.getpid()) == []


def start_launcher(tmp_path: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A launcher process, once its two ranks run."""
    pids = tmp_path / "pids"
    pids.mkdir()
    # exec: the rank is this very process, so killing it leaves no child of it behind.
    command = ["sh", "-c", f'touch "{pids}/$$"; exec sleep 600']
    arguments = ["--nodes", "2", "--rate", "10mbit", "--log-dir", str(tmp_path / "logs"), "--", *command]
    launcher = subprocess.Popen([sys.executable, BENCHMARKS / "emulation" / "network.py", *arguments])
    return launcher, pids_in(pids, 2)


def test_a_second_signal_does_not_interrupt_teardown() -> None:
    torn_down = []

    def be_stopped_twice() -> None:
        with exit_on_signals():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                torn_down.append("all of it")

    with pytest.raises(SystemExit) as caught:
        be_stopped_twice()
    assert torn_down
    assert caught.value.code == 128 + signal.SIGTERM


# What it is


@needs_network
def test_links_are_limited_and_ranks_know_their_place(tmp_path: Path) -> None:
    with Cluster(nodes=2, ranks_per_node=2, rate="8mbit") as cluster:
        command = ["sh", "-c", "env; sysctl net.ipv4.tcp_congestion_control; ls /sys/class/net; tc qdisc show dev eth0"]
        assert cluster.run(command, timeout_s=30, log_dir=tmp_path).returncode == 0
        cluster.set_rate("0")
        assert (
            cluster.run(["tc", "qdisc", "show", "dev", "eth0"], timeout_s=30, log_dir=tmp_path / "free").returncode == 0
        )
    seen = (tmp_path / "rank3.log").read_text()
    for line in ("RANK=3", "WORLD_SIZE=4", "LOCAL_RANK=1", "NODE_RANK=1", "NETNS_RATE_BITS=8000000", "eth0"):
        assert f"{line}\n" in seen
    assert "net.ipv4.tcp_congestion_control = reno" in seen
    assert "tbf" in seen
    assert "rate 8Mbit" in seen
    assert "tbf" not in (tmp_path / "free" / "rank3.log").read_text()


# The benchmark; what it compares, and how rates are read, is in tests/golden/python/emulation.txt


@needs_network
def test_a_small_run_counts_the_bytes_of_the_plans() -> None:
    options = "--nodes 2 --rate 200mbit --seq 2048 --heads 2 --head-dim 16 --rounds 2 --backward --calibration-s 0.01"
    command = [sys.executable, str(BENCHMARK), *options.split(), "--timeout", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    problem = replace(JOB, seq=2048).problem(2)
    assert [row["method"] for row in answer["rows"]] == list(default_methods(problem, DIRECTIONS))
    for row in answer["rows"]:
        plans = plans_of(problem, row["options"], DIRECTIONS)
        planned = [sum(rank_costs(plan, rank).sent_nbytes for plan in plans) for rank in range(2)]
        assert row["planned_nbytes"] == max(planned)
        least, most = row["counted_over_planned"]
        assert 1.0 <= least <= most <= 1.1
        assert row["floor_nbytes"] < 0.02 * max(planned)
        assert 0 < row["error"] < 1e-5
        assert len(row["times_s"]) == len(row["floors_s"]) == len(row["speedups"]) == 2
        # A link cannot be faster than it is, but for the 128 KiB that its bucket lets through in each pass.
        assert min(row["times_s"]) > (max(planned) - 2 * 2**17) / (200e6 / 8)
    ring = answer["rows"][0]
    assert ring["speedups"] == [1.0, 1.0]
    assert set(answer["calibration"]) == {"links", "kernel", "kernel_times", "merge"}
    assert all(row["method"] in done.stdout for row in answer["rows"])


@needs_network
def test_a_wrong_result_is_never_timed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        "import emulation.worker as worker; right = worker.single_process_attention; "
        "worker.single_process_attention = lambda *given: [tensor * 1.001 for tensor in right(*given)]; worker.main()"
    )
    job = json.dumps(asdict(replace(JOB, backward=False)))
    with Cluster(nodes=1, ranks_per_node=2) as cluster:
        command = [sys.executable, "-c", program, job, str(tmp_path)]
        paths = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
        result = cluster.run(command, timeout_s=60, env={"PYTHONPATH": paths}, log_dir=tmp_path / "logs")
    assert result.returncode != 0  # 1, or what Gloo makes of a process that ends without taking leave
    assert not (tmp_path / "measured.json").exists()
    assert "WrongResultError: mesh is wrong on ranks [0, 1]" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (None, "skipped: no ip, tc, sysctl on the path"),
        ("echo Operation not permitted >&2; exit 1", "could not be made: ip netns list: Operation not permitted"),
    ],
)
def test_where_networks_cannot_be_emulated_the_benchmark_says_so_in_one_line(
    tmp_path: Path, tool: str | None, message: str
) -> None:
    if tool is not None:
        if os.geteuid() != 0:
            pytest.skip("without root it does not come to asking the tools")
        for name in ("ip", "tc", "sysctl"):
            (tmp_path / name).write_text(f"#!/bin/sh\n{tool}\n")
            (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, str(BENCHMARK)], capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert message in done.stdout
