"""Real text that every Python carries: its language reference and its standard library's source, as two jsonl files.

    python scripts/demo_corpus.py OUT          writes OUT/reference.jsonl and OUT/library.jsonl, lines {"id", "text", "licence"}

Deterministic for one Python version. Documents are cut where the text itself has a boundary (a topic, a top-level
definition), so that a split by document keeps held-out text apart.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

# Plain, well-commented modules of the standard library; about 22,000 tokens together with the reference.
MODULES = ("bisect", "fnmatch", "heapq", "shlex", "textwrap", "string", "reprlib", "queue")
CHARACTERS = (300, 4500)  # shorter documents say little, longer ones would be half the corpus each


def reference() -> Iterator[tuple[str, str]]:
    """(id, text) of every topic of the language reference."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"reference/{name}", topics[name].strip()


def library() -> Iterator[tuple[str, str]]:
    """(id, text) of every top-level definition of MODULES, with the comments before it."""
    for module in MODULES:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise RuntimeError(f"this Python has no source file for its module {module}")
        source = Path(spec.origin).read_text(encoding="utf-8")
        lines = source.splitlines(keepends=True)
        begin = 0
        for node in ast.parse(source).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield f"library/{module}.{node.name}", "".join(lines[begin : node.end_lineno]).strip()
                begin = node.end_lineno or begin


def write(path: Path, documents: Iterator[tuple[str, str]]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for name, text in documents:
            if CHARACTERS[0] <= len(text) <= CHARACTERS[1]:
                file.write(json.dumps({"id": name, "text": text, "licence": "PSF-2.0"}) + "\n")
                count += 1
    return count


def make(out: Path) -> int:
    """Write both files into `out`; returns the number of documents."""
    out.mkdir(parents=True, exist_ok=True)
    return write(out / "reference.jsonl", reference()) + write(out / "library.jsonl", library())


if __name__ == "__main__":
    print(make(Path(sys.argv[1])), "documents")
