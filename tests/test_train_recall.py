"""The training example: one curve on any number of ranks, through an interruption, and refusals that help."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pool import run_script

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPT = EXAMPLES / "train_recall.py"
sys.path.append(str(EXAMPLES))

from recall import checkpoints  # noqa: E402
from recall.checkpoints import SETTINGS, find_checkpoint, refuse_used  # noqa: E402
from recall.display import HEADER, Display  # noqa: E402
from recall.flags import read_flags  # noqa: E402
from recall.task import IGNORED, KEYS, Lesson, lesson_seq, make_batch  # noqa: E402

from mesh_attention.errors import UsageError  # noqa: E402

STEPS, SAVED = 6, 3
# Sequences of three lengths, the first two before the checkpoint; 70 tokens leave ranks with unequal shards.
SMALL = ("--seq", "70", "--lessons", "16x2,33x2", "--dtype", "float64", "--steps", str(STEPS))
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def train(ranks: int, *flags: str) -> dict[str, Any]:
    """The summary of a run that ends well; with 0 ranks it is started alone."""
    done = run_script(SCRIPT, *SMALL, "--json", *flags, ranks=ranks, timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert f"/{STEPS}  70 tokens  loss " in done.stderr  # readable where there is no terminal
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def read_curve(path: Path) -> list[tuple[int, float, float]]:
    header, *lines = path.read_text().splitlines()
    assert header == HEADER
    return [(int(step), float(loss), float(recall)) for step, loss, recall in (line.split(",") for line in lines)]


def losses(path: Path) -> list[float]:
    return [loss for _, loss, _ in read_curve(path)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recall")


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[dict[str, Any], Path]:
    return train(0, "--curve", str(folder / "alone.csv")), folder / "alone.csv"


@pytest.fixture(scope="module")
def on_four(folder: Path) -> tuple[dict[str, Any], Path]:
    """Four ranks; the folder then holds checkpoints of step 3 and step 6."""
    flags = ("--tile", "2x2", "--checkpoint", str(folder / "kept"), "--save-every", str(SAVED))
    return train(4, *flags, "--curve", str(folder / "four.csv")), folder / "four.csv"


def test_four_ranks_have_the_curve_of_one_process(
    alone: tuple[dict[str, Any], Path], on_four: tuple[dict[str, Any], Path]
) -> None:
    assert [step for step, _, _ in read_curve(on_four[1])] == list(range(STEPS))
    assert losses(on_four[1]) == pytest.approx(losses(alone[1]), abs=1e-9, rel=0)
    assert on_four[0]["ranks"] == 4
    assert on_four[0]["loss"] == pytest.approx(alone[0]["loss"], abs=1e-9, rel=0)
    assert len(set(losses(alone[1]))) == STEPS


def test_two_ranks_go_on_with_the_curve_of_four(
    alone: tuple[dict[str, Any], Path], on_four: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    kept = on_four[1].parent / "kept"
    assert sorted(path.name for path in kept.iterdir()) == ["step-000003", "step-000006"]
    shutil.copytree(kept / "step-000003", tmp_path / "kept" / "step-000003")
    curve = tmp_path / "two.csv"
    shutil.copy(on_four[1], curve)  # as an earlier run left it; what comes after the checkpoint is written anew
    summary = train(2, "--method", "ring", "--checkpoint", str(tmp_path / "kept"), "--resume", "--curve", str(curve))
    assert [step for step, _, _ in read_curve(curve)] == list(range(STEPS))
    assert losses(curve)[:SAVED] == losses(on_four[1])[:SAVED]
    assert losses(curve)[SAVED:] != losses(on_four[1])[SAVED:]  # computed here: two ranks round otherwise
    assert losses(curve) == pytest.approx(losses(alone[1]), abs=1e-9, rel=0)
    assert summary["loss"] == pytest.approx(alone[0]["loss"], abs=1e-9, rel=0)


def test_an_interrupted_run_ends_cleanly_and_can_go_on(alone: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    kept, curve = tmp_path / "kept", tmp_path / "curve.csv"
    flags = [*SMALL[:-1], "1000000", "--checkpoint", str(kept), "--curve", str(curve)]
    process = subprocess.Popen([sys.executable, SCRIPT, *flags], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        deadline_s = time.monotonic() + 280
        while not curve.is_file() or len(curve.read_text().splitlines()) < STEPS + 2:
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=200)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in stderr
    steps = len(read_curve(curve))
    assert f"interrupted after step {steps}; continue with --resume --checkpoint {kept}" in stderr
    assert [path.name for path in kept.iterdir()] == [f"step-{steps:06}"]
    assert losses(curve)[:STEPS] == losses(alone[1])


def test_a_refusal_is_one_line_and_an_exit_code(tmp_path: Path) -> None:
    done = run_script(SCRIPT, *SMALL, "--checkpoint", str(tmp_path / "none"), "--resume")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"train_recall.py: error: --resume: there is no checkpoint in {tmp_path / 'none'}; leave --resume out to start "
        "a new run there"
    ]


def test_bad_flags_are_refused(capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]) -> None:
    """Lines are flags and what is said of them; versions of Python list choices in their own ways."""
    said = []
    for line in (Path(__file__).parent / "golden" / "train-recall-flags.txt").read_text().splitlines():
        flags = line.partition(": ")[0]
        with pytest.raises(SystemExit, match="2"):
            read_flags(flags.split())
        message = capsys.readouterr().err.splitlines()[-1].partition("error: ")[2].partition(" (choose from")[0]
        said.append(f"{flags}: {message}\n")
    golden("train-recall-flags.txt", "".join(said))


def test_only_the_first_rank_complains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        read_flags(["--steps", "0"])
    assert capsys.readouterr().err == ""


def written_checkpoint(folder: Path, step: int, settings: dict[str, Any]) -> None:
    (folder / f"step-{step:06}").mkdir(parents=True)
    (folder / f"step-{step:06}" / SETTINGS).write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--seq 64", "seq=128, but this run has seq=64"),
        ("--seq 128 --seed 1", "seed=0, but this run has seed=1"),
        ("--seq 128 --dtype float64", "dtype=float32, but this run has dtype=float64"),
        ("--seq 128 --lessons 16x3", "has lessons=[[16, 3]]"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(flags: str, message: str, tmp_path: Path) -> None:
    settings = read_flags(["--seq", "128"]).settings
    written_checkpoint(tmp_path, 40, settings)
    assert find_checkpoint(tmp_path, settings=settings) == (tmp_path / "step-000040", 40)
    with pytest.raises(UsageError, match="use the same settings, or another --checkpoint") as caught:
        find_checkpoint(tmp_path, settings=read_flags(flags.split()).settings)
    assert message in str(caught.value)


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    for step in (40, 1000, 200):
        written_checkpoint(tmp_path, step, {})
    assert find_checkpoint(tmp_path, settings={})[1] == 1000


def test_a_checkpoint_that_was_cut_off_is_not_taken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(checkpoints, "dist", SimpleNamespace(get_rank=lambda: 0, barrier=lambda: None))
    monkeypatch.setattr(checkpoints, "get_state_dict", lambda *_: ({}, {}))
    monkeypatch.setattr(checkpoints, "dcp", SimpleNamespace(save=fail))
    with pytest.raises(OSError, match="no space left"):
        checkpoints.save_checkpoint(tmp_path, None, None, step=50, settings={})
    with pytest.raises(UsageError, match="there is no checkpoint in"):
        find_checkpoint(tmp_path, settings={})
    written_checkpoint(tmp_path, 40, {})
    assert find_checkpoint(tmp_path, settings={})[1] == 40


def test_a_new_run_does_not_overwrite_checkpoints(tmp_path: Path) -> None:
    refuse_used(tmp_path / "new")
    written_checkpoint(tmp_path, 40, {})
    with pytest.raises(UsageError, match="holds step-000040; add --resume to continue it"):
        refuse_used(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file; expected a folder"):
        refuse_used(tmp_path / "file")


def test_every_answer_was_told_before_it_is_asked() -> None:
    for seed, step, seq in product((0, 1), (0, 7), (8, 16, 33, 600, 2000)):
        batch = make_batch(seed, step, rows=2, seq=seq)
        for ids, targets in zip(batch["input_ids"].tolist(), batch["shift_labels"].tolist(), strict=True):
            told = dict(zip(ids[: seq // 4 * 2 : 2], ids[1 : seq // 4 * 2 : 2], strict=True))
            asked, due = ids[seq // 4 * 2 :], targets[seq // 4 * 2 :]
            assert [told[key] for key in asked] == due
            assert all(key < KEYS <= value for key, value in told.items())
            assert set(targets[: seq // 4 * 2]) == {IGNORED}
            assert len(ids) == seq


def test_sequences_differ_between_steps_seeds_and_streams() -> None:
    batches = [make_batch(*case, rows=1, seq=64, stream=stream) for case in product((0, 1), (0, 1)) for stream in
               ("training", "test")]  # fmt: skip
    texts = {tuple(batch["input_ids"][0].tolist()) for batch in batches}
    assert len(texts) == len(batches)
    assert torch.equal(make_batch(1, 1, rows=1, seq=64)["input_ids"], batches[6]["input_ids"])


def test_lessons_come_in_turn_and_are_no_longer_than_the_sequence() -> None:
    lessons = (Lesson(16, 2), Lesson(64, 1))
    assert [lesson_seq(step, seq=128, lessons=lessons) for step in range(5)] == [16, 16, 64, 128, 128]
    assert [lesson_seq(step, seq=32, lessons=lessons) for step in range(5)] == [16, 16, 32, 32, 32]


def test_a_file_that_is_no_curve_is_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("buy milk\n")
    with pytest.raises(UsageError, match="is not the curve of an earlier run: it begins with 'buy milk'"):
        Display(start=3, steps=4, is_shown=True, curve=tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "buy milk\n"


def test_other_ranks_show_and_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Display(start=0, steps=1, is_shown=False, curve=tmp_path / "curve.csv") as display:
        display.show(0, seq=64, loss=1.0, recall=0.5)
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "curve.csv").exists()
