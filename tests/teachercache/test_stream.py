"""The stream: its order is a function of the manifest and the seed, and its state resumes exactly."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter

import pytest

import teachercache
from teachercache.errors import StoreUnavailable, UnsafeManifest, UsageError
from teachercache.parquet.datafile import DataFile
from teachercache.read import stream as streams
from teachercache.read.disk_cache import DiskCache
from teachercache.store.store import Store
from teachercache.testing import synthetic_records
from tests.teachercache.caches import PER_SHARD, SHARDS, SPEC, in_a_fork, make, names, streamed


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return streamed(tmp_path_factory.mktemp("stream") / "cache")


def options(world_size, rank, shuffle):
    return {"seed": 7, "world_size": world_size, "rank": rank, "shuffle": shuffle, "shuffle_groups": 3, "prefetch": 2}


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
def test_stop_and_resume_at_50_random_points_twice_in_a_row_repeats_and_skips_nothing(cache, world_size, shuffle):
    total = int(2.3 * SHARDS * PER_SHARD / world_size)  # across an epoch's end, and one more
    rng = random.Random(0)
    for rank in range(world_size):
        args = options(world_size, rank, shuffle)
        whole = names(cache.stream(**args), total)
        assert len(whole) == total
        for _ in range(-(-50 // world_size)):
            first, second = sorted(rng.sample(range(total), 2))
            with cache.stream(**args) as stream:
                head = [next(stream).doc_id for _ in range(first)]
                state = json.loads(json.dumps(stream.state()))
            with cache.stream(**args, state=state) as stream:
                middle = [next(stream).doc_id for _ in range(second - first)]
                state = json.loads(json.dumps(stream.state()))
            tail = names(cache.stream(**args, state=state), total - second)
            assert head + middle + tail == whole


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 50])
def test_an_epoch_holds_every_record_once_over_all_ranks(cache, world_size, shuffle):
    seen = Counter(
        name
        for rank in range(world_size)
        for name in names(cache.stream(**options(world_size, rank, shuffle), repeat=False))
    )
    assert len(seen) == SHARDS * PER_SHARD
    assert set(seen.values()) == {1}


def test_a_rank_beyond_the_row_groups_does_not_run_dry(cache):
    assert len(names(cache.stream(split="heldout", world_size=4, rank=3), 5)) == 5


def test_epochs_and_seeds_differ_and_a_seed_repeats(cache):
    count = SHARDS * PER_SHARD
    both = names(cache.stream(seed=1), 2 * count)
    assert sorted(both[:count]) == sorted(both[count:])
    assert both[:count] != both[count:]
    assert names(cache.stream(seed=1), count) == both[:count]
    assert names(cache.stream(seed=2), count) != both[:count]


def test_shuffling_mixes_records_of_several_files(cache):
    first = names(cache.stream(seed=0), 20)
    assert len({name.split("-")[0] for name in first}) >= 3


def test_without_shuffle_the_order_is_that_of_records(cache):
    assert names(cache.stream(shuffle=False, repeat=False)) == [r.doc_id for r in cache.records(split="train")]


def test_the_state_of_another_stream_is_refused_by_name(cache):
    with cache.stream(seed=1) as stream:
        next(stream)
        state = stream.state()
    assert len(json.dumps(state)) < 400
    with pytest.raises(UsageError, match="seed: state 1, stream 2"):
        cache.stream(seed=2, state=state)
    with pytest.raises(UsageError, match="world_size: state 1, stream 2"):
        cache.stream(seed=1, world_size=2, state=state)
    with pytest.raises(UsageError, match="manifest: state"):
        cache.stream(seed=1, state=state | {"manifest": "0" * 64})


def test_streams_of_one_node_share_a_bounded_disk_cache(cache, tmp_path):
    sizes = [f.size for f in cache.files(split="train")]
    bound = sum(sizes) - min(sizes) // 2  # all but one of the files fit
    plain = names(cache.stream(seed=3), 200)
    for _ in range(2):
        with cache.stream(seed=3, cache_dir=tmp_path, cache_bytes=bound) as stream:
            assert [next(stream).doc_id for _ in range(200)] == plain
            assert 0 < DiskCache(tmp_path, bound).size() <= bound


def test_streaming_over_s3_equals_streaming_from_disk(s3_url):
    writer = teachercache.create(s3_url, SPEC)
    writer.rows_per_group = 120
    records = synthetic_records(SPEC, 40)
    writer.commit("s", records)
    writer.publish()
    with teachercache.open(s3_url).stream(repeat=False) as stream:
        assert sorted(r.doc_id for r in stream) == sorted(r.doc_id for r in records)
    with teachercache.open(s3_url).stream(columns={"doc_id", "input_ids"}) as stream:
        record = next(stream)
        assert record.topk_ids is None
        assert record.input_ids is not None


def test_a_stream_outlives_lost_connections_and_short_answers(s3_url, monkeypatch):
    writer = teachercache.create(s3_url, SPEC)
    records = synthetic_records(SPEC, 20)
    writer.commit("s", records)
    writer.publish()
    cache = teachercache.open(s3_url)
    real, calls = cache.store.fs.cat_file, itertools.count()

    def flaky(path, start=None, end=None, **options):
        turn = next(calls) % 3
        if turn == 0:
            raise ConnectionResetError("connection reset by peer")
        data = real(path, start=start, end=end, **options)
        return data[: len(data) // 2] if turn == 1 else data

    monkeypatch.setattr(cache.store.fs, "cat_file", flaky)
    with cache.stream(repeat=False) as stream:
        assert sorted(r.doc_id for r in stream) == [r.doc_id for r in records]
    assert next(calls) > 3


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_stream_that_raised_goes_on_where_it_was_instead_of_ending(cache, shuffle, monkeypatch):
    """A caller that catches the error and asks again must not take the silence for the end of the data."""
    plain = names(cache.stream(shuffle=shuffle, shuffle_groups=2, repeat=False))
    real, calls = DataFile.read_group, itertools.count()

    def fails_once(file, i, columns=None):
        if next(calls) == 5:
            raise StoreUnavailable("the store went away")
        return real(file, i, columns)

    monkeypatch.setattr(DataFile, "read_group", fails_once)
    found = []
    with cache.stream(shuffle=shuffle, shuffle_groups=2, repeat=False) as stream:
        with pytest.raises(StoreUnavailable):
            found.extend(r.doc_id for r in stream)
        found += [r.doc_id for r in stream]
    assert found == plain


@pytest.mark.parametrize("shuffle", [True, False])
def test_row_groups_that_are_in_memory_together_are_bounded_together(cache, monkeypatch, shuffle):
    """Each of them is below its bound; eight of them, and eight ahead, would be gigabytes."""
    sizes = []
    for entry in cache.files(split="train"):
        with DataFile(Store.open(cache.url), entry, cache.spec) as file:
            sizes += [file.group_bytes(g) for g in range(file.footer.num_row_groups)]
    monkeypatch.setattr(streams, "GROUP_BYTES", 0)
    monkeypatch.setattr(streams, "SPARE_BYTES", max(sizes))
    with pytest.raises(UnsafeManifest, match="shuffle_groups=1"), cache.stream(**options(1, 0, shuffle)) as stream:
        list(itertools.islice(stream, 200))
    assert len(names(cache.stream(**options(1, 0, shuffle) | {"shuffle_groups": 1}), 200)) == 200


@pytest.mark.parametrize("damage", ["cut", "flipped", "zeros"])
def test_a_damaged_local_copy_is_replaced_by_the_object(cache, tmp_path, damage):
    plain = names(cache.stream(seed=3, repeat=False))
    assert names(cache.stream(seed=3, repeat=False, cache_dir=tmp_path)) == plain
    copies = list(tmp_path.glob("*.parquet"))
    for copy in copies:
        data = copy.read_bytes()
        half = len(data) // 2
        flipped = bytes(b ^ 0xFF for b in data[:half])
        copy.write_bytes({"cut": data[:half], "flipped": flipped + data[half:], "zeros": bytes(len(data))}[damage])
    assert names(cache.stream(seed=3, repeat=False, cache_dir=tmp_path)) == plain
    assert names(cache.stream(seed=3, repeat=False, cache_dir=tmp_path)) == plain
    assert {c.name for c in tmp_path.glob("*.parquet")} == {c.name for c in copies}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_stream_refuses_a_fork_instead_of_waiting_for_ever(tmp_path):
    with make(tmp_path / "cache").stream() as stream:
        next(stream)
        assert isinstance(in_a_fork(lambda: [r.doc_id for _, r in zip(range(50), stream, strict=False)]), UsageError)


def test_a_state_of_an_older_manifest_says_which_one_to_open(tmp_path):
    cache = make(tmp_path / "cache")
    with cache.stream() as stream:
        next(stream)
        state = stream.state()
    writer = teachercache.create(tmp_path / "cache", SPEC)
    writer.commit("t", synthetic_records(SPEC, 2, prefix="more", seed=9))
    writer.publish()
    with pytest.raises(UsageError, match="manifest 1, where this is 2"):
        teachercache.open(tmp_path / "cache").stream(state=state)
    with teachercache.open(tmp_path / "cache", manifest=1).stream(state=state) as stream:
        next(stream)
