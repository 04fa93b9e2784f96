"""`train.register`: one entry in the cache, which says how good the student is and nothing about its machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from teachercache.errors import StoreDenied
from teachercache.store.ledger import Ledger
from teachercache.store.store import Store
from tests.trainer import runs, tiny


@pytest.fixture
def config(tmp_path: Path, teacher: Path, student: Path) -> Path:
    cache = tiny.make_cache(str(tmp_path / "cache"), teacher)
    return runs.write_config(
        tmp_path / "train.yaml", cache=cache, student=str(student), output=str(tmp_path / "private" / "run"),
        data={"seq_len": 128}, train={"threads": 1, "max_steps": 2, "register": True}, eval={"every_steps": 2},
        log={"tensorboard": False},
    )  # fmt: skip


def test_a_run_that_ends_registers_once_for_each_end_and_names_no_path(config: Path, tmp_path: Path) -> None:
    summary = runs.fit_here(config)
    runs.fit_here(config)  # it is finished: nothing is added
    (entry,), _ = Ledger.open(tmp_path / "cache").runs()
    assert (entry.steps, entry.rows, entry.parameters) == (2, summary["rows"], summary["parameters"])
    assert entry.heldout_kl == summary["heldout_kl"]
    assert entry.student == "model"
    (path,) = (tmp_path / "cache" / "runs").iterdir()
    assert not any(part in path.read_text() for part in ("private", str(tmp_path), "/"))
    runs.fit_here(config, "train.max_steps=4")
    (later,), _ = Ledger.open(tmp_path / "cache").runs()
    assert (later.run, later.steps) == (entry.run, 4)


def test_a_refused_entry_fails_the_command_after_the_model_is_whole_and_the_same_command_adds_it(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Store.create

    def create(self: Store, path: str, data: Any) -> None:
        if path.startswith("runs/"):
            raise StoreDenied("no right to create")
        real(self, path, data)

    monkeypatch.setattr(Store, "create", create)
    with pytest.raises(StoreDenied):
        runs.fit_here(config)
    assert (tmp_path / "private/run/final/model.safetensors").exists()
    monkeypatch.undo()
    runs.fit_here(config)
    assert len(Ledger.open(tmp_path / "cache").runs()[0]) == 1
