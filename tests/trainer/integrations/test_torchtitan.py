"""torchtitan's components, built by torchtitan's own configuration: fit's losses from hidden states, every document once.

torchtitan's Trainer needs a GPU, so what it does with its loader, its loss and its model's head is done here: one step
after another, with a student's hidden states in place of its model's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import teachercache
from teachercache.errors import UsageError
from tests.trainer.integrations.conftest import LR, SEQ_LEN, STEPS, example
from trainer.config import OptimConfig
from trainer.integrations.loss import SequenceLoss
from trainer.model.attention import DocumentLayout
from trainer.model.student import hidden_states, load_student
from trainer.optim import build_optimizer

try:
    from trainer.integrations.torchtitan import check
except UsageError as error:
    pytest.skip(f"{error} (alone, with torchdata, tyro and spmd_types)", allow_module_level=True)

CPU = torch.device("cpu")


def loader_of(url: str, rank: int = 0, ranks: int = 1, **changes: Any) -> Any:
    config = example("torchtitan_config").llama3_from_cache(url, "debugmodel", SEQ_LEN)
    for name, value in changes.items():
        setattr(config.dataloader, name, value)
    return config.dataloader.build(
        dp_world_size=ranks, dp_rank=rank, tokenizer=None, seq_len=SEQ_LEN, local_batch_size=1
    )


@pytest.mark.parametrize("rows", ["top_k", "sampled"])
def test_losses_are_those_of_fit(rows, student: Path, caches, fit_losses):
    config = example("torchtitan_config").llama3_from_cache(caches[rows], "debugmodel", SEQ_LEN)
    check(config)
    loader, loss_fn = loader_of(caches[rows]), config.loss.build()
    model = load_student(student, dtype=torch.float32, device=CPU)
    optimizer = build_optimizer(model, OptimConfig(lr=LR))
    loss_fn.set_lm_head(model.lm_head)
    loss_fn.sequence_loss = SequenceLoss(loader.cache, loss_fn.objective)
    found = []
    for inputs, labels in loader:
        sequence = loss_fn.sequence = inputs.pop("sequence")
        layout = DocumentLayout(sequence.document_lengths, "documents", CPU)
        hidden = hidden_states(model, inputs["input"][0], inputs["positions"][0], layout)
        loss, _ = loss_fn(hidden[None], labels, (labels != -100).sum(), positions=inputs["positions"])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
        if len(found) == STEPS:
            break
    assert found == pytest.approx(fit_losses(rows, per_step=1), abs=1e-5)


def test_two_ranks_share_the_sequences_and_a_state_continues(cache_url):
    whole = [inputs["sequence"].documents for inputs, _ in loader_of(cache_url, epochs=1)]
    ranks = [iter(loader_of(cache_url, rank, 2)) for rank in range(2)]
    pairs = [next(ranks[i % 2])[0]["sequence"].documents for i in range(8)]
    assert pairs == whole[:8]
    first = loader_of(cache_url, epochs=1)
    batches = iter(first)
    for _ in range(3):
        next(batches)
    second = loader_of(cache_url, epochs=1)
    second.load_state_dict(first.state_dict())
    assert [inputs["sequence"].documents for inputs, _ in second] == whole[3:]
    documents = sorted(doc for documents in whole for doc in documents)
    assert documents == sorted((r.doc_id, r.window) for r in teachercache.open(cache_url).records(split="train"))


def test_what_would_train_on_something_else_is_refused(cache_url):
    config = example("torchtitan_config").llama3_from_cache(cache_url, "debugmodel", SEQ_LEN)
    config.parallelism.tensor_parallel_degree = 2
    config.training.disable_cuda_graphs = False
    with pytest.raises(
        UsageError, match=r"parallelism must be off, found .*'tensor': 2.*disable_cuda_graphs must be set"
    ):
        check(config)
    with pytest.raises(UsageError, match="2 ranks need epochs=None"):
        loader_of(cache_url, 0, 2, epochs=1)
