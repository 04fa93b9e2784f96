"""What the pool counts and waits for, without a cluster: Ray is replaced by an object that remembers the calls."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from pipeline.config import RunConfig, load_job, parse_job
from pipeline.running import ray_pool
from pipeline.running.job import run_job
from pipeline.running.ray_pool import GpuMeter, RayPool, time_limit_s
from pipeline.running.tasks import ShardTask
from teachercache import PlanShard
from teachercache.errors import TeacherCacheError
from teachercache.testing import synthetic_spec
from tests.pipeline.conftest import documents, write_jsonl


def test_starting_counts_as_held_gpu_time_and_an_actor_without_a_gpu_counts_as_one():
    now = [100.0]
    two, none = GpuMeter(2.0, lambda: now[0]), GpuMeter(0.0, lambda: now[0])
    for meter in (two, none):
        meter.add_start(600.0)
    now[0] += 10
    for meter in (two, none):
        meter.advance(3)
    assert (two.seconds, none.seconds) == (1200 + 60, 600 + 30)


def test_the_watchdog_waits_longer_for_a_shard_that_could_not_be_cut():
    small, large = (
        ShardTask(PlanShard(shard_id="s1", source="s", input="i", input_digest="d", estimated_tokens=n))
        for n in (1000, 200_000_000)
    )
    assert time_limit_s(RunConfig(), small) == 3600
    assert time_limit_s(RunConfig(), large) == 360_000


class FakeRay:
    """Ray whose actors fail to start with `error`, at once."""

    def __init__(self, error: Exception) -> None:
        self.error, self.starts = error, 0
        self.exceptions = SimpleNamespace(RayTaskError=RuntimeError, RayActorError=RuntimeError, RayError=RuntimeError)

    def remote(self, **options):
        return lambda made: SimpleNamespace(remote=lambda *args: self.actor())

    def actor(self):
        return SimpleNamespace(start=SimpleNamespace(remote=self.start))

    def start(self, *arguments):
        self.starts += 1
        return f"start {self.starts}"

    def wait(self, refs, num_returns=1, timeout=None):
        return list(refs), []

    def get(self, ref, timeout=None):
        raise self.error

    def kill(self, handle):
        pass

    def cluster_resources(self):
        return {"CPU": 2.0}


def test_an_actor_that_does_not_start_is_started_again_although_no_other_is_left(monkeypatch):
    fake = FakeRay(OSError("no space left"))
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(ray_pool.StartJudge, "fail", _without_pause(ray_pool.StartJudge.fail))
    job = parse_job({"cache": "c", "teacher": {"model": "m", "engine": "noop"}, "corpora": [{"files": ["x"]}]})
    pool = RayPool(job, "m", synthetic_spec(), "d", 1)

    def wait_often() -> None:
        for _ in range(100):
            assert pool.wait(0.01) == []

    with pytest.raises(TeacherCacheError, match="no space left"):
        wait_often()
    assert fake.starts == 3


def _without_pause(fail):
    def judge(self, cause, *, others_ready):
        fail(self, cause, others_ready=others_ready)
        return 0.001  # the pool looks again while no actor is left

    return judge


def test_the_budget_holds_without_ray_as_well(job_file, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", documents(40))
    job = load_job(job_file(tmp_path / "cache", [path], teacher={"engine_args": {"delay_s": 0.1}}))
    poor = job.model_copy(update={"run": job.run.model_copy(update={"budget_gpu_hours": 1e-5})})  # 36 ms
    result = run_job(poor)
    assert (result.outcome.reason, result.manifest) == ("budget", None)
    assert result.outcome.tally.committed < 3  # what scoring the first document costs counts, too
    assert result.outcome.gpu_hours > 1e-5
    assert run_job(job).manifest is not None
