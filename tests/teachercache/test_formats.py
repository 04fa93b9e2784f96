"""export --format: the columns of other trainers against a loop over records, and as `datasets` reads them."""

from __future__ import annotations

import dataclasses
import math

import datasets
import numpy as np
import pytest

import teachercache
from teachercache.errors import UsageError
from teachercache.format.spec import SampledRows
from teachercache.testing import synthetic_records, synthetic_spec
from teachercache.views.export import export
from teachercache.views.formats import FORMATS

KINDS = {"top_k": None, "sampled": SampledRows(entries=12, exact=4, seed=0)}


@pytest.fixture(params=KINDS)
def cache(request, tmp_path):
    """Two splits; some rows must not be learnt, some positions have none, as in conversations."""
    spec = synthetic_spec(top_k=8, rows=KINDS[request.param])
    rng = np.random.default_rng(3)
    records = []
    for record in synthetic_records(spec, 30):
        keep = rng.random(len(record.row_pos)) < 0.8
        keep[0] = True
        if spec.rows.kind == "sampled":
            keep[:] = True  # the draws are of this record's key
        mask = record.loss_mask & (rng.random(len(keep)) < 0.7)
        rows = {
            name: getattr(record, name)[keep]
            for name in ("row_pos", "topk_ids", "topk_logprobs", "tail_logprob", "target_logprob", "entropy")
        }
        exact = None if record.exact is None else record.exact[keep]
        records.append(dataclasses.replace(record, loss_mask=mask[keep], exact=exact, **rows))
    writer = teachercache.create(tmp_path / "cache", spec)
    writer.commit("a", records)
    writer.commit("b", synthetic_records(spec, 4, seed=9, prefix="h", split="heldout"))
    writer.publish()
    return teachercache.open(tmp_path / "cache")


def expected(name: str, record: teachercache.Record) -> dict[str, list]:
    """One line, a position at a time."""
    n, k = len(record.input_ids), record.topk_ids.shape[1]
    line = {"input_ids": record.input_ids.tolist(), "attention_mask": [1] * n, "labels": [-100] * n}
    if name == "axolotl":
        empty = {"target_token_ids": [0] * k, "target_logprobs": [-1e9] * k, "target_mask": [0] * k}
    elif name == "distillkit":
        empty = {"token_ids": list(range(k)), "top_values": [-math.log(2 * k)] * k}
    else:
        empty = {}
    line |= {column: [value] * n for column, value in empty.items()}
    for row, position in enumerate(record.row_pos.tolist()):
        if not record.loss_mask[row]:
            continue
        labelled = position if name == "distillkit" else position + 1
        line["labels"][labelled] = record.input_ids[labelled]
        ids, logprobs = record.topk_ids[row].tolist(), record.topk_logprobs[row].tolist()
        if record.exact is not None:  # docs/FORMAT.md: log tau = tail_logprob - log m; the exact ones have the rest
            count, tail = int(record.exact[row]), float(record.tail_logprob[row])
            mass = math.exp(tail) if count < k else 0.0
            scale = (1 - mass) / sum(map(math.exp, logprobs[:count]))
            logprobs = [v + math.log(scale) for v in logprobs[:count]] + [tail - math.log(max(k - count, 1))] * (
                k - count
            )
        if name == "axolotl":
            total = math.log(sum(map(math.exp, logprobs)))
            line["target_token_ids"][position] = ids
            line["target_logprobs"][position] = [value - total for value in logprobs]
            line["target_mask"][position] = [1] * k
        elif name == "distillkit":
            line["token_ids"][position], line["top_values"][position] = ids, logprobs
    return line


@pytest.mark.parametrize("name", FORMATS)
def test_datasets_reads_each_record_as_a_loop_makes_it(name, cache, tmp_path):
    export(cache, tmp_path / "out", format=name)
    read = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "hf"))
    assert sorted(read) == ["heldout", "train"]
    for split, lines in read.items():
        records = list(cache.records(split=split))
        assert len(lines) == len(records)
        for line, record in zip(lines, records, strict=True):
            wanted = expected(name, record)
            assert line.keys() == wanted.keys()
            for column, values in wanted.items():
                np.testing.assert_allclose(line[column], values, rtol=1e-6, atol=1e-6, err_msg=column)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "One line for each record: " in card
    assert ("forward KL at temperature 1" in card) == (cache.spec.rows.kind == "sampled" and name != "trl")


@pytest.mark.parametrize("codec", ["open", "compact"])
def test_sampled_rows_are_written_with_weights_that_sum_to_one(codec, tmp_path):
    """Those that are stored are rounded: they sum to 1 within 1.5 % only."""
    spec = synthetic_spec(rows=KINDS["sampled"])
    writer = teachercache.create(tmp_path / "cache", spec, codec=codec)
    writer.commit("a", synthetic_records(spec, 30))
    writer.publish()
    for name, column in (("axolotl", "target_logprobs"), ("distillkit", "top_values")):
        export(teachercache.open(tmp_path / "cache"), tmp_path / name, format=name)
        read = datasets.load_dataset(str(tmp_path / name), cache_dir=str(tmp_path / "hf"), split="train")
        sums = [sum(map(math.exp, row)) for line in read for row in line[column]]
        assert all(total == pytest.approx(1, abs=1e-5) or total < 0.51 for total in sums)  # of no row: 0, or a half
        assert sum(total > 0.6 for total in sums) > 500


def test_a_format_that_is_not_written_is_refused_with_its_reason(cache, tmp_path):
    with pytest.raises(UsageError, match="megatron is not written: Megatron-LM's stored rows have no tokens"):
        export(cache, tmp_path / "out", format="megatron")
    with pytest.raises(UsageError, match="must be one of axolotl, distillkit, trl, found 'axlotl'"):
        export(cache, tmp_path / "out", format="axlotl")
    assert not (tmp_path / "out").exists()
