"""What the adapters are held against: `fit` on the same batches, and every document once."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from teachercache.format.spec import SampledRows
from tests.trainer import runs, tiny
from trainer.model.init_student import init_student

ROOT = Path(__file__).resolve().parents[3]
SEQ_LEN, STEPS, PER_STEP, LR = 100, 6, 2, 1e-3


def example(name: str) -> ModuleType:
    """One file of examples/, imported."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory, teacher: Path, cache_url: str) -> dict[str, str]:
    """A cache of each kind of rows, by the kind's name."""
    rows = SampledRows(entries=12, exact=4, seed=0)
    sampled = tiny.make_cache(str(tmp_path_factory.mktemp("sampled") / "cache"), teacher, rows=rows)
    return {"top_k": cache_url, "sampled": sampled}


@pytest.fixture(scope="session")
def fit_losses(
    tmp_path_factory: pytest.TempPathFactory, student: Path, caches: dict[str, str]
) -> Callable[..., list[float]]:
    """The losses of `fit` on a kind of cache: STEPS steps of `per_step` sequences, AdamW as the adapters are given it."""
    found: dict[tuple[str, int], list[float]] = {}

    def losses(kind: str, per_step: int = PER_STEP) -> list[float]:
        if (kind, per_step) not in found:
            folder = tmp_path_factory.mktemp("fit")
            config: dict[str, Any] = {
                "cache": caches[kind],
                "student": str(student),
                "output": str(folder / "run"),
                "data": {"seq_len": SEQ_LEN, "batch_tokens": SEQ_LEN * per_step},
                "optim": {"lr": LR, "schedule": "constant", "warmup_steps": 0},
                "train": {"threads": 1, "max_steps": STEPS},
                "log": {"tensorboard": False, "every_steps": 1},
            }
            runs.fit_here(runs.write_config(folder / "train.yaml", **config))
            found[kind, per_step] = [entry["loss"] for entry in runs.metrics(folder / "run")]
        return found[kind, per_step]

    return losses


@pytest.fixture(scope="session")
def other_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student whose tokenizer is not the caches' teacher's."""
    folder = tmp_path_factory.mktemp("other")
    tiny.make_model(folder / "model")
    tiny.make_tokenizer(folder / "model", vocab_size=300, text=["some other words, in another order"])
    init_student(folder / "model", folder / "student", layers="every-2")
    return folder / "student"
