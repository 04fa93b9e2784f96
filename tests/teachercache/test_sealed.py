"""Sealed objects: damaged, crafted, huge, deep or of a newer format."""

from __future__ import annotations

import json

import pytest

import teachercache
from teachercache.errors import CorruptFile, TeacherCacheError, UnsafeManifest, UnsupportedFormat
from teachercache.format import layout
from teachercache.format.objects import Manifest
from teachercache.format.sealed import seal, unseal
from teachercache.format.spec import canonical_json
from teachercache.testing import synthetic_spec
from tests.teachercache.caches import craft, make, write_sealed

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


def test_a_newer_format_is_refused_by_number(cache):
    craft(cache, lambda value: value.update(format_version=2))
    with pytest.raises(UnsupportedFormat, match="format version 2"):
        teachercache.open(cache)


def test_a_sealed_document_survives_its_own_round_trip(cache):
    manifest = unseal(Manifest, (cache / layout.manifest_path(1)).read_bytes(), "")
    assert unseal(Manifest, seal(manifest), "") == manifest
