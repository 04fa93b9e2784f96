"""What all adapters share: the loss of one packed sequence, and the checks that a student and a cache go together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from teachercache import Cache
from teachercache.errors import UsageError
from trainer.data import PackedSequence
from trainer.data.sequence import NO_LABEL
from trainer.losses import kl_loss
from trainer.losses.options import Objective
from trainer.model import Model, attention, student

T = TypeVar("T")


class SequenceLoss:
    """The distillation loss of packed sequences of one cache, the same as that of `fit` with this objective.

    objective  default `Objective()`: KL over the K+1 outcomes of a top-K cache, over the full vocabulary of a sampled one
    Raises UsageError for an objective that the cache's kind of rows cannot have.
    """

    def __init__(self, cache: Cache, objective: Objective | None = None) -> None:
        try:
            self.objective = (objective or Objective()).for_rows(cache.spec.rows.kind == "sampled")
        except ValueError as error:
            raise UsageError(f"the cache {cache.url} has {cache.spec.rows.kind} rows: {error}") from error
        self.cache, self.vocab_size = cache, cache.spec.tokenizer.vocab_size

    def check(self, model: Model) -> None:
        """Raise UsageError for a student that lets packed documents see one another, or of another tokenizer.

        The tokenizer is compared where the model was loaded from a local folder.
        """
        kind = model.config._attn_implementation
        if kind != attention.NAME:
            raise UsageError(
                f"the student attends with {kind!r}, so packed documents would see one another; load it with "
                "trainer.model.student.load_student, or from_pretrained(attn_implementation=trainer.model.attention.NAME)"
            )
        folder = Path(model.config._name_or_path or "nowhere")
        if folder.is_dir():
            student.check_fits(folder, self.cache)
        rows = student.head(model).weight.shape[0]
        if rows < self.vocab_size:
            raise UsageError(
                f"the student has {rows} rows in its head, the cache {self.cache.url} has ids up to {self.vocab_size - 1}: "
                "resize the student's embeddings"
            )

    def count(self, sequence: PackedSequence) -> int:
        """Return the rows that count: all, or with a cross-entropy term those whose next token is known."""
        return int((sequence.labels != NO_LABEL).sum()) if self.objective.ce_weight else sequence.num_rows

    def __call__(
        self,
        model: Model,
        sequence: PackedSequence,
        num_valid: int | float | Tensor | None = None,
        autocast: AbstractContextManager[object] | None = None,
    ) -> Tensor:
        """Return the sum over the sequence's rows / num_valid (default: its own count), a float32 scalar in nats.

        sequence  on the model's device;  autocast  what the layers run in, not the loss
        """
        device = sequence.input_ids.device
        layout = attention.DocumentLayout(sequence.document_lengths, attention.choose_kind(device, "auto"), device)
        with autocast or nullcontext():
            hidden = student.hidden_states(model, sequence.input_ids, sequence.position_ids, layout)
        head, rows = student.head(model), hidden.index_select(0, sequence.row_index)
        return self.of_hidden(rows, head, sequence, num_valid)

    def of_hidden(
        self, hidden: Tensor, head: student.Head, sequence: PackedSequence, num_valid: int | float | Tensor | None
    ) -> Tensor:
        """Return the same from the last hidden states [R, d] at the sequence's rows."""
        mixed = bool(self.objective.ce_weight)
        return kl_loss(
            head.scaled(hidden),
            head.weight.to(hidden.dtype),
            replace(sequence.teacher_rows(), valid=sequence.labels != NO_LABEL if mixed else None),
            options=self.objective.for_head(head.softcap),
            labels=sequence.labels if mixed else None,
            num_valid=num_valid,
            vocab_size=self.vocab_size,
            bias=head.bias,
            validate=False,  # records were checked when they were committed
        )


def within_forward(wrapper: Model, module: Model, function: Callable[..., T], *args: Tensor) -> T:
    """Call `function(*args)` as the forward pass of `module`, through `wrapper` around it, which sees it begin and end.

    DistributedDataParallel adds up gradients only of what it saw, and FSDP has whole weights only then.
    """
    own = vars(module).get("forward")

    def restore() -> None:
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = own

    def forward(*args: Tensor) -> T:
        restore()
        return function(*args)

    module.forward = forward
    try:
        result: T = wrapper(*args)
    finally:
        restore()
    return result
