"""The contract works on every Python that pyproject.toml names and this machine has: installed from a wheel, alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = """
import pkgutil, sys
import teachercache
from teachercache.testing import synthetic_records, synthetic_spec

for module in pkgutil.walk_packages(teachercache.__path__, "teachercache."):
    __import__(module.name)
spec = synthetic_spec()
writer = teachercache.create(sys.argv[1], spec)
records = synthetic_records(spec, 5, seed=1)
writer.commit("a", records)
writer.publish()
read = list(teachercache.open(sys.argv[1]).records())
assert [r.doc_id for r in read] == [r.doc_id for r in records], read
assert not {"torch", "ray", "transformers"} & sys.modules.keys()
print("ok", sys.version_info[:2])
"""


def versions() -> list[str]:
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    return [v for v in named if v != f"3.{sys.version_info.minor}"]


def interpreter(version: str) -> str | None:
    found = shutil.which(f"python{version}")
    works = found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0
    return found if works else None


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", versions())
def test_the_contract_works_on(version: str, tmp_path: Path) -> None:
    if (python := interpreter(version)) is None:
        pytest.skip(f"there is no python{version} here")
    subprocess.run([python, "-m", "venv", str(tmp_path / "venv")], check=True)
    skip = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "checkout", ignore=skip)
    bin_ = tmp_path / "venv" / "bin"
    subprocess.run([str(bin_ / "pip"), "install", "-q", str(tmp_path / "checkout")], check=True)
    cache = str(tmp_path / "cache")
    done = subprocess.run(
        [str(bin_ / "python"), "-c", PROGRAM, cache], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.startswith("ok"), done.stdout
    for command in (["verify", cache], ["show", cache], ["--help"], ["fit", "--help"]):
        done = subprocess.run([str(bin_ / "teachercache"), *command], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
