"""Shared by the trainer's tests: one tiny teacher, one student cut from it, one cache, per test session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer import tiny


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("teacher") / "model")


@pytest.fixture(scope="session")
def student(tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> Path:
    from trainer.model.init_student import init_student

    out = tmp_path_factory.mktemp("student") / "model"
    init_student(teacher, out, layers="every-2")
    return out


@pytest.fixture(scope="session")
def cache_url(tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> str:
    return tiny.make_cache(str(tmp_path_factory.mktemp("cache") / "cache"), teacher)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # tiny matrices: threads would wait for one another
