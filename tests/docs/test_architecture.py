"""docs/ARCHITECTURE.md lists every room of the three packages, and an import goes only up in its tables."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.deploy.manifests import ROOT

PAGE = ROOT / "docs/ARCHITECTURE.md"
PACKAGES = ("teachercache", "pipeline", "trainer")


def rows(package: str) -> dict[str, int]:
    """Return the rooms of a package and the rows of its table that name them, the first row being 0."""
    text = PAGE.read_text(encoding="utf-8").split(f"### {package}", 1)[1].split("\n#", 1)[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")][2:]
    return {room.rstrip("/"): row for row, cell in enumerate(cells) for room in re.findall(r"`([\w/]+)`", cell)}


def files(package: str) -> dict[str, list[Path]]:
    """Return the files of each room: a folder, or a module next to the folders."""
    found: dict[str, list[Path]] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        inside = path.relative_to(ROOT / package)
        if inside.name not in ("__init__.py", "__main__.py") or len(inside.parts) > 1:
            found.setdefault(inside.parts[0].removesuffix(".py"), []).append(path)
    return found


def imported_rooms(path: Path, package: str) -> set[str]:
    """Return the rooms of its package that a file imports, also inside functions and under TYPE_CHECKING."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    inside = {name.split(".")[1] for name in names if name.startswith(f"{package}.")}
    return inside & files(package).keys()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_has_a_line(package: str) -> None:
    assert sorted(rows(package)) == sorted(files(package))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_room_imports_only_rooms_above_it(package: str) -> None:
    order = rows(package)
    downward = {
        f"{path.relative_to(ROOT)} imports {other}"
        for room, paths in files(package).items()
        for path in paths
        for other in imported_rooms(path, package) - {room}
        if order[other] >= order[room]
    }
    assert downward == set()
