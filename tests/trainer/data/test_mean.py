"""The mean of several teachers' sampled rows: unbiased, of the same documents alone, exact to resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import teachercache
from teachercache.errors import TeacherCacheError, UsageError
from teachercache.format.sampled import sample_row
from teachercache.format.spec import SampledRows
from tests.trainer import tiny
from tests.trainer.data.test_dataset import same
from trainer.data import MixedCaches, PackedCache
from trainer.data.mean import MeanCache, mean_rows
from trainer.evaluate import evaluate
from trainer.model import student

SHARES = [0.75, 0.25]
SMALL: dict[str, Any] = {"seq_len": 64, "block_sequences": 3, "blocks_per_flush": 2}
V = 40


def drawn_rows(seed: int, entries: int, exact: int, draws: int) -> tuple[np.ndarray, teachercache.Record]:
    """A distribution [V] and a record whose rows are independent draws of one sampled row of it."""
    rng = np.random.default_rng(seed)
    p = np.exp(2 * rng.standard_normal(V))
    p /= p.sum()
    row = sample_row(np.arange(V), p, entries, exact, rng.random(draws))
    record = teachercache.Record(
        doc_id="a",
        input_ids=np.zeros(draws, np.int32),
        row_pos=np.arange(draws, dtype=np.int32),
        topk_ids=row.ids,
        topk_logprobs=np.tile(row.logprobs, (draws, 1)),
        tail_logprob=np.full(draws, row.tail),
        target_logprob=np.zeros(draws, np.float32),
        loss_mask=np.ones(draws, bool),
        exact=np.full(draws, row.exact, np.uint16),
    )
    return p, record


def dense(rows: dict[str, Any]) -> np.ndarray:
    """Weights [r, V] of mean rows, an entry at a time."""
    found = np.zeros((len(rows["topk_ids"]), V))
    for r, (ids, logprobs) in enumerate(zip(rows["topk_ids"], rows["topk_logprobs"], strict=True)):
        for v, logprob in zip(ids, logprobs, strict=True):
            found[r, v] += np.exp(np.float64(logprob))
    return found


def test_a_mean_row_is_the_sum_of_the_rows_weights_id_by_id() -> None:
    for entries in ((12, 12), (5, 30), (2, 3)):
        records = [drawn_rows(c, n, 1, 50)[1] for c, n in enumerate(entries)]
        rows = mean_rows(records, SHARES)
        expected = np.zeros((50, V))
        for share, record in zip(SHARES, records, strict=True):
            for r in range(50):
                weights = np.exp(record.topk_logprobs[r].astype(np.float64))
                for v, weight in zip(record.topk_ids[r], weights, strict=True):
                    expected[r, v] += share * weight
        np.testing.assert_allclose(dense(rows), expected, rtol=1e-5, atol=1e-9)
        assert rows["topk_ids"].shape == (50, sum(entries))
        assert all(len(set(ids)) == sum(entries) for ids in rows["topk_ids"].tolist())
        assert (np.diff(rows["topk_logprobs"], axis=1) <= 0).all()
        np.testing.assert_allclose(dense(rows).sum(axis=1), 1, rtol=1e-6)


def test_the_mean_of_two_sampled_rows_is_unbiased() -> None:
    """z test of each id's weight over 20,000 draws; ids that are exact in both rows have no spread."""
    (p, one), (q, other) = drawn_rows(1, 8, 2, 20_000), drawn_rows(2, 12, 3, 20_000)
    found = dense(mean_rows([one, other], SHARES))
    truth, spread = SHARES[0] * p + SHARES[1] * q, found.std(axis=0)
    z = (found.mean(axis=0) - truth) / np.maximum(spread / 20_000**0.5, 1e-9)
    assert (spread > 1e-6).sum() > 20
    assert abs(z[spread > 1e-6]).max() < 4.2  # of 40 normal deviates, one in 1,000 is above it
    np.testing.assert_allclose(found.mean(axis=0)[spread <= 1e-6], truth[spread <= 1e-6], rtol=1e-5)


Twins = tuple[list[teachercache.Cache], list[Any]]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> Twins:
    """Caches of two teachers in another order; three documents are in one alone, one has other tokens."""
    folder = tmp_path_factory.mktemp("twins")
    second = tiny.make_model(folder / "model", seed=5)
    models = [LlamaForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for f in (teacher, second)]
    url = tiny.make_cache(str(folder / "a"), teacher, rows=SampledRows(entries=12, exact=3), heldout=1)
    first = teachercache.open(url)
    spec = tiny.spec_for(second, rows=SampledRows(entries=10, exact=2, seed=3))
    writer = teachercache.create(str(folder / "b"), spec, tokenizer_files=second, probe=False)

    def other(record: teachercache.Record) -> teachercache.Record:
        ids = record.input_ids[::-1].copy() if record.doc_id == "doc-0005" else record.input_ids
        doc_id = "only-here" if record.doc_id == "doc-0001" else record.doc_id
        return tiny.sampled(replace(record, doc_id=doc_id, input_ids=ids, content_key=b""), models[1], spec)

    kept = [record for record in first.records(split="train") if record.doc_id not in ("doc-0003", "doc-0004")]
    for number in range(4):
        writer.commit(f"shard-{number}", [other(record) for record in kept[::-1][number::4]])
    writer.publish(allow_partial=True)
    return [first, teachercache.open(str(folder / "b"))], models


def packed(caches: Iterable[teachercache.Cache], **options: Any) -> PackedCache:
    return PackedCache(MeanCache(list(caches), splits=["train", "train"], weights=[3, 1]), **{**SMALL, **options})


def test_documents_that_not_all_caches_have_are_counted_and_left_out(twins: Twins) -> None:
    caches, _ = twins
    mean = MeanCache(caches, splits=["train", "train"], weights=[3, 1])
    assert mean.describe() == (
        "combine: the mean of 2 teachers' rows for 37 records; left out as not in all caches: "
        f"3 of 40 in {caches[0].url}, 1 of 38 in {caches[1].url}"
    )
    whole = packed(caches)
    found = {doc_id for sequence in whole for doc_id, _ in sequence.documents}
    counts = whole.counts_of(whole.state())
    assert found == {r.doc_id for r in caches[0].records(split="train")} - {f"doc-000{n}" for n in (1, 3, 4, 5)}
    assert (counts.documents, counts.not_in_all, counts.without_rows) == (40, 4, 0)
    assert counts.tokens_done + counts.tokens_pending == whole.total_tokens == counts.tokens_read


def test_the_loss_of_mean_rows_is_the_mean_of_the_teachers_divergences(twins: Twins) -> None:
    """Without bias (z test over rows), and its entries' weights are those of p^ of each cache."""
    caches, models = twins
    differences = []
    torch.manual_seed(0)
    for sequence in packed(caches, epochs=3):
        rows = sequence.teacher_rows()
        estimate, constant = rows.estimate(torch.float64)
        torch.testing.assert_close(estimate.topk_logprobs.exp().sum(1), torch.ones(len(rows), dtype=torch.float64))
        q = torch.randn(len(rows), 320).double().log_softmax(1)
        p = estimate.topk_logprobs.exp()
        found = (p * (estimate.topk_logprobs - q.gather(1, rows.topk_ids.long()))).sum(1) + constant
        starts = np.cumsum([0, *sequence.document_lengths])
        logits = [torch.cat([m(sequence.input_ids[a:b][None]).logits[0] for a, b in pairwise(starts)]) for m in models]
        truth = torch.zeros(len(rows), dtype=torch.float64)
        for share, theirs in zip(SHARES, logits, strict=True):
            log_p = theirs[sequence.row_index].double().log_softmax(1)
            truth += share * (log_p.exp() * (log_p - q)).sum(1)
        differences.append((found - truth).detach().numpy())
    errors = np.concatenate(differences)
    assert errors.std() > 0.05
    assert abs(errors.mean()) < 4 * errors.std() / len(errors) ** 0.5


def test_evaluation_on_mean_rows_has_no_standard_error(teacher: Path, twins: Twins) -> None:
    """Their entries all count as exact, so they do not say what the draws left open; the rows of one cache do."""
    caches, _ = twins
    model = student.load_student(teacher, dtype=torch.float32, device=torch.device("cpu"))
    call: dict[str, Any] = {"vocab_size": 320, "attention_kind": "documents"}
    mean = evaluate(model, packed(caches), **call)
    assert mean["rows"] > 0
    assert "heldout_kl_standard_error" not in mean
    assert evaluate(model, PackedCache(caches[0], **SMALL), **call)["heldout_kl_standard_error"] > 0


def test_ids_that_two_sources_share_are_documents_of_each(teacher: Path, twins: Twins, tmp_path: Path) -> None:
    """Ids are unique in a source: "1" of web is not "1" of code, in whatever order the caches have them."""
    records = list(twins[0][0].records(split="train", limit=12))
    urls = []
    for name, model, order in zip("ab", twins[1], ((0, 1), (1, 0)), strict=True):
        spec = tiny.spec_for(teacher, rows=SampledRows(entries=12, exact=3, seed=ord(name)))
        writer = teachercache.create(str(tmp_path / name), spec, probe=False)
        for at in order:
            source = ("web", "code")[at]
            named = [replace(r, doc_id=str(i), source=source) for i, r in enumerate(records[6 * at : 6 * at + 6])]
            writer.commit(f"{source}-s", [tiny.sampled(replace(r, content_key=b""), model, spec) for r in named])
        writer.publish(allow_partial=True)
        urls.append(teachercache.open(str(tmp_path / name)))
    whole = packed(urls)
    assert sum(len(sequence.documents) for sequence in whole) == 12
    assert whole.counts_of(whole.state()).not_in_all == 0


def test_a_mean_of_no_equal_document_says_so(teacher: Path, twins: Twins, tmp_path: Path) -> None:
    (one, _), (model, _) = twins
    spec = tiny.spec_for(teacher, rows=SampledRows(entries=12, exact=3, seed=9))
    writer = teachercache.create(str(tmp_path / "c"), spec, probe=False)
    turned = [replace(r, input_ids=r.input_ids[::-1].copy(), content_key=b"") for r in one.records(split="train")]
    writer.commit("s", [tiny.sampled(record, model, spec) for record in turned])
    writer.publish(allow_partial=True)
    with pytest.raises(TeacherCacheError, match="of 40 documents 40 not in all caches with the same tokens and rows"):
        list(packed([one, teachercache.open(str(tmp_path / "c"))]))


def test_ranks_and_resumed_runs_have_the_same_mean_rows(twins: Twins) -> None:
    caches, _ = twins
    whole = list(packed(caches, epochs=2))
    for rank in range(2):
        shared = list(packed(caches, epochs=2, rank=rank, world_size=2))
        assert all(same(a, b) for a, b in zip(shared, whole[rank::2], strict=True))
    for at in (3, len(whole) - 4):
        rest = list(packed(caches, epochs=2, state=json.loads(json.dumps(whole[at].state))))
        assert all(same(a, b) for a, b in zip(rest, whole[at + 1 :], strict=True))
    assert len(list(MixedCaches([packed(caches)], weights=[1.0]))) > 3
    state = whole[-2].state
    assert state is not None
    other = MeanCache(caches, splits=["train", "train"], weights=[1, 1])
    with pytest.raises(UsageError, match="the state belongs to a mean of other caches"):
        list(PackedCache(other, epochs=2, state=state, **SMALL))


def test_what_has_no_mean_is_refused(twins: Twins, cache: teachercache.Cache) -> None:
    caches, _ = twins
    refused: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: MeanCache([caches[0], cache], splits=["train"] * 2, weights=[1, 1]),
            "has top-16 rows: each teacher leaves",
        ),
        (
            lambda: MeanCache(caches[::-1], splits=["train", "heldout"], weights=[1, 1]),
            "finds no document of .* in all of",
        ),
        (lambda: packed(caches, entropy_above=1.0), "entropy of the mean, which no cache knows"),
    ]
    for call, message in refused:
        with pytest.raises(UsageError, match=message):
            call()
