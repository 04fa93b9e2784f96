"""Where numbers go: Weights & Biases gets one page for a run, however often it is resumed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from teachercache.errors import UsageError
from tests.trainer import runs


class FakeWandb(SimpleNamespace):
    """The three calls that are used of the package, recorded."""

    def __init__(self) -> None:
        super().__init__(started=[], logged=[], finished=0)

    def init(self, **options: Any) -> FakeWandb:
        self.started.append(options)
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.logged.append((step, numbers))

    def finish(self) -> None:
        self.finished += 1


def test_a_resumed_run_continues_its_page(
    cache_url: str, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    config = runs.write_config(
        tmp_path / "train.yaml", cache=cache_url, student=str(student), output=str(tmp_path / "run"),
        data={"seq_len": 128}, train={"threads": 1}, log={"tensorboard": False, "wandb": True},
    )  # fmt: skip
    runs.fit_here(config, "train.max_steps=3")
    runs.fit_here(config, "train.max_steps=5")
    first, second = wandb.started
    assert first["id"] == second["id"]
    assert first["name"] == "run"
    assert first["config"]["train"]["max_steps"] == 3
    assert [step for step, _ in wandb.logged] == [1, 2, 3, 4, 5]
    assert wandb.logged[0][1]["train/loss"] == runs.metrics(tmp_path / "run")[0]["loss"]
    assert wandb.finished == 2


def test_without_the_package_it_is_refused_by_name(
    cache_url: str, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    config = runs.write_config(
        tmp_path / "train.yaml", cache=cache_url, student=str(student), output=str(tmp_path / "run"),
        log={"tensorboard": False, "wandb": True},
    )  # fmt: skip
    with pytest.raises(UsageError, match="needs the package wandb"):
        runs.fit_here(config)
