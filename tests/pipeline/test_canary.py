"""The canary lets noise pass and refuses an engine that is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.config import TeacherConfig, parse_job
from pipeline.corpus.encode import Encoder
from pipeline.errors import CanaryFailed
from pipeline.teachers.base import EngineRows, RowsWanted, rows_from_columns
from pipeline.teachers.canary import LIMITS, TEXTS, WARN_RATIO, check_teacher, drift_ratio, mean_drift
from pipeline.teachers.noop import NoopTeacher, expected_columns
from teachercache.format.spec import TopKRows
from tests.pipeline.drift import largest_drift

K, VOCAB = 20, 300
TOP_K = RowsWanted(TopKRows(entries=K), VOCAB)


def rows_of(ids: np.ndarray) -> EngineRows:
    return rows_from_columns(ids, np.arange(len(ids), dtype=np.int32), expected_columns(ids, K, VOCAB), TOP_K)


def test_drift_of_equal_rows_is_zero_and_of_other_rows_infinite():
    a, b = rows_of(np.arange(40, dtype=np.int32)), rows_of(np.arange(100, 140, dtype=np.int32))
    assert mean_drift(a, a) == largest_drift(a, a) == 0
    assert mean_drift(a, b) == float("inf")


def test_noise_of_a_size_gives_a_drift_of_that_size():
    a = rows_of(np.arange(40, dtype=np.int32))
    b = rows_of(np.arange(40, dtype=np.int32))
    b.topk_logprobs = b.topk_logprobs + np.float32(0.01)
    assert mean_drift(a, b) == pytest.approx(0.009, rel=0.02)  # the K hold 0.9 of the mass
    assert largest_drift(a, b) == pytest.approx(0.01, rel=1e-3)


class Lying(NoopTeacher):
    """Claims to be vLLM; its accelerated path shifts every log-probability."""

    def __init__(self, config: TeacherConfig, vocab: int, shift: float) -> None:
        super().__init__(config, RowsWanted(TopKRows(entries=K), vocab))
        self.shift, self.on = shift, False

    def accelerate(self) -> None:
        self.on = True

    def submit_public(self, key, ids, pos):
        self.on, before = False, self.on
        self.submit(key, ids, pos)
        self.on = before

    def collect(self):
        done = super().collect()
        for scored in done:
            if self.on and scored.rows is not None:
                scored.rows.topk_logprobs = scored.rows.topk_logprobs + np.float32(self.shift)
        return done


@pytest.mark.parametrize(("shift", "fine"), [(0.0, True), (0.01, True), (0.3, False)])
def test_a_fast_path_that_gives_other_numbers_is_refused(tokenizer_folder, shift, fine):
    config = TeacherConfig(model=str(tokenizer_folder), engine="vllm")
    job = parse_job({"cache": "unused", "teacher": config.model_dump(), "corpora": [{"files": ["unused"]}]})
    encoder = Encoder(job, tokenizer_folder)
    teacher = Lying(config, encoder.vocab_size, shift)
    if fine:
        report = check_teacher(teacher, config, str(tokenizer_folder), encoder)
        assert report["active_vs_public"] <= LIMITS["active_vs_public"]["bfloat16"]
        assert 0 <= drift_ratio(report, "bfloat16") <= 1
    else:
        with pytest.raises(CanaryFailed, match="active path"):
            check_teacher(teacher, config, str(tokenizer_folder), encoder)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_largest_ratio_that_an_actor_reports_is_one_and_a_warning_comes_before(dtype):
    """The metric is set from reports that the canary let pass: any drift up to the limit of its pair."""
    reachable = {pair: limits[dtype] for pair, limits in LIMITS.items()}
    assert drift_ratio(reachable, dtype) == 1.0
    assert 0 < WARN_RATIO < 1.0
    assert drift_ratio({}, dtype) == 0.0
    assert drift_ratio({pair: 0.4 * limit for pair, limit in reachable.items()}, dtype) == pytest.approx(0.4)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_bfloat16_of_a_real_model_is_noise_and_a_wrong_layer_is_not():
    model = Path("build/models/smollm2-135m")
    if not (model / "model.safetensors").exists():
        pytest.skip(f"{model} is not there; `make model` makes it")
    torch = pytest.importorskip("torch")
    from pipeline.teachers.hf import HfTeacher

    job = parse_job(
        {"cache": "unused", "teacher": {"model": str(model), "engine": "hf"}, "corpora": [{"files": ["unused"]}]}
    )
    encoder = Encoder(job, model)
    inputs = [np.asarray(encoder.backend.encode(t).ids, dtype=np.int32) for t in TEXTS]
    exact = HfTeacher(
        TeacherConfig(model=str(model), dtype="float32"), str(model), RowsWanted(TopKRows(), encoder.vocab_size)
    )
    rough = HfTeacher(
        TeacherConfig(model=str(model), dtype="bfloat16"), str(model), RowsWanted(TopKRows(), encoder.vocab_size)
    )
    expected = [s.rows for s in exact.score(inputs)]
    noise = max(mean_drift(a, b.rows) for a, b in zip(expected, rough.score(inputs), strict=True))
    with torch.no_grad():
        exact.model.model.layers[3].mlp.down_proj.weight.zero_()
    wrong = min(mean_drift(a, b.rows) for a, b in zip(expected, exact.score(inputs), strict=True))
    limit = LIMITS["vs_transformers"]["bfloat16"]
    print(f"bf16 {noise:.4f} nat, one layer broken {wrong:.4f} nat, limit {limit}")
    assert noise < limit * WARN_RATIO
    assert wrong > limit
