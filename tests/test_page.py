"""The explorer's data says what plans and timelines say, and nothing in it can break out of the page."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from base64 import b64encode
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from page_scenes import all_kinds, scene, slower, unpacked

from mesh_attention.errors import UsageError
from mesh_attention.masks import BlockKind
from mesh_attention.plan.format import format_step
from mesh_attention.plan.plan import rank_costs
from mesh_attention.plan.steps import Attend, Direction
from mesh_attention_lab.drawing.page import Scene, page, write_page
from mesh_attention_lab.drawing.page.document import block_kind, page_data

SCENES = all_kinds()
DATA = page_data(SCENES)
PASSES: list[tuple[Scene, Direction, dict[str, Any]]] = [
    (one, direction, data["passes"][direction])
    for one, data in zip(SCENES, DATA["scenes"], strict=True)
    for direction in one.directions
]
TITLE = "Sixteen shards & <b>one</b> </script> {{data}}"


def pattern(data: dict[str, Any], row: int, col: int) -> str:
    return str(DATA["grids"][data["grid"]][row][col])


# Data


def test_bytes_and_memory_are_those_of_the_plan() -> None:
    for one, direction, data in PASSES:
        for rank in range(one.ranks):
            costs = rank_costs(one.plans[direction], rank)
            given = {kind: values[rank] for kind, values in data["costs"]["received"].items()}
            assert {kind: n for kind, n in given.items() if n} == {
                kind: nbytes.total for kind, nbytes in costs.received.items() if nbytes.total
            }
            assert data["costs"]["peak"][rank] == costs.peak_nbytes


def test_tiles_hold_just_the_blocks_that_each_rank_attends() -> None:
    for one, direction, data in PASSES:
        plan = one.plans[direction]
        for rank in range(one.ranks):
            place = rank // data["ulysses"]
            attended = {
                (row.shard if row.form != "home" else place, col.shard if col.form != "home" else place)
                for step in plan.program(rank).steps
                if isinstance(step, Attend)
                for row in step.rows
                for col in step.cols
            }
            tile = {(row, col) for row in data["rows"][place] for col in data["cols"][place]}
            assert attended == {block for block in tile if pattern(data, *block) != "0"}
            assert data["rows"][place] == [plan.assignment.peer("row", place, k) for k in range(data["tile"][0])]
            assert data["cols"][place] == [plan.assignment.peer("col", place, k) for k in range(data["tile"][1])]


def test_patterns_say_what_the_mask_leaves_of_a_block() -> None:
    for one, direction, data in PASSES:
        matrix = one.plans[direction].matrix
        for row in range(len(data["rows"])):
            for col in range(len(data["rows"])):
                shown = {"0": BlockKind.EMPTY, "1": BlockKind.FULL}.get(pattern(data, row, col), BlockKind.PARTIAL)
                assert shown is block_kind(matrix, row, col)


def test_zigzag_blocks_are_drawn_segment_by_segment() -> None:
    data = next(data for one, _, data in PASSES if one.method == "ring" and one.ranks == 8)
    assert pattern(data, 2, 2) == "20/12"  # early and late segment, each causal; late sees all of early
    assert (pattern(data, 5, 2), pattern(data, 2, 5)) == ("10/10", "00/11")


def test_programs_are_those_of_the_plan_word_for_word() -> None:
    for one, direction, data in PASSES:
        for program, texts in zip(one.plans[direction].all_programs(), data["programs"], strict=True):
            assert texts == [format_step(step) for step in program.steps]


def test_every_span_is_there_with_its_step_and_name() -> None:
    for one, direction, data in PASSES:
        timeline, given = one.forecasts[direction], data["forecast"]
        assert set(given["spans"]) == {str(span.rank) for span in timeline.spans}
        for rank, lanes in given["spans"].items():
            for lane, drawn in lanes.items():
                spans = sorted(
                    (s for s in timeline.spans if (s.rank, s.lane) == (int(rank), lane)), key=lambda s: s[2:4]
                )
                assert [(step, name) for _, _, step, name in drawn] == [(span.step, span.name) for span in spans]
                for (start, stop, _, _), span in zip(drawn, spans, strict=True):
                    assert (start, stop) == pytest.approx((span.start_s, span.stop_s), rel=1e-5)


# The document


class Reader(HTMLParser):
    """What a browser would make of the page: elements, and the texts of scripts, styles and the heading."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]][-1] += data


def test_markup_in_titles_notes_and_methods_stays_text() -> None:
    odd = "</script><img src=x onerror=alert(1)>\u2028<!--"
    one = replace(scene(2, "ring"), method=odd)
    text = page([one], title=TITLE, notes=["a < b & c </ul>", odd])
    seen = Reader(text)
    assert seen.texts["h1"] == seen.texts["title"] == [TITLE]
    assert len(seen.texts["script"]) == 2
    assert "img" not in seen.texts
    assert unpacked(seen.texts["script"][0])["scenes"][0]["method"] == odd
    assert seen.texts["li"][:2] == ["a < b & c </ul>", odd]


def test_the_policy_lets_in_this_script_and_this_style_and_nothing_else() -> None:
    seen = Reader(page([scene(2, "ring")], title="t"))
    policy = next(attrs["content"] for tag, attrs in seen.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    for directive, text in (("script-src", seen.texts["script"][1]), ("style-src", seen.texts["style"][0])):
        digest = b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy
    assert "unsafe" not in policy


def test_the_page_asks_for_nothing_from_anywhere() -> None:
    text = page([scene(2, "ring")], title="t")
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
    for _, attrs in Reader(text).tags:
        assert "src" not in attrs
        assert attrs.get("href") in (None, "data:,", "#matrix-card")
        assert not any(name.startswith("on") or name == "style" for name in attrs)


def test_equal_scenes_give_equal_bytes_in_any_process() -> None:
    code = (
        "import sys, hashlib; from page_scenes import scene; from mesh_attention_lab.drawing.page import page;"
        "text = page([scene(4, 'mesh', tile=(2, 2)), scene(4, 'ring')], title='t', notes=['n']);"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_sixty_four_ranks_take_little_room() -> None:
    bare = len(page([scene(2, "ring")], title="t"))
    one = scene(64, "mesh", tile=(8, 8), seq=65536, shown=range(0, 64, 8))
    assert len(page([one], title="t")) - bare < 140_000  # thirty such scenes are about four megabytes


def test_a_page_is_written_as_it_is_made(tmp_path: Path) -> None:
    one = scene(2, "ring")
    write_page(tmp_path / "page.html", [one], title="Ünïcode")
    assert (tmp_path / "page.html").read_bytes() == page([one], title="Ünïcode").encode()


# Refusals

FOUR, TWO = scene(4, "mesh", tile=(2, 2)), scene(2, "ring")


def test_a_page_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        write_page("/no/such/folder/page.html", [TWO], title="t")


def test_one_pass_and_measurements_of_one_pass_are_enough() -> None:
    one = scene(2, "ring", directions=("forward",))
    both = replace(TWO, measured={"backward": slower(TWO.forecasts["backward"])})
    data = page_data([one])["scenes"][0]["passes"]
    assert list(data) == ["forward"]
    passes = page_data([both])["scenes"][0]["passes"]
    assert passes["forward"]["measured"] is None
    assert passes["backward"]["measured"]["time_s"] == pytest.approx(1.5 * passes["backward"]["forecast"]["time_s"])
