"""What the training loop is given is what the dataset gives, in order, whatever happens to the store meanwhile."""

from __future__ import annotations

import pytest

import teachercache
from tests.trainer.data.test_dataset import names, same
from trainer.data import PackedCache, Prefetcher


def test_the_prefetcher_hands_over_the_same_batches_and_states(cache: teachercache.Cache) -> None:
    plain = list(PackedCache(cache, seq_len=128).with_states())
    for depth in (1, 4):
        prefetcher = Prefetcher(PackedCache(cache, seq_len=128), depth=depth)
        pairs = list(prefetcher)
        assert next(prefetcher, None) is None  # at the end of a batch that the data did not fill, fit calls once more
        prefetcher.close()
        assert all(same(a[0], b[0]) and a[1] == b[1] for a, b in zip(pairs, plain, strict=True))


def test_the_prefetcher_waits_for_a_store_that_is_away_and_repeats_nothing(
    cache: teachercache.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = names(sequence for sequence, _ in PackedCache(cache, seq_len=128).with_states())
    real, failures = teachercache.Cache.stream, iter([3, 1, 2])

    def flaky(self: teachercache.Cache, *args: object, **options: object) -> object:
        stream = real(self, *args, **options)
        left = next(failures, None)
        if left is None:
            return stream

        class Flaky:
            def __next__(self) -> object:
                nonlocal left
                left -= 1
                if left < 0:
                    raise ConnectionResetError("the server went away")
                return next(stream)

            state, close = stream.state, stream.close

        return Flaky()

    monkeypatch.setattr(teachercache.Cache, "stream", flaky)
    monkeypatch.setattr("teachercache.store.failures.time.sleep", lambda _seconds: None)
    prefetcher = Prefetcher(PackedCache(cache, seq_len=128), depth=2)
    assert names(sequence for sequence, _ in prefetcher) == plain
    prefetcher.close()
