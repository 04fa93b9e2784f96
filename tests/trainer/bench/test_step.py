"""The step's bench on a CPU: a case is a row, and a case that fails is a row that says how."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainer.bench import step


@pytest.mark.slow
def test_a_case_is_measured_and_a_failing_one_is_a_row_with_its_error(tmp_path: Path) -> None:
    bench = step.StepBench("tiny", torch.device("cpu"), torch.float32)
    case = step.StepCase(64, "full", "documents", documents=2)
    good = bench.run(case, repeats=1)
    assert good.seconds is not None
    assert good.tokens_per_s == pytest.approx(64 / good.seconds)
    assert good.loss is not None
    bad = bench.run(replace(case, policy="unheard-of"), repeats=1)
    assert bad.seconds is None
    assert "unheard-of" in bad.error
    assert step.table([good, bad], "steps").row_count == 2
    pytest.importorskip("matplotlib")
    step.plots([good, bad], tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 0


def test_synthetic_rows_are_valid_teacher_rows() -> None:
    from trainer.losses import TeacherRows

    sequence = step.synthetic_sequence(60, 3, 500, top_k=20)
    assert sequence.document_lengths == (20, 20, 20)
    rows = TeacherRows(sequence.topk_ids, sequence.topk_logprobs, sequence.tail_logprob)
    assert len(rows) == 57  # no row at the last position of a document
    rows.check_values(500)
