"""Actors of Ray. No shard data crosses Ray: tasks and receipts are a few hundred bytes.

An actor is a process with one teacher. Its engine's death ends it; the pool starts another and reports what was lost.
Actors that the cluster has no room for stay pending and join whenever a node does, so a growing or shrinking cluster
needs no further code.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.config import JobConfig, RunConfig
from pipeline.running.starts import StartJudge
from pipeline.running.tasks import Failed, Finished, PoolState, Receipt, ShardTask
from teachercache import CacheSpec
from teachercache.errors import TeacherCacheError

if TYPE_CHECKING:
    from pipeline.running.worker import ShardWorker

logger = logging.getLogger(__name__)

# credentials and settings that actors need; they travel as an argument, not in the runtime environment, which Ray's
# dashboard shows to everyone
FORWARDED = (
    *("AWS_", "FSSPEC_", "HF_", "GOOGLE_", "AZURE_"),
    *("VLLM_", "NCCL_", "TORCH_", "TOKENIZERS_PARALLELISM"),
)
CPUS_PER_ACTOR = 1.0  # that Ray reserves; threads are set by OMP_NUM_THREADS


Observer = Callable[[Receipt | None], None]  # called after each shard of an actor; None: it raised
Observe = Callable[["ShardWorker"], Observer]  # called inside the actor


class GpuMeter:
    """GPU-seconds that actors of `weight` GPUs held; an actor without a GPU counts as one."""

    def __init__(self, gpus: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._weight, self._clock = gpus or 1.0, clock
        self._last = clock()
        self.seconds = 0.0

    def add_start(self, seconds: float) -> None:
        """Count the time in which an actor loaded its teacher."""
        self.seconds += self._weight * seconds

    def advance(self, ready: int) -> None:
        """Count the time since the last call for `ready` actors."""
        now = self._clock()
        self.seconds += ready * self._weight * (now - self._last)
        self._last = now


def time_limit_s(run: RunConfig, task: ShardTask) -> float:
    """Return the watchdog's limit: that of the job file, longer for a shard that could not be cut to size."""
    return run.shard_timeout_s * max(1.0, task.shard.estimated_tokens / run.shard_tokens)


class TeacherActor:
    """Runs in an actor process: `start` loads the teacher, then shards run in a few threads."""

    def __init__(self, env: dict[str, str]) -> None:
        for name, value in env.items():
            os.environ.setdefault(name, value)
        self._placed = time.monotonic()  # from now on this actor holds its GPUs
        self._worker: ShardWorker
        self._observer: Observer | None = None

    def start(
        self, job: JobConfig, model_path: str, spec: CacheSpec, plan_digest: str, journal: Any, observe: Observe | None
    ) -> float:
        """Load the teacher and return the seconds since this actor holds its GPUs. Errors travel back as themselves."""
        import ray

        from pipeline.running.worker import ShardWorker

        if not os.path.isdir(model_path):  # a hub id was fetched on the driver's node: fetch it here as well
            from pipeline.planning.identity import resolve_model

            model_path = str(resolve_model(job.teacher))
        on_this_node = 1 if job.teacher.gpus_per_actor else job.run.actors
        threads = job.teacher.threads or max(1, (os.cpu_count() or 2) // max(1, on_this_node))
        os.environ["OMP_NUM_THREADS"] = str(threads)

        def note(shard_id: str, event: str, ordinals: Sequence[int]) -> None:  # before they enter or leave the engine
            ray.get(journal.note.remote(shard_id, event, list(ordinals)), timeout=30)

        self._worker = ShardWorker(job, model_path, spec, plan_digest=plan_digest, journal=note)
        if observe is not None:
            self._observer = observe(self._worker)
        return time.monotonic() - self._placed

    def run(self, task: ShardTask) -> Receipt:
        """Do a shard; see ShardWorker.run."""
        receipt: Receipt | None = None
        try:
            receipt = self._worker.run(task)
            return receipt
        finally:
            if self._observer is not None and not task.trial:
                self._observer(receipt)

    def state(self) -> dict[str, Any]:
        """Return what ShardWorker.state returns; empty before `start` has ended."""
        return self._worker.state() if hasattr(self, "_worker") else {}


class JournalActor:
    """Outlives the teachers: which documents of a retried shard were inside the engine when its process died."""

    def __init__(self) -> None:
        self._inside: dict[str, set[int]] = {}

    def note(self, shard_id: str, event: str, ordinals: list[int]) -> None:
        """Note documents that enter ("in") or leave ("out") an engine."""
        inside = self._inside.setdefault(shard_id, set())
        if event == "in":
            inside.update(ordinals)
        else:
            inside.difference_update(ordinals)

    def take(self, shard_id: str) -> list[int]:
        """Return the documents that are inside, and forget them."""
        return sorted(self._inside.pop(shard_id, set()))


def connect() -> None:
    """Join the cluster that RAY_ADDRESS names (`ray job submit` sets it), else start a Ray for this process."""
    import ray

    if ray.is_initialized():
        return
    # "local": otherwise Ray joins whatever cluster happens to run on this machine
    own: dict[str, Any] = {"address": "local", "num_cpus": os.cpu_count(), "include_dashboard": False}
    where = {"address": "auto"} if os.environ.get("RAY_ADDRESS") else own
    ray.init(**where, log_to_driver=False, logging_level=logging.WARNING)


@dataclass(slots=True)
class _Actor:
    handle: Any
    started: Any  # ref of start()
    ready: bool = False
    tasks: dict[Any, tuple[ShardTask, float]] = field(default_factory=dict)  # by ref of run(): the task and its begin
    solo: bool = False


class RayPool:
    """Up to `size` actors of a job; see tasks.Pool. Call `connect` before."""

    def __init__(
        self,
        job: JobConfig,
        model_path: str,
        spec: CacheSpec,
        plan_digest: str,
        size: int,
        observe: Observe | None = None,
    ) -> None:
        import ray as ray_module

        ray: Any = ray_module  # its stubs know neither max_concurrency nor actor methods
        self._ray, self._job, self._size = ray, job, size
        gpus = job.teacher.gpus_per_actor
        if gpus is None:
            has_gpus = ray.cluster_resources().get("GPU", 0) > 0
            gpus = float(job.teacher.tensor_parallel) if has_gpus and job.teacher.engine != "noop" else 0.0
        self._gpus = gpus
        self._journal: Any = ray.remote(num_cpus=0, max_restarts=3)(JournalActor).remote()
        self._env = {k: v for k, v in os.environ.items() if k.startswith(FORWARDED)}
        self._actor_class = ray.remote(
            num_cpus=CPUS_PER_ACTOR, num_gpus=gpus, max_restarts=0, max_concurrency=job.run.shards_per_actor + 2
        )(TeacherActor)
        self._arguments = (job, model_path, spec, plan_digest, self._journal, observe)
        self._actors: list[_Actor] = []
        self._deaths = 0
        self._judge = StartJudge(size)
        self._meter = GpuMeter(gpus)
        self._began = time.monotonic()
        self._next_start = 0.0
        self._refill()

    def _refill(self) -> None:
        while len(self._actors) < self._size and time.monotonic() >= self._next_start:
            handle = self._actor_class.remote(self._env)
            self._actors.append(_Actor(handle, handle.start.remote(*self._arguments)))

    def _ready(self) -> list[_Actor]:
        return [a for a in self._actors if a.ready]

    # -- the driver's side ---------------------------------------------------------------------------------------

    def free_slots(self) -> int:
        """Return how many tasks can be submitted now."""
        return sum(self._room(a) for a in self._actors)

    def _room(self, actor: _Actor) -> int:
        takes_more = actor.ready and not actor.solo
        return self._job.run.shards_per_actor - len(actor.tasks) if takes_more else 0

    def submit(self, task: ShardTask, solo: bool = False) -> bool:
        """Start a task on the actor with the fewest; `solo` on one without any. False where there is none."""
        candidates = [a for a in self._actors if self._room(a) > 0 and not (solo and a.tasks)]
        if not candidates:
            return False
        actor = min(candidates, key=lambda a: len(a.tasks))
        actor.solo = solo
        actor.tasks[actor.handle.run.remote(task)] = (task, time.monotonic())
        return True

    def wait(self, timeout_s: float) -> list[Finished | Failed]:
        """Return what ended within `timeout_s`. Raises UsageError or TeacherCacheError where no actor can start."""
        self._meter.advance(len(self._ready()))
        starting = {a.started: a for a in self._actors if not a.ready}
        running = {ref: a for a in self._actors for ref in a.tasks}
        refs = [*starting, *running]
        if not refs:
            time.sleep(min(timeout_s, 0.2))
            self._refill()
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
        """Give up where the cluster never had room for an actor."""
        waited = time.monotonic() - self._began
        if not self._judge.started and waited > self._job.run.actor_start_timeout_s:
            have = {k: v for k, v in self._ray.cluster_resources().items() if k in ("CPU", "GPU")}
            raise TeacherCacheError(
                f"expected at least one actor after {waited:.0f} s, found none: each needs {CPUS_PER_ACTOR:g} CPU and "
                f"{self._gpus:g} GPU, the cluster has {have}"
            )

    def _settle_start(self, actor: _Actor) -> None:
        try:
            self._meter.add_start(self._ray.get(actor.started))
        except Exception as error:
            cause = getattr(error, "cause", None) or error
            self._actors.remove(actor)
            self._ray.kill(actor.handle)
            pause = self._judge.fail(cause, others_ready=bool(self._ready()))
            logger.warning("an actor did not start: %s", " ".join(str(cause).split())[-600:])
            self._next_start = time.monotonic() + pause
        else:
            actor.ready = True
            self._judge.succeed()

    def _settle_task(self, actor: _Actor, ref: Any) -> list[Finished | Failed]:
        task, _ = actor.tasks.pop(ref)
        event: Finished | Failed
        try:
            event = Finished(task, self._ray.get(ref))
        except self._ray.exceptions.RayTaskError as error:
            event = Failed.of(task, getattr(error, "cause", None) or error)
            if event.kind == "died":
                return [event, *self._drop_actor(actor, event.message)]
        except self._ray.exceptions.RayActorError as error:
            message = "the actor's process died: " + " ".join(str(error).split())[:300]
            return [self._lost(task, message), *self._drop_actor(actor, message)]
        actor.solo = actor.solo and bool(actor.tasks)
        return [event]

    def _lost(self, task: ShardTask, message: str) -> Failed:
        suspects: tuple[int, ...] = ()
        if task.attempt > 0:
            try:
                suspects = tuple(self._ray.get(self._journal.take.remote(task.shard.shard_id), timeout=10))
            except Exception as error:  # the journal's node may be gone as well: then nothing is known
                logger.warning("journal not available: %s", error)
        return Failed(task, "died", message, suspects)

    def _drop_actor(self, actor: _Actor, message: str) -> list[Finished | Failed]:
        """Forget an actor; what else it was doing is lost with it."""
        self._deaths += 1
        self._actors.remove(actor)
        lost: list[Finished | Failed] = []
        for ref, (task, _) in actor.tasks.items():
            done, _ = self._ray.wait([ref], timeout=0.5)
            try:  # it may have finished in the same moment, or know its suspects
                lost.append(Finished(task, self._ray.get(ref)) if done else self._lost(task, message))
            except self._ray.exceptions.RayTaskError as error:
                lost.append(Failed.of(task, getattr(error, "cause", None) or error))
            except Exception:
                lost.append(self._lost(task, message))
        actor.tasks.clear()
        self._ray.kill(actor.handle)
        return lost

    def _time_out(self) -> list[Finished | Failed]:
        events: list[Finished | Failed] = []
        now, run = time.monotonic(), self._job.run
        for actor in self._ready():
            late = [task for task, began in actor.tasks.values() if now - began > time_limit_s(run, task)]
            if not late:
                continue
            message = f"no result after {max(time_limit_s(run, task) for task in late):.0f} s"
            for event in self._drop_actor(actor, message):
                if isinstance(event, Failed):
                    event.kind, event.message = ("timeout" if event.task in late else "died"), message
                events.append(event)
        return events

    def state(self) -> PoolState:
        """Return the counts of actors and the GPU-seconds so far."""
        ready = len(self._ready())
        return PoolState(self._size, ready, len(self._actors) - ready, self._deaths, self._meter.seconds)

    def worker_states(self, timeout_s: float = 2.0) -> list[dict[str, Any]]:
        """Return what the actors report of themselves, without those that do not answer in time."""
        refs = [a.handle.state.remote() for a in self._ready()]
        done, _ = self._ray.wait(refs, num_returns=len(refs), timeout=timeout_s) if refs else ([], [])
        states = []
        for ref in done:
            try:
                states.append(self._ray.get(ref))
            except self._ray.exceptions.RayError:
                continue  # it died in between; wait() reports that
        return states

    def close(self) -> None:
        """Kill all actors."""
        for actor in self._actors:
            self._ray.kill(actor.handle)
        self._ray.kill(self._journal)
        self._actors.clear()
