"""What `export --format` writes, read by the other project's own code: its rows give the loss that ours give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import teachercache
from teachercache.views.export import export
from tests.trainer.integrations.conftest import SEQ_LEN
from trainer.data.sequence import pack_records
from trainer.losses import kl_loss

KINDS = ["top_k", "sampled"]


@pytest.fixture(params=KINDS)
def cache(request, caches):
    return teachercache.open(caches[request.param])


def read(cache: teachercache.Cache, name: str, folder: Path) -> Any:
    export(cache, folder / name, format=name)
    return datasets.load_dataset(str(folder / name), split="train", cache_dir=str(folder / "hf"))


@pytest.fixture
def hidden() -> Any:
    """Hidden states of 32 numbers for a document of n tokens, and a head of 320 words."""
    dice = torch.Generator().manual_seed(0)
    head = torch.randn(320, 32, generator=dice)
    return lambda n: (torch.randn(n, 32, generator=dice), head)


def ours(record: teachercache.Record, hidden: torch.Tensor, head: torch.Tensor, tail: str) -> float:
    """The sum of our losses over the rows of one record."""
    sequence = pack_records([record])
    rows = sequence.teacher_rows()
    return kl_loss(hidden[sequence.row_index], head, rows, tail=tail, num_valid=1).item()


def test_axolotls_collators_and_loss_read_the_rows(cache, student, hidden, tmp_path):
    pytest.importorskip("axolotl", reason="axolotl is not installed: pip install --no-deps axolotl addict")
    from axolotl.integrations.kd.collator import DataCollatorForKD, KDBatchSamplerDataCollatorForSeq2Seq
    from axolotl.integrations.kd.kernels.liger import LigerFusedLinearKLTopKLogprobLoss

    lines = read(cache, "axolotl", tmp_path)
    records = list(cache.records(split="train", limit=4))
    loss = LigerFusedLinearKLTopKLogprobLoss(0.0, 1.0, beta=0.0, compiled=False, normalize_topk=False)
    tokenizer = AutoTokenizer.from_pretrained(student)
    padded = DataCollatorForKD(tokenizer)([dict(lines[i]) for i in range(4)])
    packed = KDBatchSamplerDataCollatorForSeq2Seq(tokenizer)([[dict(lines[i]) for i in range(4)]])
    longest = max(len(record.input_ids) for record in records)
    states = [hidden(longest) for _ in records]
    head, wanted = states[0][1], 0.0
    for record, (state, _) in zip(records, states, strict=True):
        wanted += ours(record, state, head, "sampled" if record.exact is not None else "renormalize")
        if record.exact is not None:  # our loss has the teacher's own entropy, axolotl's that of the K weights
            rows = pack_records([record]).teacher_rows()
            wanted -= rows.estimate(torch.float32)[1].sum().item()
    joined = torch.cat([state[: len(record.input_ids)] for record, (state, _) in zip(records, states, strict=True)])
    for batch, state in ((padded, torch.stack([state for state, _ in states])), (packed, joined[None])):
        columns = (batch[name] for name in ("target_token_ids", "target_logprobs", "target_mask", "labels"))
        theirs = loss(head, state, *columns).item()
        assert theirs == pytest.approx(wanted, rel=1e-4 if records[0].exact is None else 3e-3)


def test_distillkits_decompressor_and_loss_read_the_rows(cache, hidden, tmp_path):
    pytest.importorskip("distillkit", reason="DistillKit is not on PyPI: put its repository on PYTHONPATH")
    from distillkit.compression.compressor import LogprobCompressor
    from distillkit.compression.config import DistributionQuantizationConfig
    from distillkit.lossfuncs.kl import KLDLoss
    from distillkit.main import collate_packed_batch
    from distillkit.missing_probability import MissingProbabilityHandling
    from distillkit.signals import OfflineSignalSource
    from transformers.modeling_outputs import CausalLMOutput

    k = cache.spec.top_k
    config = DistributionQuantizationConfig(d=320, k=k, exact_k=k, residual_bins=[])
    source = OfflineSignalSource(LogprobCompressor(config), vocab_size=320)
    loss = KLDLoss(1.0, MissingProbabilityHandling.ZERO)
    for line, record in zip(read(cache, "distillkit", tmp_path), cache.records(split="train", limit=4), strict=False):
        batch = collate_packed_batch([line])
        state, head = hidden(len(record.input_ids))
        signal = source.get_signal(batch)
        output = CausalLMOutput(logits=(state @ head.T)[None])
        theirs = loss(output, signal, mask=(batch["labels"] >= 0)[..., None], num_items_in_batch=1).item()
        sampled = record.exact is not None
        wanted = ours(record, state, head, "sampled" if sampled else "renormalize")
        if sampled:
            wanted -= pack_records([record]).teacher_rows().estimate(torch.float32)[1].sum().item()
        assert theirs == pytest.approx(wanted, rel=3e-3)


def test_distillkits_packer_takes_the_rows_along(cache, tmp_path):
    pytest.importorskip("distillkit", reason="DistillKit is not on PyPI: put its repository on PYTHONPATH")
    from distillkit.pack_logits import iterative_packing

    lines = read(cache, "distillkit", tmp_path)
    packed = iterative_packing(lines, max_len=128)

    def rows_of(data: Any) -> list[tuple[int, tuple[int, ...]]]:
        """Label and ids of every row that counts; documents are at most 60 tokens, so none is cut but at a full line."""
        return sorted(
            (y, tuple(k)) for line in data for y, k in zip(line["labels"], line["token_ids"], strict=True) if y >= 0
        )

    assert all(len(line["attention_mask"]) == len(line["token_ids"]) <= 128 for line in packed)
    assert set(rows_of(packed)) <= set(rows_of(lines))


def test_trl_trains_on_the_tokens_and_labels(student, cache, tmp_path):
    lines = read(cache, "trl", tmp_path)
    options = {"max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True, "bf16": False, "report_to": []}
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(student),
        SFTConfig(str(tmp_path / "run"), max_length=SEQ_LEN, save_strategy="no", **options),
        train_dataset=lines,
        processing_class=AutoTokenizer.from_pretrained(student),
    )
    seen = trainer.data_collator([trainer.train_dataset[0]])
    assert seen["labels"][0].tolist() == lines[0]["labels"]
    assert seen["input_ids"][0].tolist() == lines[0]["input_ids"]
    assert trainer.train().training_loss > 0
