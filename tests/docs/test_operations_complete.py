"""docs/OPERATIONS.md has a page for every error code and every alert, and none for what does not exist."""

from __future__ import annotations

import ast
import re

import yaml

from tests.deploy.manifests import DEPLOY, ROOT

PAGE = (ROOT / "docs/OPERATIONS.md").read_text(encoding="utf-8")


def error_codes() -> dict[str, str]:
    """Code -> class name, from every class of the three packages that sets `code`."""
    found: dict[str, str] = {}
    for package in ("teachercache", "pipeline", "trainer"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.ClassDef):
                    continue
                for line in node.body:
                    target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
                    value = getattr(line, "value", None)
                    if (
                        isinstance(target, ast.Name)
                        and target.id == "code"
                        and isinstance(value, ast.Constant)
                        and isinstance(value.value, str)
                    ):
                        assert value.value not in found, f"{value.value}: {found[value.value]} and {node.name}"
                        found[value.value] = node.name
    return found


def test_every_error_code_has_its_page_and_no_page_is_stale() -> None:
    pages = dict(re.findall(r"^### (TC-\w+) (\w+)$", PAGE, re.M))
    assert pages == error_codes()


def test_every_page_says_what_to_do() -> None:
    for section in re.split(r"^### ", PAGE, flags=re.M)[1:]:
        title, _, body = section.partition("\n")
        assert "**Do**" in body, title


def test_every_alert_has_its_page_and_no_page_is_stale() -> None:
    groups = yaml.safe_load((DEPLOY / "monitoring/rules.yaml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    assert alerts
    pages = set(re.findall(r"^### (Teachercache\w+)$", PAGE, re.M))
    assert pages == alerts


def test_messages_that_common_errors_quotes_are_in_the_code() -> None:
    """The parts of a quoted message between its ellipses, wherever the source has them."""
    section = PAGE.split("\n## Common errors\n")[1].split("\n## ")[0]
    quoted = [quote for row in re.findall(r"^\| (.*?) \|", section, re.M) for quote in re.findall(r"`([^`]+)`", row)]
    parts = {part.strip(" ,:;?()") for quote in quoted for part in quote.split("…")}
    packages = [ROOT / name for name in ("teachercache", "pipeline", "trainer")]
    source = "\n".join(path.read_text(encoding="utf-8") for folder in packages for path in folder.rglob("*.py"))
    assert len(quoted) >= 5
    assert [part for part in parts if part not in source] == []
