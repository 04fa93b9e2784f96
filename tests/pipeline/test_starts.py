"""Whether a pool goes on after actors that did not start; no Ray, no engine."""

from __future__ import annotations

import pytest

from pipeline.errors import CanaryFailed
from pipeline.running.starts import STARTS_BEFORE_GIVING_UP, StartJudge
from teachercache.errors import StoreUnavailable, TeacherCacheError, UsageError


def fail(judge: StartJudge, error: Exception, times: int, *, others_ready: bool = False) -> list[float]:
    return [judge.fail(error, others_ready=others_ready) for _ in range(times)]


def test_a_wrong_job_or_engine_is_refused_at_the_first_start():
    with pytest.raises(UsageError, match="no such option"):
        fail(StartJudge(4), UsageError("no such option"), 1)
    with pytest.raises(TeacherCacheError, match="drift"):
        fail(StartJudge(4), CanaryFailed("drift"), 1)


def test_a_store_that_is_down_for_a_while_ends_no_start():
    pauses = fail(StartJudge(4), StoreUnavailable("503"), 20)
    assert pauses == sorted(pauses)
    assert pauses[-1] == 60


def test_one_bad_node_does_not_end_a_job_that_has_actors():
    judge = StartJudge(4)
    judge.succeed()
    assert len(fail(judge, CanaryFailed("drift"), 100, others_ready=True)) == 100


def test_a_job_whose_actors_all_died_and_never_start_again_ends():
    judge = StartJudge(4)
    judge.succeed()
    fail(judge, RuntimeError("disk full"), STARTS_BEFORE_GIVING_UP * 4 - 1)
    with pytest.raises(TeacherCacheError, match="disk full"):
        fail(judge, RuntimeError("disk full"), 1)


def test_a_start_that_succeeds_begins_the_count_again():
    judge = StartJudge(1)
    for _ in range(5):
        fail(judge, RuntimeError("flaky"), STARTS_BEFORE_GIVING_UP - 1)
        judge.succeed()
    assert judge.started == 5
