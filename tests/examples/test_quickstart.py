"""examples/quickstart.ipynb: every code cell runs in order with a tiny teacher, and git has no outputs of it."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import teachercache.cli
from tests.deploy.manifests import ROOT
from tests.trainer import tiny

NOTEBOOK = json.loads((ROOT / "examples/quickstart.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def tagged(tag: str) -> list[dict[str, Any]]:
    return [cell for cell in CODE if tag in cell["metadata"].get("tags", [])]


def shell(line: str, names: dict[str, Any]) -> None:
    """Run `teachercache …` in this process, with {NAME} filled in as IPython does it."""
    program, *arguments = shlex.split(re.sub(r"\{(\w+)\}", lambda match: str(names[match[1]]), line))
    assert program == "teachercache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [program, *arguments])
        with pytest.raises(SystemExit) as ended:
            teachercache.cli.main()
    assert ended.value.code in (0, None), line


def run(cell: dict[str, Any], names: dict[str, Any]) -> None:
    source = re.sub(r"^!(.*)$", lambda line: f"__shell__({line[1]!r})", "".join(cell["source"]), flags=re.M)
    exec(compile(source, cell["id"], "exec"), names)


@pytest.mark.timeout(250)
def test_every_cell_runs_and_the_student_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (parameters,), (install,) = tagged("parameters"), tagged("install")
    smaller = {"TEACHER": str(tiny.make_model(tmp_path / "teacher")), "DOCUMENTS": 16, "SEQ_LEN": 256, "STEPS": 12}
    smaller["LEARNING_RATE"] = 1e-2
    named = {name.id for node in ast.walk(ast.parse("".join(parameters["source"]))) for name in ast.walk(node)
             if isinstance(name, ast.Name)}  # fmt: skip
    assert named == smaller.keys()
    names: dict[str, Any] = {"__name__": "__main__"} | smaller
    names["__shell__"] = lambda line: shell(line, names)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with contextlib.chdir(tmp_path):
        for cell in CODE:
            if cell not in (parameters, install):
                run(cell, names)
    assert len(names["losses"]) == smaller["STEPS"]
    assert names["losses"][-1] < names["losses"][0]
    said = capfd.readouterr().out
    before, after = (float(value) for value in re.findall(r"heldout_kl +│ +([\d.]+)", said))
    assert after < before
    assert said.count("step 3: ") == 1
    assert (tmp_path / "run/final/model.safetensors").exists()
    assert os.listdir(tmp_path / "cache/commits")


def test_it_is_a_notebook_without_outputs() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert [cell["id"] for cell in CODE if cell["outputs"] or cell["execution_count"] is not None] == []
    identities = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(identities) == len(set(identities))
    assert all(re.fullmatch(r"[\w-]{1,64}", identity) for identity in identities)
