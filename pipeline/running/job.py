"""One job from its file to a published manifest: check, plan, start, drive, publish."""

from __future__ import annotations

import signal
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import teachercache
from pipeline.config import JobConfig
from pipeline.corpus.encode import Encoder
from pipeline.planning.identity import build_spec, resolve_model
from pipeline.planning.plan import Planned, make_plan
from pipeline.planning.prior_plans import Earlier, read_earlier
from pipeline.running.driver import Driver, Leases, Outcome, Tally
from pipeline.running.inline_pool import InlinePool
from pipeline.running.tasks import Pool, PoolState
from teachercache import CacheSpec, CacheWriter, Ledger, Manifest, Plan
from teachercache.errors import NotACache, SpecMismatch, UsageError


@dataclass(slots=True)
class Prepared:
    """Everything known before anything is written or started."""

    job: JobConfig
    model: Path
    spec: CacheSpec
    encoder: Encoder
    planned: Planned


@dataclass(slots=True)
class Result:
    """What `run` did. `manifest` is None where nothing was published."""

    outcome: Outcome
    manifest: Manifest | None
    plan_digest: str


def check_cache(job: JobConfig, spec: CacheSpec) -> Earlier:
    """Refuses wrong credentials and a cache of another teacher before anything is planned; returns what it holds.

    Writes nothing.
    """
    try:
        ledger = Ledger.open(job.cache)
        existing = ledger.spec()
    except NotACache:
        return Earlier()
    if existing != spec:
        raise SpecMismatch(job.cache, spec.differences(existing))
    return read_earlier(ledger.store, ledger.committed())


def absolute(job: JobConfig) -> JobConfig:
    """Local paths made absolute: actors may run in another folder than the driver."""
    changed: dict[str, Any] = {}
    if "://" not in job.cache:
        if Path.cwd().name.startswith("_ray_pkg_") and not Path(job.cache).expanduser().is_absolute():
            raise UsageError(
                f"cache: found the relative path {job.cache} in a job that runs in Ray's copy of the folder it was submitted "
                "from, which Ray removes; expected an object store's URL or an absolute path that every node sees"
            )
        changed["cache"] = str(Path(job.cache).expanduser().absolute())
    template = job.recipe.chat.template
    if template is not None:
        chat = job.recipe.chat.model_copy(update={"template": str(Path(template).expanduser().absolute())})
        changed["recipe"] = job.recipe.model_copy(update={"chat": chat})
    return job.model_copy(update=changed)


def prepare(job: JobConfig) -> Prepared:
    """Model, identity, tokenizer, plan; nothing is written."""
    job = absolute(job)
    model = resolve_model(job.teacher)
    spec = build_spec(job, model)
    earlier = check_cache(job, spec)
    encoder = Encoder(job, model, spec.tokenizer)
    return Prepared(job, model, spec, encoder, make_plan(job, encoder, spec.digest, earlier))


@contextmanager
def stop_on_signals(stop: threading.Event, say: Callable[[str], None]) -> Iterator[None]:
    """SIGTERM and Ctrl-C give the shards in work back; a second signal ends the process as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def handler(signum: int, frame: types.FrameType | None) -> None:
        say(f"{signal.Signals(signum).name}: giving back the shards in work")
        stop.set()
        for number, old in before.items():
            signal.signal(number, old)

    for number in (int(signal.SIGTERM), int(signal.SIGINT)):
        before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _pool_maker(
    prepared: Prepared, plan_digest: str, shards: int, observe: Callable[[Any], Any] | None
) -> Callable[[], Pool]:
    job = prepared.job

    def make() -> Pool:
        if job.run.executor == "inline":
            from pipeline.running.worker import ShardWorker

            gpus = float(job.teacher.gpus_per_actor or job.teacher.tensor_parallel)
            return InlinePool(lambda: ShardWorker(job, prepared.model, prepared.spec, plan_digest=plan_digest), gpus)
        from pipeline.running.ray_pool import RayPool, connect

        connect()
        size = min(job.run.actors, max(1, shards))
        return RayPool(job, str(prepared.model), prepared.spec, plan_digest, size, observe)

    return make


def run_job(
    job: JobConfig,
    *,
    on_planned: Callable[[Prepared], None] | None = None,
    on_progress: Callable[[Tally, PoolState], None] | None = None,
    on_event: Callable[[str, dict[str, Any]], None] | None = None,
    observe: Callable[[Any], Any] | None = None,
    say: Callable[[str], None] = print,
    stop: threading.Event | None = None,
) -> Result:
    """Runs a whole job. Running it again resumes it: committed shards are skipped.

    Raises UsageError (nothing was started) or another TeacherCacheError (what is committed stays committed).
    """
    prepared = prepare(job)
    job = prepared.job
    if on_planned is not None:
        on_planned(prepared)
    writer = teachercache.create(job.cache, prepared.spec, tokenizer_files=prepared.model)
    plan_digest = writer.put_plan(prepared.planned.plan)
    job = _with_reuse_settled(job, writer, prepared.planned.plan)
    prepared.job = job
    leases = _leases(job, writer)
    stop = stop or threading.Event()
    driver = Driver(
        job.run,
        writer,
        prepared.planned.plan.shards,
        _pool_maker(prepared, plan_digest, len(prepared.planned.plan.shards), observe),
        leases=leases,
        on_progress=on_progress,
        on_event=on_event,
        stop=stop,
    )
    known = {} if job.run.retry_quarantined else writer.quarantined()
    skip = {s for s, q in known.items() if not q.reason.startswith("document:")}
    for shard in skip & driver.shards.keys():
        driver.quarantined[shard] = known[shard].message
    with stop_on_signals(stop, say):
        outcome = driver.run(skip)
    manifest = None
    complete = outcome.reason == "done" and not outcome.quarantined
    if job.run.publish and (complete or job.run.allow_partial):
        manifest = writer.publish(
            allow_partial=job.run.allow_partial, allow_repeated_content=job.run.allow_repeated_content
        )
    return Result(outcome, manifest, plan_digest)


def _with_reuse_settled(job: JobConfig, writer: CacheWriter, plan: Plan) -> JobConfig:
    """`run.reuse: auto` made on or off: what this plan itself commits holds nothing that its other shards need."""
    if job.run.reuse != "auto":
        return job
    others = writer.committed() - {shard.shard_id for shard in plan.shards}
    run = job.run.model_copy(update={"reuse": "on" if others else "off"})
    return job.model_copy(update={"run": run})


def _leases(job: JobConfig, writer: CacheWriter) -> Leases | None:
    if not job.run.leases:
        return None
    from pipeline.running.leases import StoreLeases

    return StoreLeases(writer.store, job.run.lease_s)
