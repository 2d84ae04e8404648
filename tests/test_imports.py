"""Imports go one way, and the planning half never imports torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import mesh_attention

ROOT = Path(mesh_attention.__file__).parent
LAB = ROOT.parent / "mesh_attention_lab"

VALUES = ("errors", "units", "masks", "problem")
PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"


def _layers(page: str) -> dict[str, tuple[str, ...]]:
    """What each part may import, besides itself, as a table of the page of the architecture says."""
    rows = page.split("| part | may import |\n| --- | --- |\n")[1].split("\n\n")[0].splitlines()
    layers: dict[str, tuple[str, ...]] = {}
    for row in rows:
        parts, words = (cell.split(", ") for cell in row.strip("| ").split(" | "))
        names = tuple(name for word in words for name in (VALUES if word == "values" else (word,)) if name != "nothing")
        layers |= dict.fromkeys(parts, names)
    return layers


LAYERS = _layers(PAGE.read_text())
WITH_TORCH = (
    *("kernels", "comm", "session", "execution", "machine"),
    *("arguments", "api", "serving", "sequences", "batches", "context_parallel", "transformers", "integrations"),
)
STACKS = ("context_parallel", "transformers", "integrations")


def modules_after(statement: str) -> str:
    """What a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def loads_torch(statement: str) -> bool:
    return "torch" in modules_after(statement).split()


def test_planning_does_not_import_torch() -> None:
    modules = [_module_name(path) for path in ROOT.rglob("*.py") if _part(path) not in WITH_TORCH]
    assert not loads_torch(f"import {', '.join(modules)}")


def test_the_test_for_torch_can_fail() -> None:
    assert loads_torch("import torch")


def imported_modules(path: Path) -> set[str]:
    """The modules that a file imports, wherever in the file it does so."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def imported_parts(path: Path) -> set[str]:
    """The parts of this package that a file imports."""
    return {name.split(".")[1] for name in imported_modules(path) if name.startswith("mesh_attention.")}


def test_imports_go_one_way() -> None:
    for path in ROOT.rglob("*.py"):
        part = _part(path)
        if part != "__init__":
            surplus = imported_parts(path) - {part, *LAYERS[part]}
            assert not surplus, f"{path.relative_to(ROOT)} imports {', '.join(sorted(surplus))}"


def test_the_library_does_not_know_the_lab() -> None:
    for path in ROOT.rglob("*.py"):
        assert not any(name.startswith("mesh_attention_lab") for name in imported_modules(path)), path


def test_the_library_loads_nothing_of_the_command_line() -> None:
    modules = [_module_name(path) for path in ROOT.rglob("*.py") if _part(path) not in STACKS]
    loaded = modules_after(f"import {', '.join(modules)}").split()
    assert not {"rich", "typer", "mesh_attention_lab"} & set(loaded)


def test_the_test_for_directions_can_fail(tmp_path: Path) -> None:
    upside_down = tmp_path / "layout.py"
    upside_down.write_text("def f():\n    from mesh_attention.planners.make import plan_mesh\n")
    assert imported_parts(upside_down) - {"plan", *LAYERS["plan"]} == {"planners"}


def test_torch_distributed_is_imported_where_groups_are_handled_only() -> None:
    for path in ROOT.rglob("*.py"):
        if any(name.startswith("torch.distributed") for name in imported_modules(path)):
            assert _part(path) in ("comm", "session", "batches", *STACKS), path


def test_only_the_session_shares_texts_or_raises_for_another_rank() -> None:
    """Transports carry texts and wrappers pass them on; what they say, and what follows, is the session's."""
    for path in (*ROOT.rglob("*.py"), *LAB.rglob("*.py")):
        if _is_in(path, "comm", "session"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                assert ast.unparse(node.exc.func) != "DisagreementError", path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "share":
                whose = ast.unparse(node.func.value)
                assert whose in WRAPPED or not whose.endswith("comm"), f"{path}: {whose}.share"


WRAPPED = ("self.inner",)


def _is_in(path: Path, *parts: str) -> bool:
    return (path.is_relative_to(ROOT) and _part(path) in parts) or path.is_relative_to(LAB / "testing")


def _part(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
