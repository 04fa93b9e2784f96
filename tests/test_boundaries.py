"""`pipeline -> teachercache <- trainer`, and nothing else crosses: read from the imports, wherever they are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "teachercache": {"ray", "vllm", "torch", "triton", "transformers", "pipeline", "trainer"},
    "trainer": {"ray", "vllm", "pipeline"},
    "pipeline": {"trainer"},
}


def imported(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names |= {str(arg.value).split(".")[0] for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    return names


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_a_package_imports_nothing_across_its_boundary(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package} has no files"
    crossing = {str(f.relative_to(ROOT)): sorted(bad) for f in files if (bad := imported(f) & FORBIDDEN[package])}
    assert crossing == {}
