"""Several caches in one order: shares, exact resumption, ranks and workers, and what is refused."""

from __future__ import annotations

import json
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import teachercache
from teachercache.errors import TeacherCacheError, UsageError
from teachercache.format.spec import SampledRows
from tests.trainer import tiny
from tests.trainer.data.test_dataset import same
from trainer.data import MixedCaches, PackedCache
from trainer.data.dataset import DataCounts

SMALL: dict[str, Any] = {"seq_len": 64, "block_sequences": 3, "blocks_per_flush": 2}
WEIGHTS = [0.7, 0.3]


@pytest.fixture(scope="module")
def caches(
    cache: teachercache.Cache, tmp_path_factory: pytest.TempPathFactory, teacher: Path
) -> list[teachercache.Cache]:
    """A top-K cache and a sampled one."""
    folder = str(tmp_path_factory.mktemp("sampled") / "cache")
    rows = SampledRows(entries=12, exact=3)
    return [cache, teachercache.open(tiny.make_cache(folder, teacher, rows=rows, documents=25, seed=7))]


def mixed(
    caches: list[teachercache.Cache], *, weights: list[float] = WEIGHTS, seed: int = 0, **options: Any
) -> MixedCaches:
    own = {key: options.pop(key) for key in ("rank", "world_size", "state") if key in options}
    parts = [PackedCache(cache, seed=seed, **{**SMALL, "epochs": 2, **options}) for cache in caches]
    return MixedCaches(parts, weights=weights, seed=seed, **own)


@pytest.mark.parametrize("weights", [[0.7, 0.3], [1.0, 1.0], [1.0, 30.0], [0.25, 1e-3, 3.0]])
def test_the_shares_of_every_stretch_are_the_weights(weights: list[float]) -> None:
    """Over 10,000 sequences each share is within 0.01 % of its weight; nowhere is a cache behind by more than two."""
    order = object.__new__(MixedCaches)
    order.weights, order._offsets = weights, [0.3, 0.9, 0.5][: len(weights)]
    times = sorted(order._time(c, k) for c in range(len(weights)) for k in range(10_000))[:10_000]
    given = [0] * len(weights)
    for number, (_, c) in enumerate(times, 1):
        assert order._place(c, given[c]) == number - 1
        given[c] += 1
        assert all(abs(n - number * w / sum(weights)) < 2 for n, w in zip(given, weights, strict=True))


def test_ten_thousand_sequences_of_both_kinds_are_within_a_percent_of_the_weights(
    caches: list[teachercache.Cache],
) -> None:
    packed = mixed(caches, epochs=None)
    orders = packed.all_sequences(packed.state(), lambda number: number % 97 == 0)
    for sequence, state in islice(orders, 10_000):
        given = [cache["counts"]["sequences"] for cache in state["caches"]]
        assert sequence is None or (sequence.exact is not None) == (sequence.cache == 1)
    assert sum(given) == 10_000
    assert [n / 10_000 for n in given] == pytest.approx(WEIGHTS, rel=1e-3)


def test_each_cache_gives_its_own_sequences_in_its_own_order(caches: list[teachercache.Cache]) -> None:
    found = list(mixed(caches))
    for c, cache in enumerate(caches):
        alone = list(PackedCache(cache, epochs=2, **SMALL))
        ours = [sequence for sequence in found if sequence.cache == c]
        assert all(same(a, b) for a, b in zip(ours, alone, strict=False))
        assert len(ours) <= len(alone)
    lengths = [sum(s.cache == c for s in found) for c in (0, 1)]
    assert any(n == len(list(PackedCache(cache, epochs=2, **SMALL))) for n, cache in zip(lengths, caches, strict=True))
    done = [sequence.tokens_done for sequence in found]
    assert done == sorted(done)
    assert done[-1] == pytest.approx(2 * mixed(caches).total_tokens, rel=0.02)
    other = [sequence.documents for sequence in mixed(caches, seed=1)]
    assert other != [sequence.documents for sequence in found]


def test_a_length_curriculum_follows_the_whole_run_and_resumes(caches: list[teachercache.Cache]) -> None:
    """Each cache changes over near the middle of the run, by its counts alone: a state says all."""

    def curriculum(state: Any = None) -> MixedCaches:
        def length(c: int, counts: DataCounts) -> int:
            return 32 if packed.whole_run(c, counts)[0] < packed.total_tokens else 64  # of two epochs

        parts = [PackedCache(x, **{**SMALL, "seq_len": partial(length, c)}, epochs=2) for c, x in enumerate(caches)]
        packed = MixedCaches(parts, weights=WEIGHTS, state=state)
        return packed

    whole = list(curriculum())
    for c in (0, 1):
        first = next(i for i, s in enumerate(whole) if s.cache == c and s.input_ids.numel() > 32)
        assert whole[first].tokens_done == pytest.approx(curriculum().total_tokens, rel=0.25)
    for at in range(0, len(whole), 9):
        rest = list(curriculum(whole[at].state))
        assert all(same(a, b) for a, b in zip(rest, whole[at + 1 :], strict=True))


def test_one_cache_is_a_mixture_of_one(cache: teachercache.Cache) -> None:
    alone, found = list(PackedCache(cache, epochs=2, **SMALL)), list(mixed([cache], weights=[5.0]))
    assert all(same(a, b) and a.tokens_done == b.tokens_done for a, b in zip(found, alone, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_number_of_ranks_continues_the_order_from_every_state(
    caches: list[teachercache.Cache], world_size: int
) -> None:
    whole = list(mixed(caches))
    ranks = [list(mixed(caches, rank=r, world_size=world_size).with_states()) for r in range(world_size)]
    for rank, pairs in enumerate(ranks):
        assert all(same(a, b) and a.cache == b.cache for (a, _), b in zip(pairs, whole[rank::world_size], strict=True))
    for turn in range(0, len(ranks[-1]), 11):
        state = json.loads(json.dumps(ranks[0][turn][1]))
        assert all(pairs[turn][1] == state for pairs in ranks)
        for others in (1, 2):
            for rank in range(others):
                rest = list(mixed(caches, rank=rank, world_size=others, state=state))
                expected = whole[(turn + 1) * world_size :][rank::others]
                assert all(same(a, b) for a, b in zip(rest, expected, strict=True))


def test_workers_share_the_order_and_every_sequence_knows_where_to_continue(caches: list[teachercache.Cache]) -> None:
    expected, packed = list(mixed(caches)), mixed(caches)
    found = list(DataLoader(packed, batch_size=None, num_workers=2))
    assert all(same(a, b) and a.state == b.state for a, b in zip(found, expected, strict=True))
    with pytest.raises(UsageError, match="read this MixedCaches"):
        packed.state()
    rest = list(mixed(caches, state=found[9].state))
    assert all(same(a, b) for a, b in zip(rest, expected[10:], strict=True))


def test_another_mixture_does_not_continue_a_state(caches: list[teachercache.Cache]) -> None:
    state = next(iter(mixed(caches).with_states()))[1]
    for wrong, message in (
        ({"weights": [0.6, 0.4]}, r"caches of weights \[0.7, 0.3\], this run has \[0.6, 0.4\]"),
        ({"seed": 3}, "the checkpoint has seed 0, this run has 3"),
        ({"state": {**state, "caches": state["caches"][::-1]}}, "the checkpoint has manifest"),
        ({"state": {**state, "caches": [{**state["caches"][0], "used": "x"}] * 2}}, "damaged"),
        ({"state": {}}, "damaged"),
    ):
        with pytest.raises(TeacherCacheError, match=message):
            mixed(caches, **{"state": state, **wrong})
    for weights in ([1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]):
        with pytest.raises(UsageError, match="mixture of 2 caches needs as many weights"):
            mixed(caches, weights=weights)
