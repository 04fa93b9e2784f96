"""What the three programs share at a terminal: errors of one line, exit statuses, bars, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import typer

from teachercache.console import print_json, progress_bar, run_cli, stop_on_signals
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


def test_a_signal_sets_the_event_and_a_second_one_is_as_before():
    before, seen, stop = signal.getsignal(signal.SIGTERM), [], threading.Event()
    with stop_on_signals(stop, seen.append):
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(stop.is_set, 30, "the event to be set")
        assert seen == ["SIGTERM"]
        assert signal.getsignal(signal.SIGTERM) == before
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == before
