"""Error codes: one list, made of the classes; docs/FORMAT.md has all of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from teachercache import errors
from teachercache.errors import UsageError, all_codes

ROOT = Path(__file__).parents[2]


def classes_with_a_code() -> dict[str, ast.ClassDef]:
    """Every class of the three packages that has a code, from the source: nothing heavy is imported."""
    found: dict[str, ast.ClassDef] = {}
    for path in [p for package in ("teachercache", "pipeline", "trainer") for p in (ROOT / package).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and (code := constant(node, "code")):
                assert code not in found, f"{code} is the code of {found[code].name} and of {node.name}"
                found[code] = node
    return found


def constant(node: ast.ClassDef, name: str) -> str:
    """The string that a class's body assigns to a name, or \"\"."""
    for line in node.body:
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        if getattr(target, "id", None) == name and isinstance(line.value, ast.Constant):  # type: ignore[attr-defined]
            return str(line.value.value)  # type: ignore[attr-defined]
    return ""


@pytest.mark.parametrize("node", classes_with_a_code().values(), ids=lambda node: node.name)
def test_every_class_with_a_code_says_what_it_means_and_what_to_do(node):
    assert re.fullmatch(r"TC-[ET]\d{3}", constant(node, "code"))
    assert len((ast.get_docstring(node) or "").splitlines()[0]) > 20
    assert constant(node, "remedy").endswith(".")


def test_the_registry_has_every_class_of_the_contract():
    known = {c.code: c.name for c in all_codes()}
    ours = {
        v.code: v.__name__
        for v in vars(errors).values()
        if isinstance(v, type) and isinstance(vars(v).get("code"), str)
    }
    assert known.items() >= ours.items()
    assert all(c.meaning and c.remedy and c.exit_status in (1, 2) for c in all_codes())
    assert {c.exit_status for c in all_codes(UsageError)} == {2}


def test_format_lists_every_code():
    text = (ROOT / "docs" / "FORMAT.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| (TC-[ET]\d+) \| (\w+) \|", text, re.MULTILINE))
    assert documented == {code: node.name for code, node in classes_with_a_code().items()}, (
        "python scripts/make_docs.py"
    )
