"""thin: rows drawn from rows stay unbiased; the new cache is written, resumed and refused like any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import teachercache
from teachercache.errors import SpecMismatch, UsageError
from teachercache.format.sampled import sample_row
from teachercache.format.spec import SampledRows
from teachercache.testing import synthetic_records, synthetic_spec
from teachercache.upkeep.optimize import optimize
from teachercache.upkeep.thin import thin, thin_rows
from teachercache.upkeep.verify import verify
from teachercache.views.show import shards_in_words, summary
from teachercache.write.writer import CacheWriter

LARGE = SampledRows(entries=40, exact=10)


def make(folder: Path, shards: int = 2, rows: SampledRows | None = LARGE) -> teachercache.Cache:
    spec = synthetic_spec(vocab_size=997, rows=rows)
    writer = teachercache.create(folder, spec)
    for shard in range(shards):
        writer.commit(f"shard-{shard}", synthetic_records(spec, 3, seed=shard, prefix=f"doc{shard}"))
    writer.publish()
    return teachercache.open(folder)


def distributions() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    p = {
        "ordinary": rng.dirichlet(np.full(131, 0.2)),
        "flat": np.full(131, 1 / 131),
        "ties": np.repeat([4.0, 2.0, 1.0], [3, 8, 120]),
        "peaked": np.append(np.full(130, 1e-4), 1.0),
        "one token": np.append(np.zeros(130), 1.0),
        "few tokens": np.append(np.zeros(121), rng.dirichlet(np.ones(10))),
    }
    return {name: x / x.sum() for name, x in p.items()}


@pytest.mark.parametrize("name", distributions())
@pytest.mark.parametrize(("entries", "least"), [(12, 3), (12, 1), (23, 6), (2, 1)])
def test_thinned_rows_are_an_unbiased_estimate(name: str, entries: int, least: int) -> None:
    """Over 20,000 seeds of both draws: z test of each token at 5 sigma; weights sum to 1; ids are distinct."""
    p, n, seeds = distributions()[name], 24, 20_000
    rng = np.random.default_rng(1)
    row = sample_row(np.arange(131), p, n, 6, rng.random(seeds))
    tail, exact = np.full(seeds, row.tail), np.full(seeds, row.exact)
    logprobs = np.broadcast_to(row.logprobs, row.ids.shape)
    ids, kept, new_tail, count = thin_rows(row.ids, logprobs, tail, exact, rng.random(seeds), entries, least)
    assert (np.diff(np.sort(ids, axis=1), axis=1) > 0).all()
    weights = np.exp(kept.astype(np.float64))
    assert abs(weights.sum(axis=1) - 1).max() < 1e-6
    is_drawn = np.arange(entries) >= count[:, None]
    assert ((count >= least) & (count <= np.minimum(row.exact, entries))).all()
    expected = np.where(count < entries, np.log(np.maximum(entries - count, 1)), 0)
    drawn = is_drawn.any(axis=1)
    assert abs(kept[drawn, -1] - (new_tail - expected)[drawn]).max(initial=0) < 1e-5
    assert (np.diff(np.where(is_drawn, ids, -1), axis=1)[:, 1:] >= 0).all() or entries == 2  # drawn ids ascend
    total = np.zeros(131)
    np.add.at(total, ids, weights)
    heaviest = np.where(is_drawn, weights, 0).max()  # a draw counts at most this: Var p^ <= p * heaviest
    bound = 5 * np.sqrt(p * heaviest / seeds) + 10 * heaviest / seeds + 1e-6
    assert (abs(total / seeds - p) <= bound).all(), (abs(total / seeds - p) / bound).max()


def test_rows_that_are_exact_are_drawn_as_from_the_distribution_itself() -> None:
    """A row that holds its whole distribution thins as the reference draws from it, point for point."""
    rng = np.random.default_rng(3)
    u = rng.random(200)
    p = np.append(np.sort(rng.dirichlet(np.full(24, 0.5)))[::-1], np.zeros(100))
    ids = rng.permutation(124).astype(np.int32)
    expected = sample_row(ids, p, 12, 3, u)
    row_ids = np.broadcast_to(ids[:24], (200, 24))
    logprobs = np.broadcast_to(np.log(p[:24]).astype(np.float32), (200, 24))
    tail, exact = np.full(200, np.log(2.0**-23), np.float32), np.full(200, 24)
    found, weights, new_tail, count = thin_rows(row_ids, logprobs, tail, exact, u, 12, 3)
    assert (count == expected.exact).all()
    assert np.mean((found == expected.ids).all(axis=1)) >= 0.99  # float32 logarithms move a point across a boundary
    np.testing.assert_allclose(weights[0], expected.logprobs, atol=1e-5)
    np.testing.assert_allclose(new_tail, expected.tail, atol=1e-5)


def test_a_thinned_cache_is_published_verified_and_keeps_everything_else(tmp_path: Path) -> None:
    old = make(tmp_path / "old")
    done = thin(old, tmp_path / "new", entries=12)
    new = teachercache.open(tmp_path / "new")
    assert done.shards == 2
    assert new.spec.rows == SampledRows(entries=12, exact=3, thinned_from=old.spec.digest)
    assert verify(new.store, new.spec).problems == []
    assert shards_in_words(summary(new)) == "2 committed, none was planned"
    for theirs, ours in zip(old.records(), new.records(), strict=True):
        assert ours.topk_ids.shape == (len(theirs.row_pos), 12)
        assert ours.content_key != theirs.content_key  # rows of another identity
        same = {"topk_ids", "topk_logprobs", "tail_logprob", "exact", "content_key"}
        fields = {name: getattr(theirs, name) for name in same}
        assert replace(ours, **fields).same_as(theirs)
        for row in range(len(theirs.row_pos)):
            count = int(ours.exact[row])
            assert (ours.topk_ids[row, :count] == theirs.topk_ids[row, :count]).all()
            assert (ours.topk_logprobs[row, :count] == theirs.topk_logprobs[row, :count]).all()
            assert set(ours.topk_ids[row]) <= set(theirs.topk_ids[row])


def test_the_same_command_resumes_and_takes_over_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = make(tmp_path / "old", shards=3)
    commit, calls = CacheWriter.commit, []

    def dies_at_the_second(self: CacheWriter, *args, **options):  # type: ignore[no-untyped-def]
        if len(calls) == 1:
            raise KeyboardInterrupt
        calls.append(args[0])
        return commit(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(CacheWriter, "commit", dies_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            thin(old, tmp_path / "new", entries=12)
    assert thin(old, tmp_path / "new", entries=12).shards == 2
    first = {r.doc_id: r for r in teachercache.open(tmp_path / "new").records()}
    again = thin(old, tmp_path / "new", entries=12)
    assert (again.shards, again.manifest.number) == (0, 1)
    # A takedown and a merge of the old cache reach the new one; the other rows are drawn as before.
    optimize(CacheWriter(old.store, old.spec), without=["doc1-00001"])
    assert thin(teachercache.open(tmp_path / "old"), tmp_path / "new", entries=12).manifest.number == 2
    second = {r.doc_id: r for r in teachercache.open(tmp_path / "new").records()}
    assert second.keys() == first.keys() - {"doc1-00001"}
    assert all(record.same_as(first[name]) for name, record in second.items())


def test_a_shard_that_lost_all_its_documents_leaves_the_new_cache_too(tmp_path: Path) -> None:
    old = make(tmp_path / "old")
    thin(old, tmp_path / "new", entries=12)
    gone = [f"doc1-{n:05d}" for n in range(3)]
    optimize(CacheWriter(old.store, old.spec), without=gone, target_bytes=1)  # its shard has no file any more
    again = thin(teachercache.open(tmp_path / "old"), tmp_path / "new", entries=12)
    assert (again.shards, again.manifest.number) == (1, 2)
    left = {record.doc_id for record in teachercache.open(tmp_path / "new").records()}
    assert left == {record.doc_id for record in teachercache.open(tmp_path / "old").records()}
    assert not left.intersection(gone)
    assert thin(teachercache.open(tmp_path / "old"), tmp_path / "new", entries=12).shards == 0
    thin(teachercache.open(tmp_path / "old"), tmp_path / "fresh", entries=12)
    assert {record.doc_id for record in teachercache.open(tmp_path / "fresh").records()} == left


def test_a_new_cache_that_was_rewritten_takes_what_was_added_and_refuses_what_was_replaced(tmp_path: Path) -> None:
    old = make(tmp_path / "old")
    writer = CacheWriter(old.store, old.spec)
    small = thin(old, tmp_path / "new", entries=12)
    new = teachercache.open(tmp_path / "new")
    optimize(CacheWriter(new.store, new.spec), codec="compact")
    assert thin(old, tmp_path / "new", entries=12).shards == 0
    writer.commit("more", synthetic_records(old.spec, 3, seed=9, prefix="more"))
    writer.publish()
    added = thin(teachercache.open(tmp_path / "old"), tmp_path / "new", entries=12)
    assert added.manifest.documents == small.manifest.documents + 3
    optimize(writer, without=["doc1-00001"])
    commits = sorted((tmp_path / "new/commits").iterdir())
    with pytest.raises(UsageError, match=r"rewritten by `optimize`: it has opt-\w+ in place of .*thin into a new URL"):
        thin(teachercache.open(tmp_path / "old"), tmp_path / "new", entries=12)
    assert sorted((tmp_path / "new/commits").iterdir()) == commits


def test_what_was_merged_again_and_again_is_taken_over(tmp_path: Path) -> None:
    """Twice in the old cache between two calls, and once after a call that took the first merge over."""
    old = make(tmp_path / "old", shards=4)
    writer = CacheWriter(old.store, old.spec)
    thin(old, tmp_path / "new", entries=12)
    for gone in (["doc0-00000"], ["doc1-00000"]):
        optimize(writer, without=gone)
    assert thin(teachercache.open(tmp_path / "old"), tmp_path / "new", entries=12).shards == 1
    optimize(writer, without=["doc2-00000"])
    last = thin(teachercache.open(tmp_path / "old"), tmp_path / "new", entries=12)
    found = {record.doc_id for record in teachercache.open(tmp_path / "new").records()}
    assert found == {record.doc_id for record in teachercache.open(tmp_path / "old").records()}
    assert (last.shards, len(found), verify(writer.store, writer.spec).problems) == (1, 9, [])


@pytest.mark.parametrize("change", ["added", "merged", "taken out", "emptied"])
def test_a_manifest_older_than_the_one_thinned_before_is_refused(tmp_path: Path, change: str) -> None:
    """Its shards would repeat what the newer manifest merged, and bring back what that left out."""
    old = make(tmp_path / "old")
    writer = CacheWriter(old.store, old.spec)
    if change == "added":
        writer.commit("more", synthetic_records(old.spec, 3, seed=9, prefix="more"))
        writer.publish()
    else:
        gone = {"merged": [], "taken out": ["doc1-00001"], "emptied": [f"doc1-{n:05d}" for n in range(3)]}[change]
        optimize(writer, without=gone, target_bytes=1 if gone else 2**20)
    newer = teachercache.open(tmp_path / "old")
    assert newer.manifest.number == 2
    thin(newer, tmp_path / "new", entries=12)
    files = sorted((tmp_path / "new").rglob("*"))
    with pytest.raises(
        UsageError, match=r"new was thinned from manifest 2 of \S+old; manifest 1, .* is older.*a new URL"
    ):
        thin(old, tmp_path / "new", entries=12)
    assert sorted((tmp_path / "new").rglob("*")) == files
    again = thin(newer, tmp_path / "new", entries=12)
    assert (again.shards, again.manifest.number) == (0, 1)
    writer.commit("newest", synthetic_records(old.spec, 3, seed=10, prefix="newest"))
    writer.publish()
    last = thin(teachercache.open(tmp_path / "old"), tmp_path / "new", entries=12)
    assert (last.shards, last.manifest.documents) == (1, again.manifest.documents + 3)


def test_what_cannot_be_thinned_is_refused_with_the_reason(tmp_path: Path) -> None:
    old = make(tmp_path / "old")
    for options, reason in (
        ({"entries": 40}, "expected --entries from 2 to 39"),
        ({"entries": 12, "exact": 12}, "expected --exact from 1 to 10"),
        ({"entries": 24, "exact": 11}, "expected --exact from 1 to 10"),
    ):
        with pytest.raises(UsageError, match=reason):
            thin(old, tmp_path / "new", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()
    with pytest.raises(SpecMismatch, match=r"rows\.entries"):
        thin(old, tmp_path / "old", entries=12)
    top_k = make(tmp_path / "top", rows=None)
    with pytest.raises(UsageError, match=r"top-8 rows, which do not say.*data.top_k=4"):
        thin(top_k, tmp_path / "new", entries=4)
    thin(old, tmp_path / "new", entries=12)
    with pytest.raises(SpecMismatch, match=r"rows\.entries"):
        thin(old, tmp_path / "new", entries=13)
