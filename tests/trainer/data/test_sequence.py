"""One sequence's rows and labels."""

from __future__ import annotations

import dataclasses

import numpy as np

import teachercache
from trainer.data.sequence import NO_LABEL, pack_records


def test_a_last_row_that_may_be_learnt_has_no_label(cache: teachercache.Cache) -> None:
    record = next(iter(cache.records(split="train")))
    record = dataclasses.replace(record, loss_mask=np.ones_like(record.loss_mask))
    sequence = pack_records([record])
    assert sequence.labels[-1] == NO_LABEL
    assert sequence.row_index[-1] == len(record.input_ids) - 1
