"""Workers as plain Ray actors.  No shard data crosses Ray: tasks and receipts are a few hundred bytes.

An actor is a process with one teacher.  Its engine's death ends it; the pool starts another and reports what was lost.
Actors that the cluster has no room for stay pending and join whenever a node does, so a growing or shrinking cluster
needs no code of its own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.config import JobConfig
from pipeline.running.inline_pool import (
    Failed,
    Finished,
    PoolState,
    classify,
)
from pipeline.running.worker import Receipt, ShardTask
from teachercache import CacheSpec
from teachercache.errors import StoreUnavailable, TeacherCacheError, UsageError

logger = logging.getLogger(__name__)

# credentials and settings that actors need; they travel as an argument, not in the runtime environment, which the
# dashboard shows to everybody
FORWARDED = (
    *("AWS_", "FSSPEC_", "HF_", "GOOGLE_", "AZURE_"),
    *("VLLM_", "NCCL_", "TORCH_", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
)
STARTS_BEFORE_GIVING_UP = 3
STORE_STARTS_BEFORE_GIVING_UP = 20  # with pauses of up to a minute: a quarter of an hour, as the driver's patience
LONGEST_START_PAUSE_S = 60.0


class TeacherActor:
    """Runs in an actor process: starts the worker in the constructor's place, then does shards in a few threads."""

    def __init__(
        self,
        job: dict[str, Any],
        model_path: str,
        spec: dict[str, Any],
        plan_digest: str,
        journal: Any,
        env: dict[str, str],
    ) -> None:
        for name, value in env.items():
            os.environ.setdefault(name, value)
        self._arguments = (job, model_path, spec, plan_digest, journal)
        self._placed = time.monotonic()  # from now on this actor holds its GPUs
        self._worker: Any = None
        self._metrics: Any = None

    def start(self) -> dict[str, Any]:
        """Loads the teacher.  Errors travel back as themselves."""
        from pipeline.running.worker import ShardWorker

        job_tree, model_path, spec_tree, plan_digest, journal = self._arguments
        job = JobConfig.model_validate(job_tree)
        if not os.path.isdir(model_path):  # a hub id was fetched on the driver's node: fetch it here as well
            from pipeline.planning.identity import resolve_model

            model_path = str(resolve_model(job.teacher))
        threads = job.teacher.threads or max(1, (os.cpu_count() or 2) // max(1, _actors_per_node(job)))
        os.environ["OMP_NUM_THREADS"] = str(threads)
        self._worker = ShardWorker(
            job,
            model_path,
            CacheSpec.model_validate(spec_tree),
            plan_digest=plan_digest,
            journal=_RemoteJournal(journal),
        )
        from pipeline.watching.metrics import ActorMetrics

        self._metrics = ActorMetrics(self._worker)
        return {**self._worker.loop.teacher.provenance, "start_seconds": time.monotonic() - self._placed}

    def run(self, task: ShardTask) -> Receipt:
        try:
            receipt: Receipt = self._worker.run(task)
        except Exception:
            self._metrics.failed()
            raise
        self._metrics.committed(receipt)
        return receipt

    def state(self) -> dict[str, Any]:
        return self._worker.state() if self._worker is not None else {}

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _actors_per_node(job: JobConfig) -> int:
    return job.run.actors if not job.teacher.gpus_per_actor else 1


class _RemoteJournal:
    """Tells the journal actor which documents enter and leave the engine, before they do."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __call__(self, shard_id: str, event: str, ordinals: Sequence[int]) -> None:
        import ray

        ray.get(self._actor.note.remote(shard_id, event, list(ordinals)), timeout=30)


class JournalActor:
    """Outlives the teachers: which documents of a retried shard were inside the engine when its process died."""

    def __init__(self) -> None:
        self._inside: dict[str, set[int]] = {}

    def note(self, shard_id: str, event: str, ordinals: list[int]) -> None:
        inside = self._inside.setdefault(shard_id, set())
        if event == "in":
            inside.update(ordinals)
        else:
            inside.difference_update(ordinals)

    def take(self, shard_id: str) -> list[int]:
        return sorted(self._inside.pop(shard_id, set()))


def connect() -> None:
    """Joins the cluster that RAY_ADDRESS names (`ray job submit` sets it), else starts a Ray of this process's own."""
    import ray

    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
    else:
        # "local": otherwise Ray joins whatever cluster happens to run on this machine
        ray.init(
            "local",
            num_cpus=os.cpu_count(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )


@dataclass(slots=True)
class _Member:
    handle: Any
    started: Any  # ref of start()
    created: float
    ready_at: float | None = None
    tasks: dict[Any, tuple[ShardTask, float]] = field(default_factory=dict)
    solo: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class RayPool:
    def __init__(self, job: JobConfig, model_path: str, spec: CacheSpec, plan_digest: str, size: int) -> None:
        import ray as ray_module

        ray: Any = ray_module  # its stubs know neither max_concurrency nor actor methods
        self._ray, self._job, self._size = ray, job, size
        gpus = job.teacher.gpus_per_actor
        if gpus is None:
            has_gpus = ray.cluster_resources().get("GPU", 0) > 0
            gpus = float(job.teacher.tensor_parallel) if has_gpus and job.teacher.engine != "noop" else 0.0
        self._gpus = gpus
        self._weight = gpus or 1.0  # without GPUs the budget counts teachers
        self._journal: Any = ray.remote(num_cpus=0, max_restarts=3)(JournalActor).remote()
        env = {k: v for k, v in os.environ.items() if k.startswith(FORWARDED)}
        self._actor_class = ray.remote(
            num_cpus=job.teacher.cpus_per_actor,
            num_gpus=gpus,
            max_restarts=0,
            max_concurrency=job.run.shards_per_actor + 2,
        )(TeacherActor)
        self._arguments = (
            job.model_dump(mode="json"),
            model_path,
            spec.model_dump(mode="json"),
            plan_digest,
            self._journal,
            env,
        )
        self._members: list[_Member] = []
        self._deaths = 0
        self._failed_starts = 0  # in a row
        self._next_start = 0.0
        self._ever_ready = 0
        self._gpu_seconds = 0.0
        self._began = self._last_seen = time.monotonic()
        self._refill()

    def _refill(self) -> None:
        while len(self._members) < self._size and time.monotonic() >= self._next_start:
            handle = self._actor_class.remote(*self._arguments)
            self._members.append(_Member(handle, handle.start.remote(), time.monotonic()))

    # -- the driver's side ---------------------------------------------------------------------------------------

    def free_slots(self) -> int:
        return sum(self._room(m) for m in self._members)

    def _room(self, member: _Member) -> int:
        if member.ready_at is None or member.solo:
            return 0
        return self._job.run.shards_per_actor - len(member.tasks)

    def submit(self, task: ShardTask, solo: bool = False) -> bool:
        candidates = [m for m in self._members if self._room(m) > 0 and not (solo and m.tasks)]
        if not candidates:
            return False
        member = min(candidates, key=lambda m: len(m.tasks))
        member.solo = solo
        member.tasks[member.handle.run.remote(task)] = (task, time.monotonic())
        return True

    def wait(self, timeout_s: float) -> list[Finished | Failed]:
        self._account()
        starting = {m.started: m for m in self._members if m.ready_at is None}
        running = {ref: m for m in self._members for ref in m.tasks}
        refs = [*starting, *running]
        if not refs:
            time.sleep(min(timeout_s, 0.2))
            return []
        ready, _ = self._ray.wait(refs, num_returns=1, timeout=timeout_s)
        if ready and len(refs) > 1:  # take along everything else that is done
            ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        events: list[Finished | Failed] = []
        for ref in ready:
            if ref in starting:
                self._settle_start(starting[ref])
            elif ref in running and ref in running[ref].tasks:
                events += self._settle_task(running[ref], ref)
        events += self._time_out()
        self._refill()
        self._check_starts()
        return events

    def _check_starts(self) -> None:
        """Gives up where the cluster never had room for the least number of teachers."""
        waited = time.monotonic() - self._began
        ready = sum(m.ready_at is not None for m in self._members)
        least = min(self._job.run.min_actors, self._size)
        if self._ever_ready < least and ready < least and waited > self._job.run.actor_start_timeout_s:
            have = {k: v for k, v in self._ray.cluster_resources().items() if k in ("CPU", "GPU")}
            raise TeacherCacheError(
                f"expected at least {least} teachers after {waited:.0f} s, found {ready}: each needs "
                f"{self._job.teacher.cpus_per_actor} CPU and {self._gpus} GPU, the cluster has {have}"
            )

    def _settle_start(self, member: _Member) -> None:
        try:
            member.info = self._ray.get(member.started)
        except Exception as error:
            cause = getattr(error, "cause", None) or error
            self._members.remove(member)
            self._ray.kill(member.handle)
            self._failed_starts += 1
            self._next_start = time.monotonic() + min(LONGEST_START_PAUSE_S, 2.0**self._failed_starts)
            self._judge_start(cause)
            return
        self._gpu_seconds += self._weight * float(member.info.get("start_seconds", 0.0))
        member.ready_at = time.monotonic()
        self._ever_ready += 1
        self._failed_starts = 0

    def _judge_start(self, cause: BaseException) -> None:
        """Raises where no start can help.  A job that has teachers, or had, outlives one bad node or a store's outage."""
        text = " ".join(str(cause).split())[-600:]
        if not self._ever_ready:
            if isinstance(cause, UsageError):
                raise UsageError(str(cause)) from cause
            hopeless = isinstance(cause, TeacherCacheError) and not isinstance(cause, StoreUnavailable)
        else:
            hopeless = False
        others = any(m.ready_at is not None for m in self._members)
        limit = STARTS_BEFORE_GIVING_UP * (self._size if self._ever_ready else 1)
        if isinstance(cause, StoreUnavailable):
            limit = STORE_STARTS_BEFORE_GIVING_UP * self._size
        if hopeless or (self._failed_starts >= limit and not others):
            raise TeacherCacheError(f"no teacher could be started ({self._failed_starts} tries): {text}") from cause
        logger.warning("a teacher did not start: %s", text)

    def _settle_task(self, member: _Member, ref: Any) -> list[Finished | Failed]:
        task, _ = member.tasks.pop(ref)
        try:
            receipt = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            kind, message, suspects, code = classify(getattr(error, "cause", None) or error)
            failed = Failed(task, kind, message, suspects, code)
            return [failed, *self._bury(member, message)] if kind == "died" else self._free(member, [failed])
        except self._ray.exceptions.RayActorError as error:
            message = "the teacher's process died: " + " ".join(str(error).split())[:300]
            return [self._lost(task, message), *self._bury(member, message)]
        return self._free(member, [Finished(task, receipt)])

    def _free(self, member: _Member, events: list[Finished | Failed]) -> list[Finished | Failed]:
        member.solo = member.solo and bool(member.tasks)
        return events

    def _lost(self, task: ShardTask, message: str) -> Failed:
        suspects: tuple[int, ...] = ()
        if task.attempt > 0:
            try:
                suspects = tuple(self._ray.get(self._journal.take.remote(task.shard.shard_id), timeout=10))
            except Exception as error:  # the journal's node may be gone as well: then nothing is known
                logger.warning("journal not available: %s", error)
        return Failed(task, "died", message, suspects)

    def _bury(self, member: _Member, message: str) -> list[Finished | Failed]:
        """Forgets an actor; what else it was doing is lost with it."""
        self._deaths += 1
        if member in self._members:
            self._members.remove(member)
        lost: list[Finished | Failed] = []
        for ref, (task, _) in member.tasks.items():
            done, _ = self._ray.wait([ref], timeout=0.5)
            try:  # it may have finished in the same moment, or know its own suspects
                lost.append(Finished(task, self._ray.get(ref)) if done else self._lost(task, message))
            except self._ray.exceptions.RayTaskError as error:
                kind, text, suspects, code = classify(getattr(error, "cause", None) or error)
                lost.append(Failed(task, kind, text, suspects, code))
            except Exception:
                lost.append(self._lost(task, message))
        member.tasks.clear()
        self._ray.kill(member.handle)
        return lost

    def _time_out(self) -> list[Finished | Failed]:
        events: list[Finished | Failed] = []
        now = time.monotonic()
        for member in list(self._members):
            if member.ready_at is None:
                continue
            late = [t for t, began in member.tasks.values() if now - began > self._patience_s(t)]
            if late:
                limit = max(map(self._patience_s, late))
                events += [
                    Failed(
                        f.task, "timeout" if f.task in late else "died", f"no result after {limit:.0f} s", f.suspects
                    )
                    if isinstance(f, Failed)
                    else f
                    for f in self._bury(member, "the teacher was ended because a shard took too long")
                ]
        return events

    def _patience_s(self, task: ShardTask) -> float:
        """The watchdog's limit: that of the job file, longer for a shard that could not be cut to size."""
        run = self._job.run
        return run.shard_timeout_s * max(1.0, task.shard.estimated_tokens / run.shard_tokens)

    def _account(self) -> None:
        now = time.monotonic()
        live = sum(1 for m in self._members if m.ready_at is not None)
        self._gpu_seconds += live * self._weight * (now - self._last_seen)
        self._last_seen = now

    def state(self) -> PoolState:
        ready = [m for m in self._members if m.ready_at is not None]
        return PoolState(
            wanted=self._size,
            ready=len(ready),
            starting=len(self._members) - len(ready),
            deaths=self._deaths,
            gpu_seconds=self._gpu_seconds,
        )

    def worker_states(self, timeout_s: float = 2.0) -> list[dict[str, Any]]:
        """Asks the actors; those that do not answer in time are left out."""
        refs = [m.handle.state.remote() for m in self._members if m.ready_at is not None]
        done, _ = self._ray.wait(refs, num_returns=len(refs), timeout=timeout_s) if refs else ([], [])
        states = []
        for ref in done:
            try:
                states.append(self._ray.get(ref))
            except self._ray.exceptions.RayError:
                continue  # it died in between; wait() reports that
        return states

    def close(self) -> None:
        for member in self._members:
            self._ray.kill(member.handle)
        self._ray.kill(self._journal)
        self._members.clear()
