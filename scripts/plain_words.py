"""Check the language of code, docs and messages: plain words, and Markdown lines of at most 120 characters.

    python scripts/plain_words.py              every text file of the repository
    python scripts/plain_words.py FILE…        these files (what pre-commit does)

Prints `file:line:column: …` for each finding, like ruff, and exits with 1 if there is any. Standard library only.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".cff", ".css", ".Dockerfile", ".html", ".json", ".md", ".mmd", ".py", ".sh", ".toml", ".yaml", ".yml"}
NAMES = {"Makefile", "run"}
# These two name the words. The other folders are data: measurements, chat templates of models, third-party schemas.
EXEMPT = ("scripts/plain_words.py", "tests/test_plain_words.py", "benchmarks/results/", "tests/pipeline/templates/")
MARKDOWN_COLUMNS = 120

# Pattern -> what to write instead, and why. A space in a pattern is any white space, also the end of a line.
WORDS = {
    r"stands?(?![-_]?ins?\b)|stood|standing": "write is, are or remains: a thing in a file does not stand",
    r"beside": "write next to or with: the word is rare, and mostly read as besides",
    r"of (its|their|our|his) own": "write its, their or separate: the phrase adds nothing",
    r"so (many|long)": "write this many, that long or as long as: the reader cannot see how many are meant",
    r"nobody": "write no one, or name who it is",
    r"somebody": "write someone, or name who it is",
    r"in work": "write in progress",
    r"mend(s|ed|ing)?": "write fix or repair",
    r"told": "write requested, asked or set: a program is not told things",
    r"(give|gives|given|gave|giving) out": "write dispatch or issue: to give out also means to fail",
    r"hand(s|ed|ing)? out": "write dispatch or issue",
}
# A sentence that begins with a relative clause ("Who needs …"): write "If you need …" or "A user who needs …".
CLAUSE = (r"""(?:(?<=[.!?:] )|(?<=\n)[#\s>*-]*|(?<="))Who \w+s\b(?![^.?!]*\?)""", "write If you …, or A user who …")
SPACES = (r"(?<=[a-z)`])[.!?]  +[A-Z`(]", "write one space between sentences")
CHECKS = {re.compile(pattern): message for pattern, message in (CLAUSE, SPACES)}
for pattern, message in WORDS.items():
    CHECKS[re.compile(r"\b(?:" + pattern.replace(" ", r"[\s#]+") + r")\b", re.IGNORECASE)] = message


def files(arguments: list[str]) -> list[Path]:
    """The files to check: those named, or every text file outside hidden and generated folders."""
    found = [Path(name).resolve() for name in arguments]
    if not arguments:
        skip = re.compile(r"\.(?!ci$)|(build|dist|node_modules|__pycache__)$|.*\.egg-info$")
        for folder, folders, names in os.walk(ROOT):
            folders[:] = [name for name in folders if not skip.match(name)]
            found += [Path(folder, name) for name in names]
    return sorted(
        path
        for path in found
        if (path.suffix in SUFFIXES or path.name in NAMES) and not str(path.relative_to(ROOT)).startswith(EXEMPT)
    )


def findings(path: Path) -> Iterator[tuple[int, int, str]]:
    """(line, column, message), both from 1, of one file."""
    text = path.read_text(encoding="utf-8")
    for check, message in CHECKS.items():
        for found in check.finditer(text):
            before = text[: found.start()]
            word = " ".join(found[0].split())
            yield before.count("\n") + 1, found.start() - before.rfind("\n"), f"`{word}`: {message}"
    if path.suffix == ".md":
        yield from long_lines(text)


def long_lines(text: str) -> Iterator[tuple[int, int, str]]:
    """Lines of Markdown that are too long, but for tables, code blocks and lines with no space to break at."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            continue
        breakable = " " in line[: MARKDOWN_COLUMNS + 1].lstrip(" >-*#0123456789.")
        if len(line) > MARKDOWN_COLUMNS and breakable and not fenced and not line.lstrip().startswith("|"):
            yield number, MARKDOWN_COLUMNS + 1, f"line of {len(line)} characters, at most {MARKDOWN_COLUMNS}"


def main() -> int:
    """Print every finding and return the exit status."""
    found = [(path, *finding) for path in files(sys.argv[1:]) for finding in sorted(findings(path))]
    for path, line, column, message in found:
        print(f"{path.relative_to(ROOT)}:{line}:{column}: {message}")
    print(f"{len(found)} findings in words and lines" if found else "All words plain!", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
