"""Fenced blocks, code spans and links of the documentation: what a test can run, and why it cannot run the rest.

Every fence names its language. `sh`, `python`, `sql` and `yaml` blocks run (test_docs.py); `text` is what a command
printed, `json` an object of a cache. A block that cannot run here is marked by a comment on the line before it:

    <!-- not run by the tests: REASON -->

A yaml block whose first line is `# NAME.yaml` is the file of that name for the blocks that follow on its page.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

RUNNERS = ("sh", "python", "sql", "yaml")
MARK = re.compile(r"<!-- not run by the tests: (?P<reason>.+?) -->\s*$")
MAKE = re.compile(r"^make (demo|test)\b")


@dataclass(frozen=True)
class Block:
    path: Path
    line: int  # of the opening fence, from 1
    language: str
    code: str
    reason: str | None  # why it is not run

    @property
    def runs(self) -> bool:
        """False for output, for marked blocks, and for a shell block of nothing but the two make targets."""
        if self.reason is not None or self.language not in RUNNERS:
            return False
        return self.language != "sh" or any(
            line.strip() and not line.startswith("#") and not MAKE.match(line) for line in self.code.splitlines()
        )

    @property
    def file_name(self) -> str | None:
        """The file that a yaml block says it is."""
        found = re.match(r"# ([\w.-]+\.yaml)\b", self.code) if self.language == "yaml" else None
        return found[1] if found else None


def blocks(path: Path) -> list[Block]:
    """Every fenced block of a markdown file, indented ones too."""
    found: list[Block] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    for index, line in enumerate(lines):
        stripped = line.strip()
        if start is None and stripped.startswith("```"):
            start = index
        elif start is not None and stripped == "```":
            before = next((text for text in reversed(lines[:start]) if text.strip()), "")
            mark = MARK.search(before)
            language = lines[start].strip().removeprefix("```").strip()
            code = textwrap.dedent("\n".join(lines[start + 1 : index]))
            found.append(Block(path, start + 1, language, code, mark["reason"] if mark else None))
            start = None
    assert start is None, f"{path}:{start}: the block is never closed"
    return found


def prose(path: Path) -> str:
    """The text without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)


def code_spans(path: Path) -> list[str]:
    """The text between single backticks outside fenced blocks, on one line each."""
    return [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", prose(path))]


def headings(path: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)


def links(path: Path) -> list[str]:
    """Targets of relative links, code blocks left out."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)) if "://" not in target]


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    kept = "".join(c for c in heading.lower().replace("`", "") if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")
