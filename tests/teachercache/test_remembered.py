"""What publishers remember: commits that a manifest settled, keys of its records, parts that manifests share; races on these."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections import Counter
from datetime import timedelta

import pytest

import teachercache
from teachercache.errors import CommitConflict, DuplicateDocument, MissingObject, RepeatedContent, UnsafeManifest
from teachercache.format import layout
from teachercache.store.ledger import Ledger
from teachercache.store.store import Store
from teachercache.testing import synthetic_records
from teachercache.upkeep.gc import collect
from teachercache.upkeep.optimize import optimize
from teachercache.write import publish as publishing
from teachercache.write import uniqueness
from tests.teachercache.caches import SPEC, craft, writer_with
from tests.teachercache.faultfs import Actor
from tests.teachercache.test_faults import RECORDS, World, interleave, without_threads  # noqa: F401


@pytest.fixture
def reads(monkeypatch):
    """Paths that were read since."""
    seen: list[str] = []
    for name in ("read", "read_range"):
        honest = getattr(Store, name)

        def noting(self, path, *args, honest=honest, **options):
            seen.append(path)
            return honest(self, path, *args, **options)

        monkeypatch.setattr(Store, name, noting)
    return seen


def commits_in(paths):
    return sorted(path for path in paths if path.startswith(layout.COMMITS))


def add(writer, name, count=2, **options):
    writer.commit(name, synthetic_records(SPEC, count, seed=len(name) * 31 + ord(name[-1]), prefix=name, **options))


def test_publishing_reads_the_commits_and_keys_of_new_shards_alone(tmp_path, reads, monkeypatch):
    opened = []
    real = uniqueness.keys_of
    monkeypatch.setattr(
        uniqueness, "keys_of", lambda entry, blocks: opened.append(entry.shard_id) or real(entry, blocks)
    )
    writer = writer_with(tmp_path, range(5))
    for turn, name in enumerate(("x", "y", "z")):
        add(writer, name)
        reads.clear()
        opened.clear()
        manifest = writer.publish()
        assert commits_in(reads) == [f"commits/{name}.json"]
        assert opened == [name]
        assert (manifest.number, manifest.records, manifest.documents) == (turn + 2, 22 + 2 * turn, 22 + 2 * turn)
    reads.clear()
    assert writer.publish() == manifest
    assert commits_in(reads) == []
    assert sum(run.records for run in manifest.keys) == manifest.records


@pytest.mark.parametrize("seed", range(4))
def test_what_is_published_bit_by_bit_is_what_is_published_at_once(tmp_path, seed):
    """The naive twin: a copy of the cache without manifests, published from nothing."""
    rng, writer = random.Random(seed), teachercache.create(tmp_path / "a", SPEC)
    for i in range(8):
        records = synthetic_records(SPEC, rng.choice([0, 1, 3]) if i else 1, seed=100 * seed + i, prefix=f"d{i}")
        writer.commit(f"s{i}", records, drops={"empty": i}, provenance={"reused": {"rows": i}})
        if rng.random() < 0.5:
            writer.publish()
        if rng.random() < 0.3 and writer.ledger.newest_manifest():
            optimize(writer)
    ours = writer.publish()
    twin = tmp_path / "b"
    (tmp_path / "a").rename(twin)
    replaced = ours.replaced
    for path in (twin / "manifests").rglob("*.*"):
        path.unlink()
    again = teachercache.create(twin, SPEC).publish()
    assert again.replaced == replaced
    assert (again.documents, again.records, again.drops, again.idle) == (
        ours.documents,
        ours.records,
        ours.drops,
        ours.idle,
    )
    assert (again.files, again.shards_committed, again.reused_rows) == (
        ours.files,
        ours.shards_committed,
        ours.reused_rows,
    )


def test_a_document_that_is_remembered_is_refused(tmp_path):
    writer = writer_with(tmp_path, range(3))
    writer.commit("twin", [synthetic_records(SPEC, 4, seed=1, prefix="s1")[2]])
    with pytest.raises(DuplicateDocument, match="'s1-00002' window 0"):
        writer.publish()
    assert writer.ledger.manifest_numbers() == [1]


def test_content_that_is_remembered_in_another_split_is_refused(tmp_path):
    writer = writer_with(tmp_path, range(3))
    first = synthetic_records(SPEC, 4, seed=1, prefix="s1")[2]
    writer.commit("same-split", [dataclasses.replace(first, doc_id="copy")])
    assert writer.publish().repeated_content == 0
    writer.commit("leak", [dataclasses.replace(first, doc_id="leaked", split="heldout")])
    with pytest.raises(RepeatedContent, match="3 records"):
        writer.publish()
    assert writer.publish(allow_repeated_content=True).repeated_content == 3


def test_a_window_of_a_remembered_document_adds_no_document(tmp_path):
    writer = writer_with(tmp_path, range(2))
    other = dataclasses.replace(synthetic_records(SPEC, 1, seed=77)[0], doc_id="s1-00002", window=1, start=9)
    writer.commit("rest", [other])
    assert (writer.publish().documents, writer.publish().records) == (8, 9)


@pytest.mark.parametrize("damage", ["gone", "cut", "changed"])
def test_key_runs_that_are_lost_or_damaged_cost_time_and_nothing_else(tmp_path, damage):
    writer = writer_with(tmp_path, range(2))
    (run,) = (tmp_path / layout.KEYS).iterdir()
    if damage == "gone":
        run.unlink()
    else:
        data = run.read_bytes()
        run.write_bytes(data[:-9] if damage == "cut" else data[:20] + bytes([data[20] ^ 1]) + data[21:])
    add(writer, "x")
    writer.store._sleep = lambda seconds: None  # a cut object looks like a transfer that broke
    assert writer.publish().records == 10
    writer.commit("twin", [synthetic_records(SPEC, 4, seed=1, prefix="s1")[2]])
    with pytest.raises(DuplicateDocument):
        writer.publish()


@pytest.mark.parametrize(("old", "new"), [(b"document", b"\x80ocument"), (b"content", b"\x80ontent")])
def test_a_key_run_whose_footer_names_no_text_is_not_believed(tmp_path, old, new):
    """Whoever wrote it named its digest too; the keys of all files decide instead."""
    writer = writer_with(tmp_path, range(2))
    (run,) = (tmp_path / layout.KEYS).iterdir()
    data = run.read_bytes()
    for changed in (data.replace(old, new), data[: data.rfind(old)] + new + data[data.rfind(old) + len(old) :]):
        run.write_bytes(changed)
        described = {"size": len(changed), "sha256": hashlib.sha256(changed).hexdigest()}
        craft(tmp_path, lambda manifest, described=described: manifest["keys"][0].update(described))
        writer.commit(f"twin-{len(changed)}", [synthetic_records(SPEC, 4, seed=1, prefix="s1")[2]])
        with pytest.raises(DuplicateDocument):
            writer.publish()


def test_runs_stay_few(tmp_path):
    writer = teachercache.create(tmp_path, SPEC)
    for i in range(12):
        add(writer, f"s{i}", 1)
        manifest = writer.publish()
    assert len(manifest.keys) <= 4
    assert sum(run.records for run in manifest.keys) == 12


# ---- strange names and moved objects ------------------------------------------------------------------------------

STRANGE = [
    "commits/._s0.json", "commits/backup/s0.json", "commits/s0 (1).json", "commits/s0.json~", "plans/._x.json",
    "plans/old.json", "quarantine/._x.json", "quarantine/s0/notes.json", "manifests/._00000001.json",
    "manifests/00000001 (1).json", "manifests/parts/x.json", "manifests/keys/x", "data/_SUCCESS", ".DS_Store",
]  # fmt: skip


def test_strange_names_are_ignored_and_can_be_listed(tmp_path):
    from pipeline.watching.status import read_quarantine, read_status

    writer = writer_with(tmp_path, range(2))
    commit = (tmp_path / "commits/s0.json").read_bytes()
    for name in STRANGE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(commit if "s0 (1)" in name or "backup" in name else b"\0\5\26\7\0")
    assert writer.ledger.strange_names() == sorted(STRANGE)
    assert writer.ledger.committed() == {"s0", "s1"}
    assert (read_status(str(tmp_path))["rows"], read_quarantine(str(tmp_path))) == (
        teachercache.open(tmp_path).manifest.rows,
        [],
    )
    assert [o for o in collect(writer.store, SPEC).objects if not o.path.startswith("probes/")] == []
    add(writer, "x")
    assert writer.publish().records == 10
    assert optimize(writer).files_after == 1


def test_a_copied_commit_is_called_a_moved_object(tmp_path):
    writer = writer_with(tmp_path, range(2))
    (tmp_path / "commits/s0-copy.json").write_bytes((tmp_path / "commits/s0.json").read_bytes())
    for work in (writer.publish, lambda: collect(writer.store, SPEC)):
        with pytest.raises(
            CommitConflict, match=r"objects were moved: commits/s0-copy\.json is the commit of shard s0"
        ):
            work()


# ---- parts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(publishing, "PART_ENTRIES", 3)


def test_a_large_manifest_shares_its_parts_with_the_next(tmp_path, small_parts, reads):
    writer = writer_with(tmp_path, range(8))
    first = teachercache.open(tmp_path).manifest
    assert [ref.files for ref in first.parts] == [3, 3, 2]
    assert [f.path for f in first.files] == sorted(f.path for f in first.files)
    for name in "abcd":
        add(writer, name)
    second = writer.publish()
    assert second == teachercache.open(tmp_path).manifest
    assert second.parts[:3] == first.parts
    assert teachercache.open(tmp_path, manifest=1).manifest == first
    assert second.parent == first.digest
    assert writer.publish() == second
    assert len(list((tmp_path / layout.PARTS).iterdir())) == len(second.parts)
    assert teachercache.open(tmp_path).manifest.digest == second.digest
    assert Counter(r.doc_id for r in teachercache.open(tmp_path).records()).most_common(1)[0][1] == 1


def test_parts_follow_an_optimise_and_the_collector_keeps_what_is_named(tmp_path, small_parts, monkeypatch):
    writer = writer_with(tmp_path, range(8))
    optimize(writer)
    merged = teachercache.open(tmp_path).manifest
    assert (len(merged.files), len(merged.replaced)) == (1, 8)
    assert sum(ref.replaced for ref in merged.parts) >= 6
    real = Store.now
    monkeypatch.setattr(Store, "now", lambda store: real(store) + timedelta(days=30))
    kept = {f"{layout.PARTS}{ref.sha256}.json" for n in (1, 2) for ref in teachercache.open(tmp_path, n).manifest.parts}
    assert collect(writer.store, SPEC).parts == []
    collect(writer.store, SPEC, keep_manifests=1, dry_run=False)
    assert teachercache.open(tmp_path).manifest == merged
    assert len(list(teachercache.open(tmp_path).records())) == 32
    assert kept


def test_the_collector_takes_parts_only_when_their_publisher_can_no_longer_name_them(
    tmp_path, small_parts, monkeypatch
):
    """Killed between its parts and its manifest: for a sleeping publisher they must stay until its number is taken."""
    writer = writer_with(tmp_path, range(2))
    for name in "abcd":
        add(writer, name)
    real = Store.create

    def killed(self, path, data):
        if path == layout.manifest_path(2):
            raise KeyboardInterrupt
        real(self, path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "create", killed)
        with pytest.raises(KeyboardInterrupt):
            writer.publish()
    left = {o.path for o in writer.store.list(layout.MANIFESTS) if layout.is_of_manifests(o.path)}
    now, modified = Store.now, Store.list
    monkeypatch.setattr(Store, "now", lambda store: now(store) + timedelta(days=30))
    assert collect(writer.store, SPEC).parts == [], "manifest 2 is not taken yet"
    second = writer.publish()
    used = {layout.part_path(r.sha256) for r in second.parts} | {layout.keys_path(r.name) for r in second.keys}
    assert not used & left - {layout.keys_path(r.name) for r in teachercache.open(tmp_path, 1).manifest.keys}

    def later(self, prefix):
        """Manifest 2 came an hour after the rest."""
        hour = timedelta(hours=1)
        return [
            dataclasses.replace(o, modified=o.modified + hour) if o.path == layout.manifest_path(2) else o
            for o in modified(self, prefix)
        ]

    monkeypatch.setattr(Store, "list", later)
    gone = {o.path for o in collect(writer.store, SPEC, dry_run=False).parts}
    assert gone
    assert gone <= left
    assert not gone & used
    assert teachercache.open(tmp_path).manifest == second


def test_a_part_that_is_not_the_manifests_is_refused(tmp_path, small_parts):
    writer_with(tmp_path, range(8))
    parts = sorted((tmp_path / layout.PARTS).iterdir())
    content = parts[0].read_bytes()
    parts[0].write_bytes(parts[1].read_bytes())
    with pytest.raises(
        (teachercache.errors.CorruptFile, UnsafeManifest), match="not the object that its manifest names"
    ):
        teachercache.open(tmp_path)
    parts[0].unlink()
    with pytest.raises(MissingObject):
        teachercache.open(tmp_path)
    parts[0].write_bytes(content)
    assert len(teachercache.open(tmp_path).manifest.files) == 8


# ---- races --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_publishers_that_each_add_the_same_document_never_publish_it_twice(monkeypatch):
    """Each remembers the manifest before; the later one must start over and see the other's shard."""
    monkeypatch.setitem(RECORDS, "twin", RECORDS["s1"][:1])

    def make():
        world = World()
        world.job("s0").work()

        def appender(shard):
            def work():
                world.commit(world, shard)
                world.writer().publish()

            return Actor(shard, work)

        return world, [appender("s1"), appender("twin")]

    assert interleave(make, preemptions=2) > 100


def test_a_publisher_races_a_collector_over_parts_and_keys(monkeypatch):
    """Whatever the order: the newest manifest can be read with all its parts."""
    monkeypatch.setattr(publishing, "PART_ENTRIES", 1)

    def make():
        world = World()
        world.job("s0", "s1").work()
        world.commit(world, "s2")
        world.fs.seconds += 3000
        return world, [world.publisher(), world.collector()]

    def check(world):
        manifest = Ledger(world.store()).newest_manifest()
        assert {entry.shard_id for entry in manifest.files} >= {"s0", "s1"}
        for run in manifest.keys:
            assert world.store().exists(layout.keys_path(run.name))

    assert interleave(make, preemptions=1, check=check) > 10
