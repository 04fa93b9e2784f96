"""torchtitan components: a data loader and a loss over a cache, and the Trainer that hands rows from one to the other.

    CacheTrainer.Config(
        dataloader=CacheDataLoader.Config(url="s3://bucket/cache"),
        loss=CacheLoss.Config(),
        model_spec=model_registry("8B", attn_backend="flex"),
        training=TrainingConfig(local_batch_size=1, seq_len=4096, disable_cuda_graphs=True), …)

A packed sequence is a batch; torchtitan's mask keeps documents apart by their positions. The loss of a step is the mean
over its valid rows on all ranks. The data's position is in torchtitan's checkpoints, and may continue with another number
of ranks. Written for torchtitan 0.3, whose later sources have another data loader.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import teachercache
from teachercache.errors import UsageError
from trainer.data import PackedCache, PackedSequence
from trainer.data.sequence import NO_LABEL
from trainer.integrations.loss import SequenceLoss, within_forward
from trainer.losses.options import Objective
from trainer.model.student import Head

try:
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention
    from torchtitan.trainer import Trainer
except ImportError as error:
    raise UsageError(
        f"these components need torchtitan 0.3, which cannot be imported ({error}): pip install torchtitan"
    ) from error


class CacheDataLoader(BaseDataLoader):  # type: ignore[misc]  # torchtitan is optional
    """Packed sequences of a cache, padded to `seq_len`, shared by the data-parallel ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """The cache, and the order of its sequences; `dataset` and `dataset_path` are not read."""

        url: str = ""
        manifest: int | None = None
        split: str = "train"
        seed: int = 0
        epochs: int | None = None

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_unused: Any
    ) -> None:
        if local_batch_size != 1:
            raise UsageError(
                f"local_batch_size must be 1, found {local_batch_size}: a packed sequence is a batch; raise seq_len or "
                "global_batch_size instead"
            )
        if dp_world_size > 1 and config.epochs is not None:
            raise UsageError(f"{dp_world_size} ranks need epochs=None: where the data end, some may have no sequence")
        self.cache = teachercache.open(config.url, config.manifest)
        self.dataset = PackedCache(
            self.cache, split=config.split, seq_len=seq_len, seed=config.seed, epochs=config.epochs, pad=True, rank=dp_rank,
            world_size=dp_world_size,
        )  # fmt: skip

    def __iter__(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """Yield ({input [1, T], positions [1, T], sequence}, labels [1, T]); labels are set where a row counts."""
        for sequence in self.dataset:
            known = sequence.labels != NO_LABEL
            labels = torch.full_like(sequence.input_ids, NO_LABEL)
            labels[sequence.row_index] = torch.where(known, sequence.labels, sequence.topk_ids[:, 0].long())
            inputs = {"input": sequence.input_ids[None], "positions": sequence.position_ids[None], "sequence": sequence}
            yield inputs, labels[None]

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the sequence that came last: the same on all ranks."""
        return {"data": json.dumps(self.dataset.state())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue there."""
        if state_dict:
            self.dataset.load_state(json.loads(state_dict["data"]))


class CacheLoss(ChunkedLossWrapper):  # type: ignore[misc]
    """The loss of a packed sequence from hidden states: torchtitan leaves the head to every ChunkedLossWrapper."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):  # type: ignore[misc]
        """What is minimised; `num_chunks` and `loss_fn` are not read. Cross-entropy cannot be mixed in."""

        objective: Objective = field(default_factory=Objective)

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        if config.objective.ce_weight:
            raise UsageError("ce_weight must be 0: torchtitan counts all rows, of which some have no next token")
        super().__init__(config, compile_config=compile_config)
        self.objective = config.objective
        self.sequence: PackedSequence | None = None
        self.sequence_loss: SequenceLoss | None = None

    def __call__(
        self, pred: torch.Tensor, labels: torch.Tensor, global_valid_tokens: torch.Tensor | None = None, **_unused: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the sum over the rows of the current sequence / global_valid_tokens, from hidden states [1, T, d]."""
        sequence, loss, head = self.sequence, self.sequence_loss, self.lm_head
        assert sequence is not None
        assert loss is not None

        def of_hidden(hidden: torch.Tensor) -> torch.Tensor:  # in the head's forward pass, where its weight is whole
            weights = Head(head.weight, getattr(head, "bias", None), 1.0, None)
            return loss.of_hidden(hidden, weights, sequence, global_valid_tokens)

        return within_forward(head, head, of_hidden, pred[0].index_select(0, sequence.row_index)), {}


class CacheTrainer(Trainer):  # type: ignore[misc]
    """torchtitan's Trainer with CacheDataLoader and CacheLoss.

    Raises UsageError for other components, tensor, context and pipeline parallelism, CUDA graphs (each sequence has its own
    number of rows), and attention without a mask of documents.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """torchtitan's own."""

    def __init__(self, config: Config) -> None:
        check(config)
        super().__init__(config)
        self.loss_fn.sequence_loss = SequenceLoss(self.dataloader.cache, self.loss_fn.objective)

    def post_dataloading_process(self, input_dict: dict[str, Any], labels: torch.Tensor) -> Any:
        """Give the teacher's rows of a batch to the loss; the rest goes to the model."""
        self.loss_fn.sequence = input_dict.pop("sequence").to(self.device)
        return super().post_dataloading_process(input_dict, labels)


def check(config: Any) -> None:
    """Raise UsageError for a configuration that CacheTrainer cannot train; see there."""
    parallel = config.parallelism
    degrees = {name: getattr(parallel, f"{name}_parallel_degree") for name in ("tensor", "context", "pipeline")}
    attention = config.model_spec.model.first_attention.inner_attention
    problems = {
        "dataloader must be a CacheDataLoader.Config": not isinstance(config.dataloader, CacheDataLoader.Config),
        "loss must be a CacheLoss.Config": not isinstance(config.loss, CacheLoss.Config),
        f"tensor, context and pipeline parallelism must be off, found {degrees}": max(degrees.values()) > 1,
        "training.disable_cuda_graphs must be set": not config.training.disable_cuda_graphs,
        f"the model's attn_backend must be flex or varlen, found {type(attention).__qualname__}": not isinstance(
            attention, FlexAttention.Config | VarlenAttention.Config
        ),
    }
    wrong = [problem for problem, found in problems.items() if found]
    if wrong:
        raise UsageError(f"torchtitan cannot train on a cache with this configuration: {'; '.join(wrong)}")
