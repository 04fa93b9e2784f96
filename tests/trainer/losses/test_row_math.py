"""The gradient of a row that is written out, against autograd."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.losses.cases import accepted_kd, accepted_with_mix, kd_name
from trainer.losses import TeacherRows
from trainer.losses.options import LossOptions
from trainer.losses.row_math import row_loss, row_loss_and_grad, teacher_log_vector


@pytest.mark.parametrize("kd", accepted_kd(), ids=kd_name)
def test_row_gradients_written_out_equal_autograd(kd: dict) -> None:
    for options in (LossOptions(**o) for o in accepted_with_mix(kd)):
        g = torch.Generator().manual_seed(3)
        y = torch.randn(6, 5, generator=g, dtype=torch.float64).requires_grad_()
        teacher = torch.log_softmax(torch.randn(6, 5, generator=g, dtype=torch.float64), 1)
        rows = TeacherRows(torch.arange(4).expand(6, 4), teacher[:, :4], teacher[:, 4])
        log_s = teacher_log_vector(rows, options, True)
        z_label = torch.zeros(6, dtype=torch.float64)
        scale = options.logit_scale
        row_loss(y[:, :4] * scale, y[:, 4] * scale, z_label, log_s, options, True).sum().backward()
        ours = row_loss_and_grad(y.detach()[:, :4] * scale, y.detach()[:, 4] * scale, z_label, log_s, options, True)
        assert y.grad is not None
        torch.testing.assert_close(ours.topk, y.grad[:, :4])
        torch.testing.assert_close(ours.outside, y.grad[:, 4])
