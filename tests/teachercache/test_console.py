"""What the three programs share at a terminal: errors of one line, exit statuses, bars, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import typer
from rich.table import Column, Table
from rich.text import Text

from teachercache.console import note, print_json, printable, progress_bar, run_cli, say, stop_on_signals, text_console
from teachercache.errors import CorruptFile, UsageError
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]


def program(action) -> typer.Typer:
    app = typer.Typer()

    @app.callback()
    def main() -> None:
        pass

    @app.command()
    def go(number: int = 0) -> None:
        action()

    return app


def run(action, capsys, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        run_cli(program(action), arguments or ("go",))
    return int(ended.value.code or 0), capsys.readouterr().err


def raiser(error: BaseException):
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (CorruptFile("the file\nis damaged"), 1, "error: the file is damaged [TC-E102]"),
        (UsageError("no such key"), 2, "error: no such key [TC-E200]"),
        (FileNotFoundError(2, "No such file or directory", "x.yaml"), 1, "x.yaml: No such file or directory; check"),
        (ModuleNotFoundError("No module named 'ray'", name="ray"), 2, "pip install '.[pipeline]'"),
        (ModuleNotFoundError("No module named 'torch'", name="torch.nn"), 2, "pip install '.[trainer]'"),
        (ModuleNotFoundError("No module named 'rare'", name="rare"), 2, "pip install rare"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (typer.Exit(3), 3, ""),
    ],
)
def test_an_error_that_a_user_understands_is_one_line_and_an_exit_status(error, status, says, capsys):
    found, said = run(raiser(error), capsys)
    assert (found, len(said.splitlines())) == (status, int(bool(says)))
    assert says in said


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_cli(program(lambda: 1 / 0), ("go",))


@pytest.mark.parametrize("arguments", [("go", "--nope"), ("go", "--number", "x"), ("gone",)])
def test_misuse_is_one_line_that_names_the_help(arguments, capsys):
    status, said = run(lambda: None, capsys, *arguments)
    assert status == 2
    assert said.startswith("error: ")
    assert said.rstrip().endswith("--help")
    assert len(said.splitlines()) == 1


def test_a_reader_that_leaves_early_is_no_error():
    code = (
        "import typer\nfrom teachercache.console import run_cli\napp = typer.Typer()\n"
        "@app.command()\ndef go():\n    for i in range(100_000):\n        print(i)\nrun_cli(app, [])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "0\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 1


def test_without_a_terminal_a_bar_is_a_line_every_tenth(capsys):
    with progress_bar("reading") as progress:
        for done in range(1, 101):
            progress(done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "reading: 100 of 100"


def test_json_is_printed_whole_or_on_one_line(capsys):
    print_json({"name": "é"})
    print_json({"name": "é"}, indent=None)
    assert capsys.readouterr().out == '{\n  "name": "é"\n}\n{"name": "é"}\n'


# A document's id that would set a terminal's title and colours, clear it and turn its letters round; and rich's markup.
HOSTILE = "d\x1b]0;owned\x1b\\\x1b[31mred\x1b[2J\x9b\u202ei\u2066 [/b]:smile:\x07\x7f\ud800\u2028"
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def test_what_a_terminal_would_obey_becomes_a_visible_escape():
    assert printable(HOSTILE) == (
        r"d\x1b]0;owned\x1b" + "\\" + r"\x1b[31mred\x1b[2J\x9b\u202ei\u2066 [/b]:smile:\x07\x7f\ud800\u2028"
    )
    plain = "é 漢字 العربية 👩\u200d👩 [b] two\nlines"
    assert printable(plain) == plain
    assert all(OBEYED.search(printable(chr(code))) is None for code in range(0x10000))


def table(console):
    shown = Table(Column("id"), title=HOSTILE)
    shown.add_row(HOSTILE)
    shown.add_row(Text(HOSTILE, style="green"))
    console.print(shown)


@pytest.mark.parametrize(
    "show",
    [
        lambda: text_console().print(HOSTILE),
        lambda: text_console(stderr=True).print(Text(HOSTILE)),
        lambda: table(text_console()),
        lambda: say(HOSTILE),
        lambda: note(HOSTILE),
    ],
    ids=["a string", "a text", "a table", "say", "note"],
)
def test_every_way_of_printing_escapes_it_and_keeps_markup(show, capsys):
    show()
    said = "".join(capsys.readouterr())
    assert OBEYED.search(said) is None
    assert "[/b]:smile:" in said
    assert r"\x1b[2J" in said


def test_an_error_that_quotes_it_is_harmless_and_json_has_its_own_escapes(capsys):
    _, said = run(raiser(UsageError(HOSTILE)), capsys)
    assert OBEYED.search(said) is None
    print_json({"id": HOSTILE})
    out = capsys.readouterr().out
    assert OBEYED.search(out) is None
    assert json.loads(out) == {"id": HOSTILE}


def test_no_module_makes_a_console_that_prints_text_as_it_comes():
    sources = (path for room in ("teachercache", "pipeline", "trainer") for path in (ROOT / room).rglob("*.py"))
    making = {path.name for path in sources if re.search(r"\bConsole\(", path.read_text(encoding="utf-8"))}
    assert not making


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_a_stream_that_is_not_utf_8_gets_replacement_characters_and_whole_json(encoding):
    code = (
        "import typer\nfrom teachercache.console import print_json, run_cli, say, text_console\napp = typer.Typer()\n"
        "@app.command()\ndef go():\n    text_console().print('≈ 3 → é')\n    say('≈ 3 → é', stderr=False)\n"
        "    say('→')\n    print_json({'x': '→😀'}, indent=None)\nrun_cli(app, [])\n"
    )
    env = dict(os.environ, PYTHONIOENCODING=encoding)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.decode(encoding).splitlines()
    assert lines == ["≈ 3 → é".encode(encoding, "replace").decode(encoding)] * 2
    assert json.loads(last) == {"x": "→😀"}


def test_a_signal_sets_the_event_and_a_second_one_is_as_before():
    before, seen, stop = signal.getsignal(signal.SIGTERM), [], threading.Event()
    with stop_on_signals(stop, seen.append):
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(stop.is_set, 30, "the event to be set")
        assert seen == ["SIGTERM"]
        assert signal.getsignal(signal.SIGTERM) == before
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == before
