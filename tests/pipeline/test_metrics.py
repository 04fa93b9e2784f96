"""Every metric that is declared is set, with the value that it is described by."""

from __future__ import annotations

from pipeline.running.driver import Tally
from pipeline.running.tasks import PoolState
from pipeline.watching.metrics import JOB_GAUGES, job_values


def test_the_jobs_gauges_have_their_values():
    tally = Tally(total=10, committed=3, found=2, quarantined=1, retries=7)
    values = job_values(tally, PoolState(wanted=4, ready=2, deaths=5))
    assert values.keys() == JOB_GAUGES.keys()
    assert list(values.values()) == [4, 1, 7, 4, 2, 5]
