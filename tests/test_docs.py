"""What the documentation shows is what the code does."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run(page: Path) -> None:
    for snippet in snippets(page):
        exec(compile(snippet, str(page), "exec"), {})


def test_the_readme_says_what_its_snippets_print(capsys: pytest.CaptureFixture[str]) -> None:
    attend, plan, tune = snippets(ROOT / "README.md")
    exec(attend, {})
    assert float(re.findall(r"tensor\((.*)\)", capsys.readouterr().out)[0]) < 1e-5
    exec(plan, {})
    assert "a rank receives 353 MiB, with ring 480 MiB" in capsys.readouterr().out
    exec(tune, {})
    assert re.match(r"\S+ +\d+\.\d\d ms  chosen\n", capsys.readouterr().out)


def test_the_picture_is_what_its_script_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "make_tiles_picture.py"))["picture"]()
    assert (ROOT / "docs" / "tiles.svg").read_text() == drawn


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_folder_map_names_every_module() -> None:
    readme = (ROOT / "README.md").read_text()
    for path in (ROOT / "src" / "mesh_attention").glob("*/*.py"):
        if (
            path.parent.name not in ("cli", "testing")  # the folder map says what these hold as a whole
            and path.stem != "__init__"
        ):
            assert path.stem in readme, f"{path.parent.name}/{path.stem} is missing from the folder map"
