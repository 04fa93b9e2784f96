"""Commands, options and files that README and docs mention exist, also where the text is not run."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import pipeline.cli
import teachercache.cli
import trainer.cli
from tests.deploy.manifests import DEPLOY, ROOT
from tests.docs.markdown import blocks, code_spans
from tests.docs.test_docs import DOCS, RUNNABLE, page_name

COMMANDS: dict[str, dict[str, Any]] = {
    program: typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for program, app in (
        ("teachercache", teachercache.cli.app),
        ("pipeline", pipeline.cli.app),
        ("trainer", trainer.cli.app),
    )
}
CALL = re.compile(r"(?:python -m (pipeline|trainer|teachercache)|^(teachercache)) ([a-z][a-z/-]*)(.*)")
FOLDERS = ("benchmarks", "constraints", "deploy", "docs", "pipeline", "scripts", "teachercache", "tests", "trainer")
PATH = re.compile(rf"(?<![\w/.:-])(?:{'|'.join(FOLDERS)})/[\w./*-]*[\w/*]")
PAGES = [path for path in DOCS if path.name not in ("LOG.md", "CHANGELOG.md")]  # history: what they name may be gone


def owner(program: str, subcommand: str) -> str:
    """The package that has a command: `teachercache fit` is the trainer's."""
    if program == "teachercache" and subcommand not in COMMANDS[program]:
        return next((name for name in ("pipeline", "trainer") if subcommand in COMMANDS[name]), program)
    return program


def calls_in(text: str) -> Iterator[tuple[str, str, str]]:
    """(program, subcommand, its arguments) of each of our commands in shell code."""
    for line in re.sub(r"\s#.*", "", text.replace("\\\n", " "), flags=re.M).splitlines():
        for command in re.split(r"&&|\|\||;|\||\$\(", line):
            found = CALL.search(command.strip())
            if found:
                for subcommand in found[3].split("/"):
                    yield owner(found[1] or found[2], subcommand), subcommand, found[4]


def calls(path: Path) -> Iterator[tuple[str, str, str]]:
    """The same of a page: in code spans and in shell blocks, those that are not run too."""
    for text in [*code_spans(path), *(block.code for block in blocks(path) if block.language == "sh")]:
        yield from calls_in(text)


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_commands_and_options_exist(path: Path) -> None:
    wrong = []
    for program, subcommand, arguments in calls(path):
        command = COMMANDS[program].get(subcommand)
        if command is None:
            wrong.append(f"{program} {subcommand}")
            continue
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        wrong += [f"{program} {subcommand} {o}" for o in re.findall(r"(?<!\S)--[\w-]+", arguments) if o not in known]
    assert not wrong, wrong


def test_the_reading_of_commands_finds_them() -> None:
    found = {(program, subcommand) for path in PAGES for program, subcommand, _ in calls(path)}
    assert {("pipeline", "run"), ("pipeline", "plan"), ("trainer", "fit"), ("teachercache", "gc")} <= found
    assert len(found) > 15


# Commands that a page names in passing and no block runs: what runs them.
ELSEWHERE = {("teachercache", name): "tests/teachercache/test_cli.py" for name in ("export", "thin")}
ELSEWHERE["teachercache", "push"] = "tests/teachercache/test_hub.py"


def test_every_command_that_a_page_names_is_run() -> None:
    """By a block of some page, whatever its options, or by the test that ELSEWHERE names."""
    run = {
        (program, subcommand)
        for block in RUNNABLE
        if block.language == "sh"
        for program, subcommand, _ in calls_in(block.code)
    }
    named = {(program, subcommand) for path in PAGES for program, subcommand, _ in calls(path)}
    assert named - run == ELSEWHERE.keys()
    for (_, subcommand), test in ELSEWHERE.items():
        assert f'"{subcommand}"' in (ROOT / test).read_text()


def test_the_completion_that_a_page_names_completes(tmp_path: Path) -> None:
    """`teachercache --install-completion`, then what a shell asks for."""
    env = dict(os.environ, HOME=str(tmp_path), SHELL="/bin/bash")
    program = str(Path(sys.executable).with_name("teachercache"))
    # Typer takes the nearest shell among its parents, which under make is sh; `exit` keeps bash from becoming the program.
    typed = ["bash", "-c", f"{shlex.quote(program)} --install-completion; exit $?"]
    done = subprocess.run(typed, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "teachercache" in (tmp_path / ".bashrc").read_text()
    asked = env | {"COMP_WORDS": "teachercache ver", "COMP_CWORD": "1", "_TEACHERCACHE_COMPLETE": "complete_bash"}
    done = subprocess.run([program], env=asked, capture_output=True, text=True)
    assert done.stdout.split() == ["verify"]


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_files_that_are_mentioned_exist(path: Path) -> None:
    missing = [named for named in PATH.findall(path.read_text()) if not list(ROOT.glob(named.rstrip("/")))]
    for span in code_spans(path):  # a file by its name alone, or relative to the page
        if re.fullmatch(r"[\w/.-]+\.py", span) and not (path.parent / span).exists():
            missing += [] if list(ROOT.glob(f"[!.]*/**/{Path(span).name}")) else [span]
        if re.fullmatch(r"(images|kuberay|aws|storage|iam|monitoring|helm|examples)/[\w./-]+", span):
            missing += [] if (path.parent / span).exists() else [span]
    assert not missing, missing


SCRIPTS = sorted({named for path in PAGES for named in re.findall(r"\bbenchmarks/\w+\.py", path.read_text())})


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_that_a_page_names_explains_itself(script: str, monkeypatch, capsys) -> None:
    """Its docstring shows its command, and `--help` works; the figures themselves need their machine and minutes."""
    source = (ROOT / script).read_text()
    assert f"python {script}" in source.split('"""')[1]
    if "argparse" in source:
        monkeypatch.setattr(sys, "argv", [script, "--help"])
        monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        assert ended.value.code == 0
        assert "usage:" in capsys.readouterr().out


# Which test looks at which files of deploy/: a new file has to join a row.
CHECKED = {
    "deploy/test_manifests.py": ["kuberay/**/*.yaml", "trainer/job.yaml", "trainer*/kustomization.yaml"],
    "deploy/test_slurm.py": ["slurm/*.sbatch"],
    "deploy/test_sky.py": ["sky/*.yaml"],
    "deploy/test_monitoring.py": ["monitoring/*.yaml", "monitoring/*.json", "monitoring/*.py"],
    "deploy/test_examples.py": ["examples/*.yaml", "trainer/train.yaml", "kuberay/overlays/*/job.yaml"],
    "deploy/test_helm_values.py": ["helm/*.values.yaml"],
    "deploy/test_launcher.py": ["aws/cluster.yaml"],
    "deploy/test_storage_policies.py": ["storage/*.json", "storage/iam/*.json"],
    "deploy/test_images.py": ["images/*"],
    "docs/test_docs.py": ["**/README.md"],
}


def test_no_file_of_deploy_is_without_a_check() -> None:
    checked = {path for globs in CHECKED.values() for pattern in globs for path in DEPLOY.glob(pattern)}
    files = {path for path in DEPLOY.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert files - checked == set()
    for test in CHECKED:
        assert (ROOT / "tests" / test).exists()
