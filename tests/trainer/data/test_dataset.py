"""Batches hold exactly the cache's rows at the right places, and a resumed stream continues with the next batch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import teachercache
from teachercache.errors import TeacherCacheError, UsageError
from teachercache.parquet.datafile import DataFile
from teachercache.testing import synthetic_records
from tests.trainer import tiny
from trainer.data import PackedCache, PackedSequence, dataset, lengths
from trainer.data.lengths import describe_lengths


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
    tokens = [len(record.input_ids) for record in cache.records(split="train")]
    long = sum(length > 32 for length in tokens)
    *_, (_, state) = PackedCache(cache, seq_len=32, long_documents="truncate").with_states()
    counts = PackedCache.counts_of(state)
    rows = sum(int(record.loss_mask[record.row_pos >= 32].sum()) for record in cache.records(split="train"))
    assert counts.rows_cut == rows
    assert counts.truncated_documents == long
    assert counts.tokens_trained == sum(min(length, 32) for length in tokens)
    assert counts.tokens_done == sum(tokens)
    *_, (_, state) = PackedCache(cache, seq_len=32, long_documents="drop").with_states()
    assert PackedCache.counts_of(state).dropped_documents == long
    with pytest.raises(TeacherCacheError, match=r"document doc-\d+ .* more than data.seq_len = 32"):
        list(PackedCache(cache, seq_len=32, long_documents="refuse"))


def rows_of(sequences: Iterable[PackedSequence]) -> list[tuple[str, bytes, int]]:
    """Every row: its document, its numbers and its label. Rows of the tests' documents are all different."""
    found = []
    for sequence in sequences:
        borders = np.cumsum(sequence.document_lengths)
        for i, position in enumerate(sequence.row_index.tolist()):
            doc_id, _ = sequence.documents[int(np.searchsorted(borders, position, side="right"))]
            found.append((doc_id, sequence.topk_logprobs[i].numpy().tobytes(), int(sequence.labels[i])))
    return sorted(found)


@pytest.mark.parametrize("seq_len", [2, 7, 16, 33])
def test_pieces_of_long_documents_hold_every_row_once_with_context_and_label(
    cache: teachercache.Cache, seq_len: int
) -> None:
    """The naive twin reads whole documents: every row of it is there, and its label is the document's next token."""
    options = {"seq_len": seq_len, "block_sequences": 40}
    whole = rows_of(PackedCache(cache, seq_len=128))
    pieces = list(PackedCache(cache, **options))
    assert rows_of(pieces) == whole
    lengths = [len(record.input_ids) for record in cache.records(split="train")]
    *_, (_, state) = PackedCache(cache, **options).with_states()
    counts = PackedCache.counts_of(state)
    assert counts.split_documents == sum(length > seq_len for length in lengths)
    assert counts.tokens_done + counts.tokens_pending == counts.tokens_read == sum(lengths)
    assert counts.rows_cut == 0
    records = {record.doc_id: record for record in cache.records(split="train")}
    later = 0
    for sequence in pieces:
        start = 0
        for (doc_id, _), length in zip(sequence.documents, sequence.document_lengths, strict=True):
            assert length <= seq_len
            ids = sequence.input_ids[start : start + length].tolist()
            inside = (sequence.row_index >= start) & (sequence.row_index < start + length)
            first = int(sequence.row_index[inside].min()) - start
            record = records[doc_id].input_ids.tolist()
            # A row is known by its numbers, which tokens that repeat may share.
            row = sequence.topk_logprobs[inside][0].numpy()
            positions = np.flatnonzero((records[doc_id].topk_logprobs == row).all(axis=1)).tolist()
            begins = [p - first for p in positions if record[p - first : p - first + length] == ids]
            assert begins
            if min(begins) > 0:
                later += 1
                assert first == seq_len // 8
            start += length
    assert later > 0


def test_resuming_between_the_pieces_of_a_document_continues_with_the_next(cache: teachercache.Cache) -> None:
    options = {"seq_len": 16, "block_sequences": 3, "blocks_per_flush": 2, "epochs": 2}
    pairs = list(PackedCache(cache, **options).with_states())
    for index in range(0, len(pairs), 17):
        rest = list(PackedCache(cache, **options, state=json.loads(json.dumps(pairs[index][1]))))
        assert all(same(a, b) for a, (b, _) in zip(rest, pairs[index + 1 :], strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_one_order_and_any_number_of_them_continues_it(cache: teachercache.Cache, world_size: int) -> None:
    options = {"seq_len": 64, "epochs": 2, "block_sequences": 3, "blocks_per_flush": 2}
    whole = list(PackedCache(cache, **options))
    ranks = [
        list(PackedCache(cache, **options, rank=r, world_size=world_size).with_states()) for r in range(world_size)
    ]
    for rank, pairs in enumerate(ranks):
        assert all(same(a, b) for (a, _), b in zip(pairs, whole[rank::world_size], strict=True))
    for turn in (0, 3, len(ranks[-1]) - 1):
        states = [pairs[turn][1] for pairs in ranks]
        assert all(state == states[0] for state in states)
        for others in (1, 2):
            rest = [
                list(PackedCache(cache, **options, rank=r, world_size=others, state=states[0])) for r in range(others)
            ]
            for rank, sequences in enumerate(rest):
                expected = whole[(turn + 1) * world_size :][rank::others]
                assert all(same(a, b) for a, b in zip(sequences, expected, strict=True))
    with pytest.raises(UsageError, match="rank 2 must lie in"):
        PackedCache(cache, rank=2, world_size=2)


def test_a_rank_reads_rows_and_builds_tensors_of_its_own_sequences_alone(
    tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record is a row group here, and every second one two pieces of a long document."""
    writer = teachercache.create(str(tmp_path / "cache"), tiny.spec_for(teacher), tokenizer_files=teacher, probe=False)
    writer.rows_per_group = 1
    spec = tiny.spec_for(teacher)
    records = [record for n in (60, 90) for record in synthetic_records(spec, 12, prefix=f"n{n}", length=n)]
    writer.commit("s", records)
    writer.publish(allow_partial=True)
    cache = teachercache.open(str(tmp_path / "cache"))
    options = {"seq_len": 64, "epochs": 1, "block_sequences": 3, "blocks_per_flush": 2}
    whole = list(PackedCache(cache, **options))
    read, built = [], []
    read_group, pack = DataFile.read_group, dataset.pack_records

    def counting(file: DataFile, i: int, columns: set[str] | None = None, **more: Any) -> Any:
        if columns is None or "topk_ids" in columns:
            read.append(i)
        return read_group(file, i, columns, **more)

    monkeypatch.setattr(DataFile, "read_group", counting)
    monkeypatch.setattr(dataset, "pack_records", lambda *a, **k: built.append(1) or pack(*a, **k))
    groups_of_rank = []
    for rank in range(3):
        ours = list(PackedCache(cache, **options, rank=rank, world_size=3))
        assert all(same(a, b) for a, b in zip(ours, whole[rank::3], strict=True))
        assert len(built) == len(ours)
        assert sorted(set(read)) == sorted(read)  # none twice
        groups_of_rank.append({name for sequence in ours for name in sequence.documents})
        assert len(read) == len(groups_of_rank[-1])
        read.clear(), built.clear()
    assert len(set.union(*groups_of_rank)) == len(records)
    assert all(len(found) < len(records) * 2 / 3 for found in groups_of_rank)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_of_a_dataloader_share_the_sequences_in_order(cache: teachercache.Cache, workers: int) -> None:
    """Every row once, in the order without workers, and each sequence knows where to continue."""
    options = {"seq_len": 64, "block_sequences": 3, "blocks_per_flush": 2}
    expected = list(PackedCache(cache, **options))
    packed = PackedCache(cache, **options)
    found = list(DataLoader(packed, batch_size=None, num_workers=workers))
    assert rows_of(found) == rows_of(expected)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    if workers:
        with pytest.raises(UsageError, match=r"sequence\.state"):
            packed.state()
    middle = len(found) // 2
    rest = PackedCache(cache, **options, state=found[middle].state)
    assert all(same(a, b) for a, b in zip(rest, expected[middle + 1 :], strict=True))
    assert found[middle].state == expected[middle].state


def test_what_becomes_of_long_documents_is_said_beforehand(
    cache: teachercache.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = list(cache.records(split="train"))
    long = [record for record in records if len(record.input_ids) > 32]
    rows = sum(int(record.loss_mask.sum()) for record in records)
    share = f"{len(long) / len(records):.1%} of the records are longer than data.seq_len = 32"
    cut = sum(int(record.loss_mask[record.row_pos >= 32].sum()) for record in long)
    dropped = sum(int(record.loss_mask.sum()) for record in long)
    said = {mode: describe_lengths(cache, "train", 32, mode) for mode in ("split", "truncate", "drop", "refuse")}
    assert all(f"data: {len(records)} records" in line and share in line for line in said.values())
    assert said["split"].endswith("split into pieces, every row used, each with 4 tokens of context or more")
    assert said["truncate"].endswith(f"with {cut / rows:.1%} of the rows")
    assert said["drop"].endswith(f"with {dropped / rows:.1%} of the rows")
    assert "none of them is longer than data.seq_len = 128" in describe_lengths(cache, "train", 128, "split")
    monkeypatch.setattr(lengths, "SAMPLED_GROUPS", 1)
    line = describe_lengths(cache, "train", 32, "truncate")
    assert "about " in line
    assert line.endswith(f"by 1 of {sum(f.row_groups for f in cache.files(split='train'))} row groups")


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
