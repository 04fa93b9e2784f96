"""The check before an actor takes work: does this engine, in this version, give the rows that it should.

Three fixed texts are scored by the active path and by vLLM's public path, which must agree to the engine's noise, and
by transformers in float32 where the model is small enough to load next to the engine. Costs a few seconds; an engine
that is wrong for a day costs a day.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.config import TeacherConfig
from pipeline.corpus.documents import Document
from pipeline.corpus.encode import Encoder
from pipeline.errors import CanaryFailed
from pipeline.teachers.base import EngineRows, Teacher

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "def area(radius):\n    return 3.14159 * radius ** 2\n\nprint(area(2.0))\n",
    "Water boils at 100 degrees Celsius at sea level; at the top of a mountain it boils earlier, because",
)
# Largest drift that is still noise, by dtype: mean over rows of Σ p |Δ log p| in nats. Above it an actor does not start.
LIMITS = {
    "active_vs_public": {"float32": 1e-4, "float16": 5e-3, "bfloat16": 0.05},  # one engine, two ways out
    "vs_transformers": {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.15},
}
PAIRS = {
    "active_vs_public": "the active path and vLLM's public path",
    "vs_transformers": "the engine and transformers in float32",
}
WARN_RATIO = 0.5  # share of a limit at which the alert TeachercacheCanaryDrift fires (deploy/monitoring/rules.yaml)
MISSING_MASS = 0.05
REFERENCE_PARAMETERS = 400_000_000  # largest model that is compared with transformers in float32


def mean_drift(reference: EngineRows, other: EngineRows) -> float:
    """Return the mean over rows of Σ_k p_k |Δ log p_k| in nats; inf where `other` misses more than 5 % of the mass.

    Of sampled rows the exact part is compared: as many entries as both have.
    Weighted by the reference's probability, because bf16 weights move unlikely tokens by half a nat without being wrong.
    """
    drift = missing = 0.0
    exact = [rows.topk_ids.shape[1] if rows.exact is None else rows.exact for rows in (reference, other)]
    both_exact = np.broadcast_to(np.minimum(*exact), len(reference.topk_ids))
    for k, *columns in zip(
        both_exact, reference.topk_ids, reference.topk_logprobs, other.topk_ids, other.topk_logprobs, strict=True
    ):
        ids_a, lp_a, ids_b, lp_b = (column[:k] for column in columns)
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
    rows = []
    for answer in teacher.score(inputs, public=public):
        if answer.rows is None:
            raise CanaryFailed(f"the engine gives no usable rows for a plain sentence: {answer.error}")
        rows.append(answer.rows)
    return rows


def check_teacher(teacher: Teacher, config: TeacherConfig, model_path: str, encoder: Encoder) -> dict[str, float]:
    """Return the drift of each pair of LIMITS that was compared, for the provenance; also call `teacher.accelerate`.

    Raises CanaryFailed where a drift is above its limit. Engines other than vllm have one path and are not compared.
    """
    if config.engine != "vllm":
        return {}
    inputs = _canary_inputs(encoder, config.max_model_len - 1)
    report: dict[str, float] = {}

    def compare(pair: str, reference: list[EngineRows], other: list[EngineRows]) -> None:
        drift = max(mean_drift(a, b) for a, b in zip(reference, other, strict=True))
        limit = LIMITS[pair][config.dtype]
        if not drift <= limit:
            raise CanaryFailed(
                f"canary: {PAIRS[pair]} differ by {drift:.4g} nat a row on a fixed text, noise stays below {limit}; "
                "not starting"
            )
        report[pair] = round(drift, 6)

    public = _rows(teacher, inputs, public=True)
    teacher.accelerate()
    active = _rows(teacher, inputs)
    compare("active_vs_public", public, active)
    if 0 < _parameters(model_path) <= REFERENCE_PARAMETERS and config.engine_args.get("load_format") != "dummy":
        from pipeline.teachers.hf import HfTeacher

        plain = config.model_copy(update={"dtype": "float32", "head_dtype": "float32", "engine_args": {}})
        compare("vs_transformers", _rows(HfTeacher(plain, model_path, teacher.wanted), inputs), active)
    return report


def drift_ratio(report: dict[str, float], dtype: str) -> float:
    """Return the largest drift of a report as a share of its limit, in [0, 1]; 0 where nothing was compared."""
    return max((min(1.0, drift / LIMITS[pair][dtype]) for pair, drift in report.items()), default=0.0)


def _parameters(model_path: str) -> int:
    """Return the parameters of a safetensors folder, from the sizes of its files at two bytes each: an upper bound."""
    return sum(f.stat().st_size for f in Path(model_path).glob("*.safetensors")) // 2
