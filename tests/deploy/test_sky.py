"""The SkyPilot files: keys are SkyPilot's, their scripts are sound, and what they start exists."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.config import load_job
from tests.deploy.manifests import DEPLOY, ROOT
from tests.deploy.test_slurm import shellcheck
from trainer.config import load_config

FILES = sorted((DEPLOY / "sky").glob("*.yaml"))
# Keys of SkyPilot 0.14.1's schema (sky.utils.schemas) that the files may use, by their place.
KEYS = {
    "": {"name", "workdir", "num_nodes", "resources", "envs", "file_mounts", "setup", "run"},
    "resources": {"infra", "accelerators", "use_spot", "disk_size", "job_recovery"},
    "resources.job_recovery": {"strategy", "max_restarts_on_errors"},
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_key_is_one_of_skypilots(path: Path) -> None:
    tree = yaml.safe_load(path.read_text())
    for place, known in KEYS.items():
        node = tree
        for part in filter(None, place.split(".")):
            node = node[part]
        assert set(node) <= known, place
    assert set(tree) >= {"resources", "setup", "run"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_skypilot_itself_reads_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sky = pytest.importorskip("sky", reason="skypilot is not installed: it pins older packages than ours")
    monkeypatch.chdir(ROOT)
    task = sky.Task.from_yaml(str(path))
    assert task.name == yaml.safe_load(path.read_text())["name"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
@pytest.mark.parametrize("key", ["setup", "run"])
def test_its_scripts_are_sound(path: Path, key: str, tmp_path: Path) -> None:
    script = tmp_path / f"{key}.sh"
    names = [*yaml.safe_load(path.read_text())["envs"], "SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"]  # SkyPilot sets them
    declared = "".join(f"export {name}=\n" for name in names)
    script.write_text(f"#!/bin/bash\n{declared}{yaml.safe_load(path.read_text())[key]}")
    assert shellcheck(script) == ""


def test_the_files_that_they_start_load_by_default() -> None:
    teacher, student = (yaml.safe_load((DEPLOY / f"sky/{name}.yaml").read_text()) for name in ("teacher", "student"))
    job = load_job(ROOT / teacher["envs"]["JOB"])
    config = load_config(ROOT / student["envs"]["TRAIN"], [f"output={student['envs']['OUTPUT']}"])
    assert job.cache == config.cache
    gpus = int(teacher["resources"]["accelerators"].split(":")[1]) * teacher["num_nodes"]
    assert job.run.actors * job.teacher.tensor_parallel <= gpus
