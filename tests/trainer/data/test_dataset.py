"""Batches hold exactly the cache's rows at the right places, and a resumed stream continues with the next batch."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
import pytest
import torch

import teachercache
from teachercache.errors import TeacherCacheError
from tests.trainer import tiny
from trainer.data import PackedCache, PackedSequence


def same(ours: PackedSequence, theirs: PackedSequence) -> bool:
    return ours.documents == theirs.documents and all(
        torch.equal(value, getattr(theirs, name)) for name, value in vars(ours).items() if torch.is_tensor(value)
    )


def names(sequences: Iterable[PackedSequence]) -> list[tuple[str, int]]:
    return [document for sequence in sequences for document in sequence.documents]


def test_every_row_of_every_document_arrives_once_with_its_own_numbers(cache: teachercache.Cache) -> None:
    records = {record.doc_id: record for record in cache.records(split="train")}
    seen = set()
    for sequence in PackedCache(cache, seq_len=128):
        start = 0
        row = 0
        for (doc_id, _window), length in zip(sequence.documents, sequence.document_lengths, strict=True):
            record = records[doc_id]
            assert doc_id not in seen
            seen.add(doc_id)
            assert sequence.input_ids[start : start + length].tolist() == record.input_ids.tolist()
            assert sequence.position_ids[start : start + length].tolist() == list(range(length))
            kept = np.flatnonzero(record.loss_mask)
            rows = slice(row, row + len(kept))
            assert sequence.row_index[rows].tolist() == (record.row_pos[kept] + start).tolist()
            assert np.array_equal(sequence.topk_ids[rows].numpy(), record.topk_ids[kept])
            assert np.array_equal(sequence.topk_logprobs[rows].numpy(), record.topk_logprobs[kept])
            assert sequence.labels[rows].tolist() == record.input_ids[record.row_pos[kept] + 1].tolist()
            start, row = start + length, row + len(kept)
        assert start == len(sequence.input_ids) <= 128
        assert row == sequence.num_rows
    assert seen == set(records)


def test_padding_is_a_separate_document_without_rows(cache: teachercache.Cache) -> None:
    for sequence in PackedCache(cache, seq_len=128, pad=True):
        assert len(sequence.input_ids) == 128 == sum(sequence.document_lengths)
        if sequence.num_padding:
            assert sequence.row_index.max() < 128 - sequence.num_padding


def test_the_same_seed_gives_the_same_batches_and_another_seed_others(cache: teachercache.Cache) -> None:
    first = list(PackedCache(cache, seq_len=128, seed=1))
    second = list(PackedCache(cache, seq_len=128, seed=1))
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    assert names(first) != names(PackedCache(cache, seq_len=128, seed=2))
    assert sorted(names(first)) == sorted(names(PackedCache(cache, seq_len=128, seed=2)))


def test_epochs_hold_the_same_documents_in_another_order(cache: teachercache.Cache) -> None:
    once = names(PackedCache(cache, seq_len=128, epochs=1))
    twice = names(PackedCache(cache, seq_len=128, epochs=2))
    assert twice[: len(once)] == once
    assert sorted(twice[len(once) :]) == sorted(once)
    assert twice[len(once) :] != once


@pytest.mark.parametrize("blocks_per_flush", [1, 2, 16])
def test_resuming_from_any_state_continues_with_the_next_batch(
    cache: teachercache.Cache, blocks_per_flush: int
) -> None:
    options = {"seq_len": 128, "epochs": 2, "block_sequences": 2, "blocks_per_flush": blocks_per_flush}
    pairs = list(PackedCache(cache, **options).with_states())
    assert len(pairs) > 15
    for index in range(0, len(pairs), 3):
        state = json.loads(json.dumps(pairs[index][1]))
        rest = list(PackedCache(cache, **options, state=state).with_states())
        assert len(rest) == len(pairs) - index - 1
        for (ours, our_state), (theirs, their_state) in zip(rest, pairs[index + 1 :], strict=True):
            assert same(ours, theirs)
            assert our_state == their_state


def test_a_state_of_another_run_is_refused(cache: teachercache.Cache) -> None:
    state = next(iter(PackedCache(cache, seq_len=128).with_states()))[1]
    with pytest.raises(TeacherCacheError, match="split train, this run has heldout"):
        PackedCache(cache, split="heldout", seq_len=128, state=state)
    with pytest.raises(TeacherCacheError, match="seed"):
        PackedCache(cache, seq_len=128, seed=5, state=state)


def test_long_documents_are_truncated_dropped_or_refused_and_counted(cache: teachercache.Cache) -> None:
    lengths = [len(record.input_ids) for record in cache.records(split="train")]
    long = sum(length > 32 for length in lengths)
    *_, (_, state) = PackedCache(cache, seq_len=32, long_documents="truncate").with_states()
    counts = PackedCache.counts_of(state)
    assert counts.truncated_documents == long
    assert counts.tokens_trained == sum(min(length, 32) for length in lengths)
    assert counts.tokens_done == sum(lengths)
    *_, (_, state) = PackedCache(cache, seq_len=32, long_documents="drop").with_states()
    assert PackedCache.counts_of(state).dropped_documents == long
    with pytest.raises(TeacherCacheError, match=r"document doc-\d+ .* more than data.seq_len = 32"):
        list(PackedCache(cache, seq_len=32, long_documents="refuse"))


def test_sources_are_mixed_by_weight(tmp_path, teacher) -> None:
    import dataclasses

    spec = tiny.spec_for(teacher)
    writer = teachercache.create(str(tmp_path / "cache"), spec, tokenizer_files=teacher, probe=False)
    from teachercache.testing import synthetic_records

    for source in ("web", "code"):
        made = synthetic_records(spec, 200, prefix=source, length=10, seed=len(source), source=source)
        writer.commit(source, [dataclasses.replace(record) for record in made])
    writer.publish(allow_partial=True)
    cache = teachercache.open(str(tmp_path / "cache"))
    found = names(PackedCache(cache, seq_len=64, weights={"web": 1.0, "code": 0.25}))
    web, code = (sum(name.startswith(source) for name, _ in found) for source in ("web", "code"))
    assert web == 200
    assert 30 <= code <= 70
