"""The life of one attempt at a shard: what an exception or a sleep leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

import teachercache
from teachercache.errors import MissingObject, StaleAttempt, StoreUnavailable
from teachercache.store.store import Store
from teachercache.testing import synthetic_records
from teachercache.upkeep.verify import verify
from teachercache.write.attempt import ShardAttempt
from tests.teachercache.caches import SPEC, id_too_large, one_nan, one_topk_nan, swap_rows, too_much_mass, writer_with


def visible(url: str) -> list[str]:
    return [o.path for o in Store.open(url).list("")]


@pytest.mark.slow
def test_an_exception_while_a_file_is_built_leaves_nothing(any_url):
    writer = teachercache.create(any_url, SPEC)
    before = visible(any_url)

    def records():
        yield from synthetic_records(SPEC, 30, length=2000)  # several row groups are written by then
        raise RuntimeError("the corpus broke")

    with pytest.raises(RuntimeError, match="the corpus broke"):
        writer.commit("s", records())
    assert visible(any_url) == before


@pytest.mark.slow
def test_an_exception_while_a_file_is_uploaded_leaves_nothing_that_a_reader_sees(any_url, monkeypatch):
    writer = teachercache.create(any_url, SPEC)
    writer.commit("before", synthetic_records(SPEC, 3))
    writer.publish()
    real, calls = Store._put, []

    def broken(self, path, data, *, new):
        calls.append(path)
        if len(calls) >= 2:
            raise OSError("the cable was cut")
        real(self, path, data, new=new)

    monkeypatch.setattr(Store, "_put", broken)
    records = synthetic_records(SPEC, 3, prefix="x", seed=1) + synthetic_records(
        SPEC, 3, prefix="y", seed=2, split="heldout"
    )
    with pytest.raises(StoreUnavailable):
        writer.commit("s", records)
    monkeypatch.setattr(Store, "_put", real)
    assert writer.committed() == {"before"}
    assert [r.doc_id for r in teachercache.open(any_url).records()] == ["doc-00000", "doc-00001", "doc-00002"]
    assert writer.commit("s", records).won, "running the shard again heals it"
    assert writer.publish().records == 9
    assert verify(Store.open(any_url), SPEC).ok


def test_an_attempt_that_slept_past_half_the_grace_period_gives_up(tmp_path):
    writer = writer_with(tmp_path, [0])
    now = [0.0]
    with ShardAttempt(writer.store, SPEC, "s9", grace_seconds=100.0, clock=lambda: now[0]) as attempt:
        attempt.build(synthetic_records(SPEC, 1, prefix="z"))
        attempt.upload()
        now[0] = 51.0
        with pytest.raises(StaleAttempt, match="51 s ago"):
            attempt.commit()
    assert writer.committed() == {"s0"}


def test_an_attempt_whose_file_was_collected_cannot_commit(tmp_path):
    writer = writer_with(tmp_path, [0])
    with ShardAttempt(writer.store, SPEC, "s9") as attempt:
        attempt.build(synthetic_records(SPEC, 1, prefix="z"))
        attempt.upload()
        writer.store.delete(attempt.entries[0].path)
        with pytest.raises(MissingObject):
            attempt.commit()


def test_the_second_commit_of_a_shard_loses_without_harm(any_url):
    writer = teachercache.create(any_url, SPEC)
    assert writer.commit("s", synthetic_records(SPEC, 3, seed=1)).won
    assert not writer.commit("s", synthetic_records(SPEC, 3, seed=2)).won
    assert writer.committed() == {"s"}
    assert writer.publish().records == 3


@pytest.fixture
def cache(tmp_path) -> Path:
    writer_with(tmp_path / "cache", range(3), 10)
    return tmp_path / "cache"


@pytest.mark.parametrize("damage", [swap_rows, too_much_mass, one_nan, one_topk_nan, id_too_large])
def test_a_broken_row_never_reaches_a_commit(cache, damage):
    writer = teachercache.create(cache, SPEC)
    before = sorted(p for p in cache.rglob("*") if p.is_file())
    with pytest.raises(teachercache.errors.InvalidRecord):
        writer.commit("bad", [damage(synthetic_records(SPEC, 1, seed=9, prefix="bad", length=12)[0])])
    assert sorted(p for p in cache.rglob("*") if p.is_file()) == before
