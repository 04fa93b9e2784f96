"""Evaluation of a student: against a cache, against a live teacher if there is one, on a plain text.

`heldout_kl` is what the cache alone says, and comparable between all students of one cache. Of a top-K cache it is the KL
over K+1 outcomes (the cached K and "anything else"), never above the full-vocabulary KL. Of a sampled cache it is an
unbiased estimate of the full-vocabulary KL, with the standard error that its draws have: how far the figure on the same
rows by a live teacher may be. `heldout_kl_full_vocabulary` needs a live teacher. All are means over rows, in nats.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from teachercache import Cache
from teachercache.errors import TeacherCacheError, UsageError
from trainer import setup
from trainer.checkpoint import resolve_model_folder
from trainer.config import TrainerConfig
from trainer.data.dataset import PackedCache
from trainer.data.sequence import NO_LABEL, PackedSequence, no_rows
from trainer.losses import TeacherRows
from trainer.model import Model, parallel, student
from trainer.model.attention import DocumentLayout

ECE_BINS = 15
CHUNK_ROWS = 512
"""Rows of full logits that live at a time."""


def heldout_sequences(
    cache: Cache, split: str, seq_len: int, max_rows: int | None, *, pad: bool = False
) -> Iterable[PackedSequence]:
    """Iterate over a split once, unshuffled, until max_rows rows were seen: the same sequences every time.

    Of several ranks each takes its share of them; all take equally many steps, some on a sequence without rows.
    """
    rows, rank = 0, parallel.rank()
    ours = iter(
        PackedCache(
            cache,
            split=split,
            seq_len=seq_len,
            shuffle=False,
            epochs=1,
            pad=pad,
            rank=rank,
            world_size=parallel.count(),
        )
    )
    while True:
        sequence = next(ours, None)
        counts = parallel.gathered(-1 if sequence is None else sequence.num_rows)
        if max(counts) < 0:
            return
        before = rows + sum(max(0, count) for count in counts[:rank])
        if sequence is None or (max_rows is not None and before >= max_rows):
            sequence = no_rows(cache.spec.rows, seq_len if pad else 2)
        yield sequence
        rows += sum(max(0, count) for count in counts)
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
) -> dict[str, Any]:
    """Return means over all valid rows: KL, top-1 agreement, perplexity, calibration error.

    The model's mode is restored. Raises TeacherCacheError when there is no row. Memory: CHUNK_ROWS · V · 4 bytes of
    logits a few times over; with a teacher, R · V · 4 bytes for a sequence's rows.
    """
    device = next(model.parameters()).device
    sums: Counter[str] = Counter()
    calibration = torch.zeros(3, ECE_BINS, dtype=torch.float64)  # rows, confidence and correctness, summed in each bin
    was_training, started = model.training, time.monotonic()
    model.eval()

    def measure(sequence: PackedSequence) -> None:
        layout = DocumentLayout(sequence.document_lengths, attention_kind, device)
        where = (sequence.input_ids, sequence.position_ids)
        hidden = student.hidden_states(model, *where, layout).index_select(0, sequence.row_index)
        theirs = student.row_logits(teacher, *where, sequence.row_index, layout) if teacher is not None else None
        student.at_head(model, partial(add, sequence, theirs), hidden)

    def add(sequence: PackedSequence, theirs: Tensor | None, head: student.Head, hidden: Tensor) -> None:
        for start in range(0, sequence.num_rows, CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            rows = sequence.teacher_rows(part)
            logprobs = head.logits(hidden[part])[:, :vocab_size].log_softmax(dim=1)
            sums.update(_sums(logprobs, rows, sequence.labels[part], calibration))
            if theirs is not None:
                teacher_logprobs = theirs[part, :vocab_size].log_softmax(dim=1)
                full = (teacher_logprobs.exp() * (teacher_logprobs - logprobs)).double().sum().item()
                sums.update({"kl_full": full})

    for sequence in sequences:
        parallel.inside(model, measure, sequence.to(device))
    parallel.settle(model)
    model.train(was_training)
    of_ranks, sums = parallel.gathered((sums, calibration)), Counter()
    for each, _ in of_ranks:
        sums.update(each)
    count, confidence, correct = torch.stack([each for _, each in of_ranks]).sum(dim=0)
    if sums["rows"] == 0:
        raise TeacherCacheError("nothing to evaluate: the split has no valid row")
    sampled = sums["drawn_rows"] > 0
    error = _standard_error(sums) if sampled else None
    result: dict[str, Any] = {
        "heldout_kl": sums["kl"] / sums["rows"],
        "heldout_kl_kind": "full vocabulary (sampled rows)" if sampled else "K+1 outcomes (bucket)",
        **({} if error is None else {"heldout_kl_standard_error": error}),
        "top1_agreement": sums["agree"] / sums["rows"],
        "perplexity": math.exp(min(sums["nll"] / max(sums["labelled"], 1), 700.0)),
        "ece": ((confidence - correct).abs().sum() / count.sum().clamp_min(1)).item(),
        "rows": sums["rows"],
        "seconds": time.monotonic() - started,
    }
    if teacher is not None:
        result["heldout_kl_full_vocabulary"] = sums["kl_full"] / sums["rows"]
    return result


def _sums(logprobs: Tensor, rows: TeacherRows, labels: Tensor, calibration: Tensor) -> dict[str, float]:
    """Return sums over rows of a chunk, from the student's log-probabilities [N, V]; adds to `calibration`."""
    confidence, top1 = logprobs.max(dim=1)
    known = labels != NO_LABEL
    confidence, correct = confidence[known].exp(), top1[known] == labels[known]
    bins = (confidence * ECE_BINS).long().clamp(0, ECE_BINS - 1).cpu()
    for row, value in enumerate((torch.ones_like(confidence), confidence, correct)):
        calibration[row].index_add_(0, bins, value.double().cpu())
    return {
        "rows": len(labels),
        **({"kl": _bucket_kl(logprobs, rows)} if rows.exact is None else _sampled_kl(logprobs, rows)),
        "agree": (top1 == rows.topk_ids[:, 0]).sum().item(),
        "nll": -logprobs[known].gather(1, labels[known, None]).double().sum().item(),
        "labelled": int(known.sum()),
    }


def _bucket_kl(logprobs: Tensor, rows: TeacherRows) -> float:
    """Sum over rows of KL over the K+1 outcomes, spelled out from full log-probabilities [N, V]."""
    ids = rows.topk_ids.long()
    outside = logprobs.scatter(1, ids, float("-inf")).logsumexp(dim=1)
    q = torch.cat([logprobs.gather(1, ids), outside[:, None]], dim=1).double()
    p = torch.cat([rows.topk_logprobs, rows.tail_logprob[:, None]], dim=1).double().log_softmax(dim=1)
    return (p.exp() * (p - q)).sum().item()


def _sampled_kl(logprobs: Tensor, rows: TeacherRows) -> dict[str, float]:
    """Return the sum over rows of -H(p) - sum p^ log q, and sums from which `_standard_error` has the draws' variance.

    A row's m drawn entries estimate the part of the tail by mass * mean(log q). Its variance is at most about
    mass^2 * var(log q) / m, with the variance over the drawn entries. For rows with one such entry it is pooled: within
    other rows, and between such entries of different rows. Systematic draws are a little better than that.
    """
    assert rows.exact is not None
    estimate, constant = rows.estimate(torch.float64)
    q = logprobs.gather(1, rows.topk_ids.long()).double()
    p = estimate.topk_logprobs.exp()
    kl = (p * (estimate.topk_logprobs - q)).sum(dim=1) + constant
    count = rows.top_k - rows.exact.long()
    drawn = torch.arange(rows.top_k, device=q.device) >= rows.exact[:, None]
    mean = (q * drawn).sum(dim=1) / count.clamp_min(1)
    squares = ((q - mean[:, None]).square() * drawn).sum(dim=1)
    weight = rows.tail_logprob.double().exp().square() / count.clamp_min(1)
    several, single = count > 1, count == 1
    sums = {
        "kl": kl,
        "drawn_rows": torch.ones_like(kl),
        "variance": torch.where(several, weight * squares / (count - 1).clamp_min(1), 0.0),
        "squares": torch.where(several, squares, 0.0),
        "freedom": torch.where(several, count - 1, 0),
        "single": torch.where(single, weight, 0.0),
        "singles": single,
        "single_q": torch.where(single, mean, 0.0),
        "single_squares": torch.where(single, mean.square(), 0.0),
    }
    return {name: value.sum().item() for name, value in sums.items()}


def _standard_error(sums: Mapping[str, float]) -> float | None:
    """Return the standard error that the draws leave.

    None of a single drawn entry, which says nothing of the others, and of rows without one, as mean rows are.
    """
    count = max(sums["singles"], 1.0)
    between = max(sums["single_squares"] - sums["single_q"] ** 2 / count, 0.0)
    freedom = sums["freedom"] + count - 1
    if not freedom:
        return None
    pooled = (sums["squares"] + between) / max(freedom, 1.0)
    return math.sqrt(sums["variance"] + pooled * sums["single"]) / sums["rows"]


def evaluate_cache(config: TrainerConfig, split: str) -> dict[str, Any]:
    """Evaluate `config.student` on one split of the configured caches, against `config.teacher` too where it is set.

    Nothing is written. Raises UsageError where a cache does not fit the student or lacks the split, and under torchrun.
    """
    parallel.refuse_several("eval")
    compute = setup.choose_compute(config.train)
    setup.configure_torch(config.train)
    folder = resolve_model_folder(config.student)
    caches = setup.open_caches(config)
    student.check_fits(folder, caches[0])
    for cache in caches:
        setup.check_split(cache, split, "split")
    model = setup.load_frozen(folder, compute, trust_remote_code=config.trust_remote_code)
    teacher = setup.load_teacher(config, compute, caches[0]) if config.teacher else None
    where: dict[str, Any] = {"student": str(folder)}
    for entry, cache in zip(config.caches, caches, strict=True):
        where |= {f"cache{entry.suffix}": cache.url, f"manifest{entry.suffix}": cache.manifest.number}
    return where | {"split": split} | evaluate_caches(model, caches, config, split, compute, teacher=teacher)


def evaluate_caches(
    model: Model,
    caches: Sequence[Cache],
    config: TrainerConfig,
    split: str,
    compute: setup.Compute,
    *,
    teacher: Model | None = None,
    only: Callable[[Iterable[PackedSequence]], Iterable[PackedSequence]] = iter,
) -> dict[str, Any]:
    """Evaluate on one split of each of a run's caches, whose `only` says which sequences.

    Of `data.caches`, each figure's name ends in the cache's, as in `heldout_kl/web`. `heldout_kl` is then their mean by
    weight: comparable between students of the same mixture.
    """
    results = []
    for cache in caches:
        sequences = heldout_sequences(cache, split, config.data.seq_len, config.eval.max_rows, pad=compute.on_gpu)
        results.append(
            evaluate(
                model,
                only(sequences),
                vocab_size=cache.spec.tokenizer.vocab_size,
                attention_kind=compute.attention,
                teacher=teacher,
            )
        )
    entries = config.caches
    if not entries[0].suffix:
        return results[0]
    found = {f"{k}{entry.suffix}": v for entry, each in zip(entries, results, strict=True) for k, v in each.items()}
    mean = sum(entry.weight * each["heldout_kl"] for entry, each in zip(entries, results, strict=True))
    return {
        "heldout_kl": mean / sum(entry.weight for entry in entries),
        "heldout_kl_kind": "mean of the caches by weight",
        "rows": sum(each["rows"] for each in results),
        "seconds": sum(each["seconds"] for each in results),
        **found,
    }


@torch.no_grad()
def evaluate_text(config: TrainerConfig, path: Path) -> dict[str, Any]:
    """Return the perplexity of a UTF-8 file, in windows of data.seq_len tokens; UsageError where it is unreadable."""
    compute = setup.choose_compute(config.train)
    folder = resolve_model_folder(config.student)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path} as UTF-8 text: {error}") from error
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    if len(ids) < 2:
        raise TeacherCacheError(f"{path} has {len(ids)} tokens; expected at least two")
    model = setup.load_frozen(folder, compute, trust_remote_code=config.trust_remote_code)
    head, nll = student.head(model), 0.0
    for start in range(0, len(ids) - 1, config.data.seq_len):
        window = torch.tensor(ids[start : start + config.data.seq_len + 1], device=compute.device)
        inputs, labels = window[:-1], window[1:]
        layout = DocumentLayout((len(inputs),), compute.attention, compute.device)
        hidden = student.hidden_states(model, inputs, torch.arange(len(inputs), device=compute.device), layout)
        for part_hidden, part_labels in zip(hidden.split(CHUNK_ROWS), labels.split(CHUNK_ROWS), strict=True):
            logprobs = head.logits(part_hidden).log_softmax(dim=1)
            nll -= logprobs.gather(1, part_labels[:, None]).double().sum().item()
    count = len(ids) - 1
    return {"student": str(folder), "text": str(path), "tokens": count, "perplexity": math.exp(nll / count)}
