"""transformers' Trainer over a cache: `CacheTrainer`, or `DistillationMixin` in front of a Trainer of your own.

    model = load_student(folder, dtype=torch.bfloat16, device=device)
    args = TrainingArguments("run", max_steps=1000, per_device_train_batch_size=1)
    CacheTrainer(model, args, train_dataset=PackedCache(cache, seq_len=4096, epochs=2)).train()

A packed sequence is a batch. The loss of an optimiser step is the mean over its valid rows on all ranks, as in `fit`, with
gradient accumulation too. The run ends with `max_steps` or with the data, whichever comes first. Where the data are is in
trainer_state.json of every checkpoint, so `train(resume_from_checkpoint=True)` repeats and skips no sequence, and may
continue with another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, cast

import torch
import transformers
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader
from transformers.trainer_callback import ExportableState, TrainerCallback

from teachercache.errors import UsageError
from trainer.data import PackedCache, PackedSequence
from trainer.evaluate import evaluate
from trainer.integrations.loss import SequenceLoss, within_forward
from trainer.losses.options import Objective
from trainer.model import Model
from trainer.model.attention import choose_kind


class DataPosition(TrainerCallback, ExportableState):
    """Keep where the data are in trainer_state.json, and continue there."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data = data

    def state(self) -> dict[str, Any]:
        """Return what transformers saves."""
        return {"args": {}, "attributes": {"data": self.data}}

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        """Continue after the sequence that the checkpoint trained on last."""
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved is None:
            raise UsageError(
                f"the checkpoint at step {state.global_step} does not say where its data were: another trainer wrote it; "
                "start from its weights, without resume_from_checkpoint"
            )
        self.data = saved["attributes"]["data"]
        if self.data is not None:
            train_dataloader.dataset.load_state(self.data)


def collate(sequence: PackedSequence) -> dict[str, Any]:
    """Return one packed sequence as transformers' batch: `input_ids` [1, T] to count tokens by, and the sequence."""
    return {"input_ids": sequence.input_ids[None], "sequence": sequence, "counts": True}


class DistillationMixin:
    """Make a transformers Trainer learn a cache: `class Mine(DistillationMixin, Trainer): ...`.

    train_dataset  a PackedCache;  eval_dataset  another, for `evaluate`: held-out KL, top-1 agreement, perplexity
    objective      what is minimised (trainer.losses.options.Objective); default the forward KL of `fit`
    Raises UsageError for what would train on something else: another batch size than 1, DataParallel, FSDP, DeepSpeed and
    torch_compile, a student whose attention or tokenizer does not fit; and for what would have no effect (`ignored`).
    """

    ignored: tuple[str, ...] = (
        *("label_smoothing_factor", "data_seed", "train_sampling_strategy"),
        *("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"),
    )
    """Settings and arguments that a Trainer takes and this one does not read."""

    # The Trainer's, which comes behind in the order of bases.
    args: Any
    model: Model
    accelerator: Any
    callback_handler: Any
    state: Any
    control: Any
    log: Any
    add_callback: Any
    train_dataset: Any
    eval_dataset: Any

    def __init__(
        self,
        *args: Any,
        train_dataset: PackedCache,
        eval_dataset: PackedCache | None = None,
        objective: Objective | None = None,
        **kwargs: Any,
    ) -> None:
        for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            if not isinstance(dataset, PackedCache | None):
                raise UsageError(f"{name} must be a PackedCache, found {type(dataset).__name__}")
        kwargs |= {"train_dataset": self.shown(train_dataset), "eval_dataset": self.shown(eval_dataset)}
        super().__init__(*args, **kwargs)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._refuse_ignored(kwargs)
        if self.args.per_device_train_batch_size != 1:
            raise UsageError(
                f"per_device_train_batch_size must be 1, found {self.args.per_device_train_batch_size}: a packed sequence is "
                "a batch; raise seq_len or gradient_accumulation_steps instead"
            )
        if self.args.torch_compile:
            raise UsageError("torch_compile would compile the pass through the model, which the loss does not take")
        sharded = (DistributedType.FSDP, DistributedType.DEEPSPEED)
        if self.args.n_gpu > 1 or self.accelerator.distributed_type in sharded:
            raise UsageError(
                "several GPUs need DistributedDataParallel here: start with torchrun, without FSDP or DeepSpeed"
            )
        self.sequence_loss = SequenceLoss(train_dataset.cache, objective)
        self.sequence_loss.check(self.model)
        self.model_accepts_loss_kwargs = True  # the loss is divided by the rows of the whole accumulated batch
        self.args.ignore_data_skip = True  # DataPosition continues exactly: there is nothing to skip
        self.data_position = DataPosition(train_dataset.state())
        self.add_callback(self.data_position)
        self._last_batch: dict[str, Any] = {}

    def _refuse_ignored(self, arguments: dict[str, Any]) -> None:
        """Raise UsageError for what is set of `ignored`: fields of the settings, and arguments that are not None."""
        settings = {f.name: f.default for f in fields(self.args)}
        values = {name: getattr(self.args, name) if name in settings else arguments.get(name) for name in self.ignored}
        found = [name for name, value in values.items() if value != settings.get(name)]
        if found:
            raise UsageError(
                f"{', '.join(found)} would have no effect: the cache decides about rows and their order, `objective` about the "
                "loss, and `evaluate` measures what `trainer eval` does; leave it out"
            )

    def shown(self, dataset: PackedCache | None) -> Any:
        """Return what the Trainer's own __init__ is given for a dataset."""
        return dataset

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return this rank's sequences, one a batch; workers share them and keep their order."""
        args, dataset = self.args, self.train_dataset
        dataset.rank, dataset.world_size = args.process_index, args.world_size
        return DataLoader(
            dataset,
            batch_size=None,
            collate_fn=cast(Any, collate),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            prefetch_factor=args.dataloader_prefetch_factor if args.dataloader_num_workers else None,
        )

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Return the micro-batches of a step, and how many rows of all ranks count in it.

        Where the data end, a rank may lack some: it repeats its last one, which then counts nothing.
        """
        batches, _ = cast(Any, super()).get_batch_samples(epoch_iterator, num_batches, device)
        rows = sum(self.sequence_loss.count(batch["sequence"]) for batch in batches)
        total, most = self.accelerator.gather(torch.tensor([[rows, len(batches)]], device=device)).T
        if not most.any():
            self.control.should_training_stop = True
            return [], None
        if not (most.all() or self._last_batch):  # the first step: the same on all ranks
            raise UsageError(f"{self.args.world_size} ranks are more than the sequences of the data: use fewer")
        self._last_batch = batches[-1] if batches else self._last_batch
        filler = [{**self._last_batch, "counts": False}] * (num_batches - len(batches))
        return batches + filler, total.sum()

    def compute_loss(
        self, model: Model, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Return the sum of the sequence's losses / the rows of the step, times the ranks that gradients are averaged over."""
        sequence = inputs["sequence"].to(self.args.device)

        def loss() -> torch.Tensor:
            return self.sequence_loss(self.model, sequence, num_items_in_batch, self.accelerator.autocast())

        value = within_forward(model, self.model, loss)
        self.data_position.data = sequence.state
        weighted: torch.Tensor = value * self.args.world_size * inputs["counts"]
        return weighted

    def evaluate(
        self, eval_dataset: PackedCache | None = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return and log what `trainer eval` measures on a PackedCache. Every rank reads all of it."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if not isinstance(dataset, PackedCache):
            raise UsageError(f"evaluate needs a PackedCache as its eval_dataset, found {type(dataset).__name__}")
        found = evaluate(
            self.model,
            (sequence for sequence, _ in dataset.with_states()),
            vocab_size=self.sequence_loss.vocab_size,
            attention_kind=choose_kind(self.args.device),
        )
        metrics = {f"{metric_key_prefix}_{k}": v for k, v in found.items() if isinstance(v, int | float)}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class CacheTrainer(DistillationMixin, transformers.Trainer):  # type: ignore[misc]  # ours come first
    """transformers' Trainer that learns a cache; see DistillationMixin."""
