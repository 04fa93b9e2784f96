"""The contract, alone, and the trainer with its extra work on every Python that pyproject.toml names and this machine has.

Each is installed into a fresh environment. torch brings CUDA's libraries there: the trainer takes 5 GB and minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
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


TRAINER_PROGRAM = """
import pkgutil, sys
import torch
import teachercache, trainer
from teachercache.testing import synthetic_records, synthetic_spec
from trainer.data import PackedCache
from trainer.losses import kl_loss

for module in pkgutil.walk_packages(trainer.__path__, "trainer."):
    if not module.name.startswith(("trainer.integrations", "trainer.__main__")):  # those need their own packages
        __import__(module.name)
spec = synthetic_spec()
writer = teachercache.create(sys.argv[1], spec)
writer.commit("a", synthetic_records(spec, 5, seed=1))
writer.publish()
sequence = next(iter(PackedCache(teachercache.open(sys.argv[1]), seq_len=64)))
hidden = torch.randn(sequence.num_rows, 16, requires_grad=True)
head = torch.randn(spec.tokenizer.vocab_size, 16, requires_grad=True)
kl_loss(hidden, head, sequence.teacher_rows()).backward()
assert head.grad.isfinite().all() and head.grad.norm() > 0
print("ok", sys.version_info[:2], torch.__version__)
"""
NAMED = re.findall(r"Programming Language :: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())


def interpreter(version: str) -> str | None:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for found in (shutil.which(f"python{version}"), *pyenv.glob(f"versions/{version}.*/bin/python")):
        if found and subprocess.run([str(found), "-c", ""], capture_output=True).returncode == 0:
            return str(found)
    return None


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", NAMED)
@pytest.mark.parametrize(
    ("extra", "program", "commands"),
    [
        ("", PROGRAM, ["verify CACHE", "show CACHE", "--help", "fit --help"]),
        (
            "[trainer]",
            TRAINER_PROGRAM,
            ["verify CACHE", "fit --help", "bench-step --shape tiny --tokens 64 --device cpu"],
        ),
    ],
    ids=["contract", "trainer"],
)
def test_a_fresh_environment_has_all_that_it_needs(
    version: str, extra: str, program: str, commands: list[str], tmp_path: Path
) -> None:
    if (python := interpreter(version)) is None:
        pytest.skip(f"there is no python{version} here")
    subprocess.run([python, "-m", "venv", str(tmp_path / "venv")], check=True)
    skip = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "checkout", ignore=skip)
    bin_ = tmp_path / "venv" / "bin"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([str(bin_ / "pip"), "install", "-q", f"{tmp_path / 'checkout'}{extra}"], check=True, env=environment)
    cache = str(tmp_path / "cache")
    command = [str(bin_ / "python"), "-c", program, cache]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout.startswith("ok"), done.stderr
    print(done.stdout)
    for command in ([part.replace("CACHE", cache) for part in line.split()] for line in commands):
        done = subprocess.run(
            [str(bin_ / "teachercache"), *command], capture_output=True, text=True, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stderr
