"""One optimiser step: micro-batches in, one update out, with one global count of valid rows.

The loss of every micro-batch is its sum over valid rows divided by the valid rows of the *whole* batch, so the
gradient does not depend on how the batch is split or padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from teachercache.errors import TeacherCacheError
from teachercache.format.spec import SampledRows
from trainer.config import TrainerConfig
from trainer.data.sequence import NO_LABEL, PackedSequence
from trainer.losses import TeacherRows, kl_loss, online_kl_loss
from trainer.losses.online import sampled_rows
from trainer.model import Model, parallel, student
from trainer.model.attention import DocumentLayout
from trainer.optim import apply_step, clear_gradients, gradient_norm


class TrainingDiverged(TeacherCacheError):
    """A loss or gradient is not finite, or far above the running mean; names the documents of the batch."""

    code = "TC-T101"
    alike = True
    remedy = "Lower optim.lr or raise its warm-up, and resume from the last checkpoint."


@dataclass(frozen=True)
class StepResult:
    """What one step did: its loss is the mean over its valid rows in nats, its tokens leave padding out.

    by_cache  the same loss and number of rows for the rows of each cache (each of the configuration's `parts`)
    """

    loss: float
    grad_norm: float
    rows: int
    tokens: int
    by_cache: tuple[tuple[float, int], ...] = ()


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
        rows = [0] * len(self.config.parts)
        for sequence in sequences:
            rows[sequence.cache] += sum(int(valid.sum()) for _, _, valid in self._shares(sequence))
        tokens = sum(sequence.input_ids.numel() - sequence.num_padding for sequence in sequences)
        *rows, tokens = map(sum, zip(*parallel.gathered([*rows, tokens]), strict=True))
        total = sum(rows)
        if total == 0:
            raise TeacherCacheError(f"no valid row in a step's batch of documents {_names(sequences)}")
        clear_gradients(self.parameters)
        losses = torch.zeros(len(rows), device=self.device)
        for sequence in sequences:
            part = self.loss(sequence.to(self.device), num_valid=total)
            part.backward()
            losses[sequence.cache] += part.detach()
        parallel.summed(losses)
        norm = gradient_norm(self.parameters)
        result = StepResult(
            loss=losses.sum().item(),
            grad_norm=norm.item(),
            rows=total,
            tokens=tokens,
            by_cache=tuple((loss * total / max(n, 1), n) for loss, n in zip(losses.tolist(), rows, strict=True)),
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

    def _shares(self, sequence: PackedSequence) -> list[tuple[float, torch.Tensor | None, torch.Tensor]]:
        """Return (ce_weight, indices of the rows with it, which of them count [rows]); None is all rows.

        Cross-entropy needs the next token: rows without one do not count where it has a weight. Waits for the device
        where sources differ in their weight.
        """
        loss, known = self.config.loss, sequence.labels != NO_LABEL
        if not isinstance(loss.ce_weight, dict):
            return [(loss.ce_weight, None, known if loss.ce_weight else torch.ones_like(known))]
        weights = [loss.weight_of(source) for source in sequence.sources]
        of_row = torch.tensor(weights, dtype=torch.float64, device=known.device)[sequence.row_documents()]
        shares: list[tuple[float, torch.Tensor | None, torch.Tensor]] = []
        for weight in sorted(set(weights)):
            index = (of_row == weight).nonzero()[:, 0]
            shares.append((weight, index, known[index] if weight else torch.ones_like(index, dtype=torch.bool)))
        return shares

    def loss(self, sequence: PackedSequence, *, num_valid: int) -> torch.Tensor:
        """Return the configured loss, the sum over the sequence's valid rows / num_valid: a scalar."""
        tokens = (sequence.input_ids, sequence.position_ids)
        layout = DocumentLayout(sequence.document_lengths, self.attention_kind, self.device)

        def whole() -> torch.Tensor:
            hidden = student.hidden_states(self.model, *tokens, layout).index_select(0, sequence.row_index)
            logits = None
            if self.config.loss.method == "online":
                assert self.teacher is not None
                logits = student.row_logits(self.teacher, *tokens, sequence.row_index, layout)
            return student.at_head(self.model, partial(self._head_loss, sequence, num_valid, logits), hidden)

        return parallel.inside(self.model, whole)

    def _head_loss(
        self,
        sequence: PackedSequence,
        num_valid: int,
        logits: torch.Tensor | None,
        head: student.Head,
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """Return the loss of hidden states [R, d]; `logits` are a live teacher's."""
        config = self.config.loss
        hidden = head.scaled(hidden)
        weight = head.weight.to(hidden.dtype)
        call: dict[str, Any] = {
            "num_valid": num_valid,
            "vocab_size": min(self.vocab_size, weight.shape[0]),
            "bias": head.bias,
            "chunk_size": config.chunk_size,
        }
        if logits is not None:
            if config.tail is None:
                return online_kl_loss(hidden, weight, logits, options=config.for_head(head.softcap), **call)
            rows = self._live_rows(logits[:, : call["vocab_size"]], sequence)
        else:
            rows, top_k = sequence.teacher_rows(), self.config.data.top_k
            rows = rows if top_k is None else rows.truncate(top_k)
        total = torch.zeros((), device=self.device)
        for ce_weight, index, valid in self._shares(sequence):
            part, labels = (hidden, sequence.labels) if index is None else (hidden[index], sequence.labels[index])
            total = total + kl_loss(
                part,
                weight,
                replace(rows if index is None else rows[index], valid=valid if ce_weight else None),
                options=config.for_head(head.softcap, ce_weight),
                method="fused" if config.method == "online" else config.method,
                labels=labels if ce_weight else None,
                recompute=config.recompute,
                validate=False,  # records were checked when they were committed, ids when the cache was opened
                **call,
            )
        return total

    def _live_rows(self, logits: torch.Tensor, sequence: PackedSequence) -> TeacherRows:
        """Cut a live teacher's logits [R, V] to rows as a cache holds them; what is drawn depends on the progress."""
        kind = self.config.loss.rows.spec if self.config.loss.rows else None
        if isinstance(kind, SampledRows):
            dice = torch.Generator().manual_seed((self.config.seed * 1_000_003 + sequence.tokens_done) % 2**32)
            u = torch.rand(sequence.num_rows, generator=dice, dtype=torch.float64).to(logits.device)
            return sampled_rows(logits, kind.entries, kind.exact, u)
        entries = kind.entries if kind else self.config.data.top_k or sequence.topk_ids.shape[1]
        return TeacherRows.from_logits(logits, entries)


def _names(sequences: Sequence[PackedSequence], limit: int = 20) -> str:
    """Return the documents of a step; every rank asks."""
    ours = [f"{doc_id}#{window}" for sequence in sequences for doc_id, window in sequence.documents]
    names = [name for each in parallel.gathered(ours) for name in each]
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
