"""The documentation as a site: it builds without a warning, every link works, and nothing is fetched from elsewhere."""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

pytest.importorskip("material", reason="mkdocs-material is not installed")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


class Links(HTMLParser):
    """What a page leads to, what it loads, and the places in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attributes}
        self.places |= {named[name] for name in ("id", "name") if name in named}
        if tag == "a" and "href" in named:
            self.targets.append(named["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in named:
            self.loaded.append(named["src"])
        if tag == "link" and "href" in named:
            self.loaded.append(named["href"])


def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    links = {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    for page, found in links.items():
        for target in found.targets + found.loaded:
            address, place = urldefrag(unquote(target))
            if re.match(r"[a-z]+:", address):
                continue
            there = (page.parent / address).resolve() if address else page
            assert there.is_file() or (there / "index.html").is_file(), f"{page.relative_to(site)}: {target}"
            if place and there in links and not place.startswith("__"):
                assert place in links[there].places, f"{page.relative_to(site)}: {target}"


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        elsewhere = [target for target in Links(page).loaded if re.match(r"([a-z]+:)?//", target)]
        assert not elsewhere, f"{page.relative_to(site)}: {elsewhere}"


def test_files_of_the_repository_are_in_the_site_as_they_are(site: Path) -> None:
    for path, suffix in (
        ("benchmarks/results/what_do_the_papers_claim.txt", ""),
        ("src/mesh_attention/errors.py", ".txt"),
    ):
        assert (site / "repository" / f"{path}{suffix}").read_bytes() == (ROOT / path).read_bytes()


@pytest.fixture
def server(site: Path) -> Iterator[str]:
    class Silent(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Silent, directory=str(site))) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_in_a_browser_pages_ask_nobody_else_and_the_search_finds_things(server: str) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no browser")
    asked: list[str] = []
    wrong: list[str] = []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 400, "height": 800}, color_scheme="dark")
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        for name in ("index", "choosing", "errors"):
            page.goto(f"{server}/{name}.html")
            too_wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
            assert too_wide <= 0, f"{name} can be pushed sideways on a phone"
        assert page.evaluate("document.body.getAttribute('data-md-color-scheme')") == "slate"
        page.set_viewport_size({"width": 1280, "height": 800})
        page.locator(".md-search__input").click()
        page.keyboard.type("disagreement")
        page.locator(".md-search-result__item").first.wait_for()
        browser.close()
    assert not wrong
    assert [url for url in asked if not url.startswith((server, "data:"))] == []
