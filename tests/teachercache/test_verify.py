"""verify finds each kind of damage, and nothing in a sound cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import teachercache
from teachercache.errors import StoreDenied
from teachercache.format import layout
from teachercache.format.objects import Commit, Manifest
from teachercache.format.sealed import seal, unseal
from teachercache.store.store import Store
from teachercache.testing import synthetic_records, synthetic_spec
from teachercache.upkeep.verify import verify
from tests.teachercache.caches import (
    SPEC,
    id_too_large,
    make,
    one_nan,
    one_topk_nan,
    swap_rows,
    too_much_mass,
    writer_with,
)


@pytest.fixture
def cache(tmp_path) -> Path:
    writer_with(tmp_path / "cache", range(3), 10)
    return tmp_path / "cache"


def test_a_sound_cache_has_no_problems(cache):
    found = verify(Store.open(cache), SPEC)
    assert found.problems == []
    assert (found.files, found.files_read, found.records) == (3, 3, 30)


def test_a_sample_reads_only_its_share(cache):
    found = verify(Store.open(cache), SPEC, sample=0.34)
    assert (found.ok, found.files, found.files_read) == (True, 3, 1)


def problems(root: Path) -> str:
    return "\n".join(p.message for p in verify(Store.open(root), SPEC).problems)


def data_files(root: Path) -> list[Path]:
    return sorted((root / "data").rglob("*.parquet"))


def test_a_flipped_byte_is_found(cache):
    path = data_files(cache)[1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert f"{path.name} has sha256" in problems(cache)


def test_a_missing_file_is_found(cache):
    path = data_files(cache)[1]
    path.unlink()
    assert f"{path.name} does not exist" in problems(cache)


def test_a_file_swapped_with_another_shards_is_found(cache):
    first, second = data_files(cache)[:2]
    aside = cache / "aside"
    shutil.move(first, aside)
    shutil.move(second, first)
    shutil.move(aside, second)
    found = problems(cache)
    assert first.name in found
    assert second.name in found


def rewrite(path: Path, model: type, **changes) -> None:
    """Edit a sealed document and seal it again: a liar, not an accident."""
    old = unseal(model, path.read_bytes(), str(path))
    path.write_bytes(seal(old.model_copy(update=changes)))


def test_a_file_swapped_and_described_as_such_is_found_too(cache):
    """Even where a commit's size and digest are those of the file that is there now."""
    first, second = data_files(cache)[:2]
    commits = [unseal(Commit, (cache / layout.commit_path(f"s{i}")).read_bytes(), "") for i in range(2)]
    shutil.copy(second, first)
    entry = (
        commits[0].files[0].model_copy(update={"size": commits[1].files[0].size, "sha256": commits[1].files[0].sha256})
    )
    rewrite(cache / layout.commit_path("s0"), Commit, files=[entry])
    manifest = unseal(Manifest, (cache / layout.manifest_path(1)).read_bytes(), "")
    files = [
        f.model_copy(update={"size": entry.size, "sha256": entry.sha256}) if f.shard_id == "s0" else f
        for f in manifest.files
    ]
    rewrite(cache / layout.manifest_path(1), Manifest, files=files)
    assert "files were swapped" in problems(cache)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (swap_rows, "must descend"),
        (too_much_mass, "above 1.001"),
        (one_nan, "is NaN"),
        (one_topk_nan, "is NaN"),
        (id_too_large, "outside [0, 1000)"),
    ],
)
def test_a_broken_row_is_found_although_checksums_agree(cache, monkeypatch, damage, says):
    writer = teachercache.create(cache, SPEC)
    good = synthetic_records(SPEC, 4, seed=9, prefix="bad", length=12)
    with monkeypatch.context() as patch:
        patch.setattr("teachercache.parquet.datafile.check_record", lambda *a, **k: None)
        writer.commit("bad", [*good[:2], damage(good[2]), good[3]])
    writer.publish()
    found = problems(cache)
    assert says in found
    assert "'bad-00002'" in found


@pytest.mark.parametrize("name", ["rows", "records", "tokens", "documents"])
def test_a_wrong_count_is_found(cache, name):
    commit = unseal(Commit, (cache / layout.commit_path("s1")).read_bytes(), "")
    entry = commit.files[0].model_copy(update={name: getattr(commit.files[0], name) + 1})
    rewrite(cache / layout.commit_path("s1"), Commit, files=[entry], **{name: getattr(entry, name)})
    assert "its commit describes it differently" in problems(cache)
    (cache / layout.manifest_path(1)).unlink()  # not even the manifest tells: count the file
    assert "its entry says" in problems(cache)


def test_a_commit_of_another_spec_is_found(cache, tmp_path):
    other = synthetic_spec(name="other")
    teachercache.create(tmp_path / "other", other).commit("s9", synthetic_records(other, 2))
    for path in (tmp_path / "other").rglob("*s9*"):
        target = cache / path.relative_to(tmp_path / "other")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    assert "belongs to spec" in problems(cache)
    with pytest.raises(teachercache.errors.CommitConflict, match="belongs to spec"):
        teachercache.create(cache, SPEC).publish()


@pytest.mark.parametrize("which", ["commits/s1.json", "manifests/00000001.json", "spec.json"])
def test_an_edited_document_is_found_by_its_seal(cache, which):
    path = cache / which
    path.write_bytes(
        path.read_bytes().replace(b'"rows":', b'"rows": ').replace(b'"top_k":8', b'"top_k":9').replace(b"s1-", b"s2-")
    )
    if which == "spec.json":
        with pytest.raises(teachercache.errors.CorruptFile, match="own seal"):
            teachercache.open(cache)
    elif b"s2-" in path.read_bytes():
        assert "own seal" in problems(cache)


def test_verify_exits_1_and_lists_what_is_wrong(cache, capsys, monkeypatch):
    from teachercache.cli import main

    def run(*args):
        monkeypatch.setattr("sys.argv", ["teachercache", "verify", str(cache), *args])
        with pytest.raises(SystemExit) as caught:
            main()
        return caught.value.code, capsys.readouterr().out

    assert run()[0] == 0
    data_files(cache)[0].unlink()
    code, printed = run("--json")
    assert code == 1
    assert json.loads(printed)["problems"][0]["code"] == "TC-E103"


def test_refused_credentials_end_a_verification_instead_of_damning_every_file(tmp_path, monkeypatch):
    cache = make(tmp_path / "cache")

    def refused(*_):
        raise StoreDenied("the token expired")

    monkeypatch.setattr(Store, "download", refused)
    with pytest.raises(StoreDenied):
        verify(cache.store, SPEC)
