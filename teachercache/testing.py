"""Make records that look like a teacher's, for tests and benchmarks: valid in every invariant, millions of rows a minute."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from teachercache.format.record import (
    Float32Array,
    Record,
    as_float16,
    content_key,
    row_uniforms,
    tail_from_logprobs,
)
from teachercache.format.sampled import sample_row
from teachercache.format.spec import CacheSpec, Rows, SampledRows, TeacherSpec, TokenizerSpec, TopKRows


def synthetic_spec(
    *,
    vocab_size: int = 1000,
    top_k: int = 8,
    rows: Rows | None = None,
    name: str = "synthetic",
    engine: str = "synthetic",
) -> CacheSpec:
    """Return a spec whose digests are hashes of `name`, of no real files. `rows`: top-K of `top_k` by default."""

    def digest(what: str) -> str:
        return hashlib.sha256(f"{name}/{what}".encode()).hexdigest()

    return CacheSpec(
        teacher=TeacherSpec(
            name=name, weights_digest=digest("weights"), config_digest=digest("config"), dtype="float32", engine=engine,
            head_dtype="float32",
        ),
        tokenizer=TokenizerSpec(digest=digest("tokenizer"), vocab_size=vocab_size, bos_id=1, eos_id=2, pad_id=0),
        rows=rows or TopKRows(entries=top_k),
    )  # fmt: skip


def synthetic_record(
    rng: np.random.Generator,
    spec: CacheSpec,
    doc_id: str,
    *,
    length: int | None = None,
    split: str = "train",
    source: str = "default",
) -> Record:
    """Return one valid record of `length` tokens (default: 1 to 60), every position with a row."""
    n = int(rng.integers(1, 61)) if length is None else length
    k, vocab = spec.top_k, spec.tokenizer.vocab_size
    if k > vocab:
        raise ValueError(f"{k} entries exceed the vocabulary {vocab}")
    scores = -np.sort(rng.exponential(2.5, size=(n, k)).astype(np.float32), axis=1)
    scores -= np.log(np.arange(1, k + 1, dtype=np.float32))
    covered = rng.uniform(0.6, 0.999, size=(n, 1)).astype(np.float32)
    logprobs = scores - np.log(np.exp(scores).sum(1, keepdims=True)) + np.log(covered)
    # One id from each of K equal stretches of the vocabulary, in random order: distinct without a loop.
    stretch = vocab // k
    order = rng.permuted(np.broadcast_to(np.arange(k, dtype=np.int32), (n, k)), axis=1)
    ids = order * stretch + rng.integers(0, stretch, size=(n, k), dtype=np.int32)
    target = as_float16(np.where(rng.random(n) < 0.9, logprobs[:, 0], np.nan))
    mask = np.ones(n, dtype=bool)
    mask[-1] = False
    record = Record(
        doc_id=doc_id,
        split=split,
        source=source,
        input_ids=rng.integers(0, vocab, size=n, dtype=np.int32),
        row_pos=np.arange(n, dtype=np.int32),
        topk_ids=ids.astype(np.int32),
        topk_logprobs=logprobs.astype(np.float32),
        tail_logprob=tail_from_logprobs(logprobs),
        target_logprob=target,
        loss_mask=mask,
        entropy=as_float16(_entropy(logprobs, vocab)),
        meta={"licence": "CC0"},
    )
    if isinstance(spec.rows, SampledRows):
        return _drawn_from(record, spec, spec.rows)
    return record


def _entropy(logprobs: Float32Array, vocab: int) -> Float32Array:
    """Return the entropy [n] where the mass outside the K entries [n, K] is spread evenly."""
    rest = np.exp(tail_from_logprobs(logprobs))
    spread = -rest * np.log(rest / max(1, vocab - logprobs.shape[1]))
    total: Float32Array = spread - (np.exp(logprobs) * logprobs).sum(1)
    return total


def _drawn_from(record: Record, spec: CacheSpec, rows: SampledRows) -> Record:
    """Return the record with sampled rows: its top K, scaled to the whole mass, and three ids more that share a bit of it."""
    vocab, r, k = spec.tokenizer.vocab_size, len(record.row_pos), rows.entries
    key = content_key(spec.digest, record.input_ids, record.row_pos)
    u = row_uniforms(spec.digest, key, record.row_pos)
    ids, weights = np.empty((r, k), np.int32), np.empty((r, k), np.float32)
    exact, tail, entropy = np.empty(r, np.uint16), np.empty(r, np.float32), np.empty(r, np.float32)
    others = np.arange(min(vocab, k + 3), dtype=np.int32)
    for i in range(r):
        rest = np.setdiff1d(others, record.topk_ids[i])[: min(vocab - k, 3)]
        p = np.exp(record.topk_logprobs[i].astype(np.float64))
        p = np.concatenate([p, np.full(len(rest), 1e-3)])
        p /= p.sum()
        row = sample_row(np.concatenate([record.topk_ids[i], rest]), p, k, rows.exact, float(u[i]))
        ids[i], weights[i], exact[i], tail[i] = row.ids[0], row.logprobs, row.exact, row.tail
        entropy[i] = -(p * np.log(p)).sum()
    entropy = as_float16(entropy)
    return replace(record, topk_ids=ids, topk_logprobs=weights, exact=exact, tail_logprob=tail, entropy=entropy)


def synthetic_records(
    spec: CacheSpec, count: int, *, seed: int = 0, prefix: str = "doc", **options: object
) -> list[Record]:
    """Return `count` records with ids prefix-00000 and up; the same seed gives the same records."""
    rng = np.random.default_rng(seed)
    return [synthetic_record(rng, spec, f"{prefix}-{i:05d}", **options) for i in range(count)]  # type: ignore[arg-type]
