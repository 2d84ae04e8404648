"""An MkDocs hook: makes links from pages to files of the repository, such as ../benchmarks/results, work in the site.

Files that pages link to are copied into the site under repository/, source files as text, and the links point to the
copies. A link to a folder leads to its README.md. The hook also adds the decisions to the navigation.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(\]\()([^)#:\s]+)(#[^)\s]*)?(\))")
SHOWN_AS_THEY_ARE = {".png", ".svg", ".json", ".txt", ".sh", ".sbatch", ".toml"}
"""Suffixes that a browser shows; other files get .txt added, or the browser would offer to save them."""


def on_config(config: Any) -> Any:
    pages = sorted((DOCS / "decisions").glob("*.md"))
    decisions = [{page.read_text().splitlines()[0].lstrip("# "): f"decisions/{page.name}"} for page in pages]
    config.nav[-1]["Development"].append({"Decisions": decisions})
    return config


def on_files(files: Files, config: Any) -> Files:
    for page in files.documentation_pages():
        for match in LINK.finditer(Path(page.abs_src_path or "").read_text()):
            there = _outside(Path(page.abs_src_path or ""), match[2])
            if there is not None and not files.get_file_from_path(_name(there)):
                content = there.read_bytes()
                files.append(File.generated(config, _name(there), content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = Path(page.file.abs_src_path)
    up = "../" * page.file.src_uri.count("/")

    def pointed(match: re.Match[str]) -> str:
        there = _outside(source, match[2])
        return match[0] if there is None else f"{match[1]}{up}{_name(there)}{match[4]}"

    return LINK.sub(pointed, markdown)


def _outside(page: Path, target: str) -> Path | None:
    """The file of the repository that a link leads to; None if it is a page of the site."""
    there = (page.parent / target).resolve()
    is_page = there.is_relative_to(DOCS) and there.suffix != ".py"
    if is_page or not there.is_relative_to(ROOT) or not there.exists():
        return None
    return there / "README.md" if there.is_dir() else there


def _name(there: Path) -> str:
    """The name of the file in the site."""
    name = there.relative_to(ROOT).as_posix()
    return f"repository/{name}" if there.suffix in SHOWN_AS_THEY_ARE else f"repository/{name}.txt"
