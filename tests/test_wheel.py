"""The wheel holds the three packages with their data and the licence, and nothing else of the repository."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import teachercache

ROOT = Path(__file__).parent.parent
PACKAGES = ("teachercache", "pipeline", "trainer")
COMMANDS = {
    "pipeline.cli:app": {"plan", "run", "status", "quarantine"},
    "trainer.cli:app": {"fit", "eval", "init-student", "bench-loss", "bench-step"},
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel, built from a copy of this checkout, is installed."""
    checkout = tmp_path_factory.mktemp("checkout") / "teachercache"
    skip = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, checkout, ignore=skip)
    wheels = checkout.parent / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(checkout)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (wheel,) = wheels.glob("*.whl")
    target = checkout.parent / "installed"
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel)], check=True)
    return target


def test_the_wheel_holds_every_module_and_data_file_of_the_packages_and_nothing_else(installed: Path) -> None:
    found = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    found = {path for path in found if not path.parts[0].endswith(".dist-info") and path.parts[0] != "bin"}
    expected = {
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }
    assert found == expected
    for name in (*(f"{package}/py.typed" for package in PACKAGES), "trainer/tasks/questions.jsonl"):
        assert (installed / name).exists()
    assert list((installed / "teachercache/templates").glob("page.*"))
    assert list((installed / "teachercache/schemas").glob("*.schema.json"))


def test_the_wheel_carries_licence_version_and_commands(installed: Path) -> None:
    (distribution,) = importlib.metadata.distributions(path=[str(installed)])
    assert distribution.version == teachercache.__version__
    assert distribution.metadata["License-Expression"] == "Apache-2.0"
    (licence,) = installed.glob("*.dist-info/licenses/LICENSE")
    assert licence.read_text() == (ROOT / "LICENSE").read_text()
    entries = {(entry.group, entry.name): entry.value for entry in distribution.entry_points}
    assert entries.pop(("console_scripts", "teachercache")) == "teachercache.cli:main"
    assert entries == {("teachercache.commands", name): app for app, names in COMMANDS.items() for name in names}


def test_every_copy_of_the_version_is_that_of_the_package() -> None:
    """Images are tagged with it, and the citation names it."""
    copies = {
        path.name: set(re.findall(pattern, path.read_text()))
        for path, pattern in [
            (ROOT / "CITATION.cff", r"(?m)^version: (\S+)$"),
            (ROOT / "deploy/images/docker-bake.json", r'"VERSION": \{"default": "(\S+)"\}'),
            *((path, r"image: registry\.example\S+:(\S+)") for path in (ROOT / "deploy").rglob("*.yaml")),
        ]
    }
    named = {name: versions for name, versions in copies.items() if versions}
    assert {"CITATION.cff", "docker-bake.json", "rayjob.yaml"} <= named.keys()
    assert {name: versions for name, versions in named.items() if versions != {teachercache.__version__}} == {}
