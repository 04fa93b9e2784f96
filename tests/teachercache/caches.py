"""Small caches, damaged records and the identity of a folder, as several of these tests need them."""

from __future__ import annotations

import dataclasses
import multiprocessing

import numpy as np

import teachercache
from teachercache import fingerprint_config, fingerprint_tokenizer, fingerprint_weights
from teachercache.format.spec import CacheSpec, TeacherSpec
from teachercache.testing import synthetic_records, synthetic_spec

SPEC = synthetic_spec()


def writer_with(url, shards, per_shard=4):
    writer = teachercache.create(url, SPEC)
    for i in shards:
        writer.commit(f"s{i}", synthetic_records(SPEC, per_shard, seed=i, prefix=f"s{i}"))
    writer.publish()
    return writer


def make(url, count: int = 5, **options) -> teachercache.Cache:
    writer = teachercache.CacheWriter(teachercache.create(url, SPEC, probe=False).store, SPEC, **options)
    writer.commit("s", synthetic_records(SPEC, count))
    writer.publish()
    return teachercache.open(url)


def in_a_fork(work):
    """What `work` returns, or its error, in a child that shares this process's memory, threads excepted."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        try:
            theirs.send(work())
        except Exception as error:
            theirs.send(error)

    process = context.Process(target=child)
    process.start()
    try:
        assert ours.poll(30), "the child hangs"
        return ours.recv()
    finally:
        process.kill()
        process.join()


def spec_of(folder, top_k=8) -> CacheSpec:
    return CacheSpec(
        teacher=TeacherSpec(
            name="t", weights_digest=fingerprint_weights(folder), config_digest=fingerprint_config(folder), dtype="float32",
            engine="hf", head_dtype="float32",
        ),
        tokenizer=fingerprint_tokenizer(folder),
        top_k=top_k,
    )  # fmt: skip


def swap_rows(record):
    logprobs = record.topk_logprobs.copy()
    logprobs[0, [0, -1]] = logprobs[0, [-1, 0]]
    return dataclasses.replace(record, topk_logprobs=logprobs)


def too_much_mass(record):
    logprobs = record.topk_logprobs.copy()
    logprobs[0, :2] = np.log(np.float32(0.6))
    return dataclasses.replace(record, topk_logprobs=logprobs)


def one_nan(record):
    tail = record.tail_logprob.copy()
    tail[0] = np.nan
    return dataclasses.replace(record, tail_logprob=tail)


def one_topk_nan(record):
    logprobs = record.topk_logprobs.copy()
    logprobs[0, 3] = np.nan
    return dataclasses.replace(record, topk_logprobs=logprobs)


def id_too_large(record):
    ids = record.topk_ids.copy()
    ids[0, 0] = SPEC.tokenizer.vocab_size
    return dataclasses.replace(record, topk_ids=ids)
