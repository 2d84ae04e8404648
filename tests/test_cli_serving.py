"""Serving on the command line: prompts, turns and decoded steps; what is printed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import test_cli
from test_cli import Run, as_json, assert_refused

from mesh_attention import Problem, causal, cluster_named, make_plan, parse_plan
from mesh_attention.tuning.result import tuning_from_json
from mesh_attention_lab.cli.terminal import cache_nbytes
from mesh_attention_lab.comparison import decode_trials

run = test_cli.run
"""The fixture."""

SIZES = "--heads 8 --kv-heads 2 --head-dim 64"
TURN = f"--new 512 --cached 64k {SIZES}"
TUNE = f"tune --cluster h100x8 {TURN} --no-cache"
DECODE = f"tune --cluster h100x16 --decode --batch 8 --cached 1m {SIZES}"
PROBLEM = Problem(
    seq_q=512, seq_kv=512 + 65536, heads=8, kv_heads=2, head_dim_qk=64, head_dim_v=64, ranks=8, mask=causal()
)


# Turns


def test_a_turn_as_json_can_be_read_back(run: Run) -> None:
    answer = as_json(run(f"{TUNE} --layers 4 --json"))
    tuning = tuning_from_json(answer["tuning"])
    assert answer["layers"] == 4
    assert answer["cache_nbytes"] == cache_nbytes(PROBLEM, layers=4) == 4 * cache_nbytes(PROBLEM)
    assert [*answer["digests"]] == ["forward"]
    assert tuning.chosen.choices["forward"].options["layout"] == "turn"
    assert as_json(run("tune --cluster h100x2 --seq 1k --heads 2 --no-cache --json"))["layers"] is None


def test_prefill_is_another_name_of_new(run: Run) -> None:
    plans = [
        as_json(run(f"plan --ranks 4 {how} {SIZES} --json"))["problem"]
        for how in ("--prefill 1k", "--new 1k", "--new 1k --cached 0", "--seq 1k --causal")
    ]
    assert all(plan == plans[0] for plan in plans)


def test_plan_simulate_and_draw_take_a_turn(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "turn.txt"
    turn = f"--ranks 8 {TURN} --tile 4x2"
    assert run(f"plan {turn} --save", file).code == 0
    saved = parse_plan(file.read_text(encoding="utf-8"))
    planned = make_plan(PROBLEM, tile=(4, 2), layout="turn")
    assert (saved.digest, saved.layout.name) == (planned.unrolled().digest, "turn")
    assert as_json(run(f"simulate --cluster h100x8 --layers 3 --json {file}"))["layers"] == 3
    drawn = as_json(run(f"draw --ranks 4 --new 8 --cached 256 {SIZES} --json --out", tmp_path / "pictures"))
    assert list(drawn["digests"]) == ["forward"]
    assert {"pass-q", "ring", "mesh"} <= {scene["method"] for scene in drawn["scenes"]}


# Decoded steps


def test_a_step_as_json_is_the_forecast(run: Run) -> None:
    answer = as_json(run(f"{DECODE} --new 2 --layers 32 --queries replicated --json"))
    problem = Problem(
        seq_q=2,
        seq_kv=2**20 + 2,
        heads=8,
        kv_heads=2,
        head_dim_qk=64,
        head_dim_v=64,
        ranks=16,
        batch=8,
        mask=causal(),
    )
    meant = decode_trials(problem, cluster_named("h100x16"), queries="replicated")
    assert [one["family"] for one in answer["trials"]] == [one.family for one in meant]
    assert [one["forecasts"]["forward"]["time_s"] for one in answer["trials"]] == [one.time_s for one in meant]
    assert answer["cache_nbytes"] == cache_nbytes(problem, layers=32)
    assert parse_plan(answer["trials"][0]["plan"]) == meant[0].plans["forward"]


def test_a_step_is_traced_and_its_plan_is_a_plan_file(run: Run, tmp_path: Path) -> None:
    trace, file = tmp_path / "trace.json", tmp_path / "plan.txt"
    answer = as_json(run(f"{DECODE} --queries sharded --json --trace", trace))
    names = {event.get("name", "") for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]}
    assert any(name.startswith("decode q0") for name in names)
    file.write_text(answer["trials"][0]["plan"], encoding="utf-8")
    assert run("verify", file).code == 0
    assert_refused(run("simulate --cluster h100x16", file), "is a decoded step, which does not say how much is cached")


# Replay


REPLAY = "replay --ranks 4 --heads 4 --kv-heads 2 --head-dim 8 --dtype float32 --device cpu --rounds 1 --cluster h200"


def test_a_turn_is_replayed_next_to_one_kernel_of_its_shape(run: Run) -> None:
    answer = as_json(run(f"{REPLAY} --new 32 --cached 992 --methods ring,pass-q --json"))
    assert [row["method"] for row in answer["rows"]] == ["ring", "pass-q"]
    assert (answer["layout"], answer["problem"]["seq_kv"]) == ("turn", 1024)
    assert (answer["one_kernel"][0]["tokens"], answer["one_kernel"][0]["kv_tokens"]) == (32, 252)
    out = " ".join(run(f"{REPLAY} --new 32 --cached 992 --methods ring").out.split())
    assert "forward; 32 new tokens on 992 cached" in out
    assert "one kernel with as much work, a call of 32 on 252 tokens" in out


def test_a_decoded_step_is_replayed(run: Run) -> None:
    line = f"{REPLAY} --decode --batch 2 --cached 500"
    code, out, err = run(line)
    words = " ".join(out.split())
    assert (code, err) == (0, "")
    assert words.startswith("replay of rank 0 of 4 on cpu, ")
    assert "decode; 2 sequences, each 1 new token on 500 cached" in words
    for part in (
        "the latency of many peers",
        "the kernel alone reads ",
        "of what this device reads",
        "forecasts for h200",
    ):
        assert part in words
    answer = as_json(run(f"{line} --queries replicated --json"))
    assert [row["method"] for row in answer["rows"]] == ["replicated, all_gather", "replicated, reduce_scatter"]
    assert answer["read_gb_per_s"] > 0
    for row in answer["rows"]:
        assert row["share"] == pytest.approx(answer["one_kernel"][0]["time_s"] / row["time_s"])


def test_without_a_cluster_the_device_and_its_link_are_measured(run: Run) -> None:
    line = REPLAY.removesuffix(" --cluster h200")
    answer = as_json(run(f"{line} --decode --batch 1 --cached 64 --queries sharded --json"))
    assert answer["is_measured"]
    assert answer["cluster"]["device"]["forward"]["call_us"] > 0
    assert answer["cluster"]["between"]["gb_per_s"] > 0
