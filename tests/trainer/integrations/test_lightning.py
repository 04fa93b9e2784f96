"""Lightning on a cache: fit's losses, exact resumption, every document once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import teachercache
from tests.trainer.integrations.conftest import STEPS, example
from tests.trainer.integrations.two_ranks import lightning_run
from trainer.integrations.lightning import pl


@pytest.mark.parametrize("rows", ["top_k", "sampled"])
def test_losses_are_those_of_fit(rows, student, caches, fit_losses, tmp_path):
    module = lightning_run(student, caches[rows], tmp_path)
    assert [loss for loss, _ in module.seen] == pytest.approx(fit_losses(rows, per_step=1), abs=1e-5)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_document_is_seen_once(workers, student, cache_url, tmp_path):
    module = lightning_run(student, cache_url, tmp_path, data={"num_workers": workers}, max_epochs=1, max_steps=-1)
    seen = sorted(doc for _, documents in module.seen for doc in documents)
    assert seen == sorted((r.doc_id, r.window) for r in teachercache.open(cache_url).records(split="train"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_repeats_and_skips_no_sequence(workers, student, cache_url, tmp_path):
    def saving() -> dict[str, Any]:
        checkpoint = pl.callbacks.ModelCheckpoint(
            tmp_path, save_top_k=-1, every_n_train_steps=STEPS // 2, filename="{step}"
        )
        return {"callbacks": [checkpoint], "enable_checkpointing": True}

    data = {"num_workers": workers}
    whole = lightning_run(student, cache_url, tmp_path, data=data, **saving())
    resumed = lightning_run(student, cache_url, tmp_path, str(tmp_path / f"step={STEPS // 2}.ckpt"), data)
    assert resumed.seen == whole.seen[STEPS // 2 :]
    for mine, theirs in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_example_learns(student, cache_url, tmp_path):
    before, after = example("lightning_fit").main(cache_url, str(student), str(tmp_path), 30)
    assert after < 0.8 * before
