"""Tries what was built: python tests/try_dist.py dist

The sdist must hold every file of the repository, the wheel every file of the package. The wheel is then installed
into an empty environment, where the README's first snippet and the command line must run from outside the checkout.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

from snippets import blocks

ROOT = Path(__file__).resolve().parent.parent
WHERE = "import mesh_attention; print(mesh_attention.__file__)"
LARGEST_ERROR = 1e-5


def main(folder: Path) -> None:
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    check_sdist(sdist)
    check_wheel(wheel)
    with tempfile.TemporaryDirectory() as elsewhere:
        try_wheel(wheel.resolve(), Path(elsewhere))
    print(f"{sdist.name} and {wheel.name} are complete; the wheel works in an empty environment")


def check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in tracked(".") if name not in held and name != ".gitignore"]
    assert not missing, f"{sdist.name} lacks {missing}; name them in MANIFEST.in"


def check_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    missing = [name for name in tracked("src") if name.removeprefix("src/") not in held]
    assert not missing, f"{wheel.name} lacks {missing}; name them in pyproject.toml, [tool.setuptools.package-data]"


def tracked(folder: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def try_wheel(wheel: Path, folder: Path) -> None:
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    run([programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *constraints, wheel])
    assert run([programs / "python", "-c", WHERE], cwd=folder).startswith(str(folder)), "not the installed package"
    snippet = next(block for block in blocks(ROOT / "README.md") if block.runs_here)
    printed = run([programs / "python", "-W", "error", "-c", snippet.source], cwd=folder)
    error = float(re.findall(r"tensor\((\S*)\)", printed)[0])
    assert error < LARGEST_ERROR, f"the README's first snippet printed {printed}"
    assert "Usage" in run([programs / "mesh-attention", "--help"], cwd=folder)


def run(command: list[str | Path], cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))} exited with {done.returncode}"
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
