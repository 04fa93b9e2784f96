"""The online method against the full vocabulary and against its own top K."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.losses.cases import make_case
from trainer.losses import online_kl_loss


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_online_over_the_full_vocabulary_bounds_the_bucket(divergence: str, temperature: float) -> None:
    case = make_case(dtype=torch.float64)
    teacher = torch.randn(13, 101, dtype=torch.float64) * 2
    options = {"divergence": divergence, "temperature": temperature, "jsd_beta": 0.3}
    full = online_kl_loss(case.hidden, case.head_weight, teacher, **options)
    everything = online_kl_loss(case.hidden, case.head_weight, teacher, tail="bucket", top_k=101, **options)
    torch.testing.assert_close(full, everything)
    if temperature == 1.0:
        cut = online_kl_loss(case.hidden, case.head_weight, teacher, tail="bucket", top_k=7, **options)
        assert float(cut) <= float(full)
    hidden = case.hidden.requires_grad_()
    valid = torch.arange(13) != 3
    loss = online_kl_loss(hidden, case.head_weight, teacher, valid=valid, chunk_size=4, **options)
    loss.backward()
    assert hidden.grad is not None
    assert float(hidden.grad[3].abs().sum()) == 0.0
    same = online_kl_loss(case.hidden.detach()[valid], case.head_weight, teacher[valid], **options)
    torch.testing.assert_close(loss.detach(), same)


def test_online_refuses_what_needs_a_tail() -> None:
    case = make_case()
    teacher = torch.randn(13, 101)
    with pytest.raises(ValueError, match="labels, method need tail="):
        online_kl_loss(case.hidden, case.head_weight, teacher, labels=case.labels, method="fused")
    for mix in ({"ce_weight": 0.5}, {"z_loss": 0.1}):
        with pytest.raises(ValueError, match="ce_weight and z_loss must be 0"):
            online_kl_loss(case.hidden, case.head_weight, teacher, **mix)
    with pytest.raises(ValueError, match="at least 101"):
        online_kl_loss(case.hidden, case.head_weight, torch.randn(13, 100))
