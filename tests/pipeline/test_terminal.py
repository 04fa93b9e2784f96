"""A corpus is other people's text: no command lets it control the terminal, and no terminal stops a command."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

import pipeline.cli
import teachercache.cli
from teachercache import Ledger
from teachercache.format.layout import quarantine_path
from teachercache.format.objects import Quarantine
from teachercache.format.sealed import seal, utc_now
from teachercache.testing import synthetic_records, synthetic_spec
from tests.pipeline.conftest import ROOT, command, environment, write_jsonl

HOSTILE = "d\x1b]0;owned\x1b\\\x1b[31mred\x1b[2J\x9b\u202ei [/b]"
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def shown(capsys, monkeypatch):
    """shown(main, "head", url) -> everything printed, checked for what a terminal would obey."""

    def call(main, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = "".join(capsys.readouterr())
        assert ended.value.code in (0, None) or arguments[0] == "quarantine", said
        assert OBEYED.search(said) is None, repr(said)
        return said

    return call


def test_no_command_lets_a_document_a_teacher_or_a_note_control_the_terminal(shown, job_file, tmp_path):
    corpus = write_jsonl(tmp_path / "a.jsonl", [{"id": HOSTILE, "text": f"text {HOSTILE} of a document\tand on"}])
    url = tmp_path / "a[" / "b]"  # a folder called [/b] below a[: rich took it for markup
    job = job_file(url, [corpus], teacher={"name": HOSTILE})
    ours, theirs = pipeline.cli.main, teachercache.cli.main
    assert r"d\x1b]0;owned" in shown(ours, "plan", job, "--show", "1")
    shown(ours, "run", job)
    ledger = Ledger.open(str(url))
    shard, attempt = next(iter(ledger.committed())), "0" * 32
    note = Quarantine(
        shard_id=shard, attempt=attempt, scope="document", reason="nan", message=HOSTILE, documents=[HOSTILE],
        created=utc_now(),
    )  # fmt: skip
    ledger.store.create(quarantine_path(shard, attempt), seal(note))
    for arguments in (("head", url), ("show", url), ("ls", tmp_path), ("report", url, "--to", tmp_path / "r.html")):
        shown(theirs, *arguments)
    for name in ("head", "show"):
        assert json.JSONDecoder().raw_decode(shown(theirs, name, url, "--json"))[0]  # a note on stderr follows
    assert r"\u202ei [/b]" in shown(theirs, "head", url)
    assert "[/b]" in shown(theirs, "ls", tmp_path)
    assert r"\x1b[2J" in shown(ours, "quarantine", url)
    assert "/a[/b]" in shown(ours, "status", url)
    assert OBEYED.search((tmp_path / "r.html").read_text(encoding="utf-8")) is None


def test_a_drop_named_like_an_escape_sequence_is_shown_by_status(shown, tmp_path):
    spec = synthetic_spec()
    writer = teachercache.create(tmp_path / "c", spec)
    writer.commit("a", synthetic_records(spec, 1), drops={HOSTILE: 1})
    assert r"d\x1b]0" in shown(pipeline.cli.main, "status", tmp_path / "c")


@pytest.mark.parametrize("name", ["a[/b]", "[bold]"])
def test_a_folder_named_like_markup_is_printed_as_it_is(shown, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)  # a short name, which no column breaks
    spec = synthetic_spec()
    teachercache.create(name, spec).commit("a", synthetic_records(spec, 1))
    assert name in shown(pipeline.cli.main, "status", name)
    assert name in shown(teachercache.cli.main, "doctor", name)


def test_a_latin_1_terminal_gets_replacement_characters(job_file, tmp_path):
    job = job_file(
        tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", [{"id": "漢", "text": "漢字 in a document"}])]
    )
    for name in ("plan", "run"):
        done = subprocess.run(
            command(name, job),
            capture_output=True,
            cwd=ROOT,
            env=environment() | {"PYTHONIOENCODING": "latin-1"},
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert b"Traceback" not in done.stderr
    assert b"(estimate) ? " in done.stdout
