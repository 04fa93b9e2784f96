"""Data files that were made to harm their reader: bombs, other types, values out of range, names mixed up."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import teachercache
from teachercache.cli import main
from teachercache.errors import CorruptFile, InvalidRecord, TeacherCacheError, UnsafeManifest
from teachercache.parquet.bounds import MAX_FOOTER_BYTES, check_column_chunks, check_pages, chunks_of
from teachercache.testing import synthetic_records
from teachercache.upkeep.verify import verify
from tests.teachercache.caches import SPEC, craft, make
from tests.teachercache.hostile import craft_file, data_file, reseal, with_column, write_table

READERS = {
    "records": "list(teachercache.open({root!r}).records())",
    "stream": "next(iter(teachercache.open({root!r}).stream(repeat=False)))",
    "verify": "sys.exit(0 if any(p.code == 'TC-E205' for p in verify(Store.open({root!r}), "
    "teachercache.open({root!r}).spec).problems) else 7)",
}


def run_in_a_gibibyte(root, what: str) -> str:
    """Return the code of the error in which a reader ends that may use 1 GiB more than its own libraries take."""
    code = (
        "import resource, sys, teachercache\n"
        "import teachercache.upkeep.optimize, pyarrow.parquet\n"
        "from teachercache.errors import TeacherCacheError\n"
        "from teachercache.upkeep.verify import verify\n"
        "from teachercache.store.store import Store\n"
        "now = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (now + 2**30 + 2**28,) * 2)\n"  # 256 MiB: stacks of threads, arenas
        f"try:\n    {READERS[what].format(root=str(root))}\n"
        "except TeacherCacheError as error:\n    print(error.code)\n"
        "except SystemExit as error:\n    print('TC-E205' if error.code == 0 else 'ok')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def bomb_of_tokens(root) -> None:
    """One record of 110 million zeros, in a file of 9 KB."""
    n = 110_000_000
    ids = pa.ListArray.from_arrays(pa.array([0, n], pa.int32()), pa.array(np.zeros(n, np.int32)))
    craft_file(
        root, with_column("input_ids", lambda _: ids), count=1, entry={"tokens": n}, use_dictionary=["input_ids"]
    )
    assert data_file(root).stat().st_size < 60_000


def bomb_of_text(root) -> None:
    """6,000 records that share one string of 1 MiB, in a file of 30 KB."""
    make(root, 1)
    path, before = data_file(root), teachercache.open(root).manifest
    table = pa.concat_tables([pq.read_table(path)] * 6000).combine_chunks()
    table = with_column("doc_id", lambda _: pa.array([f"d{i}" for i in range(6000)]))(table)
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(6000, np.int32)), pa.array(["x" * 2**20]))
    claimed = table.schema.append(pa.field("meta_x", pa.string()))
    write_table(path, table.append_column("meta_x", text), claimed=claimed)
    assert path.stat().st_size < 2**20
    many = {"tokens": 6000 * before.tokens, "rows": 6000 * before.rows}
    reseal(root, path, records=6000, documents=6000, row_groups=1, **many)


def bomb_of_nulls(root) -> None:
    """Six million records of nothing."""
    n = 6_000_000

    def change(table):
        return pa.table([pa.nulls(n, field.type) for field in table.schema], schema=table.schema)

    craft_file(root, change, count=1, entry={"records": n, "documents": n})


@pytest.mark.parametrize("bomb", [bomb_of_tokens, bomb_of_text, bomb_of_nulls])
def test_a_small_file_that_expands_without_end_is_refused_within_a_gibibyte(tmp_path, bomb):
    """B6: each was a MemoryError, or the OOM killer, in every reader."""
    bomb(tmp_path / "cache")
    for reader in READERS:
        assert run_in_a_gibibyte(tmp_path / "cache", reader) == "TC-E205", reader


def read(root) -> list:
    return list(teachercache.open(root).records())


def problems_of(root) -> list[str]:
    cache = teachercache.open(root)
    return [f"{p.code} {p.message}" for p in verify(cache.store, cache.spec).problems]


def cast_values(name: str, value: pa.DataType):
    return with_column(name, lambda table: table[name].cast(pa.list_(value)))


STRUCT = pa.array([{"a": 1}] * 3)
TYPES = {
    "float ids": (cast_values("input_ids", pa.float32()), "open", "input_ids must be list<int32>, found list<float>"),
    "int64 ids": (cast_values("input_ids", pa.int64()), "open", "input_ids must be list<int32>, found list<int64>"),
    "int mask": (cast_values("loss_mask", pa.int32()), "open", "loss_mask must be list<bool>, found list<int32>"),
    "double tail": (cast_values("tail_logprob", pa.float64()), "open", "tail_logprob must be list<float>, found list<double>"),
    "unsigned": (cast_values("row_pos", pa.uint32()), "open", "row_pos must be list<int32>, found list<uint32>"),
    "large list": (
        with_column("row_pos", lambda t: t["row_pos"].cast(pa.large_list(pa.int32()))), "open", "found large_list<int32>",
    ),
    "struct": (with_column("meta_x", lambda _: STRUCT), "open", "column meta_x must be string, int64, double or bool"),
    "date": (with_column("meta_x", lambda _: pa.array([1] * 3, pa.date32())), "open", "found date32[day]"),
    "int32 meta": (with_column("meta_x", lambda _: pa.array([1] * 3, pa.int32())), "open", "found int32"),
    "key of 15 bytes": (
        with_column("content_key", lambda _: pa.array([b"x" * 15] * 3, pa.binary(15))), "open",
        "content_key must be fixed_size_binary[16], found fixed_size_binary[15]",
    ),
    "no column": (lambda t: t.drop_columns(["row_pos"]), "open", "row_pos must be list<int32>, found no such column"),
    "twice": (lambda t: t.append_column("row_pos", t["row_pos"]), "open", "found list<int32>, list<int32>"),
    "scale": (cast_values("topk_scale", pa.int32()), "compact", "topk_scale must be list<uint8>, found list<int32>"),
    "no scale": (lambda t: t.drop_columns(["topk_scale"]), "compact", "found no such column"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(TYPES))
def test_a_column_of_another_type_is_refused_by_reader_and_verify(tmp_path, name):
    """B7: FORMAT fixes the types; a float id or a mask of integers was read as data."""
    change, codec, said = TYPES[name]
    craft_file(tmp_path / "cache", change, codec=codec)
    with pytest.raises(CorruptFile) as caught:
        read(tmp_path / "cache")
    assert said in str(caught.value)
    assert any(said in problem and problem.startswith("TC-E102") for problem in problems_of(tmp_path / "cache"))


def test_a_column_of_a_later_version_is_left_alone_whatever_it_holds(tmp_path):
    craft_file(tmp_path / "cache", with_column("later", lambda _: STRUCT))
    assert len(read(tmp_path / "cache")) == 3
    assert problems_of(tmp_path / "cache") == []


def put(name: str, value, *, at: int = 0):
    """Return a change of one stored value of a list column: the first of the first record, or `at` from there."""

    def change(table: pa.Table) -> pa.Table:
        column = table[name].combine_chunks()
        column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        flat = column.flatten()
        deep = flat.flatten() if pa.types.is_fixed_size_list(flat.type) else flat
        values = deep.to_pylist()
        values[at] = value
        fresh = pa.array(values, deep.type)
        if pa.types.is_fixed_size_list(flat.type):
            fresh = pa.FixedSizeListArray.from_arrays(fresh, flat.type.list_size)
        return with_column(name, lambda _: pa.ListArray.from_arrays(column.offsets, fresh))(table)

    return change


VALUES = {
    "top-K id beyond": (put("topk_ids", 2_000_000_000, at=9), "open", "id_out_of_range"),
    "top-K id of V": (put("topk_ids", SPEC.tokenizer.vocab_size), "open", "id_out_of_range"),
    "top-K id below": (put("topk_ids", -5), "open", "id_out_of_range"),
    "input id": (put("input_ids", 10**6), "open", "id_out_of_range"),
    "input id below": (put("input_ids", -1), "open", "id_out_of_range"),
    "position beyond": (put("row_pos", 10**6), "open", "row_pos"),
    "position below": (put("row_pos", -1), "open", "row_pos"),
    "positions fall": (put("row_pos", 7, at=1), "open", "row_pos"),
    "nan": (put("topk_logprobs", float("nan"), at=11), "open", "nan"),
    "infinite": (put("topk_logprobs", float("-inf")), "open", "nan"),
    "above 0": (put("topk_logprobs", 3.0), "open", "nan"),
    "tail nan": (put("tail_logprob", float("nan")), "open", "nan"),
    "scale 200": (put("topk_scale", 200), "compact", None),
    "level 10^6": (put("topk_level", 10**6), "compact", None),
    "level -1": (put("topk_level", -1), "compact", None),
    "delta 10^6": (put("topk_id_delta", 10**6), "compact", None),
    "delta -3": (put("topk_id_delta", -3, at=3), "compact", None),
    "null id": (put("input_ids", None), "open", None),
    "null position": (put("row_pos", None), "open", None),
    "null top-K id": (put("topk_ids", None), "open", None),
    "null mask": (put("loss_mask", None), "open", None),
    "null tail": (put("tail_logprob", None), "compact", None),
}


@pytest.mark.parametrize("name", sorted(VALUES))
def test_a_value_that_must_not_reach_a_batch_is_refused_with_its_document(tmp_path, name, monkeypatch, capsys):
    """B7: records() and stream() passed all of these on; on CUDA an id beyond its tensor is written through."""
    change, codec, reason = VALUES[name]
    craft_file(tmp_path / "cache", change, codec=codec)
    cache = teachercache.open(tmp_path / "cache")
    for reader in (lambda: list(cache.records()), lambda: list(cache.stream(repeat=False, prefetch=1))):
        with pytest.raises(TeacherCacheError) as caught:
            reader()
        assert caught.value.code == ("TC-E102" if reason is None else "TC-E101")
        assert "\n" not in str(caught.value)
        if reason is not None:
            assert (caught.value.reason, caught.value.doc_id) == (reason, "doc-00000")
    assert problems_of(tmp_path / "cache")
    monkeypatch.setattr("sys.argv", ["teachercache", "head", str(tmp_path / "cache")])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert "Traceback" not in said
    assert "TC-E10" in said


def test_a_wrong_id_is_named_with_its_document_although_only_ids_are_read(tmp_path):
    craft_file(tmp_path / "cache", put("topk_ids", 10**6, at=-1))
    with pytest.raises(InvalidRecord, match="'doc-00002'"):
        list(teachercache.open(tmp_path / "cache").records(columns={"topk_ids"}))


def test_one_broken_file_does_not_hide_the_findings_of_others(tmp_path):
    """B7: a grid of number 200 was an IndexError that ended verify."""
    craft_file(tmp_path / "cache", put("topk_scale", 200), codec="compact")
    writer = teachercache.create(tmp_path / "cache", SPEC, probe=False)
    writer.commit("t", synthetic_records(SPEC, 2, prefix="t"))
    lost = next((tmp_path / "cache" / "data").rglob("t-*.parquet"))
    lost.unlink()
    said = problems_of(tmp_path / "cache")
    assert any("stored grid lies outside" in problem for problem in said)
    assert any(lost.name in problem for problem in said)


@pytest.mark.parametrize("column", ["doc_id", "window", "content_key"])
def test_a_null_key_is_refused(tmp_path, column):
    def change(table):
        return with_column(column, lambda t: pa.array([None, *t[column].to_pylist()[1:]], t[column].type))(table)

    craft_file(tmp_path / "cache", change)
    with pytest.raises(CorruptFile, match=f"column {column} holds a null"):
        read(tmp_path / "cache")


def test_an_empty_list_is_refused(tmp_path):
    empty = pa.array([[], [1], [1]], pa.list_(pa.int32()))
    craft_file(tmp_path / "cache", with_column("input_ids", lambda _: empty), entry={"tokens": 3})
    with pytest.raises(CorruptFile, match="list of input_ids is empty"):
        read(tmp_path / "cache")


@pytest.mark.parametrize("name", ["tokens", "rows", "records", "row_groups"])
def test_counts_of_the_footer_must_be_those_of_the_entry(tmp_path, name):
    make(tmp_path / "cache", 3)
    entry = teachercache.open(tmp_path / "cache").files()[0]
    reseal(tmp_path / "cache", data_file(tmp_path / "cache"), **{name: getattr(entry, name) + 1})
    with pytest.raises(CorruptFile, match=f"{name.replace('_', ' ')}, its entry says"):
        read(tmp_path / "cache")


def test_an_encoding_in_which_strings_repeat_one_another_is_refused(tmp_path):
    craft_file(
        tmp_path / "cache", lambda table: table, use_dictionary=False, column_encoding={"doc_id": "DELTA_BYTE_ARRAY"}
    )
    with pytest.raises(CorruptFile, match="encoding 7, which FORMAT excludes"):
        read(tmp_path / "cache")


def test_a_footer_of_many_megabytes_is_refused_before_it_is_parsed(tmp_path):
    make(tmp_path / "cache", 1)
    path = data_file(tmp_path / "cache")
    table = pq.read_table(path)
    named = table.schema.metadata | {b"x": b"y" * MAX_FOOTER_BYTES}
    pq.write_table(table.replace_schema_metadata(named), path)
    reseal(tmp_path / "cache", path)
    with pytest.raises(UnsafeManifest, match="its footer claims"):
        read(tmp_path / "cache")


def test_pages_that_hold_more_than_their_footer_says_are_refused(tmp_path):
    """Arrow believes a page header: 400 million values in one page, of which the footer tells nothing."""
    make(tmp_path / "cache", 3)
    path = data_file(tmp_path / "cache")
    footer = pq.read_metadata(path)
    chunk = next(c for c in chunks_of(footer, 0, range(footer.num_columns)) if c.name.startswith("row_pos"))
    raw = memoryview(path.read_bytes())[chunk.start : chunk.start + chunk.size]
    check_pages(raw, chunk)
    for wrong in ({"num_values": chunk.num_values - 1}, {"num_values": chunk.num_values + 1}, {"plain_size": 10}):
        with pytest.raises((ValueError, IndexError)):
            check_pages(raw, chunk._replace(**wrong))


FLIP_EVERY_BYTE = """
import sys
from pathlib import Path
import teachercache
from teachercache.errors import TeacherCacheError
from teachercache.parquet.datafile import DataFile
from teachercache.store.store import Store

root = sys.argv[1]
cache = teachercache.open(root)
(entry,) = cache.files()
path = Path(root, entry.path)
whole = path.read_bytes()
footer = int.from_bytes(whole[-8:-4], "little")
outcomes = {"read": 0, "refused": 0}
for at in range(len(whole) - 8 - footer, len(whole) - 8):
    print(at, file=sys.stderr, flush=True)
    path.write_bytes(whole[:at] + bytes([whole[at] ^ int(sys.argv[2])]) + whole[at + 1 :])
    try:
        with DataFile(Store.open(root), entry, cache.spec) as file:
            file.group_bytes(0)
        outcomes["read"] += 1
    except TeacherCacheError:
        outcomes["refused"] += 1
print(outcomes)
"""


def test_no_byte_of_a_footer_ends_the_process(tmp_path):
    """pyarrow does not catch what Arrow throws about size statistics of another length: the process would abort."""
    make(tmp_path, 3)
    done = subprocess.run(
        [sys.executable, "-c", FLIP_EVERY_BYTE, str(tmp_path), "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr.splitlines()[-3:]
    outcomes = json.loads(done.stdout.replace("'", '"'))
    assert outcomes["refused"] > outcomes["read"] // 2


def test_a_column_chunk_that_is_encrypted_or_of_another_name_is_refused(tmp_path):
    """Its crypto_metadata, field 8 of a column chunk: Arrow throws where pyarrow does not catch."""
    make(tmp_path, 3)
    schema = pq.ParquetFile(data_file(tmp_path)).schema
    named = [0x39, 0x18, 6, *b"doc_id"]  # field 3, a list of one string
    metadata = {"its": named, "another": [*named[:-1], ord("x")], "no text": [*named[:-1], 0x80]}

    def footer(name, crypto):
        chunk = [0x3C, *metadata[name], 0x00, *crypto, 0x00]  # field 3, a struct
        return memoryview(bytes([0x49, 0x1C, 0x19, 0x1C, *chunk, 0x00, 0x00]))  # lists of one struct: 4, and 1 in it

    check_column_chunks(footer("its", []), schema)
    with pytest.raises(ValueError, match="encrypted"):
        check_column_chunks(footer("its", [0x5C, 0x00]), schema)  # field 8, an empty struct
    for name in ("another", "no text"):
        with pytest.raises(ValueError, match="named as another column"):
            check_column_chunks(footer(name, []), schema)


def test_train_and_heldout_file_of_one_shard_exchanged_are_told_apart(tmp_path):
    """B17: shard and attempt of both are the same; only the split in the footer tells which is which."""
    writer = teachercache.create(tmp_path, SPEC, probe=False)
    train = synthetic_records(SPEC, 3, prefix="t")
    heldout = synthetic_records(SPEC, 2, seed=1, prefix="h", split="heldout")
    writer.commit("s", [*train, *heldout])
    writer.publish()
    files = {f.split: f for f in teachercache.open(tmp_path).files()}
    paths = {split: tmp_path / entry.path for split, entry in files.items()}
    contents = {split: path.read_bytes() for split, path in paths.items()}
    paths["train"].write_bytes(contents["heldout"])
    paths["heldout"].write_bytes(contents["train"])
    described = ("size", "sha256", "records", "documents", "tokens", "rows", "row_groups")

    def exchange(value):
        one, other = value["files"]
        for name in described:
            one[name], other[name] = other[name], one[name]

    craft(tmp_path, exchange)
    with pytest.raises(CorruptFile, match="its split is 'train', expected 'heldout': files were swapped"):
        list(teachercache.open(tmp_path).records("heldout"))


def test_large_meta_makes_small_row_groups_and_is_bounded_for_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr("teachercache.parquet.datafile.GROUP_BYTES", 50_000)
    records = [dataclasses.replace(r, meta={"text": "x" * 20_000}) for r in synthetic_records(SPEC, 9)]
    writer = teachercache.create(tmp_path, SPEC, probe=False)
    writer.commit("s", records)
    assert writer.publish().files[0].row_groups >= 3
    monkeypatch.setattr("teachercache.parquet.datafile.MAX_RECORD_BYTES", 10_000)
    with pytest.raises(InvalidRecord, match="split it into windows"):
        writer.commit("t", records)
