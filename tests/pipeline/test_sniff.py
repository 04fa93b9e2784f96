"""Files that are not what their names say: read where they can be, else named in one sentence, and nothing is written."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import teachercache
from pipeline.config import CorpusConfig, load_job
from pipeline.corpus import readers
from pipeline.corpus.readers import OPEN_END, read_documents
from pipeline.errors import InputDamaged
from pipeline.running.job import prepare, run_job
from teachercache.errors import UsageError
from tests.pipeline.conftest import documents, pipeline, write_jsonl

DOCS = documents(12)
LINES = "".join(json.dumps(d) + "\n" for d in DOCS)


# -- JSON arrays ---------------------------------------------------------------------------------------------------

ODD = [
    {"id": "brackets", "text": ']}[{,"\\'},
    {"id": "é", "text": "日本語 😀 é"},
    7,
    ["a list"],
    {"id": "deep", "text": "x", "more": {"a": [{"b": []}]}},
    None,
    "text",
    {"id": "empty", "text": ""},
]
SPELLINGS: dict[str, Callable[[list], str]] = {
    "pretty": lambda v: json.dumps(v, indent=2),
    "one line": lambda v: json.dumps(v, ensure_ascii=False) + "\n",
    "narrow": lambda v: json.dumps(v, separators=(",", ":")),
    "mark": lambda v: "\ufeff \n" + json.dumps(v, indent=1),
    "two arrays": lambda v: json.dumps(v[:3]) + json.dumps(v[3:], indent=1),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("size", [1, 37, 10**9])
def test_every_cut_of_an_array_gives_its_items_once(tmp_path, monkeypatch, spelling, size):
    values = [*ODD, *({"id": str(i), "text": "é" * (i * 37 % 90)} for i in range(60))]
    path = tmp_path / "a.json"
    path.write_text(SPELLINGS[spelling](values), encoding="utf-8")
    corpus = CorpusConfig(files=[str(path)])
    total = path.stat().st_size
    edges = [*range(0, total, max(size, total // 25)), OPEN_END]
    found = [
        raw
        for start, stop in itertools.pairwise(edges)
        for raw in read_documents(str(path), corpus, start, stop, "items")
    ]
    assert [raw.value for raw in found] == [v if isinstance(v, dict) else None for v in values]
    assert {raw.problem for raw in found if raw.value is None} == {"wrong_type"}
    plain = path.read_bytes()
    for raw, value in zip(found, values, strict=True):
        if isinstance(value, dict):
            assert json.loads(plain[raw.ordinal : raw.end]) == value


def test_an_item_that_is_cut_by_a_buffer_anywhere_is_whole(tmp_path, monkeypatch):
    values = [{"text": 'é"]' * n, "n": n} for n in range(30)]

    class Dripping(io.BytesIO):
        def read(self, size=-1):
            return super().read(min(size, 3) if size > 0 else size)

    data = json.dumps(values, ensure_ascii=False).encode()
    found = list(readers._items(Dripping(data), 0, OPEN_END))
    assert [raw.value for raw in found] == values


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'[{"text": "a"}, {"text": "b"', "ends inside|no JSON"),
        (b'[{"text": "a"}, oops, {"text": "b"}]' + b" " * 100, "no JSON"),
        (b'[{"text": "a"}] and more', "behind the array's end"),
        (b"[" + b'{"a":' * 100_000, "nested|no JSON"),
    ],
)
def test_a_broken_array_gives_what_precedes_the_damage_and_then_its_place(tmp_path, data, said):
    path = tmp_path / "a.json"
    path.write_bytes(data)
    reading = read_documents(str(path), CorpusConfig(files=[str(path)]), 0, OPEN_END, "items")
    if b"oops" in data or b"more" in data or b'"b"' in data:
        assert next(reading).value == {"text": "a"}
    with pytest.raises(InputDamaged, match=said):
        list(reading)


def test_an_array_is_read_in_bounded_memory(tmp_path):
    """Ten times the bound of an item: what is read is thrown away."""
    import tracemalloc

    path = tmp_path / "a.json"
    item = json.dumps({"text": "word " * 2000})
    with path.open("w") as file:
        file.write("[" + ",\n".join([item] * 2000) + "]")
    tracemalloc.start()
    count = sum(1 for _ in read_documents(str(path), CorpusConfig(files=[str(path)]), 0, OPEN_END, "items"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 2000
    assert peak < 12 << 20, f"{path.stat().st_size} bytes of file"


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_is_read_as_its_lines_would_be(job_file, tmp_path, name, indent):
    docs = documents(40)
    path = tmp_path / name
    data = json.dumps(docs, indent=indent).encode()
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    result = run_job(load_job(job_file(tmp_path / "cache", [path], run={"shard_bytes": 1000})))
    assert result.outcome.tally.committed > 2
    assert result.manifest.complete
    assert {r.doc_id for r in teachercache.open(str(tmp_path / "cache")).records()} == {d["id"] for d in docs}
    limited = load_job(job_file(tmp_path / "other", [path], corpus={"limit_documents": 7}))
    assert run_job(limited).manifest.documents == 7


# -- files that no reader can use ------------------------------------------------------------------------------------


def parquet(rows: list) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


CASES: dict[str, tuple[str, bytes, str]] = {
    "Git LFS pointer": (
        "a.jsonl",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123\n",
        "Git LFS pointer.*git lfs pull",
    ),
    "LFS pointer as Parquet": ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "UTF-16 with its mark": ("a.jsonl", LINES.encode("utf-16"), "UTF-16.*iconv"),
    "UTF-16 without": ("a.jsonl", LINES.encode("utf-16-le"), "UTF-16.*iconv"),
    "strings of JSON": ("a.jsonl", "".join(json.dumps(json.dumps(d)) + "\n" for d in DOCS).encode(), "fromjson"),
    "strings": ("a.jsonl", b'"one"\n"two"\n"three"\n', "lines of strings"),
    "lists": ("a.jsonl", b'[{"role": "user"}]\n' * 12, "lines of lists"),
    "array of arrays": ("a.json", json.dumps([DOCS, DOCS], indent=1).encode(), "array of arrays"),
    "object with a list": ("a.json", json.dumps({"version": 1, "data": DOCS}).encode(), r"'data'.*jq -c '\.data\[\]'"),
    "pretty object": ("a.json", json.dumps({"data": DOCS}, indent=2).encode(), r"over several lines.*\.data\[\]"),
    "pretty objects": (
        "a.jsonl",
        "\n".join(json.dumps(d, indent=2) for d in DOCS).encode(),
        "over several lines.*jq -c",
    ),
    "gzip by another name": ("a.jsonl", gzip.compress(LINES.encode()), "compression: gzip"),
    "zstd by another name": ("a.jsonl", zstandard.compress(LINES.encode()), "compression: zstd"),
    "no gzip": ("a.jsonl.gz", LINES.encode(), "not packed by gzip"),
    "bzip2": ("a.jsonl", bz2.compress(LINES.encode()), "bzip2"),
    "xz": ("a.jsonl", lzma.compress(LINES.encode()), "xz"),
    "HTML": ("a.jsonl", b"<!DOCTYPE html>\n<html><body>\nLog in\n</body></html>\n", "HTML"),
    "XML": ("a.jsonl", b"<?xml version='1.0'?>\n<Error><Code>AccessDenied</Code></Error>\n", "XML"),
    "Parquet": ("a.jsonl", parquet(DOCS), "format: parquet"),
    "lines as Parquet": ("a.parquet", LINES.encode(), "not a readable Parquet file"),
    "CSV": ("a.jsonl", b"id,text\n1,one\n2,two\n", "CSV"),
    "TSV": ("a.jsonl", b"id\ttext\n1\tone\n2\ttwo\n", "TSV"),
    "Python": ("a.jsonl", "".join(f"{d!r}\n" for d in DOCS).encode(), "Python"),
    "text": ("a.jsonl", b"It was a dark night.\n" * 9, "format: text"),
    "blank lines": ("a.jsonl", b"\n\n \n", "empty_line|no document"),
    "empty array": ("a.json", b"[ ]\n", "hold no document"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_file_that_is_something_else_is_named_and_nothing_is_written(job_file, tmp_path, case):
    name, data, said = CASES[case]
    (tmp_path / name).write_bytes(data)
    job = load_job(job_file(tmp_path / "cache", [tmp_path / name]))
    with pytest.raises(UsageError, match=f"(?s){said}") as caught:
        prepare(job)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)
    good = write_jsonl(tmp_path / "good.jsonl", documents(5))
    mixed = load_job(job_file(tmp_path / "cache", [tmp_path / name, good]))
    if case in ("blank lines", "empty array"):
        prepare(mixed)
    else:  # among good files too: it is certain that this is no part of the corpus
        with pytest.raises(UsageError, match=f"(?s){said}"):
            prepare(mixed)
    assert not (tmp_path / "cache").exists()


FIELDS: dict[str, tuple[dict, list[dict], str]] = {
    "ShareGPT": (
        {},
        [{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}] * 12,
        r"fields: \{messages: conversations\}",
    ),
    "messages": ({}, [{"messages": [{"role": "user", "content": "q"}]}] * 12, r"fields: \{messages: messages\}"),
    "another text": ({"text": "body"}, [{"content": "x"}] * 12, r"fields: \{text: content\}"),
    "number as text": ({"text": "text"}, [{"text": 7}] * 12, "text is int, expected a string"),
    "fractions as ids": ({"input_ids": "ids"}, [{"ids": [1.5, 2.5]}] * 12, "list of integers, found fractions"),
    "text as ids": ({"input_ids": "ids"}, [{"ids": ["1", "2"]}] * 12, "list of integers, found text"),
    "ids of another tokenizer": ({"input_ids": "ids"}, [{"ids": [1, 40_000]}] * 12, "id 40000 ≥ vocabulary"),
    "only blank": ({"text": "text"}, [{"text": " "}] * 12, "blank 12"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_documents_that_no_reader_can_use_are_told_by_their_first_reason(job_file, tmp_path, case):
    fields, docs, said = FIELDS[case]
    job = job_file(tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", docs)], corpus={"fields": fields})
    with pytest.raises(UsageError, match=said):
        prepare(load_job(job))
    assert not (tmp_path / "cache").exists()


def test_integers_that_went_through_floats_are_read(job_file, tmp_path):
    docs = [{"key": float(i), "ids": [1.0, 2.0, float(i)], "mask": [0.0, 1.0, 1.0]} for i in range(4)]
    fields = {"input_ids": "ids", "id": "key", "loss_mask": "mask"}
    job = job_file(tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", docs)], corpus={"fields": fields})
    run_job(load_job(job))
    found = {r.doc_id: r.input_ids.tolist() for r in teachercache.open(str(tmp_path / "cache")).records()}
    assert found == {str(i): [1, 2, i] for i in range(4)}


def test_a_source_whose_filters_leave_nothing_is_refused_and_one_with_an_odd_file_is_warned_of(job_file, tmp_path):
    good = write_jsonl(tmp_path / "good.jsonl", documents(20))
    job = load_job(job_file(tmp_path / "cache", [good], recipe={"filters": {"min_tokens": 9999}}))
    with pytest.raises(UsageError, match=r"too_few_tokens 20.*filters"):
        prepare(job)
    odd = write_jsonl(tmp_path / "odd.jsonl", [{"id": str(i), "text": i} for i in range(12)])
    planned = prepare(load_job(job_file(tmp_path / "cache", [good, odd]))).planned
    assert any("odd.jsonl: nothing of the sample" in w for w in planned.warnings)
    assert any("12 of 32 documents" in w and "max_drop_share" in w for w in planned.warnings)


def test_plan_and_run_end_with_one_line_and_status_2(job_file, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(CASES["Git LFS pointer"][1])
    job = job_file(tmp_path / "cache", [tmp_path / "a.jsonl"])
    for verb in ("plan", "run"):
        result = pipeline(verb, job)
        assert result.returncode == 2
        (line,) = result.stderr.splitlines()
        assert "Git LFS pointer" in line
    assert not Path(tmp_path / "cache").exists()
