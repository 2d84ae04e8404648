"""What the documentation shows is what the code does."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pool import run_script, shared_pool
from snippets import Block, blocks, commands, differences, is_session, run_here, run_in_order

from mesh_attention import errors
from mesh_attention_lab.cli.main import main

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
LANGUAGES = {"python", "console", "text", "bash", "toml", ""}
NOT_RUN = ("make", "pip", "git", "bash", "sbatch", "torchrun", "python")
"""Commands of console blocks that need a network, a cluster or minutes; the files and targets they name must exist."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def pages_with(language: str) -> list[Path]:
    return [page for page in PAGES if any(block.language == language for block in blocks(page))]


def compare(block: Block, printed: str) -> None:
    missing = list(differences(block.shown or "", printed))
    assert not missing, f"{block.page}:{block.line}: shown but not printed: {missing}\n\nprinted:\n{printed}"


# Snippets


@pytest.mark.parametrize("page", [page for page in pages_with("python") if page != README], ids=name_of)
def test_snippets_run_and_print_what_is_shown(page: Path) -> None:
    names: dict[str, object] = {"__name__": "snippet"}
    for block in blocks(page):
        if block.runs_here:
            names = names if is_session(page) else {"__name__": "snippet"}
            compare(block, run_here(block, names))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(block.processes for block in blocks(page))], ids=name_of
)
def test_snippets_for_several_processes_run_on_them(page: Path) -> None:
    together = [block for block in blocks(page) if block.processes]
    ranks = together[0].processes
    assert ranks == 8, "the default group of the pool has 8 ranks"
    assert all(block.processes == ranks for block in together)
    for block, *printed in zip(together, *shared_pool().run(ranks, run_in_order, together), strict=True):
        compare(block, "\n".join(printed))


@pytest.mark.parametrize(
    "block",
    [block for page in PAGES for block in blocks(page) if block.torchrun],
    ids=lambda block: f"{Path(block.page).name}:{block.line}",
)
def test_scripts_run_under_torchrun(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(block.source)
    done = run_script(script, ranks=block.torchrun)
    assert done.returncode == 0, done.stderr
    compare(block, done.stdout)


@pytest.mark.parametrize("page", pages_with("console"), ids=name_of)
def test_commands_run_and_print_what_is_shown(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        for command, shown in commands(block) if block.language == "console" else ():
            program, *arguments = shlex.split(command, comments=True)
            if program != "mesh-attention":
                check_command(program, arguments)
                continue
            capsys.readouterr()
            assert main(arguments) == 0, capsys.readouterr().err
            missing = list(differences(shown, capsys.readouterr().out))
            assert not missing, f"{page}:{block.line}: shown but not printed: {missing}"


def check_command(program: str, arguments: list[str]) -> None:
    """What a command names must be there, even if it is not run here."""
    assert program in NOT_RUN, f"{program}: mesh-attention commands are run, {', '.join(NOT_RUN)} are looked at"
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), arguments
    for argument in arguments:
        if argument.endswith((".py", ".sh", ".sbatch")):
            assert (ROOT / argument).exists(), argument


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_say_what_they_are(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block.page}:{block.line}: {block.language}"
        for mark in block.marks:
            known = re.fullmatch(
                r"raises|launched|one session|on \d+ processes|under torchrun \d+|(file:|lines of) \S+", mark
            )
            assert known, f"{block.page}:{block.line}: unknown mark {mark!r}"
        assert not block.raises or block.shown, f"{block.page}:{block.line}: show what is raised"
    assert page.read_text().count("```") == 2 * len(blocks(page)), "a block that is not closed, or inside another"


def test_the_readme_says_what_its_snippets_print() -> None:
    (printed,) = [run_here(block, {}) for block in blocks(README) if block.runs_here]
    assert float(re.findall(r"tensor\((\S*)\)", printed)[0]) < 1e-5


# Figures


def figures() -> Iterator[tuple[Path, str, str]]:
    """(page, result file, paragraph) for every paragraph or table that says where its figures are from."""
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"<!-- figures of (\S+) -->\n(.*?)(?:\n\n|\Z)", text, flags=re.DOTALL):
            yield page, match[1], match[2]


NUMBER = re.compile(r"(?<![\w.·])\d+(?:,\d{3})*(?:\.\d+)?(?![\w·]|\.\d)")
"""Not those that are part of a name, such as 512k or 4x4."""


def test_figures_are_those_of_the_stored_results() -> None:
    found = list(figures())
    assert found
    for page, result, paragraph in found:
        stored = set(NUMBER.findall((ROOT / result).read_text()))
        without_links = re.sub(r"\]\([^)]*\)|`[^`]*`", "]", paragraph)
        wrong = [number for number in NUMBER.findall(without_links) if number not in stored]
        assert not wrong, f"{page.name}: {wrong} not in {result}:\n{paragraph}"


def test_every_result_names_the_commit_it_was_made_at() -> None:
    benchmarks = ROOT / "benchmarks"
    for result in (benchmarks / "results").glob("*.txt"):
        header = "\n".join(result.read_text().splitlines()[:3])
        assert re.search(r"^commit [0-9a-f]{7,}(\+changes)?\b", header, flags=re.MULTILINE), result.name
    for script in benchmarks.glob("*.py"):
        text = script.read_text()
        assert "__main__" not in text or "from run_facts import" in text, script.name


# Pictures, files and links


@pytest.mark.parametrize("name", ["tiles", "gain"])
def test_a_picture_is_what_its_script_draws(name: str) -> None:
    drawn = runpy.run_path(str(DOCS / f"make_{name}_picture.py"))["picture"]()
    assert (DOCS / f"{name}.svg").read_text() == drawn


def test_scripts_that_a_page_shows_are_the_files() -> None:
    shown = [
        (block, mark.removeprefix("file: "))
        for page in PAGES
        for block in blocks(page)
        for mark in block.marks
        if mark.startswith("file: ")
    ]
    assert {path for _, path in shown} == {name_of(path) for path in (DOCS / "launch").iterdir() if path.is_file()}
    for block, path in shown:
        assert block.source == (ROOT / path).read_text(), f"{block.page}:{block.line} is not {path}"


def test_lines_that_a_page_explains_are_lines_of_the_file() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.lines_of:
                missing = list(differences(block.source, (ROOT / block.lines_of).read_text()))
                assert not missing, f"{page.name}:{block.line}: not in {block.lines_of}, in this order: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCED.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = page if not path else (page.parent / path).resolve()
        assert there.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name}: {target}, expected one of {sorted(anchors(there))}"


FENCED = re.compile(r"^ *```.*?^ *```$", flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and MkDocs both make them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_anchors_are_the_same_on_every_site() -> None:
    for page in PAGES:
        for anchor in anchors(page):
            assert "--" not in anchor, f"{page.name}: #{anchor} is another on GitHub than in MkDocs; reword the heading"


def test_the_page_of_modules_is_what_they_say_of_themselves(golden: Callable[[str, str], None]) -> None:
    lines = [
        "# Every module, in one line",
        "",
        "The first words of each docstring, by folder. [Architecture](architecture.md) says how modules fit together.",
    ]
    src = ROOT / "src"
    for folder in sorted({path.parent for path in src.rglob("*.py")}):
        lines += ["", f"## {folder.relative_to(src)}", "", "| file | what it is |", "| --- | --- |"]
        for path in sorted(folder.glob("*.py"), key=lambda path: (path.stem != "__init__", path.stem)):
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            words = docstring.split("\n\n")[0].replace("\n", " ").replace("|", "\\|").replace("``", "`")
            lines.append(f"| {'the folder' if path.stem == '__init__' else path.name} | {words} |")
    golden("../../docs/modules.md", "\n".join(lines) + "\n")


# Errors


def test_every_error_class_is_explained_and_raised() -> None:
    page = DOCS / "errors.md"
    headings = re.findall(r"^#+ (\w+)$", page.read_text(), flags=re.MULTILINE)
    classes = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert classes - set(headings) == set()
    raised = {block.shown.split(":")[0].strip() for block in blocks(page) if block.raises and block.shown}
    base = {"MeshAttentionError", "PlanError"}  # raised as their subclasses only
    assert classes - base <= raised


def test_refusals_that_are_quoted_in_tables_are_in_the_code() -> None:
    """Where provoking each would take a model or a cluster. … stands for what a message fills in."""
    sources = [path.read_text() for path in (ROOT / "src" / "mesh_attention").rglob("*.py")]
    joined = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))  # texts that go on in the next line
    quoted = re.findall(r"^\| `([^`]+)` \|", (DOCS / "transformers.md").read_text(), flags=re.MULTILINE)
    assert len(quoted) > 5
    for message in quoted:
        for part in message.split("…"):
            assert part.strip() in joined, message


# Launching


def run(command: list[str], **changes: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | changes
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_launch_scripts_are_bash() -> None:
    for script in (DOCS / "launch").iterdir():
        done = run(["bash", "-n", str(script)])
        assert done.returncode == 0, done.stderr
        assert os.access(script, os.X_OK), f"{script.name} cannot be started"
        if shutil.which("shellcheck"):
            done = run(["shellcheck", str(script)])
            assert done.returncode == 0, done.stdout


SRUN = """#!/usr/bin/env bash
# As Slurm does: the command on every node at once; here all nodes are this machine.
shift  # --kill-on-bad-exit
for node in $(seq "$SLURM_JOB_NUM_NODES"); do "$@" & jobs+=($!); done
for job in "${jobs[@]}"; do wait "$job" || exit 1; done
"""


def test_the_slurm_script_trains_on_two_nodes(tmp_path: Path) -> None:
    """Through torchrun.sh, two launchers that meet on this machine; Slurm itself is played."""
    scripts = {
        "srun": SRUN,
        "scontrol": "#!/usr/bin/env bash\necho localhost\necho elsewhere\n",
        "torchrun": f'#!/usr/bin/env bash\nexec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"\n',
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "RANKS_PER_NODE": "1",
    }
    (program,) = (block for block in blocks(DOCS / "launch.md") if "launched" in block.marks)
    (tmp_path / "train.py").write_text(program.source)
    done = run(["bash", str(DOCS / "launch" / "slurm.sbatch"), str(tmp_path / "train.py")], **job)
    assert done.returncode == 0, done.stderr
    compare(program, done.stdout)


def test_the_torchrun_script_says_what_it_needs() -> None:
    done = run(["bash", str(DOCS / "launch" / "torchrun.sh"), "train.py"], HEAD="")
    assert done.returncode != 0
    assert "HEAD: the node where all nodes meet" in done.stderr
