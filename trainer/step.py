"""One optimiser step: micro-batches in, one update out, with one global count of valid rows.

The loss of every micro-batch is its sum over valid rows divided by the valid rows of the *whole* batch, so the
gradient does not depend on how the batch is split or padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from teachercache.errors import TeacherCacheError
from trainer.config import TrainerConfig
from trainer.data.sequence import NO_LABEL, PackedSequence
from trainer.losses import TeacherRows, kl_loss, online_kl_loss
from trainer.model import Model, student
from trainer.model.attention import DocumentLayout
from trainer.optim import apply_step, clear_gradients, gradient_norm


class TrainingDiverged(TeacherCacheError):
    """A loss or gradient is not finite, or far above the running mean; names the documents of the batch."""

    code = "TC-T101"
    remedy = "Lower optim.lr or raise its warm-up, and resume from the last checkpoint."


@dataclass(frozen=True)
class StepResult:
    """What one step did: its loss is the mean over its valid rows in nats, its tokens leave padding out."""

    loss: float
    grad_norm: float
    rows: int
    tokens: int


class Step:
    """Forward, loss, backward and update of one student.

    model       the student, on its device, in training mode
    optimizer   from trainer.optim.build_optimizer
    vocab_size  the tokenizer's real size: rows of the head beyond it are masked
    teacher     a live teacher (loss.method = online), in evaluation mode
    """

    def __init__(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer,
        config: TrainerConfig,
        *,
        attention_kind: str,
        vocab_size: int,
        teacher: Model | None = None,
    ) -> None:
        self.model, self.optimizer, self.config, self.teacher = model, optimizer, config, teacher
        self.attention_kind, self.vocab_size = attention_kind, vocab_size
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.device = self.parameters[0].device

    def run(self, sequences: Sequence[PackedSequence], *, lr: float, loss_limit: float | None = None) -> StepResult:
        """Take one step. Raises TrainingDiverged, before an update, for what is not finite or above loss_limit."""
        labelled = bool(self.config.loss.ce_weight)
        total = sum(int((s.labels != NO_LABEL).sum()) if labelled else s.num_rows for s in sequences)
        if total == 0:
            raise TeacherCacheError(f"no valid row in a step's batch of documents {_names(sequences)}")
        clear_gradients(self.parameters)
        loss = torch.zeros((), device=self.device)
        for sequence in sequences:
            part = self.loss(sequence.to(self.device), num_valid=total)
            part.backward()
            loss += part.detach()
        norm = gradient_norm(self.parameters)
        result = StepResult(
            loss=loss.item(),
            grad_norm=norm.item(),
            rows=total,
            tokens=sum(sequence.input_ids.numel() - sequence.num_padding for sequence in sequences),
        )
        problem = ""
        if not math.isfinite(result.loss) or not math.isfinite(result.grad_norm):
            problem = f"the loss is {result.loss} and the gradient norm {result.grad_norm}, expected finite numbers"
        elif loss_limit is not None and result.loss > loss_limit:
            problem = f"the loss jumped to {result.loss:.4g}, above the limit of {loss_limit:.4g} (train.spike_factor)"
        if problem:
            raise TrainingDiverged(f"{problem}; nothing was updated; the batch held documents {_names(sequences)}")
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):  # torchao keeps it as a tensor
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        apply_step(self.optimizer, norm, self.config.optim.clip_norm)
        return result

    def loss(self, sequence: PackedSequence, *, num_valid: int) -> torch.Tensor:
        """Return the configured loss, the sum over the sequence's valid rows / num_valid: a scalar."""
        config, top_k, head = self.config.loss, self.config.data.top_k, student.head(self.model)
        tokens = (sequence.input_ids, sequence.position_ids)
        layout = DocumentLayout(sequence.document_lengths, self.attention_kind, self.device)
        hidden = student.hidden_states(self.model, *tokens, layout).index_select(0, sequence.row_index)
        hidden = head.scaled(hidden)
        weight = head.weight.to(hidden.dtype)
        valid = sequence.labels != NO_LABEL if config.ce_weight else None
        call: dict[str, Any] = {
            "options": config.for_head(head.softcap),
            "num_valid": num_valid,
            "vocab_size": min(self.vocab_size, weight.shape[0]),
            "bias": head.bias,
            "chunk_size": config.chunk_size,
        }
        if config.method == "online":
            assert self.teacher is not None
            logits = student.row_logits(self.teacher, *tokens, sequence.row_index, layout)
            if config.tail is None:
                return online_kl_loss(hidden, weight, logits, valid=valid, **call)
            rows = TeacherRows.from_logits(logits[:, : call["vocab_size"]], top_k or sequence.topk_ids.shape[1], valid)
        else:
            rows = TeacherRows(sequence.topk_ids, sequence.topk_logprobs, sequence.tail_logprob, valid)
            rows = rows if top_k is None else rows.truncate(min(top_k, rows.top_k))
        return kl_loss(
            hidden,
            weight,
            rows,
            method="fused" if config.method == "online" else config.method,
            labels=sequence.labels if config.ce_weight else None,
            recompute=config.recompute,
            validate=False,  # records were checked when they were committed, ids when the cache was opened
            **call,
        )


def _names(sequences: Sequence[PackedSequence], limit: int = 20) -> str:
    names = [f"{doc_id}#{window}" for sequence in sequences for doc_id, window in sequence.documents]
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
