"""What the pool decides about teachers that do not start, and about the time that they hold GPUs; no Ray, no engine."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from pipeline.config import parse_job
from pipeline.running.job import run_job
from pipeline.running.ray_pool import STARTS_BEFORE_GIVING_UP, RayPool
from pipeline.teachers.canary import CanaryFailed
from teachercache.errors import StoreUnavailable, TeacherCacheError, UsageError
from tests.pipeline.conftest import documents, write_jsonl


@pytest.fixture
def pool() -> RayPool:
    pool = RayPool.__new__(RayPool)
    pool._job = parse_job({"cache": "c", "teacher": {"model": "m"}, "corpora": [{"files": ["x"]}]})
    pool._size, pool._failed_starts, pool._ever_ready, pool._weight = 4, 0, 0, 1.0
    pool._members, pool._gpu_seconds = [], 0.0
    return pool


def fail(pool: RayPool, error: Exception, times: int) -> None:
    for _ in range(times):
        pool._failed_starts += 1
        pool._judge_start(error)


def test_a_wrong_job_or_engine_is_refused_at_the_first_start(pool):
    with pytest.raises(UsageError, match="no such option"):
        fail(pool, UsageError("no such option"), 1)
    with pytest.raises(TeacherCacheError, match="drift"):
        fail(pool, CanaryFailed("drift"), 1)


def test_a_store_that_is_down_for_a_while_ends_no_start(pool):
    fail(pool, StoreUnavailable("503"), 20)


def test_one_bad_node_does_not_end_a_job_that_has_teachers(pool):
    pool._ever_ready = 3
    pool._members = [SimpleNamespace(ready_at=time.monotonic())]
    fail(pool, CanaryFailed("drift"), 100)


def test_a_job_whose_teachers_all_died_and_never_start_again_ends(pool):
    pool._ever_ready = 3
    with pytest.raises(TeacherCacheError, match="disk full"):
        fail(pool, RuntimeError("disk full"), STARTS_BEFORE_GIVING_UP * 4)


def test_starting_counts_as_held_gpu_time(pool):
    pool._weight = 2.0
    pool._ray = SimpleNamespace(get=lambda ref: {"start_seconds": 600.0})
    pool._settle_start(SimpleNamespace(started=None, info={}, ready_at=None))
    assert pool._gpu_seconds == 1200.0


def test_the_budget_holds_without_ray_as_well(job_file, tmp_path):
    from pipeline.config import load_job

    path = write_jsonl(tmp_path / "a.jsonl", documents(40))
    job = load_job(job_file(tmp_path / "cache", [path], teacher={"engine_args": {"delay_s": 0.1}}))
    poor = job.model_copy(update={"run": job.run.model_copy(update={"budget_gpu_hours": 1e-5})})  # 36 ms
    result = run_job(poor)
    assert (result.outcome.reason, result.manifest) == ("budget", None)
    assert 1 <= result.outcome.tally.committed < 3
    assert result.outcome.gpu_hours > 1e-5
    assert run_job(job).manifest is not None
