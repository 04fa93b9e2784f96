"""Small caches, damaged records and the identity of a folder, as several of these tests need them."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import multiprocessing

import numpy as np

import teachercache
from teachercache import fingerprint_config, fingerprint_tokenizer, fingerprint_weights
from teachercache.format import layout
from teachercache.format.spec import CacheSpec, TeacherSpec, TopKRows, canonical_json
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
        rows=TopKRows(entries=top_k),
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


def sealed(body: bytes) -> bytes:
    """Return an object with a valid seal over any body."""
    return body[:-1] + b',"seal":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def write_sealed(path, body: bytes) -> None:
    """Write an object with a valid seal over any body."""
    path.write_bytes(sealed(body))


def craft(cache, change) -> None:
    """A manifest with a valid seal and whatever `change` does to its JSON."""
    path = cache / layout.manifest_path(1)
    value = json.loads(path.read_bytes())
    value.pop("seal")
    change(value)
    write_sealed(path, canonical_json(value))


def names(stream, count=None):
    with stream:
        return [record.doc_id for record in itertools.islice(stream, count)]


SHARDS, PER_SHARD = 5, 23  # of `streamed`


def streamed(url) -> teachercache.Cache:
    """Make a cache for streams: several row groups a file, and a held-out split of three records."""
    writer = teachercache.create(url, SPEC)
    writer.rows_per_group = 120  # several row groups a file
    for i in range(SHARDS):
        writer.commit(f"s{i}", synthetic_records(SPEC, PER_SHARD, seed=i, prefix=f"s{i}"))
    writer.commit("h", synthetic_records(SPEC, 3, seed=9, prefix="h", split="heldout"))
    writer.publish()
    return teachercache.open(url)


PAGE_SPEC = synthetic_spec(vocab_size=5000, top_k=100, name="<b>teacher & co</b>")


def page_cache(url) -> teachercache.Cache:
    """Make the cache that reports and exports show: two splits, drops, provenance, a name with markup."""
    writer = teachercache.create(url, PAGE_SPEC)
    provenance = {"shard_seconds": 2.0, "engine": "synthetic 1", "device": "cpu"}
    writer.commit(
        "a",
        synthetic_records(PAGE_SPEC, 40, seed=1, prefix="a"),
        drops={"too_long": 3, "empty": 1},
        provenance=provenance,
    )
    writer.commit("b", synthetic_records(PAGE_SPEC, 9, seed=2, prefix="b", split="heldout", source="web"))
    writer.publish()
    return teachercache.open(url)
