"""Held-out evaluation of a student against a cache, and against a live teacher if there is one.

`heldout_kl` is the KL over K+1 outcomes (the cached K and "anything else"): never above the full-vocabulary KL, and
comparable between all students of one cache. `heldout_kl_full_vocabulary` needs a live teacher. Both are means over
rows, in nats.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

import torch

from teachercache.errors import TeacherCacheError
from trainer.data.dataset import NO_LABEL, PackedCache, PackedSequence
from trainer.losses import TeacherRows
from trainer.model import student
from trainer.model.attention import DocumentLayout
from trainer.model.types import Model
from trainer.step import autocast, row_logits

ECE_BINS = 15


def heldout_sequences(
    cache: Any, split: str, seq_len: int, max_rows: int | None, *, pad: bool = False
) -> Iterable[PackedSequence]:
    """One unshuffled pass over a split; the same sequences in the same order every time. `pad` as in PackedCache."""
    rows = 0
    for sequence in PackedCache(cache, split=split, seq_len=seq_len, shuffle=False, epochs=1, pad=pad):
        yield sequence
        rows += sequence.num_rows
        if max_rows is not None and rows >= max_rows:
            return


@torch.no_grad()
def evaluate(
    model: Model,
    sequences: Iterable[PackedSequence],
    *,
    vocab_size: int,
    attention_kind: str,
    teacher: Model | None = None,
    autocast_to: str = "none",
    chunk_size: int = 512,
) -> dict[str, Any]:
    """Means over all valid rows: KL, top-1 agreement, perplexity, calibration error. The model's mode is restored.

    Memory: chunk_size · V · 4 bytes of logits a few times over; with a teacher, R · V · 4 bytes for a sequence's rows.
    Raises TeacherCacheError when there is no row.
    """
    device = next(model.parameters()).device
    totals: dict[str, float] = dict.fromkeys(("kl", "kl_full", "agree", "nll"), 0.0)
    calibration = torch.zeros(3, ECE_BINS, dtype=torch.float64)  # rows, summed confidence, summed correctness
    rows = labelled = 0
    was_training, started = model.training, time.monotonic()
    model.eval()
    for cpu_sequence in sequences:
        sequence = cpu_sequence.to(device)
        documents = DocumentLayout(sequence.document_lengths, attention_kind, device)
        with autocast(autocast_to, device):
            hidden = student.hidden_states(model, sequence.input_ids, sequence.position_ids, documents)
        head = student.head(model)
        hidden = hidden.index_select(0, sequence.row_index)
        teacher_logits = row_logits(teacher, sequence, documents, autocast_to) if teacher is not None else None
        for start in range(0, sequence.num_rows, chunk_size):
            part = slice(start, start + chunk_size)
            values = _chunk(hidden[part], head, sequence, part, vocab_size, teacher_logits)
            for key in totals:
                totals[key] += values[key]
            calibration += values["calibration"]
            labelled += values["labelled"]
        rows += sequence.num_rows
    model.train(was_training)
    if rows == 0:
        raise TeacherCacheError("nothing to evaluate: the split has no valid row")
    result: dict[str, Any] = {
        "heldout_kl": totals["kl"] / rows,
        "heldout_kl_kind": "K+1 outcomes (bucket)",
        "top1_agreement": totals["agree"] / rows,
        "perplexity": math.exp(min(totals["nll"] / max(labelled, 1), 700.0)),
        "ece": _expected_calibration_error(calibration),
        "rows": rows,
        "seconds": time.monotonic() - started,
    }
    if teacher is not None:
        result["heldout_kl_full_vocabulary"] = totals["kl_full"] / rows
    return result


def _chunk(
    hidden: torch.Tensor,
    head: student.Head,
    sequence: PackedSequence,
    part: slice,
    vocab_size: int,
    teacher_logits: torch.Tensor | None,
) -> dict[str, Any]:
    """Sums over a chunk of rows."""
    rows = TeacherRows(sequence.topk_ids[part], sequence.topk_logprobs[part], sequence.tail_logprob[part])
    labels = sequence.labels[part]
    logits = head.logits(hidden)[:, :vocab_size]
    logprobs = logits.log_softmax(dim=1)
    confidence, top1 = logprobs.max(dim=1)
    known = labels != NO_LABEL
    values: dict[str, Any] = {
        "kl": _bucket_kl(logprobs, rows),
        "kl_full": 0.0,
        "agree": (top1 == rows.topk_ids[:, 0]).sum().item(),
        "nll": -logprobs[known].gather(1, labels[known, None]).double().sum().item(),
        "labelled": int(known.sum()),
        "calibration": _calibration(confidence[known].exp(), top1[known] == labels[known]),
    }
    if teacher_logits is not None:
        theirs = teacher_logits[part, :vocab_size].log_softmax(dim=1)
        values["kl_full"] = (theirs.exp() * (theirs - logprobs)).double().sum().item()
    return values


def _bucket_kl(logprobs: torch.Tensor, rows: TeacherRows) -> float:
    """Sum over rows of KL over the K+1 outcomes, spelled out from full log-probabilities [N, V]."""
    ids = rows.topk_ids.long()
    outside = logprobs.scatter(1, ids, float("-inf")).logsumexp(dim=1)
    q = torch.cat([logprobs.gather(1, ids), outside[:, None]], dim=1).double()
    p = torch.cat([rows.topk_logprobs, rows.tail_logprob[:, None]], dim=1).double().log_softmax(dim=1)
    return (p.exp() * (p - q)).sum().item()


def _calibration(confidence: torch.Tensor, correct: torch.Tensor) -> torch.Tensor:
    """float64 [3, ECE_BINS] on the CPU: rows, summed confidence and summed correctness per bin of confidence."""
    bins = (confidence * ECE_BINS).long().clamp(0, ECE_BINS - 1).cpu()
    out = torch.zeros(3, ECE_BINS, dtype=torch.float64)
    for row, value in enumerate((torch.ones_like(confidence), confidence, correct)):
        out[row].index_add_(0, bins, value.double().cpu())
    return out


def _expected_calibration_error(calibration: torch.Tensor) -> float:
    count, confidence, correct = calibration
    return ((confidence - correct).abs().sum() / count.sum().clamp_min(1)).item()
