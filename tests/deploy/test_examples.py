"""Example job and train files load through the real configuration, and each pair fits together."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import load_job
from tests.deploy.manifests import DEPLOY
from trainer.config import load_config

EXAMPLES = DEPLOY / "examples"
PAIRS = sorted(path.name.removesuffix(".job.yaml") for path in EXAMPLES.glob("*.job.yaml"))


def test_the_promised_examples_are_there() -> None:
    assert PAIRS == ["gemma-3-27b", "gpt-oss-20b", "llama-3.1-8b", "qwen3-32b"]


@pytest.mark.parametrize("name", PAIRS)
def test_job_and_training_file_fit_together(name: str) -> None:
    job = load_job(EXAMPLES / f"{name}.job.yaml")
    train = load_config(EXAMPLES / f"{name}.train.yaml")
    assert train.cache == job.cache
    assert train.data.seq_len == job.window_size  # else windows would be cut, or sequences never filled
    assert job.teacher.head_dtype == "float32"
    splits = {split for corpus in job.corpora for split in (corpus.splits or {corpus.split: 1.0})}
    assert {train.split, train.eval.split} <= splits
    assert set(train.data.weights) <= {corpus.source for corpus in job.corpora}


@pytest.mark.parametrize(
    "path",
    sorted([*EXAMPLES.glob("*job.yaml"), *DEPLOY.glob("kuberay/overlays/*/job.yaml")]),
    ids=lambda p: f"{p.parent.name}/{p.name}",
)
def test_every_job_file_loads(path: Path) -> None:
    load_job(path)


@pytest.mark.parametrize(
    "path",
    sorted([*EXAMPLES.glob("*train.yaml"), DEPLOY / "trainer/train.yaml"]),
    ids=lambda p: f"{p.parent.name}/{p.name}",
)
def test_every_training_file_loads(path: Path) -> None:
    load_config(path)


def test_long_context_of_the_paper_is_32768() -> None:
    assert load_config(EXAMPLES / "llama-3.1-8b.train.yaml").data.seq_len == 32768


def test_copies_in_overlays_are_the_examples() -> None:
    """Kustomize reads nothing above its folder, so two files are copies; they must not drift."""
    for copy, original in (
        ("kuberay/overlays/teacher-8b/job.yaml", "examples/llama-3.1-8b.job.yaml"),
        ("trainer/train.yaml", "examples/llama-3.1-8b.train.yaml"),
    ):
        assert (DEPLOY / copy).read_bytes() == (DEPLOY / original).read_bytes()
