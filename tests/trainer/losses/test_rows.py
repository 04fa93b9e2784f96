"""Teacher rows: what is refused, and what truncation does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.trainer.losses.cases import make_case
from trainer.losses import TeacherRows, kl_loss


def test_bad_rows_are_refused_and_invalid_rows_are_not_looked_at() -> None:
    case = make_case()
    rows = case.rows

    def changed(**fields: torch.Tensor) -> TeacherRows:
        return replace(rows, **fields)

    ids = rows.topk_ids.clone()
    ids[4, 1] = ids[4, 0]
    twice = changed(topk_ids=ids)
    ids = rows.topk_ids.clone()
    ids[2, 3] = 101
    outside = changed(topk_ids=ids)
    logprobs = rows.topk_logprobs.clone()
    logprobs[5, 0] = math.nan
    broken = changed(topk_logprobs=logprobs)
    raw_logits = changed(topk_logprobs=rows.topk_logprobs + 5)
    for bad, message in (
        (twice, r"1 of 13 teacher rows hold an id twice \(the first is row 4\)"),
        (outside, r"outside \[0, 101\) \(the first is row 2\)"),
        (broken, "NaN or infinite"),
        (raw_logits, "are these logits"),
    ):
        with pytest.raises(ValueError, match=message):
            kl_loss(case.hidden, case.head_weight, bad)
    valid = torch.ones(13, dtype=torch.bool)
    valid[4] = False
    kl_loss(case.hidden, case.head_weight, replace(twice, valid=valid))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"topk_ids": torch.zeros(13, dtype=torch.long)}, r"must be \[N, K\]"),
        ({"topk_ids": torch.zeros(13, 6, dtype=torch.long)}, "same shape"),
        ({"topk_ids": torch.zeros(13, 7)}, "int32 or int64"),
        ({"tail_logprob": torch.zeros(12)}, "tail_logprob must be"),
        ({"valid": torch.ones(13)}, "valid must be bool"),
        ({"topk_logprobs": torch.zeros(13, 7, requires_grad=True)}, "constants"),
    ],
    ids=str,
)
def test_rows_of_wrong_shape_or_type_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(make_case().rows, **fields)


def test_truncated_rows_move_their_mass_into_the_tail() -> None:
    logits = torch.randn(5, 50)
    long, short = TeacherRows.from_logits(logits, 20), TeacherRows.from_logits(logits, 8)
    cut = long.truncate(8)
    assert torch.equal(cut.topk_ids, short.topk_ids)
    torch.testing.assert_close(cut.tail_logprob, short.tail_logprob)
