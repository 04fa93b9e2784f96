"""`--help` teaches: every command of every program says what it does and shows an example."""

from __future__ import annotations

import pytest
import typer.main

import pipeline.cli
import teachercache.cli
import trainer.cli

COMMANDS = [
    pytest.param(command, id=f"{program} {name}")
    for program, app in (
        ("teachercache", teachercache.cli.app),
        ("pipeline", pipeline.cli.app),
        ("trainer", trainer.cli.app),
    )
    for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_it_does_and_shows_an_example(command) -> None:
    assert command.help
    assert len(command.help.split("\n")[0]) > 20
    assert "Example" in command.help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(command) -> None:
    silent = [p.name for p in command.params if p.param_type_name == "option" and not getattr(p, "help", None)]
    assert silent == []
