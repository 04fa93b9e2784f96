"""Before an actor takes work: does this engine, on this machine, in this version, give the rows it should?

Three fixed texts are scored by the active path and by vLLM's public path, which must agree to the engine's own noise,
and by transformers in float32 where the model is small enough to load beside the engine. Costs a few seconds; an
engine that is wrong for a day costs a day.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.config import TeacherConfig
from pipeline.corpus.documents import Document
from pipeline.corpus.encode import Encoder
from pipeline.errors import CanaryFailed
from pipeline.teachers.base import EngineRows, Scored, Teacher

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "def area(radius):\n    return 3.14159 * radius ** 2\n\nprint(area(2.0))\n",
    "Water boils at 100 degrees Celsius at sea level; at the top of a mountain it boils earlier, because",
)
# mean expected |Δ log-probability| in nats that is still noise: one engine twice, and engine against float32 reference
SAME_ENGINE = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 0.05}
REFERENCE = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.15}
MISSING_MASS = 0.05


def largest_drift(a: EngineRows, b: EngineRows, floor: float = 1e-3) -> float:
    """Largest |Δ log-probability| over ids in both top-K whose probability exceeds `floor`; inf when few are shared."""
    worst, shared, wanted = 0.0, 0, 0
    for ids_a, lp_a, ids_b, lp_b in zip(a.topk_ids, a.topk_logprobs, b.topk_ids, b.topk_logprobs, strict=True):
        order = np.argsort(ids_b)
        place = np.minimum(np.searchsorted(ids_b, ids_a, sorter=order), len(ids_b) - 1)
        other = order[place]
        likely = lp_a > (np.log(floor) if floor > 0 else -np.inf)
        both = likely & (ids_b[other] == ids_a)
        wanted += int(likely.sum())
        shared += int(both.sum())
        if both.any():
            worst = max(worst, float(np.abs(lp_a[both] - lp_b[other[both]]).max()))
    return worst if shared >= 0.95 * wanted else float("inf")


def mean_drift(reference: EngineRows, other: EngineRows) -> float:
    """Mean over rows of Σ_k p_k |Δ log p_k| by the reference's p; inf where `other` misses more than 5 % of the mass.

    Weighted by probability, because bf16 weights move unlikely tokens by half a nat without being wrong.
    """
    drift = missing = 0.0
    for ids_a, lp_a, ids_b, lp_b in zip(
        reference.topk_ids, reference.topk_logprobs, other.topk_ids, other.topk_logprobs, strict=True
    ):
        order = np.argsort(ids_b)
        place = order[np.minimum(np.searchsorted(ids_b, ids_a, sorter=order), len(ids_b) - 1)]
        both = ids_b[place] == ids_a
        p = np.exp(lp_a.astype(np.float64))
        drift += float((p * np.abs(lp_a - lp_b[place]))[both].sum())
        missing += float(p[~both].sum())
    rows = max(1, len(reference.topk_ids))
    return drift / rows if missing / rows <= MISSING_MASS else float("inf")


def _canary_inputs(encoder: Encoder, limit: int) -> list[np.ndarray]:
    documents = [
        Document(doc_id=str(i), ordinal=i, source="canary", split="canary", kind="text", content_hash=b"", text=text)
        for i, text in enumerate(TEXTS)
    ]
    inputs = []
    for tokens in encoder.tokens(documents):
        if isinstance(tokens, Exception):
            raise CanaryFailed(f"the tokenizer cannot encode a plain sentence: {tokens}")
        inputs.append(tokens.ids[:limit])
    return inputs


def _rows(teacher: Teacher, inputs: list[np.ndarray], public: bool = False) -> list[EngineRows]:
    if public:
        for key, ids in enumerate(inputs):
            teacher.submit_public(key, ids, np.arange(len(ids), dtype=np.int32))  # type: ignore[attr-defined]
        found: dict[int, Scored] = {}
        while teacher.pending():
            found.update((s.key, s) for s in teacher.collect())
        answers = [found[key] for key in range(len(inputs))]
    else:
        answers = teacher.score(inputs)
    rows = []
    for answer in answers:
        if answer.rows is None:
            raise CanaryFailed(f"the engine gives no usable rows for a plain sentence: {answer.error}")
        rows.append(answer.rows)
    return rows


def check_teacher(teacher: Teacher, config: TeacherConfig, model_path: str, encoder: Encoder) -> dict[str, Any]:
    """Raises CanaryFailed where the engine's rows are wrong; returns the drifts for the provenance."""
    if config.engine != "vllm":
        return {}
    inputs = _canary_inputs(encoder, config.max_model_len - 1)
    public = _rows(teacher, inputs, public=True)
    teacher.accelerate()
    active = _rows(teacher, inputs)
    drift = max(mean_drift(a, b) for a, b in zip(public, active, strict=True))
    report: dict[str, Any] = {"active_vs_public": round(drift, 6)}
    _judge("the active path and vLLM's public path", drift, SAME_ENGINE[config.dtype])
    if (
        0 < _parameters(model_path) <= config.canary_reference_parameters
        and config.engine_args.get("load_format") != "dummy"
    ):
        from pipeline.teachers.hf import HfTeacher

        plain = config.model_copy(update={"dtype": "float32", "head_dtype": "float32", "engine_args": {}})
        reference = _rows(HfTeacher(plain, model_path, teacher.vocab_size), inputs)  # type: ignore[attr-defined]
        drift = max(mean_drift(b, a) for a, b in zip(active, reference, strict=True))
        report["vs_transformers"] = round(drift, 6)
        _judge("the engine and transformers in float32", drift, REFERENCE[config.dtype])
    return report


def _judge(pair: str, drift: float, limit: float) -> None:
    if not drift <= limit:
        raise CanaryFailed(
            f"canary: {pair} differ by {drift:.4g} nat a row on a fixed text, noise stays below {limit}; not starting"
        )


def _parameters(model_path: str) -> int:
    """Parameters of a safetensors folder, from the sizes of its files (at two bytes each, an upper bound)."""
    from pathlib import Path

    return sum(f.stat().st_size for f in Path(model_path).glob("*.safetensors")) // 2
