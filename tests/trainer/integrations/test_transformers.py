"""transformers' Trainer and TRL's SFTTrainer on a cache: fit's losses, exact resumption, every document once."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainingArguments
from trl import SFTConfig

import teachercache
from teachercache.errors import UsageError
from tests.trainer.integrations import two_ranks
from tests.trainer.integrations.conftest import PER_STEP, ROOT, SEQ_LEN, STEPS, example
from tests.trainer.integrations.two_ranks import WatchedTrainer, Watching, arguments_of, losses
from tests.trainer.ranks import free_ports
from tests.trainer.runs import environment
from trainer.data import PackedCache
from trainer.integrations.transformers import CacheTrainer
from trainer.integrations.trl import CacheSFTTrainer
from trainer.losses.options import Objective
from trainer.model.student import load_student

CPU = torch.device("cpu")


class WatchedSFTTrainer(Watching, CacheSFTTrainer): ...


def trainer_of(student: Path, url: str, output: Path, kind: type = WatchedTrainer, **options: Any) -> Any:
    options = {"max_steps": STEPS, "gradient_accumulation_steps": PER_STEP, **options}
    arguments = arguments_of(output, SFTConfig if issubclass(kind, CacheSFTTrainer) else TrainingArguments, **options)
    cache = teachercache.open(url)
    return kind(
        load_student(student, dtype=torch.float32, device=CPU),
        arguments,
        train_dataset=PackedCache(cache, seq_len=SEQ_LEN),
        eval_dataset=PackedCache(cache, split="heldout", seq_len=SEQ_LEN, shuffle=False),
    )


@pytest.mark.parametrize("rows", ["top_k", "sampled"])
@pytest.mark.parametrize("kind", [WatchedTrainer, WatchedSFTTrainer])
def test_losses_are_those_of_fit(kind, rows, student, caches, fit_losses, tmp_path):
    trainer = trainer_of(student, caches[rows], tmp_path, kind)
    trainer.train()
    assert losses(trainer) == pytest.approx(fit_losses(rows), abs=1e-5)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_document_is_seen_once_and_the_run_ends_with_the_data(workers, student, cache_url, tmp_path):
    trainer = trainer_of(student, cache_url, tmp_path, max_steps=500, dataloader_num_workers=workers)
    trainer.train()
    seen = [doc for documents in trainer.seen for doc in documents]
    records = list(teachercache.open(cache_url).records(split="train"))
    assert sorted(seen) == sorted((record.doc_id, record.window) for record in records)
    assert trainer.rows == sum(int(record.loss_mask.sum()) for record in records)
    assert trainer.state.global_step < 500


@pytest.mark.parametrize(("kind", "workers"), [(WatchedTrainer, 0), (WatchedTrainer, 2), (WatchedSFTTrainer, 0)])
def test_a_resumed_run_repeats_and_skips_no_sequence(kind, workers, student, cache_url, tmp_path):
    options = {"save_strategy": "steps", "save_steps": STEPS // 2, "dataloader_num_workers": workers}
    whole = trainer_of(student, cache_url, tmp_path, kind, **options)
    whole.train()
    resumed = trainer_of(student, cache_url, tmp_path, kind, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert resumed.seen == whole.seen[STEPS // 2 * PER_STEP :]
    assert losses(resumed) == losses(whole)
    for mine, theirs in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_two_ranks_share_the_sequences_and_learn_what_one_learns(student, cache_url, tmp_path):
    alone = trainer_of(student, cache_url, tmp_path / "alone", max_steps=500)
    alone.train()
    (tmp_path / "both").mkdir()
    port = free_ports(2)
    ports = {"MASTER_PORT": str(port), "SECOND_PORT": str(port + 1)}
    address = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", **ports}
    command = [sys.executable, "-m", two_ranks.__name__, str(student), cache_url, str(tmp_path / "both")]
    ranks = [
        subprocess.Popen(command, env=environment(RANK=rank, LOCAL_RANK=rank, **address), cwd=ROOT)
        for rank in ("0", "1")
    ]
    try:
        assert [rank.wait(240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    first, second = (torch.load(tmp_path / "both" / f"rank-{rank}.pt", weights_only=True) for rank in (0, 1))
    pairs = itertools.chain(*itertools.zip_longest(first["seen"], second["seen"]))
    assert [documents for documents in pairs if documents is not None] == alone.seen
    assert first["rows"] + second["rows"] == alone.rows
    assert len(alone.seen) % 2, "the last round of the two ranks is not full"
    assert first["losses"] == pytest.approx(losses(alone), abs=1e-5)
    for mine, theirs in zip(first["weights"], alone.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    of_lightning = zip(first["lightning"], second["lightning"], strict=True)
    assert [documents for pair in of_lightning for _, documents in pair] == alone.seen[:10]


@pytest.mark.parametrize("name", ["transformers_trainer", "trl_sft"])
def test_the_example_learns(name, student, cache_url, tmp_path):
    before, after = example(name).main(cache_url, str(student), str(tmp_path), 30)
    assert after < 0.8 * before


def test_what_would_train_on_something_else_is_refused(student, other_vocabulary, caches, tmp_path):
    def make(model: Any, url: str = caches["top_k"], data: Any = None, **options: Any) -> Any:
        arguments = TrainingArguments(
            str(tmp_path), use_cpu=True, max_steps=1, **{"per_device_train_batch_size": 1} | options
        )
        dataset = PackedCache(teachercache.open(url), seq_len=SEQ_LEN) if data is None else data
        return CacheTrainer(model, arguments, train_dataset=dataset, objective=Objective(divergence="reverse"))

    fitting = load_student(student, dtype=torch.float32, device=CPU)
    with pytest.raises(UsageError, match="per_device_train_batch_size must be 1, found 8"):
        make(fitting, per_device_train_batch_size=8)
    with pytest.raises(UsageError, match="torch_compile would compile"):
        make(fitting, torch_compile=True)
    with pytest.raises(UsageError, match="train_dataset must be a PackedCache, found list"):
        make(fitting, data=[{"input_ids": [1]}])
    with pytest.raises(UsageError, match="packed documents would see one another"):
        make(AutoModelForCausalLM.from_pretrained(student))
    with pytest.raises(UsageError, match="was made with tokenizer"):
        make(load_student(other_vocabulary, dtype=torch.float32, device=CPU))
    with pytest.raises(UsageError, match="has sampled rows: sampled rows estimate forward KL"):
        make(fitting, caches["sampled"])


@pytest.mark.parametrize(
    "setting",
    [
        {"label_smoothing_factor": 0.1}, {"data_seed": 3}, {"train_sampling_strategy": "group_by_length"},
        {"loss_type": "dft"}, {"max_length": 512}, {"completion_only_loss": True},
    ],
    ids=lambda setting: next(iter(setting)),
)  # fmt: skip
def test_settings_that_nothing_reads_are_refused(setting, student, cache_url, tmp_path):
    kinds = (WatchedTrainer, WatchedSFTTrainer) if next(iter(setting)) in vars(TrainingArguments(str(tmp_path))) else ()
    for kind in kinds or (WatchedSFTTrainer,):
        with pytest.raises(UsageError, match=f"^{next(iter(setting))} would have no effect: the cache decides"):
            trainer_of(student, cache_url, tmp_path, kind, **setting)


@pytest.mark.parametrize("name", ["compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"])
def test_functions_that_nothing_calls_are_refused(name, student, cache_url, tmp_path):
    model = load_student(student, dtype=torch.float32, device=CPU)
    dataset = PackedCache(teachercache.open(cache_url), seq_len=SEQ_LEN)
    with pytest.raises(UsageError, match=f"^{name} would have no effect"):
        CacheTrainer(model, arguments_of(tmp_path), train_dataset=dataset, **{name: lambda *_: None})


def test_a_checkpoint_of_another_trainer_is_refused(student, cache_url, tmp_path):
    trainer = trainer_of(student, cache_url, tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    trainer.train()
    state = tmp_path / "checkpoint-2" / "trainer_state.json"
    state.write_text(state.read_text().replace("DataPosition", "SomebodyElse"))
    with pytest.raises(UsageError, match="does not say where its data were"):
        trainer_of(student, cache_url, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
