"""Sealed objects: damaged, crafted, huge, deep or of a newer format."""

from __future__ import annotations

import json

import pytest

import teachercache
from teachercache.errors import CorruptFile, TeacherCacheError, UnsafeManifest, UnsupportedFormat
from teachercache.format import layout
from teachercache.format.objects import Manifest
from teachercache.format.sealed import MAX_RUN, MAX_VALUES, seal, unseal
from teachercache.format.spec import canonical_json
from teachercache.testing import synthetic_records, synthetic_spec
from tests.teachercache.caches import craft, make, sealed, write_sealed

SPEC = synthetic_spec()


@pytest.fixture
def cache(tmp_path):
    make(tmp_path / "cache")
    return tmp_path / "cache"


def set_path(path):
    return lambda value: value["files"][0].update(path=path)


@pytest.mark.parametrize(
    "change",
    [
        set_path("/etc/passwd"),
        set_path("../other/data/codec=open/split=train/source=default/s-" + "0" * 32 + ".parquet"),
        set_path("data/codec=open/split=../source=default/s-" + "0" * 32 + ".parquet"),
        set_path("data/codec=open/split=train/source=default/../../s-" + "0" * 32 + ".parquet"),
        set_path("s3://other-bucket/data/codec=open/split=train/source=default/s-" + "0" * 32 + ".parquet"),
        set_path("data/codec=open/split=train/source=default/s-" + "0" * 32 + ".parquet\n"),
        set_path("data/codec=open/split=train/source=default/t-" + "0" * 32 + ".parquet"),
        lambda value: value["files"][0].update(size=10 * 2**40),
        lambda value: value["files"][0].update(rows=10**15),
        lambda value: value["files"][0].update(size=-1),
        lambda value: value.update(number=7),
        lambda value: value.update(spec_digest="0" * 64),
        lambda value: value.update(rows=value["rows"] + 1),
        lambda value: value["files"][0].update(row_groups=2**40),
        lambda value: value.update(surprise={"__reduce__": "os.system"}),
    ],
    ids=[
        "absolute", "parent", "dots-in-name", "dots-in-path", "another-bucket", "newline", "another-shard", "10-TB", "10^15-rows",
        "negative", "renumbered", "another-spec", "wrong-sum", "row-groups", "unknown-key",
    ],
)  # fmt: skip
def test_a_crafted_manifest_is_refused_with_one_line(cache, change):
    craft(cache, change)
    with pytest.raises(TeacherCacheError) as caught:
        list(teachercache.open(cache).records())
    assert isinstance(caught.value, (UnsafeManifest, CorruptFile))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.slow
def test_a_million_entries_of_one_file_are_refused(cache):
    path = cache / layout.manifest_path(1)
    value = json.loads(path.read_bytes())
    value.pop("seal")
    one = canonical_json(value["files"][0])
    write_sealed(path, canonical_json(value).replace(one, b",".join([one] * 1_000_000)))
    with pytest.raises(UnsafeManifest, match=r"1,000,00\d entries, limit 524,288"):
        teachercache.open(cache)
    write_sealed(path, canonical_json(value).replace(one, b",".join([one] * 2)))
    with pytest.raises(UnsafeManifest, match="twice"):
        teachercache.open(cache)


def test_a_huge_manifest_is_refused_before_it_is_read(cache, monkeypatch):
    monkeypatch.setattr("teachercache.format.sealed.MAX_JSON_BYTES", 100)
    with pytest.raises(TeacherCacheError, match="above the limit"):
        teachercache.Store.open(cache).read(layout.manifest_path(1), max_bytes=100)


def test_deeply_nested_json_is_refused(cache):
    (cache / layout.manifest_path(1)).write_bytes(b"[" * 100_000)
    with pytest.raises(CorruptFile, match="does not end in a seal"):
        teachercache.open(cache)
    write_sealed(cache / layout.manifest_path(1), b'{"files":' + b"[" * 100_000 + b"}")
    with pytest.raises(CorruptFile, match="ecursion"):
        teachercache.open(cache)


def body_of(cache) -> bytes:
    return (cache / layout.manifest_path(1)).read_bytes().rpartition(b',"seal":')[0] + b"}"


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body[:-1] + b',"complete":false}',
        lambda body: b'{"complete":false,' + body[1:],
        lambda body: body.replace(b'"rows":', b'"rows": '),
        lambda body: body.replace(b'"number":1,', b'"number":1.0,'),
        lambda body: body.replace(b'"number":1,', b'"number":1e0,'),
        lambda body: body.replace(b'"number":1,', b'"number":"1",'),
        lambda body: body.replace(b'"number":1,', b'"number":true,'),
        lambda body: body.replace(b'"number":1,', b'"number":' + b"1" * 5000 + b","),
        lambda body: body.replace(b'"number":1,', b'"number":-1,'),
        lambda body: body.replace(b'"number":1,', b'"number":NaN,'),
        lambda body: body.replace(b'"complete":true', b'"complete":1'),
        lambda body: body.replace(b'"created":"2', b'"created":"\\u0032'),
        lambda body: body.replace(b'"created":"2', b'"created":"\\ud800'),
        lambda body: body.replace(b'"created":"2', b'"created":"\xff'),
        lambda body: body.replace(b'"created":"2', b'"created":"' + b"2" * 20_000),
        lambda body: body.replace(b'"documents":5', b'"documents":-5'),
        lambda body: body.replace(b'"shards_planned":0', b'"shards_planned":-1'),
        lambda body: body.replace(b'"drops":{}', b'"drops":{"x":-1}'),
        lambda body: body.replace(b'"drops":{}', b'"drops":{"x":1.0}'),
        lambda body: body.replace(b'"repeated_content":0', b'"repeated_content":-1'),
        lambda body: b"[" + body + b"]",
        lambda body: b"{}",
        lambda body: b"}",
        lambda body: b"",
    ],
    ids=[
        "key-twice-at-the-end", "key-twice-in-front", "blank", "float", "exponent", "text", "bool", "5000-digits", "negative",
        "nan", "one-for-true", "escape", "half-a-pair", "no-utf-8", "long-text", "documents", "planned", "drops", "drops-float",
        "repeated", "list", "empty", "brace", "nothing",
    ],
)  # fmt: skip
def test_bytes_that_are_not_canonical_or_counts_that_cannot_be_are_refused(cache, change):
    body = body_of(cache)
    assert change(body) != body
    write_sealed(cache / layout.manifest_path(1), change(body))
    with pytest.raises(CorruptFile) as caught:
        teachercache.open(cache)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_a_string_a_list_and_a_nesting_without_end_are_refused_before_a_parser_sees_them():
    long = [b'{"created":"' + b"x" * (MAX_RUN + 1) + b'"}', b'{"plans":[' + b"1" * (MAX_RUN + 1) + b"]}"]
    long.append(b'{"plans":' + b"[" * (MAX_RUN + 1) + b"}")
    for body in long:
        with pytest.raises(UnsafeManifest, match="without a quotation mark"):
            unseal(Manifest, sealed(body), "x")
    with pytest.raises(UnsafeManifest, match="values, limit"):
        unseal(Manifest, sealed(b'{"plans":["",' + b"," * MAX_VALUES + b"]}"), "x")


def test_the_last_number_of_a_manifest_leaves_one_sentence_to_the_next_publisher(cache):
    craft(cache, lambda value: value.update(number=99_999_999))
    (cache / layout.manifest_path(1)).rename(cache / layout.manifest_path(99_999_999))
    assert teachercache.open(cache).manifest.number == 99_999_999
    writer = teachercache.create(cache, SPEC, probe=False)
    writer.commit("t", synthetic_records(SPEC, 2, prefix="t"))
    with pytest.raises(UnsafeManifest, match="the last number that there is"):
        writer.publish()


def test_a_manifest_with_foreign_digits_in_its_name_is_no_manifest(cache):
    text = (cache / layout.manifest_path(1)).read_bytes()
    (cache / "manifests" / "٠٠٠٠٠٠٠٩.json").write_bytes(text)
    assert teachercache.open(cache).manifest.number == 1


def test_ls_lists_the_good_caches_beside_one_whose_manifest_is_too_large(cache, monkeypatch, capsys):
    from teachercache.cli import main

    make(cache.parent / "good")
    with (cache / layout.manifest_path(2)).open("wb") as file:
        file.truncate(2**29 + 1)
    monkeypatch.setattr("sys.argv", ["teachercache", "ls", str(cache.parent), "--json"])
    with pytest.raises(SystemExit) as caught:
        main()
    said = capsys.readouterr()
    states = {item["url"].rsplit("/", 1)[-1]: item["state"] for item in json.loads(said.out)}
    assert (states, caught.value.code) == ({"cache": "unreadable", "good": "complete"}, 1)
    assert "TC-E205" in said.err


def test_a_newer_format_is_refused_by_number(cache):
    craft(cache, lambda value: value.update(format_version=2))
    with pytest.raises(UnsupportedFormat, match="format version 2"):
        teachercache.open(cache)


def test_a_sealed_document_survives_its_own_round_trip(cache):
    manifest = unseal(Manifest, (cache / layout.manifest_path(1)).read_bytes(), "")
    assert unseal(Manifest, seal(manifest), "") == manifest
