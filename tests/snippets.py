"""What a page shows, as blocks that can be run: Python, several processes, the command line, and what they print.

<!-- one session -->        anywhere in a page: its Python blocks are one session and share their names
<!-- on 8 processes -->     before a Python block: run by that many ranks, whose default group is the world
<!-- under torchrun 2 -->   before a Python block: a separate script, started by torchrun
<!-- lines of a/b.py -->    before a Python block: not run; its lines are lines of that file, in that order
<!-- raises -->             before a Python block: it must raise; the text block after it is the error
```text                     right after a block: what it printed, line by line, … standing for anything
```console                  `$ mesh-attention …` is run, and what is shown below it is compared in the same way
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FENCE = re.compile(
    r"^(?P<before>(?:<!--[^\n]*-->\n)*)(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<source>.*?)^(?P=indent)```$",
    flags=re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its text, the marks before it and the output shown after it."""

    page: str
    line: int
    language: str
    source: str
    marks: tuple[str, ...] = ()
    shown: str | None = None

    @property
    def raises(self) -> bool:
        return "raises" in self.marks

    def number(self, mark: str) -> int:
        """N of a mark such as ``on N processes``; 0 without one."""
        pattern = re.compile(mark.replace("N", r"(\d+)"))
        return next((int(found[1]) for one in self.marks if (found := pattern.fullmatch(one))), 0)

    @property
    def runs_here(self) -> bool:
        """Python, in the process of the tests."""
        is_elsewhere = self.processes or self.torchrun or self.lines_of or "launched" in self.marks
        return self.language == "python" and not is_elsewhere

    @property
    def processes(self) -> int:
        return self.number("on N processes")

    @property
    def torchrun(self) -> int:
        return self.number("under torchrun N")

    @property
    def lines_of(self) -> str:
        """The file of the repository that the block is taken from; empty if it is not."""
        return next((mark.removeprefix("lines of ") for mark in self.marks if mark.startswith("lines of ")), "")

    def code(self) -> Any:
        """Compiled, with the page's own line numbers."""
        return compile("\n" * self.line + self.source, self.page, "exec")


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = list(FENCE.finditer(text))
    result = []
    for number, match in enumerate(found):
        language = match["language"]
        after = found[number + 1] if number + 1 < len(found) else None
        is_shown = after is not None and after["language"] == "text" and not text[match.end() : after.start()].strip()
        is_run = language == "python"
        result.append(
            Block(
                page=str(page),
                line=text[: match.start("source")].count("\n"),
                language=language,
                source=match["source"],
                marks=tuple(mark.strip() for mark in re.findall(r"<!--(.*?)-->", match["before"])),
                shown=after["source"] if is_run and is_shown and after is not None else None,
            )
        )
    return result


def is_session(page: Path) -> bool:
    return "<!-- one session -->" in page.read_text()


def run_here(block: Block, names: dict[str, Any]) -> str:
    """What a block prints; of one that must raise, the error instead."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(block.code(), names)
        except Exception as error:
            if not block.raises:
                raise
            return f"{type(error).__name__}: {error}"
    if block.raises:
        raise AssertionError(f"{block.page}:{block.line}: nothing was raised")
    return printed.getvalue()


def run_in_order(group: Any, sources: Sequence[Block]) -> list[str]:
    """One rank's part of blocks that several processes run, one after the other, with the same names."""
    names: dict[str, Any] = {"__name__": "snippet"}
    return [run_here(block, names) for block in sources]


def differences(shown: str, printed: str) -> Iterator[str]:
    """Lines that are shown and do not come, in this order, in what was printed. Blanks count once, … is anything."""
    lines = iter([_squeezed(line) for line in printed.splitlines()])
    for line in map(_squeezed, shown.splitlines()):
        if line in ("", "…"):
            continue
        pattern = re.compile(".*".join(map(re.escape, line.split("…"))))
        if not any(pattern.fullmatch(other) for other in lines):
            yield line


def _squeezed(line: str) -> str:
    return " ".join(line.split())


def commands(block: Block) -> list[tuple[str, str]]:
    """The commands of a console block, each with what is shown below it."""
    parts = re.split(r"^\$ ", block.source, flags=re.MULTILINE)
    assert not parts[0].strip(), f"{block.page}:{block.line}: a console block begins with a command, after '$ '"
    found = []
    for part in parts[1:]:
        command, _, shown = part.replace("\\\n", " ").partition("\n")
        found.append((" ".join(command.split()), shown))
    return found
