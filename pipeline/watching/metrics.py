"""Metrics of a teacher actor through ray.util.metrics, for Prometheus: names, meanings, and one place that sets them.

Counters carry `source`-free totals per actor; Ray adds the node and the worker. Without Ray nothing is recorded.
"""

from __future__ import annotations

import threading
from typing import Any

from pipeline.running.tasks import Receipt
from pipeline.running.worker import ShardWorker

COUNTERS = {
    "teachercache_tokens": "input tokens scored and committed",
    "teachercache_rows": "rows committed",
    "teachercache_documents": "documents committed",
    "teachercache_bytes": "bytes of data files committed",
    "teachercache_shards": "shards committed by this actor",
    "teachercache_conflicts": "shards that another attempt had committed first",
    "teachercache_dropped_documents": "documents left out, by reason",
    "teachercache_failures": "attempts that came to nothing",
}
GAUGES = {
    "teachercache_engine_busy_fraction": "share of the last interval in which the engine held an input",
    "teachercache_engine_inside": "inputs inside the engine",
    "teachercache_engine_waiting": "inputs waiting for the engine",
    "teachercache_canary_drift_nat": "largest difference of log-probabilities that the canary saw at the start",
}


class ActorMetrics:
    """Counts what an actor does; gauges are refreshed by a daemon thread every `interval_s`."""

    def __init__(self, worker: ShardWorker, interval_s: float = 5.0) -> None:
        from ray.util import metrics

        self._counters = {
            name: metrics.Counter(name, text, tag_keys=("reason",) if name.endswith("dropped_documents") else ())
            for name, text in COUNTERS.items()
        }
        self._gauges = {name: metrics.Gauge(name, text) for name, text in GAUGES.items()}
        self._worker, self._interval = worker, interval_s
        self._last_busy = worker.loop.busy_s
        canary: dict[str, Any] = worker.loop.teacher.provenance.get("canary") or {}
        self._gauges["teachercache_canary_drift_nat"].set(max([0.0, *canary.values()]))
        self._stop = threading.Event()
        threading.Thread(target=self._refresh, name="metrics", daemon=True).start()

    def _refresh(self) -> None:
        while not self._stop.wait(self._interval):
            loop = self._worker.loop
            busy = loop.busy_s
            self._gauges["teachercache_engine_busy_fraction"].set(min(1.0, (busy - self._last_busy) / self._interval))
            self._last_busy = busy
            inside, waiting = loop.depths()
            self._gauges["teachercache_engine_inside"].set(inside)
            self._gauges["teachercache_engine_waiting"].set(waiting)

    def committed(self, receipt: Receipt) -> None:
        if not receipt.won:
            self._counters["teachercache_conflicts"].inc()
            return
        for name in ("tokens", "rows", "documents", "bytes"):
            value = getattr(receipt, name)
            if value:
                self._counters[f"teachercache_{name}"].inc(value)
        self._counters["teachercache_shards"].inc()
        for reason, count in receipt.drops.items():
            self._counters["teachercache_dropped_documents"].inc(count, tags={"reason": reason})

    def failed(self) -> None:
        self._counters["teachercache_failures"].inc()

    def close(self) -> None:
        self._stop.set()
