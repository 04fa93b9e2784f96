"""A sampled cache in training and evaluation, rows chosen by entropy, and a cross-entropy weight for each source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import teachercache
from teachercache.errors import TeacherCacheError, UsageError
from teachercache.format.sampled import sample_row
from teachercache.format.spec import SampledRows, TopKRows
from teachercache.testing import synthetic_spec
from tests.trainer import tiny
from trainer.config import TrainerConfig, load_config
from trainer.data import PackedCache
from trainer.data.sequence import cut_record, pack_records
from trainer.evaluate import evaluate, evaluate_cache
from trainer.fit import fit
from trainer.losses.online import sampled_rows
from trainer.model import student as students
from trainer.optim import build_optimizer
from trainer.setup import check_rows
from trainer.step import Step

CPU = torch.device("cpu")
ROWS = SampledRows(entries=12, exact=3)
ONLINE = ["loss.method=online", "teacher=t"]


@pytest.fixture(scope="module")
def sampled_cache(tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> teachercache.Cache:
    url = tiny.make_cache(str(tmp_path_factory.mktemp("sampled") / "cache"), teacher, rows=ROWS, heldout=40)
    return teachercache.open(url)


def make_step(folder: Path, **sections: Any) -> Step:
    config = TrainerConfig(cache="unused", student=str(folder), **sections)
    model = students.load_student(folder, dtype=torch.float32, device=CPU).train()
    return Step(model, build_optimizer(model, config.optim), config, attention_kind="documents", vocab_size=320)


@pytest.mark.parametrize(("entries", "exact"), [(12, 3), (40, 1), (2, 1)])
def test_rows_drawn_from_live_logits_are_those_of_the_reference(entries: int, exact: int) -> None:
    torch.manual_seed(0)
    logits = torch.cat([torch.randn(30, 131) * scale for scale in (0.0, 1.0, 3.0, 30.0)])
    logits[5] = torch.randn(131).sort().values.round()  # ties
    u = torch.rand(120, dtype=torch.float64)
    rows = sampled_rows(logits, entries, exact, u, chunk_size=50)
    p = logits.double().softmax(dim=1)
    assert rows.exact is not None
    assert rows.entropy is not None
    same = 0
    for i in range(120):
        row = sample_row(np.arange(131), p[i].numpy(), entries, exact, float(u[i]))
        assert int(rows.exact[i]) == row.exact
        torch.testing.assert_close(rows.topk_logprobs[i], torch.from_numpy(row.logprobs), atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(rows.tail_logprob[i], torch.tensor(row.tail))
        torch.testing.assert_close(rows.entropy[i].double(), torch.special.entr(p[i]).sum(), atol=1e-5, rtol=1e-6)
        same += int((rows.topk_ids[i].numpy() == row.ids[0]).all())
    assert same >= 60  # where all of the first tokens tie, topk may choose others of them


def test_a_sampled_cache_trains_towards_its_teacher(sampled_cache: teachercache.Cache, student: Path) -> None:
    sequences = list(PackedCache(sampled_cache, seq_len=128))
    assert sequences[0].exact is not None
    assert sequences[0].entropy is not None
    losses = {}
    for method in ("dense", "forward_chunked", "fused"):
        step = make_step(student, loss={"method": method})
        losses[method] = [step.run([s], lr=3e-3).loss for s in sequences]
        assert losses[method] == pytest.approx(losses["dense"], rel=2e-4)
    assert losses["fused"][-1] < 0.9 * losses["fused"][0]


def test_eval_estimates_the_full_divergence_without_a_teacher(
    sampled_cache: teachercache.Cache, student: Path, teacher: Path
) -> None:
    live = students.load_student(teacher, dtype=torch.float32, device=CPU).eval()
    model = students.load_student(student, dtype=torch.float32, device=CPU)
    heldout = list(PackedCache(sampled_cache, split="heldout", seq_len=128, shuffle=False))
    call: dict[str, Any] = {"vocab_size": 320, "attention_kind": "documents"}
    alone, both = evaluate(model, heldout, **call), evaluate(model, heldout, teacher=live, **call)
    assert alone["heldout_kl"] == both["heldout_kl"]
    assert alone["heldout_kl_kind"].startswith("full vocabulary")
    error = alone["heldout_kl_standard_error"]
    assert 0 < error < 0.1 * alone["heldout_kl"]
    full = both["heldout_kl_full_vocabulary"]
    off = abs(both["heldout_kl"] - full) / error
    print(
        f"from the cache alone {alone['heldout_kl']:.4f} ± {error:.4f}, with the teacher {full:.4f}: {off:.2f} errors off"
    )
    assert off <= 3
    itself = evaluate(live, heldout, **call)
    assert abs(itself["heldout_kl"]) <= 4 * itself["heldout_kl_standard_error"] + 1e-3
    assert itself["top1_agreement"] > 0.99


def test_a_live_teacher_of_another_tokenizer_is_refused(
    sampled_cache: teachercache.Cache, student: Path, tmp_path: Path
) -> None:
    """Its logits would be of other tokens: a traceback in `eval`, and another teacher in silence online."""
    other = tiny.make_model(tmp_path / "other", vocab_size=300)
    tiny.make_tokenizer(other, vocab_size=290)
    small = tiny.make_model(tmp_path / "small", vocab_size=300)
    common = [f"cache={sampled_cache.url}", f"student={student}", "data.seq_len=128"]
    for teacher, message in (
        (other, r"the teacher \S+ has \w+ \(290 tokens\): take a teacher with the cache's tokenizer"),
        (small, "the teacher .* has 300 rows in its head, the cache .* has ids up to 319"),
    ):
        config = load_config(None, [*common, f"teacher={teacher}"])
        with pytest.raises(UsageError, match=message):
            evaluate_cache(config, "heldout")
        config = load_config(None, [*common, f"teacher={teacher}", "loss.method=online", f"output={tmp_path / 'run'}"])
        with pytest.raises(UsageError, match=message):
            fit(config)


@pytest.mark.parametrize(("entries", "exact"), [(12, 3), (2, 1), (8, 7)])
def test_the_standard_error_is_that_of_the_draws(entries: int, exact: int) -> None:
    """Over 60 draws of the same rows, the estimates spread as their standard error says, also of one drawn entry a row."""
    torch.manual_seed(0)
    from trainer.evaluate import _sampled_kl, _standard_error

    logits, q = torch.randn(40, 320) * 2, (torch.randn(40, 320) * 2).log_softmax(dim=1)
    found, errors = [], []
    for _ in range(60):
        sums = _sampled_kl(q, sampled_rows(logits, entries, exact, torch.rand(40, dtype=torch.float64))) | {"rows": 40}
        found.append(sums["kl"] / 40)
        error = _standard_error(sums)
        assert error is not None
        errors.append(error)
    truth = (logits.softmax(1) * (logits.log_softmax(1) - q)).sum(1).mean()
    spread = float(np.std(found))
    assert abs(np.mean(found) - float(truth)) <= 4 * spread / 60**0.5
    assert 0.6 * np.mean(errors) <= spread <= 1.3 * np.mean(errors)
    one = _sampled_kl(q[:1], sampled_rows(logits[:1], 2, 1, torch.rand(1, dtype=torch.float64))) | {"rows": 1}
    assert _standard_error(one) is None


def test_online_draws_sampled_rows_on_the_fly(sampled_cache: teachercache.Cache, student: Path, teacher: Path) -> None:
    sequence = next(iter(PackedCache(sampled_cache, seq_len=128)))
    live = students.load_student(teacher, dtype=torch.float32, device=CPU).eval()

    def loss(seed: int = 0, **options: Any) -> float:
        step = make_step(student, loss={"method": "online", **options}, teacher=str(teacher), seed=seed)
        step.teacher = live
        return step.loss(sequence, num_valid=sequence.num_rows).item()

    full = loss(tail=None)
    drawn = [loss(seed, rows={"kind": "sampled", "entries": 40, "exact": 10}) for seed in range(8)]
    assert len(set(drawn)) == 8
    assert drawn[0] == loss(rows={"kind": "sampled", "entries": 40})
    assert np.mean(drawn) == pytest.approx(full, abs=4 * np.std(drawn) / 8**0.5)
    assert loss(rows={"kind": "top_k", "entries": 7}) < full
    for wrong, message in (
        ({"loss": {"rows": {"kind": "sampled", "entries": 8}}}, "loss.method=online"),
        ({"loss": {"method": "online", "rows": {"kind": "top_k"}}, "data": {"top_k": 5}}, "drop one"),
        ({"loss": {"method": "online", "rows": {"kind": "sampled"}, "tail": "bucket"}}, "does not go with sampled"),
        ({"loss": {"method": "online", "rows": {"kind": "sampled"}, "temperature": 2.0}}, "temperature 1 alone"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainerConfig.model_validate({"cache": "c", "student": "s", "teacher": "t", **wrong})


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (ROWS, [], None),
        (ROWS, ["data.top_k=3", "loss.divergence=reverse"], None),
        (ROWS, ["data.top_k=3", "loss.temperature=2"], None),
        (ROWS, ["data.top_k=4"], r"only 3 entries .* \(rows.exact\); expected at most 3"),
        (ROWS, ["data.top_k=3", "loss.tail=sampled"], "needs the unbiased rows"),
        (ROWS, ["loss.divergence=reverse"], r"sampled, 12 entries.*temperature 1 alone.*data.top_k"),
        (ROWS, ["loss.temperature=2"], r"found divergence='forward' at temperature 2"),
        (ROWS, ["loss.tail=bucket"], "does not go with sampled rows"),
        (TopKRows(entries=100), ["loss.tail=sampled"], r"top-100 rows.*needs the unbiased rows.*kind: sampled"),
        (TopKRows(entries=16), ["data.top_k=16"], None),
        (TopKRows(entries=16), ["data.top_k=17"], "data.top_k = 17, but a row of the cache has 16 entries"),
        (
            ROWS,
            [*ONLINE, "loss.rows={kind: sampled, entries: 1001}"],
            "loss.rows.entries = 1001, but .* has 1000 tokens",
        ),
        (TopKRows(entries=16), [*ONLINE, "loss.rows={kind: top_k, entries: 1001}"], "loss.rows.entries = 1001, but"),
        (TopKRows(entries=16), [*ONLINE, "data.top_k=1001"], "data.top_k = 1001, but the tokenizer"),
        (TopKRows(entries=16), [*ONLINE, "data.top_k=100"], None),
        (TopKRows(entries=100), ["loss.divergence=jsd", "loss.temperature=2"], None),
    ],
)
def test_a_loss_that_the_rows_cannot_give_is_refused_by_name(rows: Any, settings: list[str], message: str) -> None:
    config = load_config(None, ["cache=c", "student=s", "output=o", *settings])
    if message is None:
        check_rows(config, synthetic_spec(rows=rows))
    else:
        with pytest.raises(UsageError, match=message):
            check_rows(config, synthetic_spec(rows=rows))


def test_reverse_kl_takes_the_exact_entries(sampled_cache: teachercache.Cache, student: Path) -> None:
    sequence = next(iter(PackedCache(sampled_cache, seq_len=128)))
    step = make_step(student, loss={"divergence": "reverse"}, data={"top_k": 3})
    assert step.loss(sequence, num_valid=sequence.num_rows).item() > 0


def test_rows_are_chosen_by_the_teachers_entropy(sampled_cache: teachercache.Cache) -> None:
    everything = list(PackedCache(sampled_cache, seq_len=128, shuffle=False))
    entropies = torch.cat([s.entropy for s in everything])  # type: ignore[misc]
    low, high = (float(x) for x in entropies.quantile(torch.tensor([0.3, 0.8])))
    for above, below in ((low, None), (None, high), (low, high)):
        packed = PackedCache(sampled_cache, seq_len=128, shuffle=False, entropy_above=above, entropy_below=below)
        found = list(packed)
        ours = torch.cat([s.entropy for s in found])  # type: ignore[misc]
        wanted = entropies[(entropies > (above or -1)) & (entropies < (below or 1e9))]
        assert torch.equal(ours.sort().values, wanted.sort().values)
        counts = packed.counts_of(packed.state())
        assert counts.rows_left_out == len(entropies) - len(wanted)
        assert sum(len(s.input_ids) for s in found) == sum(len(s.input_ids) for s in everything)  # context stays
    for options, reason in (
        ({"entropy_above": 50.0}, f"of 40 documents 40 without a row to learn; data.rows left {len(entropies):,} rows"),
        ({"weights": {"other": 1.0}}, "of 40 documents 40 left out by data.weights"),
        ({"seq_len": 2, "long_documents": "drop"}, "of 40 documents 40 longer than data.seq_len"),
    ):
        with pytest.raises(TeacherCacheError, match=f"has nothing to train on: {reason}"):
            list(PackedCache(sampled_cache, **({"seq_len": 128} | options)))  # type: ignore[arg-type]
    record = next(iter(sampled_cache.records()))
    unknown = replace(record, entropy=np.full_like(record.entropy, np.nan))
    with pytest.raises(TeacherCacheError, match=f"rows of document {record.doc_id} have none"):
        packed._choose_rows(unknown, packed.counts_of(packed.state()))
    with pytest.raises(UsageError, match="keeps nothing"):
        load_config(None, ["cache=c", "student=s", "data.rows={entropy_above: 2, entropy_below: 1}"])


def test_sources_have_cross_entropy_weights_of_their_own(sampled_cache: teachercache.Cache, student: Path) -> None:
    """The loss is the sum over sources of theirs alone; a source that is not named has no cross-entropy."""
    records = [
        replace(record, source=source, loss_mask=np.ones_like(record.loss_mask))
        for record, source in zip(sampled_cache.records(split="train"), ["web", "math", "web", "code"], strict=False)
    ]
    mixed = pack_records(records)
    step = make_step(student, loss={"ce_weight": {"web": 0.5, "math": 0.1}})
    expected, valid = 0.0, 0
    for record in records:
        weight = {"web": 0.5, "math": 0.1}.get(record.source, 0.0)
        one = pack_records([record])
        alone = make_step(student, loss={"ce_weight": weight})
        rows = one.num_rows - (weight > 0)  # the last one has no next token
        expected += alone.loss(one, num_valid=1).item()
        valid += rows
    assert step.loss(mixed, num_valid=1).item() == pytest.approx(expected, rel=1e-5)
    assert step.run([mixed], lr=1e-3).rows == valid
    with pytest.raises(ValueError, match="ce_weight must lie in"):
        make_step(student, loss={"ce_weight": {"web": 1.5}})


def test_a_cut_record_keeps_its_kind(sampled_cache: teachercache.Cache) -> None:
    record = next(r for r in sampled_cache.records() if len(r.input_ids) > 10)
    cut = cut_record(record, 0, 7).record
    assert cut.exact is not None
    assert len(cut.exact) == len(cut.entropy) == len(cut.row_pos) == 7  # type: ignore[arg-type]
