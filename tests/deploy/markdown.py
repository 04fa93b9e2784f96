"""Fenced shell blocks of the documentation: which of them a test can run, and why the others cannot.

A block is marked by a comment on the line before it:  <!-- not run by the tests: REASON -->
Everything else runs as it stands, except the two make targets, which are tests of their own.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

MARK = re.compile(r"<!-- not run by the tests: (?P<reason>.+?) -->\s*$")
MAKE = re.compile(r"^make (demo|test)\b")


@dataclass(frozen=True)
class Block:
    path: Path
    line: int  # of the opening fence, from 1
    code: str
    reason: str | None  # why it is not run

    @property
    def runs(self) -> bool:
        return self.reason is None and any(
            line.strip() and not line.startswith("#") and not MAKE.match(line) for line in self.code.splitlines()
        )


def blocks(path: Path) -> list[Block]:
    """Every ```sh block of a markdown file, indented ones too."""
    found: list[Block] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    for index, line in enumerate(lines):
        stripped = line.strip()
        if start is None and stripped == "```sh":
            start = index
        elif start is not None and stripped == "```":
            before = next((text for text in reversed(lines[:start]) if text.strip()), "")
            mark = MARK.search(before)
            code = textwrap.dedent("\n".join(lines[start + 1 : index]))
            found.append(Block(path, start + 1, code, mark["reason"] if mark else None))
            start = None
    return found


def headings(path: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)


def links(path: Path) -> list[str]:
    """Targets of relative links, code blocks left out."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    kept = "".join(c for c in heading.lower().replace("`", "") if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")
