"""What README and docs tell people to type works: every block that this machine can run is run, in the page's order.

Each page has a folder that looks like a checkout; around it are one S3 server (moto) and small caches of the
no-op teacher. Shell, Python and SQL blocks run unchanged, but for the names of STAND_INS: a page that speaks of an 8B
teacher gets one of four tiny layers, a cluster's address becomes that of a Ray head started here. YAML blocks go through
the real configuration. Blocks of a page share its folder and, in Python, its names, as they do for a reader.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import pytest
import yaml

import teachercache
from benchmarks import sizing
from pipeline.config import load_job, parse_job
from pipeline.running.job import run_job
from tests.deploy.manifests import DEPLOY, ROOT, problems
from tests.deploy.small import job_tree, make_corpus, write_job
from tests.docs.markdown import RUNNERS, Block, anchor, blocks, headings, links
from tests.servers import Server
from tests.trainer.tiny import make_model
from trainer.config import load_config
from trainer.model.init_student import init_student

sys.path.insert(0, str(ROOT / "scripts"))
from demo_services import BIN, ray_head

ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
DOCS = sorted([*(ROOT / name for name in ROOT_PAGES), *(ROOT / "docs").glob("*.md"), *DEPLOY.rglob("README.md")])
BLOCKS = [block for path in DOCS for block in blocks(path)]
RUNNABLE = [block for block in BLOCKS if block.runs]
SMOLLM2 = ROOT / "build/models/smollm2-135m"

# What a page names and this machine lacks → what replaces it here.
STAND_INS: dict[str, dict[str, str]] = {
    "README.md": {
        "model: meta-llama/Llama-3.1-8B-Instruct, dtype: bfloat16": "model: $TINY, engine: noop",
        "--teacher meta-llama/Llama-3.1-8B-Instruct": "--teacher $TINY",
        "train: 0.999, heldout: 0.001": "train: 0.7, heldout: 0.3",
        "actors: 16": "actors: 1",
        "http://HEAD:8265": "$RAY_HEAD",
        "pip install ": "pip install --dry-run --no-deps --no-build-isolation ",
        "seq_len: 32768, batch_tokens: 131072": "seq_len: 128, batch_tokens: 256",
    },
    "docs/TRAINING.md": {
        "seq_len: 32768, batch_tokens: 131072": "seq_len: 128, batch_tokens: 256",
        "seq_len=4096": "seq_len=128",
        "--nproc-per-node 4": "--nproc-per-node 2",
    },
    "docs/INTEGRATIONS.md": {"seq_len=4096": "seq_len=128"},
    "docs/OPERATIONS.md": {"build/models/smollm2-135m": "$TINY"},
    "docs/FORMAT.md": {"['s3://bucket/cache/data/…parquet']": "$FILES"},
}


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def name(block: Block) -> str:
    return f"{page_name(block.path)}:{block.line}:{block.language}"


@dataclass
class Page:
    """A page's folder, what its stand-ins are replaced by, and the names that its Python blocks have made."""

    path: Path
    folder: Path
    values: dict[str, str]
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__docs__"})
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def code(self, block: Block) -> str:
        text = block.code
        for replacements in (STAND_INS.get(page_name(self.path), {}), self.values):
            for named, stand_in in replacements.items():
                text = text.replace(named, stand_in)
        return text


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus") / "notes.jsonl")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher with weights: the no-op engine needs its tokenizer only, students are cut out of it."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def store(s3_server: Callable[[str], Server], corpus: Path, tiny: Path) -> Iterator[Server]:
    """The buckets that the pages speak of, with caches and text; this process's environment points to them."""
    server = s3_server("moto")
    for bucket in ("teachercache", "bucket", "team-distill", "corpora"):
        server.new_bucket(bucket)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in server.env().items():
            patch.setenv(key, value)
        for cache in ("s3://teachercache/notes", "s3://bucket/cache"):
            run_job(parse_job(job_tree(cache, tiny, corpus, executor="inline")), say=lambda text: None)
        with fsspec.open("s3://corpora/web/0.jsonl.zst", "wb", compression="zstd") as file:
            file.write(corpus.read_bytes().replace(b'"id"', b'"url"'))
        yield server


@pytest.fixture(scope="module")
def pages(
    store: Server, corpus: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Path], Page]]:
    """The page of a document: its folder is made at first use, with job.yaml and a Ray head where the page wants one."""
    made: dict[Path, Page] = {}
    with contextlib.ExitStack() as stack:

        def get(path: Path) -> Page:
            if path not in made:
                page = Page(path, tmp_path_factory.mktemp(path.stem), {"$TINY": str(tiny)})
                fill(page, tiny, corpus)
                if "$RAY_HEAD" in STAND_INS.get(page_name(path), {}).values():
                    page.values["$RAY_HEAD"] = stack.enter_context(short_ray_head(page))
                made[path] = page
            return made[path]

        yield get


def fill(page: Page, tiny: Path, corpus: Path) -> None:
    """Links to the repository, models below build/, and a local cache with its job file where the page needs them."""
    build = page.folder / "build"
    (build / "models").mkdir(parents=True)
    for link, target in (
        *((page.folder / path.name, path) for path in ROOT.iterdir() if not path.name.startswith((".", "build"))),
        (build / "teacher", tiny),
        *([(build / "models/smollm2-135m", SMOLLM2)] if SMOLLM2.exists() else []),
    ):
        link.symlink_to(target)
    shutil.copy(ROOT / ".gitignore", page.folder)  # which `ray job submit --working-dir .` heeds: build/ is not sent
    (page.folder / "book.txt").write_text(corpus.read_text())
    for block in blocks(page.path):  # a reader may use a file before the page shows it
        if block.file_name:
            (page.folder / block.file_name).write_text(page.code(block))
    if page.path.name == "INTEGRATIONS.md":
        init_student(tiny, build / "student", layers="every-2")
    if page.path.name == "OPERATIONS.md":
        tree = job_tree("s3://teachercache/notes", tiny, corpus, executor="inline")
        write_job(page.folder / "job.yaml", tree)
        run_job(parse_job(tree | {"cache": str(build / "notes")}), say=lambda text: None)
    if page.path.name == "FORMAT.md":
        local = build / "cache"
        run_job(parse_job(job_tree(str(local), tiny, corpus, executor="inline")), say=lambda text: None)
        files = [str(local / file.path) for file in teachercache.open(str(local)).manifest.files]
        page.values["$FILES"], page.names["files"] = repr(files), files


@contextlib.contextmanager
def short_ray_head(page: Page) -> Iterator[str]:
    """The address of a Ray head; its folder has a short name, because the paths of Unix sockets may have 107 bytes.

    The page's environment gets the head's token.
    """
    env = page.environment
    for variable in ("RAY_ADDRESS", "PYTHONPATH"):
        env.pop(variable, None)
    env["PATH"] = f"{BIN}{os.pathsep}{env['PATH']}"
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        before, tempfile.tempdir = tempfile.tempdir, folder
        try:
            with ray_head(env, page.folder / "build/ray.log", num_cpus=2) as address:
                yield address
        finally:
            tempfile.tempdir = before


def run_shell(page: Page, block: Block) -> None:
    env = dict(page.environment, PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}", HF_HUB_OFFLINE="1", COLUMNS="120")
    env.update(TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="2")
    bash, code = shutil.which("bash"), page.code(block)
    assert bash is not None
    done = subprocess.run(
        [bash, "-euo", "pipefail", "-c", code], cwd=page.folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{code}\n--- output ---\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def run_python(page: Page, block: Block) -> None:
    with contextlib.chdir(page.folder) if sys.version_info >= (3, 11) else pytest.MonkeyPatch.context() as patch:
        if patch is not None:
            patch.chdir(page.folder)
        exec(compile(page.code(block), name(block), "exec"), page.names)


def run_sql(page: Page, block: Block) -> None:
    assert duckdb.sql(page.code(block)).limit(1).fetchall()


def run_yaml(page: Page, block: Block) -> None:
    """Kubernetes objects against their schemas, job and training files through the real configuration."""
    code = page.code(block)
    tree = yaml.safe_load(code)
    if "apiVersion" in tree:
        assert list(problems(tree)) == []
        return
    file = page.folder / (block.file_name or "build/block.yaml")
    file.write_text(code)
    if "corpora" in tree:
        parse_job(yaml.safe_load(block.code))  # unchanged, too
        load_job(file)
    else:
        load_config(file)


@pytest.mark.slow
@pytest.mark.parametrize("block", RUNNABLE, ids=name)
@pytest.mark.timeout(600)
def test_documented_block_works(block: Block, pages: Callable[[Path], Page]) -> None:
    if "TUTORIAL" in block.path.name and not SMOLLM2.exists():
        pytest.skip("the tutorial needs build/models/smollm2-135m: run `make model`")
    run = {"sh": run_shell, "python": run_python, "sql": run_sql, "yaml": run_yaml}[block.language]
    run(pages(block.path), block)


@pytest.mark.parametrize("block", BLOCKS, ids=name)
def test_a_block_runs_or_says_why_not(block: Block) -> None:
    known = (*RUNNERS, "text", "json")  # test_format_examples.py parses what is json
    assert block.language in known, f"{name(block)}: expected a language, one of {known}"
    if block.language == "text":
        command = re.search(r"^\s*\$?\s*(python |teachercache |make |pip |ray |kubectl |aws |helm )", block.code, re.M)
        assert command is None, f"{command and command[0]!r} is a command, not output: make the block `sh`"
    if block.reason is not None:
        assert len(block.reason) > 10
        if block.language == "python":
            compile(block.code, name(block), "exec")


def test_every_stand_in_stands_for_something() -> None:
    for page, table in STAND_INS.items():
        text = (ROOT / page).read_text()
        assert [named for named in table if named not in text] == []


@pytest.mark.parametrize("path", DOCS, ids=page_name)
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
