"""benchmarks/break_even.py: the formulas by hand, and the measurement rehearsed with a tiny teacher."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import pipeline.cli
import trainer.cli
from benchmarks import break_even, sizing
from tests.trainer import tiny

MAINS = {"pipeline": pipeline.cli.main, "trainer": trainer.cli.main}


def here(module: str, *arguments: object) -> str:
    """Run a command in this process; raises AssertionError where it fails."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as done:
        MAINS[module]([str(argument) for argument in arguments])
    assert done.value.code in (0, None), out.getvalue()
    return out.getvalue()


def numbers(line: str) -> list[float]:
    return [float(cell.replace(",", "").replace("GB", "")) for cell in line.split("|")[2:-1]]


def test_the_computed_table_is_what_the_formulas_give() -> None:
    lines = break_even.computed().splitlines()
    students, storage, once, again, steps, cached, online, ratio = numbers(
        next(line for line in lines if line.startswith("| Llama-3.1-8B | 3 |"))
    )
    assert (students, storage) == (3, 280)
    assert once == pytest.approx(1e9 / sizing.MEASURED_RATE, abs=1)
    assert again == pytest.approx(3e9 / break_even.PLAIN_RATE, abs=1)
    assert (cached, online) == (pytest.approx(once + steps, abs=1), pytest.approx(again + steps, abs=1))
    assert ratio == pytest.approx(cached / online, abs=0.005)
    for line in lines[2:11]:  # dearer for one student, cheaper for three and ten
        assert (numbers(line)[-1] > 1) == (numbers(line)[0] == 1), line


def test_a_pair_is_measured_once_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(break_even, "run", lambda *arguments: asked.append(arguments) or here(*arguments))
    teacher = tiny.make_model(tmp_path / "teacher")
    command = ["break_even.py", "--measure", str(tmp_path / "out"), "--smoke", "--teacher", str(teacher)]
    monkeypatch.setattr(sys, "argv", command)
    break_even.main()
    said = capsys.readouterr().out
    report = json.loads((tmp_path / "out/break_even_h200.json").read_text())
    cache, online, cached = (report["parts"][name] for name in ("cache", "online", "cached"))
    assert cache["rows"] > 0
    assert cache["bytes"] > 0
    assert online["rows"] == cached["rows"]
    assert online["heldout_kl"] == pytest.approx(cached["heldout_kl"], rel=0.2)
    assert f"{cached['heldout_kl']:.4f} from the cache" in said
    assert [line.split("|")[2].strip() for line in said.splitlines() if line.startswith("| teacher, ")] == [
        "1",
        "3",
        "10",
    ]

    first = len(asked)
    break_even.main()  # all of it is there
    assert len(asked) == first
    monkeypatch.setattr(sys, "argv", [*command, "--entries", "12"])
    with pytest.raises(SystemExit, match="other settings"):
        break_even.main()
