"""The word list finds what it is meant to find, where it is, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.plain_words import findings


def found(tmp_path: Path, text: str, name: str = "page.md") -> list[tuple[int, int]]:
    path = tmp_path / name
    path.write_text(text)
    return [(line, column) for line, column, _ in sorted(findings(path))]


@pytest.mark.parametrize(
    "text",
    [
        "it stands here",
        "Beside it",
        "a file of its own",
        "so many rows",
        "nobody reads",
        "somebody reads",
        "shards in work",
        "mended",
        "unless told",
        "shards given out",
        "hands out shards",
        "It is so. Who needs more, asks.",
        "One.  Two.",
    ],
)
def test_each_entry_of_the_list_is_found(tmp_path: Path, text: str) -> None:
    assert len(found(tmp_path, text)) == 1


@pytest.mark.parametrize(
    "text", ["a stand-in", "STAND_INS", "understand it", "recommended", "besides", "Who calls it?"]
)
def test_what_only_looks_like_an_entry_is_not_found(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, text) == []


def test_a_phrase_is_found_across_lines_of_a_comment_with_its_place(tmp_path: Path) -> None:
    assert found(tmp_path, "x = 1\n# a file of\n#   its own\n", "code.py") == [(2, 10)]


def test_long_lines_of_markdown_are_found_but_for_tables_code_and_links(tmp_path: Path) -> None:
    words = "word " * 30
    link = "- [text](https://example.org/" + "x" * 120 + ")"
    assert found(tmp_path, f"{words}\n\n| {words} |\n\n{link}\n\n```text\n{words}\n```\n") == [(1, 121)]
    assert found(tmp_path, f"# {words}", "code.py") == []
