"""What holds for every recipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from recipe_runs import RECIPES

DOCS = Path(__file__).parent.parent.parent / "docs" / "recipes"
FILES = sorted(RECIPES.glob("*.py"))


@pytest.mark.parametrize("recipe", FILES, ids=lambda path: path.name)
def test_a_recipe_is_short_and_has_a_page_and_a_test(recipe: Path) -> None:
    assert len(recipe.read_text().splitlines()) < 80
    page = (DOCS / f"{recipe.stem.replace('_', '-')}.md").read_text()
    assert f"examples/recipes/{recipe.name}" in page
    assert re.search(rf"<!-- lines of examples/recipes/{recipe.name} -->", page)
    assert (Path(__file__).parent / f"test_{recipe.stem}.py").exists()
