"""verify finds each kind of damage, and nothing in a sound cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from aiobotocore.client import AioBaseClient

import teachercache
from teachercache.errors import StoreDenied, UsageError
from teachercache.format import layout
from teachercache.format.objects import Commit, Manifest, Plan, PlanShard
from teachercache.format.sealed import seal, unseal, utc_now
from teachercache.store.ledger import Ledger
from teachercache.store.store import Store
from teachercache.testing import synthetic_records, synthetic_spec
from teachercache.upkeep.optimize import optimize
from teachercache.upkeep.verify import verify
from tests.teachercache.caches import (
    SPEC,
    craft,
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


@pytest.mark.parametrize(("asked", "read"), [(0, 0), (1, 1), (2, 2), (9, 3)])
def test_a_sample_reads_as_many_files_as_it_was_told(cache, asked, read):
    found = verify(Store.open(cache), SPEC, sample=asked)
    assert (found.problems, found.files, found.files_read, found.sampled) == ([], 3, read, True)


def sampled(root: Path) -> str:
    return "\n".join(p.message for p in verify(Store.open(root), SPEC, sample=0).problems)


def test_a_sample_still_finds_what_a_listing_shows(cache):
    short, lost = data_files(cache)[:2]
    short.write_bytes(short.read_bytes()[:-1])
    lost.unlink()
    (cache / "commits" / "s2.json").unlink()
    craft(cache, lambda value: value.update(documents=10**9))
    said = sampled(cache)
    assert f"{short.name} has" in said
    assert f"{lost.name} does not exist" in said
    assert "commits/s2.json does not exist" in said
    assert "says 1,000,000,000 documents, its files give 10 to 30" in said


def test_an_interrupted_verification_goes_on_where_it_was(cache, tmp_path, monkeypatch):
    state, paths = tmp_path / "state", []
    download = Store.download

    def counted(self, path, size, out=None):
        paths.append(path)
        return download(self, path, size, out)

    monkeypatch.setattr(Store, "download", counted)

    def stop(done, _):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(Store.open(cache), SPEC, threads=1, state=state, progress=stop)
    remembered = state.read_text().splitlines()
    assert len(remembered) == 3
    paths.clear()
    found = verify(Store.open(cache), SPEC, threads=1, state=state)
    assert (found.problems, found.files, found.files_read, found.files_skipped) == ([], 3, 1, 2)
    assert len(paths) == 1
    data_files(cache)[0].unlink()  # what was read is looked for in the listing all the same
    assert "does not exist" in "\n".join(p.message for p in verify(Store.open(cache), SPEC, state=state).problems)


def test_a_damaged_file_is_not_remembered_and_a_state_belongs_to_one_cache(cache, tmp_path):
    data_files(cache)[0].write_bytes(b"x" * data_files(cache)[0].stat().st_size)
    state = tmp_path / "state"
    assert not verify(Store.open(cache), SPEC, state=state).ok
    assert len(state.read_text().splitlines()) == 3
    assert "has sha256" in "\n".join(p.message for p in verify(Store.open(cache), SPEC, state=state).problems)
    make(tmp_path / "other")
    with pytest.raises(UsageError, match="is not the state of a verification of"):
        verify(Store.open(tmp_path / "other"), SPEC, state=state)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"documents": 10**9}, "says documents 1,000,000,000, its files give 30"),
        ({"documents": 29}, "says documents 29, its files give 30"),
        ({"shards_committed": 99}, "says shards_committed 99, its commits and plans give 3"),
        ({"shards_committed": 2}, "says shards_committed 2, its commits and plans give 3"),
        ({"shards_planned": 7}, "says shards_planned 7, its commits and plans give 3"),
        ({"shards_quarantined": 1}, "says shards_quarantined 1, its commits and plans give 0"),
        ({"complete": False}, "says complete False, its commits and plans give True"),
        ({"drops": {"x": 5}}, "says drops {'x': 5}, its commits and plans give {'too_long': 2}"),
        ({"drops": {}}, "says drops {}, its commits and plans give {'too_long': 2}"),
        ({"repeated_content": 3}, "says repeated_content 3, its files give 0"),
        ({"replaced": {"s0": "s1"}}, "that shard s0 was replaced by s1, whose commit does not"),
        ({"idle": ["gone"]}, "says that shard gone was committed, but no commit of it is there"),
        ({"plans": []}, "says shards_planned 3, its commits and plans give 0"),
    ],
)
def test_counts_of_a_manifest_are_derived_again(tmp_path, change, said):
    """B16: a billion documents and 99 shards were printed by `show`, and verify called them sound."""
    writer = teachercache.create(tmp_path / "cache", SPEC)
    shards = [PlanShard(shard_id=f"s{i}", source="default", input="x", input_digest="d") for i in range(3)]
    writer.put_plan(Plan(spec_digest=SPEC.digest, created=utc_now(), shards=shards))
    for i in range(3):
        drops = {"too_long": 2} if i == 1 else {}
        writer.commit(f"s{i}", synthetic_records(SPEC, 10, seed=i, prefix=f"s{i}"), drops=drops)
    writer.publish()
    assert problems(tmp_path / "cache") == ""
    craft(tmp_path / "cache", lambda value: value.update(change))
    assert said in problems(tmp_path / "cache")


def test_strange_names_are_named_and_are_no_problem(cache):
    strange = ["commits/._s0.json", "commits/s0 (1).json", "data/_SUCCESS", "notes.txt"]
    for name in strange:
        (cache / name).write_bytes(b"x")
    found = verify(Store.open(cache), SPEC)
    assert (found.problems, found.strange) == ([], sorted(strange))


def test_a_file_that_a_manifest_leaves_out_of_its_shard_is_found(tmp_path):
    writer = teachercache.create(tmp_path / "cache", SPEC)
    both = [*synthetic_records(SPEC, 3), *synthetic_records(SPEC, 2, seed=1, prefix="h", split="heldout")]
    writer.commit("s", both)
    writer.publish()

    def leave_out(value):
        gone = value["files"].pop()
        value.update({name: value[name] - gone[name] for name in ("records", "documents", "tokens", "rows")})

    craft(tmp_path / "cache", leave_out)
    assert "is in its commit but not in the manifest" in problems(tmp_path / "cache")


def test_optimised_and_appended_caches_derive_the_same_counts(cache):
    writer = teachercache.create(cache, SPEC)
    optimize(writer)
    assert problems(cache) == ""
    writer.commit("later", synthetic_records(SPEC, 2, prefix="later"), drops={"empty": 1})
    assert problems(cache) == ""  # not published yet
    writer.publish()
    assert problems(cache) == ""


def test_a_sample_costs_the_same_requests_whatever_the_number_of_shards(s3_url, monkeypatch):
    asked: list[str] = []
    call = AioBaseClient._make_api_call

    def counted(self, operation_name, api_params):
        asked.append(operation_name)
        return call(self, operation_name, api_params)

    monkeypatch.setattr(AioBaseClient, "_make_api_call", counted)
    costs = []
    for count in (4, 30):
        writer = teachercache.create(f"{s3_url}/{count}", SPEC, probe=False)
        for i in range(count):
            writer.commit(f"s{i}", synthetic_records(SPEC, 1, seed=i, prefix=f"s{i}"))
        writer.publish()
        store = Store.open(f"{s3_url}/{count}")
        asked.clear()
        found = verify(store, Ledger(store).spec(), sample=3)
        assert (found.problems, found.files, found.files_read) == ([], count, 3)
        costs.append(len(asked))
    assert costs[0] == costs[1] <= 40


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
        path.read_bytes()
        .replace(b'"rows":', b'"rows": ')
        .replace(b'"entries":8', b'"entries":9')
        .replace(b"s1-", b"s2-")
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
