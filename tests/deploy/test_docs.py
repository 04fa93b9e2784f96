"""What README and docs tell people to type works: every shell block that this machine can run is run, as it stands.

All blocks share one folder that looks like the repository, one S3 server, and one small cache of the no-op teacher:
s3://teachercache/notes (and a copy in build/notes), made from job.yaml.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import sizing
from pipeline.config import parse_job
from pipeline.job import run_job
from tests.deploy.manifests import DEPLOY, ROOT
from tests.deploy.markdown import Block, anchor, blocks, headings, links
from tests.deploy.small import job_tree, make_corpus, make_tokenizer, write_job
from tests.servers import Server

DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *DEPLOY.rglob("README.md")])
BLOCKS = [block for path in DOCS for block in blocks(path)]
RUNNABLE = [block for block in BLOCKS if block.runs]
MODEL = ROOT / "build/models/smollm2-135m"


def name(block: Block) -> str:
    return f"{block.path.relative_to(ROOT)}:{block.line}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, s3_server: Callable[[str], Server]) -> Iterator[Path]:
    """A folder like a checkout, with job.yaml beside it and the environment's programs and S3 server around it."""
    folder = tmp_path_factory.mktemp("checkout")
    for part in (
        "deploy",
        "scripts",
        "benchmarks",
        "constraints",
        "pipeline",
        "trainer",
        "teachercache",
        "tests",
        "docs",
    ):
        (folder / part).symlink_to(ROOT / part)
    for part in ("pyproject.toml", "README.md", "Makefile"):
        (folder / part).symlink_to(ROOT / part)
    (folder / "build/models").mkdir(parents=True)
    if MODEL.exists():
        (folder / "build/models/smollm2-135m").symlink_to(MODEL)
    model, corpus = make_tokenizer(folder / "build/models/notes"), make_corpus(folder / "build/notes.jsonl")
    tree = job_tree("s3://teachercache/notes", model, corpus, executor="inline")
    write_job(folder / "job.yaml", tree)
    server = s3_server("moto")
    server.new_bucket("teachercache")
    with pytest.MonkeyPatch.context() as patch:
        for key, value in server.env().items():
            patch.setenv(key, value)
        for cache in ("s3://teachercache/notes", str(folder / "build/notes")):
            run_job(parse_job(tree | {"cache": cache}), say=lambda text: None)
        yield folder


@pytest.mark.parametrize("block", RUNNABLE, ids=name)
@pytest.mark.timeout(600)
def test_documented_command_works(block: Block, folder: Path) -> None:
    if "TUTORIAL" in block.path.name and not MODEL.exists():
        pytest.skip("the tutorial needs build/models/smollm2-135m: run `make model`")
    env = dict(os.environ, PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    env.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="2", COLUMNS="120")
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, "-euo", "pipefail", "-c", block.code], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{block.code}\n--- output ---\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.reason is not None], ids=name)
def test_a_command_that_is_not_run_says_why(block: Block) -> None:
    assert len(str(block.reason)) > 10


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for target in links(path):
        file, _, fragment = target.partition("#")
        there = path if not file else (path.parent / file).resolve()
        if not there.exists() or (
            fragment and there.suffix == ".md" and fragment not in {anchor(heading) for heading in headings(there)}
        ):
            broken.append(target)
    assert not broken, broken


def test_sizing_table_is_the_one_that_the_command_prints(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sizing.py"])
    sizing.main()
    assert capsys.readouterr().out in (ROOT / "docs/OPERATIONS.md").read_text()
