"""Metrics of a job's driver, beside those of its actors (metrics.py): what is left, what was given up, how many teachers.

Gauges set at every progress report, so they are as fresh as `run.log_every_s`. Without Ray nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.running.driver import Tally
from pipeline.running.tasks import PoolState

JOB_GAUGES = {
    "teachercache_job_shards_left": "planned shards that are neither committed nor quarantined",
    "teachercache_job_shards_quarantined": "shards given up, with their reasons in the cache",
    "teachercache_job_retries": "attempts of this run that were given out again",
    "teachercache_job_teachers_wanted": "teachers that the job asks for",
    "teachercache_job_teachers_ready": "teachers that can take work",
    "teachercache_job_teacher_deaths": "actors that ended while this run used them",
}


class JobMetrics:
    """Called with every progress report; call it only after Ray is connected."""

    def __init__(self) -> None:
        from ray.util import metrics

        self._gauges: dict[str, Any] = {name: metrics.Gauge(name, text) for name, text in JOB_GAUGES.items()}

    def __call__(self, tally: Tally, state: PoolState) -> None:
        values = {
            "teachercache_job_shards_left": tally.total - tally.done,
            "teachercache_job_shards_quarantined": tally.quarantined,
            "teachercache_job_retries": tally.retries,
            "teachercache_job_teachers_wanted": state.wanted,
            "teachercache_job_teachers_ready": state.ready,
            "teachercache_job_teacher_deaths": state.deaths,
        }
        for name, gauge in self._gauges.items():
            gauge.set(float(values[name]))


def beside(progress: Callable[[Tally, PoolState], None]) -> Callable[[Tally, PoolState], None]:
    """The same progress report, and the metrics with it; they begin with the first report, when Ray is connected."""
    metrics: JobMetrics | None = None

    def report(tally: Tally, state: PoolState) -> None:
        nonlocal metrics
        progress(tally, state)
        metrics = metrics or JobMetrics()
        metrics(tally, state)

    return report
