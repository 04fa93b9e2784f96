"""An adapter whose trainer is not installed says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest

from teachercache.errors import UsageError


@pytest.mark.parametrize(
    ("adapter", "missing"),
    [
        ("trl", ["trl"]),
        ("lightning", ["lightning", "lightning.pytorch", "pytorch_lightning"]),
        ("axolotl", ["axolotl", "axolotl.core.trainers.base"]),
        ("torchtitan", ["torchtitan", "torchtitan.components.dataloader"]),
    ],
)
def test_a_missing_trainer_is_one_line_that_says_what_to_install(adapter, missing, monkeypatch):
    module = f"trainer.integrations.{adapter}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=rf"need.*: pip install {adapter}|need.*; pip install {adapter}"):
        importlib.import_module(module)
