"""Metrics for Prometheus through ray.util.metrics: their names, their meanings, and the places that set them.

An actor counts its work; the driver's gauges are set at every progress report, so they are as fresh as
`run.log_every_s`. Ray adds the node and the worker. Without Ray nothing is recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.running.driver import Tally
    from pipeline.running.tasks import PoolState, Receipt
    from pipeline.running.worker import ShardWorker

COUNTERS = {
    "teachercache_tokens": "input tokens scored and committed",
    "teachercache_rows": "rows committed",
    "teachercache_documents": "documents committed",
    "teachercache_bytes": "bytes of data files committed",
    "teachercache_shards": "shards committed by this actor",
    "teachercache_conflicts": "shards that another attempt had committed first",
    "teachercache_dropped_documents": "documents left out, by reason",
    "teachercache_failures": "attempts without a result",
}
# a name that ends in _fraction or _ratio has values in [0, 1]
GAUGES = {
    "teachercache_engine_busy_fraction": "share of the last interval in which the engine held an input",
    "teachercache_engine_inside": "inputs inside the engine",
    "teachercache_engine_waiting": "inputs waiting for the engine",
    "teachercache_canary_drift_ratio": "mean drift that the canary saw at the start, as a share of its limit",
}
JOB_GAUGES = {
    "teachercache_job_shards_left": "planned shards that are neither committed nor quarantined",
    "teachercache_job_shards_quarantined": "shards given up, with their reasons in the cache",
    "teachercache_job_retries": "attempts of this run that were repeated",
    "teachercache_job_teachers_wanted": "actors that the job asks for",
    "teachercache_job_teachers_ready": "actors that can take work",
    "teachercache_job_teacher_deaths": "actors that ended while this run used them",
}


class ActorMetrics:
    """Counts what an actor does; gauges are refreshed by a daemon thread every `interval_s`."""

    def __init__(self, worker: ShardWorker, interval_s: float = 5.0) -> None:
        from ray.util import metrics

        from pipeline.teachers.canary import drift_ratio

        self._counters = {
            name: metrics.Counter(name, text, tag_keys=("reason",) if name.endswith("dropped_documents") else ())
            for name, text in COUNTERS.items()
        }
        self._gauges = {name: metrics.Gauge(name, text) for name, text in GAUGES.items()}
        self._worker, self._interval = worker, interval_s
        self._last_busy = worker.loop.busy_s
        report = worker.loop.teacher.provenance.get("canary") or {}
        self._gauges["teachercache_canary_drift_ratio"].set(drift_ratio(report, worker.job.teacher.dtype))
        threading.Thread(target=self._refresh, name="metrics", daemon=True).start()

    def _refresh(self) -> None:
        pause = threading.Event()
        while not pause.wait(self._interval):
            loop = self._worker.loop
            busy = loop.busy_s
            self._gauges["teachercache_engine_busy_fraction"].set(min(1.0, (busy - self._last_busy) / self._interval))
            self._last_busy = busy
            inside, waiting = loop.depths()
            self._gauges["teachercache_engine_inside"].set(inside)
            self._gauges["teachercache_engine_waiting"].set(waiting)

    def __call__(self, receipt: Receipt | None) -> None:
        """Count a shard that ended with a receipt, or None where it raised."""
        if receipt is None or not receipt.won:
            self._counters["teachercache_conflicts" if receipt else "teachercache_failures"].inc()
            return
        for name in ("tokens", "rows", "documents", "bytes"):
            if value := getattr(receipt, name):
                self._counters[f"teachercache_{name}"].inc(value)
        self._counters["teachercache_shards"].inc()
        for reason, count in receipt.drops.items():
            self._counters["teachercache_dropped_documents"].inc(count, tags={"reason": reason})


def job_values(tally: Tally, state: PoolState) -> dict[str, float]:
    """Return the values of JOB_GAUGES."""
    return {
        "teachercache_job_shards_left": float(tally.total - tally.done),
        "teachercache_job_shards_quarantined": float(tally.quarantined),
        "teachercache_job_retries": float(tally.retries),
        "teachercache_job_teachers_wanted": float(state.wanted),
        "teachercache_job_teachers_ready": float(state.ready),
        "teachercache_job_teacher_deaths": float(state.deaths),
    }


def with_job_metrics(progress: Callable[[Tally, PoolState], None]) -> Callable[[Tally, PoolState], None]:
    """Return a progress report that sets the job's gauges too; they begin with the first report, after Ray connected."""
    gauges: dict[str, Any] = {}

    def report(tally: Tally, state: PoolState) -> None:
        progress(tally, state)
        if not gauges:
            from ray.util import metrics

            gauges.update({name: metrics.Gauge(name, text) for name, text in JOB_GAUGES.items()})
        for name, value in job_values(tally, state).items():
            gauges[name].set(value)

    return report
