"""How far two engines' rows are apart at their worst token; the canary uses the mean (pipeline/teachers/canary.py)."""

from __future__ import annotations

import numpy as np

from pipeline.teachers.base import EngineRows


def largest_drift(a: EngineRows, b: EngineRows, floor: float = 1e-3) -> float:
    """Return the largest |Δ log-probability| over shared ids more probable than `floor`; inf when few are shared."""
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
