"""The command line as its users meet it: what is printed, what is refused, and with which exit code.

Words are compared as a whole, with the sessions in tests/golden/cli; the tests here check what holds for any words.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from rich.color import Color, ColorSystem

from mesh_attention import __version__, parse_plan, rank_costs
from mesh_attention.plan.steps import Attend, Direction
from mesh_attention.verification.rules import RULES
from mesh_attention_lab.bounds import least_received_nbytes
from mesh_attention_lab.cli.main import COMMANDS, app, main
from mesh_attention_lab.cli.plan import PALETTE
from mesh_attention_lab.comparison import imbalance

EXAMPLE = "plan --ranks 16 --tile 4x4 --seq 128k --heads 32 --kv-heads 8 --head-dim 128 --causal"
GOLDEN = Path(__file__).parent / "golden" / "cli"
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


@pytest.mark.parametrize(
    ("line", "labels"),
    [
        ("simulate --cluster h100x16 --seq 64k --heads 8 --causal --backward", "time memory"),
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
    lines = run(line).out.splitlines()
    first = lines[: len(labels.split()) + 1]
    assert [text.split(" ")[0] for text in first] == [*labels.split(), ""]
    assert max(len(text) for text in lines if not re.search(r"(MeshAttention|Costs|make_plan)\(", text)) <= 80


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


@pytest.mark.parametrize(("options", "direction"), [("", "forward"), ("--backward", "backward")])
def test_ring_and_the_lower_bound_are_the_measures_of_the_comparison(
    run: Run, options: str, direction: Direction
) -> None:
    answer = as_json(run(f"{EXAMPLE} {options} --json"))
    rows, bound = answer["comparison"]["rows"], answer["comparison"]["bound_nbytes"]
    assert bound == least_received_nbytes(parse_plan(answer["plan"]).problem, direction)
    (ring,) = (row for row in rows if row["method"] == "ring")
    for row in rows:
        assert row["against_ring"] == row["received_nbytes"] / ring["received_nbytes"]
        assert row["against_bound"] == row["received_nbytes"] / bound >= 1


@pytest.mark.parametrize("options", ["--backward --keep kv", "--route ring", "--partials ring", "--blocks-per-call 4"])
def test_rivals_share_layout_direction_and_schedule_options(run: Run, options: str) -> None:
    line = f"{SMALL} --ranks 8 --causal --layout contiguous {options} --json"
    rows = as_json(run(line))["comparison"]["rows"]
    for method in ("ring", "pass-q"):
        rival = as_json(run(f"{line} --method {method}"))["comparison"]["rows"]
        expected = [row | {"is_this_plan": False} for row in rival if row["is_this_plan"]]
        assert [row for row in rows if row["method"] == method] == expected


def test_options_reach_the_plan(run: Run) -> None:
    plan = parse_plan(as_json(run(f"{SMALL} --route ring --partials ring --layout striped --json"))["plan"])
    assert (plan.schedule.route, plan.schedule.partials, plan.layout.name) == ("ring", "ring", "striped")
    grouped, single = (as_json(run(f"{EXAMPLE} {options} --json")) for options in ("--blocks-per-call 4", ""))
    assert parse_plan(grouped["plan"]).schedule.moves != parse_plan(single["plan"]).schedule.moves
    kept = parse_plan(as_json(run(f"{EXAMPLE} --inner 2x4 --keep kv --backward --json"))["plan"])
    assert (str(kept.assignment.inner), kept.schedule.keep) == ("2x4", ("kv",))
    assert as_json(run(f"{SMALL} --causal --window 8,8 --documents 0,16,64 --json"))["problem"]["mask"] == (
        "window(8,0)&documents(0,16,64)"
    )
    problem = as_json(run(f"{SMALL} --seq-kv 1k --head-dim-v 16 --json"))["problem"]
    assert (problem["seq_q"], problem["seq_kv"], problem["head_dim_qk"], problem["head_dim_v"]) == (64, 1024, 8, 16)


def test_no_terminal_is_wide_enough_for_more_than_32_shards(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert list(matrix_lines(run(f"{SMALL} --ranks 40 --method ring").out)) == list(range(0, 40, 2))


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


def test_the_plan_inside_json_output_is_what_is_saved_and_verifies_too(run: Run, tmp_path: Path) -> None:
    answer = as_json(run(f"{SMALL} --json --save", tmp_path / "plan.txt"))
    saved, moves = parse_plan((tmp_path / "plan.txt").read_text(encoding="utf-8")), parse_plan(answer["plan"])
    assert saved == moves.unrolled()
    (tmp_path / "moves.txt").write_text(answer["plan"])
    for plan, name in ((saved, "plan.txt"), (moves, "moves.txt")):
        checked = as_json(run("verify --json", tmp_path / name))
        assert (checked["ok"], checked["rules"], checked["digest"]) == (True, list(RULES), plan.digest)


# Refusals


def assert_refused(outcome: Outcome, *parts: str) -> None:
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("mesh-attention: error: ")
    assert outcome.err.endswith("\n")
    assert outcome.err.count("\n") == 1
    for part in parts:
        assert part in outcome.err


@pytest.mark.parametrize("field", ["seq_q=64", "mask full"])
def test_endless_numbers_in_a_file_are_one_line_and_exit_code_2(run: Run, tmp_path: Path, field: str) -> None:
    file = tmp_path / "file"
    endless = field.replace("64", "9" * 5000).replace("full", f"window({'9' * 4300},0)")
    file.write_text(as_json(run(f"{SMALL} --json"))["plan"].replace(field, endless), encoding="utf-8")
    assert_refused(run("verify", file), str(file), "'mesh-attention plan --save FILE' writes one")


def test_endless_numbers_in_a_line_are_one_line_and_exit_code_2(run: Run) -> None:
    assert_refused(run(f"{SMALL} --batch {'9' * 5000}"), "--batch '999", "at most 18 digits")


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


# Words


def as_printed(session: str, run: Run) -> str:
    """A session, with what its commands print now; those of the shell prepare files and look at them."""
    lines = []
    for line in session.splitlines():
        if line.startswith("#"):
            lines += ["", line] if lines else [line]
        if not line.startswith("$ "):
            continue
        lines.append(line)
        program, *arguments = shlex.split(line.removeprefix("$ "))
        if program != "mesh-attention":
            done = subprocess.run(line.removeprefix("$ "), shell=True, check=True, stdout=subprocess.PIPE, text=True)
            lines += done.stdout.splitlines()
            continue
        code, out, err = run("", *arguments)
        assert (err.count("\n"), bool(out)) == (0, True) or (err.count("\n"), out) == (1, ""), line
        lines += [text.rstrip() for text in (out + err).splitlines()] + [f"exit code {code}"] * bool(code)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_what_is_printed_and_refused_is_what_it_was(
    run: Run, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    """Rewrite with --rewrite-golden, then read the diff. A new case is a line with a command, after `$`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("GOLDEN", str(GOLDEN.parent))
    for command in ("calibrate", "demo"):  # what is refused is refused before anything starts
        monkeypatch.setattr(f"mesh_attention_lab.cli.{command}.run_processes", None)
    golden(f"cli/{path.name}", as_printed(path.read_text(encoding="utf-8"), run))
