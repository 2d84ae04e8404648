"""The command line as its users meet it: what is printed, what is refused, and with which exit code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from rich.color import Color, ColorSystem

from mesh_attention import Problem, __version__, make_plan, parse_plan, rank_costs
from mesh_attention.plan.counts import imbalance, sampled_ranks
from mesh_attention.plan.steps import Attend
from mesh_attention.planners.costs import limits
from mesh_attention.verification.rules import RULES
from mesh_attention_lab.cli.main import COMMANDS, app, main
from mesh_attention_lab.cli.plan import PALETTE

EXAMPLE = "plan --ranks 16 --tile 4x4 --seq 128k --heads 32 --kv-heads 8 --head-dim 128 --causal"
SMALL = "plan --ranks 4 --seq 64 --heads 4 --kv-heads 2 --head-dim 8"


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line in this process; the line is split at spaces, further arguments are taken as they are."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")

    def run_line(line: str, *more: object) -> Outcome:
        code = main([*line.split(), *map(str, more)])
        return Outcome(code, *capsys.readouterr())

    return run_line


def as_json(outcome: Outcome) -> Any:
    assert (outcome.code, outcome.err) == (0, "")
    return json.loads(outcome.out)


# plan, for people


def test_plan_prints_headline_matrix_steps_and_comparison(run: Run) -> None:
    code, out, err = run(EXAMPLE)
    assert (code, err) == (0, "")
    assert re.search(r"\nmesh 4x4 forward over 16 ranks, causal, zigzag; 128k tokens, 32 heads \(8 KV\) of 128", out)
    assert re.search(r"digest [0-9a-f]{12}\n", out)
    assert "query shards down, KV shards across; in each block, the rank that computes it" in out
    assert "steps of rank 0" in out
    assert "that of the worst of all ranks" in " ".join(out.split())
    assert [line.split()[0] for line in comparison_lines(out)] == [
        ">",
        "ring",
        "pass-q",
        "mesh",
        "attention2d",
        "mesh",
    ]


@pytest.mark.parametrize(
    ("line", "labels"),
    [
        ("plan --ranks 16 --seq 128k --heads 32 --causal --backward", "write time moves memory"),
        ("simulate --cluster h100x16 --seq 64k --heads 8 --causal --backward", "plan time memory"),
        ("tune --cluster h100x4 --seq 4k --heads 4 --causal --backward", "write time memory"),
        ("tune --cluster h100x4 --new 256 --cached 4k --heads 4 --layers 8", "write time memory"),
        ("tune --cluster h100x4 --decode --cached 4k --heads 4 --layers 8", "write time memory"),
    ],
)
def test_what_a_person_wants_first_comes_first(
    run: Run, line: str, labels: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = run(line).out.splitlines()[: len(labels.split()) + 1]
    assert [text.split(" ")[0] for text in first] == [*labels.split(), ""]
    assert max(map(len, first)) <= 80


def test_the_head_size_is_the_same_everywhere_unless_it_is_stated() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    sizes = {
        name: parameter.default
        for name, command in commands.items()
        for parameter in command.params
        if "--head-dim" in parameter.opts
    }
    assert sizes.keys() >= {"tune", "plan", "simulate", "draw", "replay", "calibrate"}
    assert len(set(map(str, sizes.values()))) == 1


@pytest.mark.parametrize("command", ["tune", "simulate"])
def test_many_ranks_of_which_each_is_different_are_refused_at_once(run: Run, command: str) -> None:
    problem = "--heads 8 --window 4k,0 --cluster h100x100000"
    assert_refused(
        run(f"{command} --seq 400m {problem}"),
        "100,000 ranks with the mask window(4096,0) on the layout contiguous: each rank has its own steps",
        "a part takes as long as the whole: use --ranks 16 --seq 67104",
    )


def comparison_lines(out: str) -> list[str]:
    """The rows below the rule of the last table."""
    lines = out[out.index("compared with the other methods") :].splitlines()
    rows = lines[next(i for i, line in enumerate(lines) if line.startswith("──")) + 1 :]
    return rows[: next(i for i, line in enumerate(rows) if "marks this plan" in line)]


def matrix_lines(out: str) -> dict[int, list[str]]:
    """The cells of each query shard that is shown."""
    rows = (line.partition("│") for line in out.splitlines() if re.match(r" *\d+ │", line))
    return {int(label): cells.split() for label, _, cells in rows}


@pytest.mark.parametrize("options", ["", "--causal", "--window 9,0", "--inner 1x2"])
def test_the_matrix_names_the_rank_that_attends_each_block(run: Run, options: str) -> None:
    line = f"{SMALL} --ranks 8 --tile 2x4 --layout contiguous {options}"
    drawn = matrix_lines(run(line).out)
    plan = parse_plan(as_json(run(f"{line} --json"))["plan"])
    attended = {
        (row.shard, col.shard): str(program.rank)
        for program in plan.all_programs()
        for step in program.steps
        if isinstance(step, Attend)
        for row in step.rows
        for col in step.cols
    }
    assert drawn == {row: [attended.get((row, col), "·") for col in range(8)] for row in range(8)}


def test_a_long_program_is_cut_and_says_so(run: Run) -> None:
    steps = len(as_json(run(f"{EXAMPLE} --json"))["program"]["steps"])
    assert steps > 40
    out = run(EXAMPLE).out
    assert f"{steps - 30} steps left out; --all-steps shows them" in out
    assert step_numbers(out) == [*range(20), *range(steps - 10, steps)]


def test_all_steps_shows_every_step(run: Run) -> None:
    out = run(f"{EXAMPLE} --all-steps").out
    steps = len(as_json(run(f"{EXAMPLE} --json"))["program"]["steps"])
    assert step_numbers(out) == list(range(steps))
    assert "left out" not in out


def step_numbers(out: str) -> list[int]:
    table = out[out.index("steps of rank") : out.index("compared with the other methods")]
    return [int(found) for found in re.findall(r"(?m)^ *(\d+)  [a-z]", table)]


def test_a_step_of_a_large_group_is_cut_unless_all_is_asked_for(run: Run) -> None:
    line = f"{SMALL} --ranks 16 --method attention2d --tile 1x16"
    assert "(--all-steps shows the rest)" in run(line).out
    whole = run(f"{line} --all-steps").out
    assert "shows the rest" not in whole
    assert "recv kv1 from 1" in whole


def test_rank_chooses_whose_steps_are_shown(run: Run) -> None:
    assert "steps of rank 3" in run(f"{SMALL} --rank 3").out
    assert "recv kv2 from 2" in run(f"{SMALL} --rank 3 --method ring").out


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "line",
    [
        EXAMPLE,
        f"{EXAMPLE} --backward --ulysses-degree 4 --tile auto",
        "plan --ranks 256 --seq 1m --heads 64 --kv-heads 64 --head-dim 128 --causal",
        f"{SMALL} --documents 0,10,20,64 --window 4,4 --batch 3 --head-dim-v 16",
    ],
)
def test_nothing_is_wider_than_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch, columns: int, line: str) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = run(line).out
    assert max(map(len, out.splitlines())) <= columns
    assert {len(cells) for cells in matrix_lines(out).values()} == {len(matrix_lines(out))}, "the matrix is folded"
    assert not any("…" in row for row in comparison_lines(out)), "a number is cut off"


def test_a_pipe_gets_no_colour(run: Run) -> None:
    assert "\x1b" not in run(EXAMPLE).out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_output_that_cannot_be_written_is_one_line() -> None:
    program = "import sys; from mesh_attention_lab.cli.main import main; sys.exit(main())"
    with open("/dev/full", "w") as full_disk:
        found = subprocess.run(
            [sys.executable, "-c", program, *SMALL.split()], stdout=full_disk, stderr=subprocess.PIPE, text=True
        )
    message = "mesh-attention: error: the output cannot be written: No space left on device\n"
    assert (found.returncode, found.stderr) == (2, message)


def test_a_terminal_gets_a_colour_for_each_rank(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = run(f"{SMALL} --tile 2x2").out
    used = dict(re.findall(r"\x1b\[38;5;(\d+)m +(\d)", out))
    assert sorted(used.values()) == ["0", "1", "2", "3"]


def test_every_colour_reads_on_black_and_on_white() -> None:
    for number in PALETTE:
        colour = Color.parse(f"color({number})")
        linear = [((part / 255 + 0.055) / 1.055) ** 2.4 for part in colour.get_truecolor()]
        luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        assert (luminance + 0.05) / 0.05 > 3.5, f"{number} on black"
        assert 1.05 / (luminance + 0.05) > 3.5, f"{number} on white"
        assert colour.downgrade(ColorSystem.STANDARD).number not in (0, 7, 15), f"{number} with 16 colours"


# plan, in numbers


def test_json_holds_the_plan_its_digest_a_program_and_the_comparison(run: Run) -> None:
    answer = as_json(run(f"{EXAMPLE} --rank 5 --json"))
    plan = parse_plan(answer["plan"])
    assert str(plan) == answer["plan"]
    assert plan.digest == answer["digest"]
    assert (plan.problem.seq_q, plan.problem.kv_heads, str(plan.problem.mask)) == (131072, 8, "causal")
    assert answer["program"]["rank"] == 5
    steps = answer["program"]["steps"]
    costs = rank_costs(plan, 5)
    assert [step["index"] for step in steps] == list(range(len(plan.program(5).steps)))
    assert max(step["held_nbytes"] for step in steps) == costs.peak_nbytes
    assert sum(step["moved_nbytes"] for step in steps) == costs.sent_nbytes + costs.received_nbytes


def test_the_comparison_states_the_worst_of_all_ranks(run: Run) -> None:
    answer = as_json(run(f"{SMALL} --ranks 6 --seq 65 --causal --layout contiguous --json"))
    plan = parse_plan(answer["plan"])
    costs = [rank_costs(plan, rank) for rank in range(6)]
    row = next(row for row in answer["comparison"]["rows"] if row["is_this_plan"])
    assert answer["comparison"]["counted_ranks"] == list(range(6))
    assert row["sent_nbytes"] == max(cost.sent_nbytes for cost in costs)
    assert row["received_nbytes"] == max(cost.received_nbytes for cost in costs)
    assert row["flops"] == max(cost.flops for cost in costs)
    assert row["imbalance"] == imbalance(cost.flops for cost in costs) > 0
    assert row["peak_nbytes"] == max(cost.peak_nbytes for cost in costs)
    assert row["kernel_calls"] == max(cost.kernel_calls for cost in costs)
    assert row["messages"] == max(cost.messages for cost in costs)


def test_ring_is_the_measure_of_the_comparison(run: Run) -> None:
    rows = as_json(run(f"{EXAMPLE} --json"))["comparison"]["rows"]
    ring = next(row for row in rows if row["method"] == "ring")
    assert ring["against_ring"] == 1
    for row in rows:
        assert row["against_ring"] == row["received_nbytes"] / ring["received_nbytes"]


def test_the_lower_bound_is_the_other_measure_of_the_comparison(run: Run) -> None:
    for line, direction in ((EXAMPLE, "forward"), (f"{EXAMPLE} --backward", "backward")):
        answer = as_json(run(f"{line} --json"))
        bound = limits(parse_plan(answer["plan"]).problem, direction).received_nbytes  # type: ignore[arg-type]
        assert answer["comparison"]["bound_nbytes"] == bound
        for row in answer["comparison"]["rows"]:
            assert row["against_bound"] == row["received_nbytes"] / bound >= 1


def test_what_is_kept_from_forward_has_no_lower_bound_in_backward(run: Run) -> None:
    def ratios(options: str) -> set[float | None]:
        return {row["against_bound"] for row in as_json(run(f"{EXAMPLE} {options} --json"))["comparison"]["rows"]}

    assert ratios("--keep kv --backward") == {None}
    assert None not in ratios("--keep kv") | ratios("--backward")


def test_the_comparison_shows_and_explains_the_lower_bound(run: Run) -> None:
    rows = as_json(run(f"{EXAMPLE} --json"))["comparison"]["rows"]
    out = run(EXAMPLE).out
    shown = [re.split(" {2,}", line.strip())[4] for line in comparison_lines(out)]
    assert shown == [f"{row['against_bound']:.2f}" for row in rows]
    assert "× bound: relative to the least that an average rank can receive" in " ".join(out.split())


def test_the_plan_says_why_it_moves_less_than_ring(run: Run) -> None:
    said = " ".join(run("plan --ranks 64 --seq 128k --heads 32 --kv-heads 8 --causal").out.split())
    assert "217 MiB to a rank, 0.43 of ring's bytes" in said
    assert (
        "Fewer bytes than ring: with ring, a rank receives the K and V of all 63 others; with a 4x16 "
        "tile it receives 3 query shards and 15 KV shards and returns 3 partial results."
    ) in said
    assert "Fewer bytes than ring" not in run(EXAMPLE).out


@pytest.mark.parametrize("options", ["--backward", "--route ring", "--partials ring", "--blocks-per-call 4"])
def test_rivals_share_layout_direction_and_schedule_options(run: Run, options: str) -> None:
    line = f"{SMALL} --ranks 8 --causal --layout contiguous {options} --json"
    rows = as_json(run(line))["comparison"]["rows"]
    for method in ("ring", "pass-q"):
        rival = as_json(run(f"{line} --method {method}"))["comparison"]["rows"]
        expected = [row | {"is_this_plan": False} for row in rival if row["is_this_plan"]]
        assert [row for row in rows if row["method"] == method] == expected


def test_schedule_options_reach_the_plan(run: Run) -> None:
    plan = parse_plan(as_json(run(f"{SMALL} --route ring --partials ring --layout striped --json"))["plan"])
    assert (plan.schedule.route, plan.schedule.partials, plan.layout.name) == ("ring", "ring", "striped")
    grouped = parse_plan(as_json(run(f"{EXAMPLE} --blocks-per-call 4 --json"))["plan"])
    assert grouped.schedule.moves != parse_plan(as_json(run(f"{EXAMPLE} --json"))["plan"]).schedule.moves


def test_an_inner_tile_and_what_is_kept_reach_the_plan(run: Run) -> None:
    answer = as_json(run(f"{EXAMPLE} --inner 2x4 --keep kv --backward --json"))
    plan = parse_plan(answer["plan"])
    assert (str(plan.assignment.inner), plan.schedule.keep) == ("2x4", ("kv",))
    rival = as_json(run(f"{EXAMPLE} --tile auto --method ring --keep kv --backward --json"))["comparison"]["rows"][0]
    ring = next(row for row in answer["comparison"]["rows"] if row["method"] == "ring")
    assert ring == rival | {"is_this_plan": False}


def test_a_plan_that_is_a_rival_too_is_one_marked_row(run: Run) -> None:
    rows = as_json(run(f"{SMALL} --method ring --json"))["comparison"]["rows"]
    assert [(row["method"], row["is_this_plan"]) for row in rows[:3]] == [
        ("ring", True),
        ("pass-q", False),
        ("mesh", False),
    ]


def test_ulysses_is_compared_where_it_fits(run: Run) -> None:
    def degrees(ranks: int, kv_heads: int) -> list[tuple[str, int]]:
        line = f"plan --ranks {ranks} --seq 64 --heads 12 --kv-heads {kv_heads} --head-dim 8 --json"
        rows = as_json(run(line))["comparison"]["rows"]
        return [(row["method"], row["ulysses"]) for row in rows if row["ulysses"] > 1]

    assert degrees(ranks=8, kv_heads=12) == [("mesh", 4)]
    assert degrees(ranks=4, kv_heads=12) == [("mesh", 2), ("ulysses", 4)]
    assert degrees(ranks=3, kv_heads=12) == [("ulysses", 3)]
    assert degrees(ranks=8, kv_heads=3) == []


# plan, in its variants


def test_under_ulysses_the_cells_are_places(run: Run) -> None:
    out = run(f"{SMALL} --ulysses-degree 2 --tile 1x2").out
    assert "mesh 2·1x2 forward" in out
    assert "the place (2 ranks, each with a slice of the heads)" in out
    assert matrix_lines(out) == {0: ["0", "0"], 1: ["1", "1"]}


def test_backward_plans_gradients(run: Run) -> None:
    out = run(f"{SMALL} --backward --all-steps").out
    assert "backward over 4 ranks" in out
    assert re.search("finish .*dkv0", out)


def test_a_window_leaves_blocks_empty(run: Run) -> None:
    out = run(f"{SMALL} --window -1,0 --layout contiguous").out
    assert "causal, contiguous" in out
    assert matrix_lines(out)[0] == ["0", "·", "·", "·"]
    assert "· nothing to compute" in out


def test_masks_are_combined(run: Run) -> None:
    answer = as_json(run(f"{SMALL} --causal --window 8,8 --documents 0,16,64 --json"))
    assert answer["problem"]["mask"] == "window(8,0)&documents(0,16,64)"


def test_cross_attention_has_its_own_lengths_and_sizes(run: Run) -> None:
    line = f"{SMALL} --seq-kv 1k --head-dim-v 16 --batch 2 --dtype float32"
    problem = as_json(run(f"{line} --json"))["problem"]
    assert (problem["seq_q"], problem["seq_kv"]) == (64, 1024)
    assert (problem["head_dim_qk"], problem["head_dim_v"]) == (8, 16)
    assert "2 x 64 on 1k tokens, 4 heads (2 KV) of 8 and 16, float32" in run(line).out


def test_256_ranks_are_sampled_and_the_captions_say_so(run: Run) -> None:
    out = run("plan --ranks 256 --seq 1m --heads 32 --kv-heads 8 --head-dim 128 --causal").out
    stride = int(re.search(r"of 256 shards, one in (\d+) is shown", out)[1])  # type: ignore[index]
    assert list(matrix_lines(out)) == list(range(0, 256, stride))
    assert len(matrix_lines(out)) <= 32
    assert "worst of 16 of the 256 ranks, evenly spread" in " ".join(out.split())


def test_no_terminal_is_wide_enough_for_more_than_32_shards(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert list(matrix_lines(run(f"{SMALL} --ranks 40 --method ring").out)) == list(range(0, 40, 2))


def test_the_sampled_ranks_reach_from_the_first_to_the_last() -> None:
    assert sampled_ranks(64) == tuple(range(64))
    sample = sampled_ranks(65)
    assert (len(set(sample)), sample[0], sample[-1]) == (16, 0, 64)


def test_one_rank_moves_nothing(run: Run) -> None:
    out = run("plan --ranks 1 --seq 100 --heads 1 --head-dim 8").out
    assert "over 1 rank," in out
    assert matrix_lines(out) == {0: ["0"]}
    rows = as_json(run("plan --ranks 1 --seq 100 --heads 1 --head-dim 8 --json"))["comparison"]["rows"]
    assert {(row["received_nbytes"], row["against_ring"]) for row in rows} == {(0, None)}


def test_a_rank_without_tokens_has_nothing_to_do(run: Run) -> None:
    out = run("plan --ranks 8 --seq 3 --heads 2 --head-dim 8 --method ring --rank 7").out
    assert "nothing to do" in out
    assert matrix_lines(out)[7] == ["·"] * 8


# --save and verify


@pytest.mark.parametrize("name", ["plan.txt", "plan"])
@pytest.mark.parametrize("options", ["--causal", "--backward --ulysses-degree 2", "--method attention2d"])
def test_a_saved_plan_states_every_step_and_verifies(run: Run, tmp_path: Path, name: str, options: str) -> None:
    file = tmp_path / name
    saved = run(f"{SMALL} {options} --save", file)
    text = file.read_text(encoding="utf-8")
    plan = parse_plan(text)
    assert plan.programs is not None
    steps = sum(len(program.steps) for program in plan.programs)
    assert f"{steps} steps of 4 ranks" in saved.out
    assert run("verify", file) == (0, f"plan is right: 4 ranks, {steps} steps, {len(RULES)} rules kept\n", "")


def test_save_and_json_go_together(run: Run, tmp_path: Path) -> None:
    answer = as_json(run(f"{SMALL} --json --save", tmp_path / "plan.txt"))
    saved = parse_plan((tmp_path / "plan.txt").read_text(encoding="utf-8"))
    assert saved == parse_plan(answer["plan"]).unrolled()


def test_the_plan_inside_json_output_verifies_too(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "moves.txt"
    file.write_text(as_json(run(f"{SMALL} --json"))["plan"])
    steps = sum(len(program.steps) for program in parse_plan(file.read_text()).all_programs())
    assert run("verify", file).out.startswith(f"plan is right: 4 ranks, {steps} steps")


@pytest.fixture
def broken(run: Run, tmp_path: Path) -> Path:
    """A plan in which rank 1 makes its first attend twice."""
    file = tmp_path / "broken.txt"
    run(f"{SMALL} --method ring --save", file)
    before, program, after = file.read_text(encoding="utf-8").partition("program 1 ")
    again = re.sub(r"(?m)^(  attend .*\n)", r"\1\1", after, count=1)
    file.write_text(before + program + again, encoding="utf-8")
    return file


def test_a_broken_plan_is_exit_code_1_with_the_row_marked(run: Run, broken: Path) -> None:
    code, out, err = run("verify", broken)
    assert (code, err) == (1, "")
    assert "block (q1, kv1) is attended again" in out
    assert re.search(r"--> +\d+  attend \S*q1 x \S*kv1", out)


def test_verify_as_json_lists_every_breach(run: Run, broken: Path) -> None:
    code, out, err = run("verify --json", broken)
    assert (code, err) == (1, "")
    answer = json.loads(out)
    assert answer["ok"] is False
    assert {("coverage", 1)} <= {(breach["rule"], breach["rank"]) for breach in answer["breaches"]}
    assert all(breach["message"] for breach in answer["breaches"])


def test_verify_as_json_of_a_right_plan_is_ok(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.txt"
    run(f"{SMALL} --save", file)
    answer = as_json(run("verify --json", file))
    assert (answer["ok"], answer["breaches"], answer["ranks"], answer["rules"]) == (True, [], 4, list(RULES))
    assert answer["digest"] == parse_plan(file.read_text(encoding="utf-8")).digest


# Refusals

BAD_LINES = [
    # the command line, what the message quotes, what it expects
    ("plan", "--ranks", "Missing option"),
    ("plan --ranks 4 --seq 64", "--heads", "Missing option"),
    ("plan --ranks", "--ranks", "requires an argument. See 'mesh-attention plan --help'"),
    ("plam", "plam", "No such command"),
    (f"{SMALL} extra", "extra", "unexpected extra argument"),
    (f"{SMALL} --tle 2x2", "--tle", "--tile"),
    (f"{SMALL} --zzz", "--zzz", "plan --help"),
    (f"{SMALL} --causal=maybe", "--causal", "does not take a value"),
    (f"{SMALL} --ranks four", "--ranks 'four'", "expected a whole number, 1 or more"),
    (f"{SMALL} --ranks 0", "--ranks '0'", "1 or more"),
    (f"{SMALL} --ranks -4", "--ranks '-4'", "1 or more"),
    (f"{SMALL} --heads 4.5", "--heads '4.5'", "whole number"),
    (f"{SMALL} --kv-heads 0", "--kv-heads '0'", "1 or more"),
    (f"{SMALL} --kv-heads 3", "4 heads cannot share 3 KV heads", "must be a multiple"),
    (f"{SMALL} --head-dim 0", "--head-dim '0'", "1 or more"),
    (f"{SMALL} --head-dim-v x", "--head-dim-v 'x'", "whole number"),
    (f"{SMALL} --batch {'9' * 5000}", "--batch '999", "at most 18 digits"),
    (f"{SMALL} --seq 1.5k", "--seq '1.5k'", "4096, 128k or 1m"),
    (f"{SMALL} --seq 0", "seq_q=0", "at least 1"),
    (f"{SMALL} --seq-kv much", "--seq-kv 'much'", "4096, 128k or 1m"),
    (f"{SMALL} --dtype int8", "'int8'", "float64, float32, bfloat16, float16"),
    (f"{SMALL} --window 5", "--window '5'", "LEFT,RIGHT"),
    (f"{SMALL} --window 5,-2", "--window '-2'", "whole number"),
    (f"{SMALL} --documents 0,65", "65", "64 tokens"),
    (f"{SMALL} --documents 0,40,20,64", "(0, 40, 20, 64)", "never fall"),
    (f"{SMALL} --documents 0,a,64", "--documents 'a'", "whole number"),
    (f"{SMALL} --tile 5x2", "5x2", "1x4 2x2 4x1"),
    (f"{SMALL} --tile 4by1", "'4by1'", "ROWSxCOLS, such as 4x8"),
    (f"{SMALL} --tile 0x4", "0x4", "at least 1"),
    (f"{SMALL} --method torus", "'torus'", "mesh, ring, pass-q, attention2d, ulysses"),
    (f"{SMALL} --method ring --tile 2x2", "2x2", "1x4"),
    (f"{SMALL} --method attention2d --route ring", "attention2d", "no route"),
    (f"{SMALL} --method ulysses", "Ulysses degree 4", "2 KV heads"),
    (f"{SMALL} --ulysses-degree 0", "--ulysses-degree '0'", "1 or more"),
    (f"{SMALL} --ulysses-degree 3", "Ulysses degree 3", "1 2 4"),
    (f"{SMALL} --tile 2x2 --inner 3x1", "inner tile 3x1", "must divide 2"),
    (f"{SMALL} --inner 3", "--inner", "ROWSxCOLS"),
    (f"{SMALL} --keep o", "--keep 'o'", "own q kv own,q own,kv q,kv"),
    (f"{SMALL} --layout spiral", "'spiral'", "contiguous, zigzag, striped"),
    (f"{SMALL} --route scenic", "--route 'scenic'", "ring direct"),
    (f"{SMALL} --partials scenic", "--partials 'scenic'", "ring direct"),
    (f"{SMALL} --blocks-per-call 0", "--blocks-per-call '0'", "1 or more"),
    (f"{SMALL} --rank 4", "rank 4", "ranks 0 to 3"),
    (f"{SMALL} --rank first", "--rank 'first'", "0 or more"),
    (f"{SMALL} --save no/such/plan.txt", "no/such", "does not exist"),
    (f"{SMALL} --save .", "--save .", "is a directory"),
    ("verify", "FILE", "Missing argument"),
    ("verify no-such-file", "no-such-file", "expected a plan file: no such file"),
    ("verify .", ".: ", "is a directory"),
    ("verify --jsno", "--jsno", "--json"),
]


@pytest.mark.parametrize(
    ("line", "given", "expected"), BAD_LINES, ids=[line.replace(SMALL, "…")[:60] for line, _, _ in BAD_LINES]
)
def test_a_bad_line_is_one_line_and_exit_code_2(run: Run, line: str, given: str, expected: str) -> None:
    assert_refused(run(line), given, expected)


def test_a_bad_tile_is_one_line_and_exit_code_2(run: Run) -> None:
    assert run(f"{EXAMPLE} --tile 3x5") == (
        2,
        "",
        "mesh-attention: error: 16 ranks cannot form a 3x5 tile; rows·cols must be 16: 1x16 2x8 4x4 8x2 16x1\n",
    )


def assert_refused(outcome: Outcome, *parts: str) -> None:
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("mesh-attention: error: ")
    assert outcome.err.endswith("\n")
    assert outcome.err.count("\n") == 1
    for part in parts:
        assert part in outcome.err


PLAN = str(make_plan(Problem.self_attention(seq_len=8, heads=1, head_dim=4, ranks=2)).unrolled())


def edited(before: str, after: str) -> bytes:
    """The text of the plan with a part replaced."""
    assert before in PLAN
    return PLAN.replace(before, after, 1).encode()


BAD_FILES: dict[str, tuple[bytes, str]] = {
    # what a file holds, and what is said of it; tests/test_text.py has every field
    "empty": (b"", "first line ''"),
    "other text": (b"Dear reader,\n", "first line 'Dear reader,'"),
    "not UTF-8": (b"mesh-attention plan 2\n\xff", "byte 22 is not UTF-8"),
    "JSON": (b'{"a": 1}', "first line '{\"a\": 1}'"),
    "half a plan": (PLAN[:100].encode(), "missing fields: "),
    "another dtype": (edited("dtype=bfloat16", "dtype=[]"), "is not a plan file"),
    "text for a length": (edited("seq_q=8", "seq_q=eight"), "seq_q='eight'"),
    "an endless number": (edited("seq_q=8", "seq_q=" + "9" * 5000), "is not a plan file"),
    "endless ranks": (edited("ranks=2", f"ranks={10**17}"), "ranks=1000"),
    "endless heads": (edited(" heads=1 kv_heads=1", f" heads={10**17} kv_heads={10**17}"), "at most 1,099,511,627,776"),
    "an endless tile": (re.sub("tile .*", f"tile 1x{10**30}", PLAN).encode(), "expected ROWSxCOLS"),
    "an endless window": (edited("mask full", f"mask window({'9' * 4300},0)"), "mask 'window(999"),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_file_that_is_no_plan_is_one_line_and_exit_code_2(run: Run, tmp_path: Path, what: str) -> None:
    content, said = BAD_FILES[what]
    file = tmp_path / "file"
    file.write_bytes(content)
    assert_refused(run("verify", file), str(file), said, "'mesh-attention plan --save FILE' writes one")
    assert_refused(run("verify --json", file), said)


def test_a_file_that_cannot_be_written_is_one_line_and_exit_code_2(run: Run, tmp_path: Path) -> None:
    file = tmp_path / f"{'n' * 300}.json"
    assert_refused(run(f"{SMALL} --save", file), "name too long", "write elsewhere")


def test_a_message_of_many_lines_becomes_one(run: Run) -> None:
    assert_refused(run("verify", "two\nlines"), "two lines")


# The program as a whole


def test_without_arguments_the_help_is_shown(run: Run) -> None:
    code, out, err = run("")
    assert (code, err) == (0, "")
    assert "plan" in out
    assert "verify" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run: Run, command: str) -> None:
    code, out, err = run(f"{command} --help")
    assert (code, err) == (0, "")
    assert f"mesh-attention {command}" in out


def test_the_version_is_the_packages(run: Run) -> None:
    assert run("--version") == (0, f"mesh-attention {__version__}\n", "")


def test_the_installed_command_exits_with_the_code_of_main() -> None:
    code = "import sys; from mesh_attention_lab.cli.main import main; sys.exit(main())"
    line = [sys.executable, "-c", code, *EXAMPLE.split(), "--tile", "3x5"]
    finished = subprocess.run(line, capture_output=True, text=True, check=False, encoding="utf-8")
    assert_refused(Outcome(finished.returncode, finished.stdout, finished.stderr), "3x5")


def test_simulate_answers_on_many_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    command = "simulate --cluster h100x2048 --seq 2m --heads 8 --kv-heads 8 --causal --tile 32x64"
    assert main(command.split()) == 0, capsys.readouterr().err
    assert "The last rank's calls stand for those of all." in " ".join(capsys.readouterr().out.split())
