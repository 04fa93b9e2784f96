"""The tokenizer's files in a cache: put there once, checked by every reader."""

from __future__ import annotations

import shutil

import pytest

import teachercache
from teachercache import fingerprint_tokenizer
from teachercache.errors import SpecMismatch
from teachercache.testing import synthetic_records
from tests.teachercache.caches import spec_of


def change_vocabulary(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"hello"', '"hallo"'))


def test_a_cache_carries_its_tokenizer_and_a_reader_checks_it(teacher, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    spec = spec_of(teacher)
    writer = teachercache.create(tmp_path / "cache", spec, tokenizer_files=teacher)
    writer.commit("s", synthetic_records(spec, 2))
    writer.publish()
    folder = teachercache.open(tmp_path / "cache").tokenizer_path()
    assert fingerprint_tokenizer(folder) == spec.tokenizer
    assert teachercache.open(tmp_path / "cache").tokenizer_path() == folder
    change_vocabulary(teacher)
    with pytest.raises(SpecMismatch, match=r"tokenizer\.digest"):
        teachercache.create(tmp_path / "cache", spec, tokenizer_files=teacher)
    stored = next((tmp_path / "cache").rglob("tokenizer.json"))
    stored.write_bytes(stored.read_bytes().replace(b"hello", b"hallo"))
    shutil.rmtree(tmp_path / "xdg")
    with pytest.raises(teachercache.errors.CorruptFile, match="does not have the digest"):
        teachercache.open(tmp_path / "cache").tokenizer_path()


@pytest.mark.parametrize("home", ["/proc/nonexistent", "no-slash"])
def test_a_home_that_cannot_be_written_is_no_reason_to_fail(teacher, tmp_path, monkeypatch, home):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", home)
    monkeypatch.chdir(tmp_path)
    spec = spec_of(teacher)
    writer = teachercache.create(tmp_path / "cache", spec, tokenizer_files=teacher)
    writer.commit("s", synthetic_records(spec, 2))
    writer.publish()
    folder = teachercache.open(tmp_path / "cache").tokenizer_path()
    assert fingerprint_tokenizer(folder) == spec.tokenizer
    assert teachercache.open(tmp_path / "cache").tokenizer_path() == folder
    assert not (tmp_path / "no-slash").exists()
