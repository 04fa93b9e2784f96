"""Make records that look like a teacher's, for tests and benchmarks: valid in every invariant, millions of rows a minute."""

from __future__ import annotations

import hashlib

import numpy as np

from teachercache.format.record import Record, tail_from_logprobs
from teachercache.format.spec import CacheSpec, TeacherSpec, TokenizerSpec


def synthetic_spec(
    *, vocab_size: int = 1000, top_k: int = 8, name: str = "synthetic", engine: str = "synthetic"
) -> CacheSpec:
    """Return a spec whose digests are hashes of `name`, of no real files."""

    def digest(what: str) -> str:
        return hashlib.sha256(f"{name}/{what}".encode()).hexdigest()

    return CacheSpec(
        teacher=TeacherSpec(
            name=name, weights_digest=digest("weights"), config_digest=digest("config"), dtype="float32", engine=engine,
            head_dtype="float32",
        ),
        tokenizer=TokenizerSpec(digest=digest("tokenizer"), vocab_size=vocab_size, bos_id=1, eos_id=2, pad_id=0),
        top_k=top_k,
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
        raise ValueError(f"top_k {k} exceeds the vocabulary {vocab}")
    scores = -np.sort(rng.exponential(2.5, size=(n, k)).astype(np.float32), axis=1)
    scores -= np.log(np.arange(1, k + 1, dtype=np.float32))
    covered = rng.uniform(0.6, 0.999, size=(n, 1)).astype(np.float32)
    logprobs = scores - np.log(np.exp(scores).sum(1, keepdims=True)) + np.log(covered)
    # One id from each of K equal stretches of the vocabulary, in random order: distinct without a loop.
    stretch = vocab // k
    order = rng.permuted(np.broadcast_to(np.arange(k, dtype=np.int32), (n, k)), axis=1)
    ids = order * stretch + rng.integers(0, stretch, size=(n, k), dtype=np.int32)
    target = np.where(rng.random(n) < 0.9, logprobs[:, 0], np.nan).astype(np.float32)
    mask = np.ones(n, dtype=bool)
    mask[-1] = False
    return Record(
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
        meta={"licence": "CC0"},
    )


def synthetic_records(
    spec: CacheSpec, count: int, *, seed: int = 0, prefix: str = "doc", **options: object
) -> list[Record]:
    """Return `count` records with ids prefix-00000 and up; the same seed gives the same records."""
    rng = np.random.default_rng(seed)
    return [synthetic_record(rng, spec, f"{prefix}-{i:05d}", **options) for i in range(count)]  # type: ignore[arg-type]
