"""The public names and their signatures are frozen: a change shows up as a diff of tests/golden/public-names.txt."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

import mesh_attention
from mesh_attention import MeshAttention, MeshAttentionError, ShardedCache, errors
from mesh_attention.serving import Step, Turn

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
METHODS = {
    MeshAttention: ("__call__", "shard", "unshard", "position_ids"),
    ShardedCache: ("required_nbytes", "reserve", "new", "length", "remove", "truncate", "fork", "prefill", "decode"),
    Turn: ("shard", "attend", "peak_nbytes", "layout"),
    Step: ("attend", "rows"),
}
INTEGRATIONS = {
    "mesh_attention.batches": ("LocalBatch", "batch_loss", "count_items", "reduce_loss", "shard_batch"),
    "mesh_attention.context_parallel": ("attend_dtensor", "context_parallel", "context_parallel_unshard"),
    "mesh_attention.integrations.pytorch": ("flop_formulas", "saved_attention"),
    "mesh_attention.transformers": ("parallelize", "unparallelize"),
}


def test_public_names_and_signatures_are_what_they_were(golden: Callable[[str, str], None]) -> None:
    """Rewrite with --rewrite-golden, read the diff, and list renamed names in CHANGELOG.md."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    golden("public-names.txt", "\n".join(public_lines()) + "\n")


def test_public_names_are_sorted_and_can_be_imported() -> None:
    names = mesh_attention.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert [name for name in names if not hasattr(mesh_attention, name)] == []


def test_the_package_itself_has_few_names() -> None:
    assert len(mesh_attention.__all__) <= 30


def test_the_reference_documents_every_public_name() -> None:
    documented = set(reference_paths())
    names = {f"mesh_attention.{name}" for name in mesh_attention.__all__ if not is_in_errors(name)}
    assert names - documented == set()
    for module, members in INTEGRATIONS.items():
        for member in members:
            found = [path for path in documented if re.fullmatch(rf"{module}\b.*\.{member}", path)]
            assert found, f"docs/reference lacks {module}.{member}"


def is_in_errors(name: str) -> bool:
    """True for exceptions of errors.py, which the reference documents as one module."""
    return getattr(mesh_attention, name).__class__ is type and hasattr(errors, name)


def reference_paths() -> list[str]:
    """What the reference documents, in its order."""
    return re.findall(r"^::: (\S+)", "\n".join(page.read_text() for page in sorted(REFERENCE.iterdir())), flags=re.M)


def module_paths() -> Iterator[str]:
    """What users import from a module: every exception, and what the reference documents outside the package itself."""
    yield from (f"mesh_attention.errors.{name}" for name, value in vars(errors).items() if is_exception(value))
    integrated = {member for members in INTEGRATIONS.values() for member in members}
    for path in reference_paths():
        owner, _, name = path.rpartition(".")
        if owner in ("mesh_attention", "mesh_attention.integrations.torchtitan") or name in integrated:
            continue  # torchtitan may not be installed
        if not inspect.ismodule(resolve_name(path)):
            yield path


def is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, MeshAttentionError)


def public_lines() -> Iterator[str]:
    for path in (*(f"mesh_attention.{name}" for name in mesh_attention.__all__), *module_paths()):
        yield f"{path}{describe(resolve_name(path))}"
    for owner, methods in METHODS.items():
        for method in methods:
            yield f"mesh_attention.{owner.__name__}.{method}{describe(getattr(owner, method))}"
    for path, members in INTEGRATIONS.items():
        for member in members:
            yield f"{path}.{member}{describe(getattr(import_module(path), member))}"


def describe(value: Any) -> str:
    """The signature of a function or a value's constructor; other classes by their bases, constants by their type."""
    if inspect.isfunction(value) or dataclasses.is_dataclass(value) or value in METHODS:
        return str(unquoted(inspect.signature(value)))
    if isinstance(value, type):
        return f": class of {', '.join(base.__name__ for base in value.__bases__)}"
    return f": {type(value).__name__}"


def unquoted(signature: inspect.Signature) -> inspect.Signature:
    parameters = [given.replace(annotation=plain(given.annotation)) for given in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=plain(signature.return_annotation))


def plain(annotation: Any) -> Any:
    return Plain(annotation) if isinstance(annotation, str) else annotation


class Plain(str):
    """An annotation that prints as it is written in the source."""

    def __repr__(self) -> str:
        return str(self)
