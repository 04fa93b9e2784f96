"""One job from its file to a published manifest: check, plan, start, drive, publish."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import teachercache
from pipeline.config import JobConfig
from pipeline.corpus.encode import Encoder
from pipeline.planning.identity import build_spec, resolve_model
from pipeline.planning.plan import Planned, make_plan
from pipeline.planning.prior_plans import PriorPlans, read_prior_plans
from pipeline.running.driver import Driver, Outcome, Tally
from pipeline.running.inline_pool import InlinePool
from pipeline.running.leases import StoreLeases
from pipeline.running.tasks import Pool, PoolState
from teachercache import CacheSpec, CacheWriter, Ledger, Manifest, Plan
from teachercache.console import stop_on_signals
from teachercache.errors import NotACache, SpecMismatch, UsageError
from teachercache.format.layout import PROBES
from teachercache.store.store import Store

if TYPE_CHECKING:
    from pipeline.running.ray_pool import Observe


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
    """What `run` did. `manifest`: the newest one, None where the job did not get so far; `published`: by this run."""

    outcome: Outcome
    manifest: Manifest | None
    published: bool = False


def check_cache(job: JobConfig, spec: CacheSpec) -> PriorPlans:
    """Return what a cache holds; writes nothing.

    Raises SpecMismatch where the cache is another teacher's, StoreDenied for wrong credentials: before planning.
    """
    try:
        ledger = Ledger.open(job.cache)
        existing = ledger.spec()
    except NotACache:
        return PriorPlans()
    if existing != spec:
        raise SpecMismatch(job.cache, spec.differences(existing))
    return read_prior_plans(ledger)


def absolute(job: JobConfig) -> JobConfig:
    """Return the job with absolute local paths: actors may run in another folder than the driver."""
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


def today() -> str:
    """Return the day by UTC, YYYY-MM-DD."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def prepare(job: JobConfig, *, exact: bool = False) -> Prepared:
    """Resolve the model, its identity and tokenizer, and plan (exact: see make_plan); nothing is written."""
    job = absolute(job)
    model = resolve_model(job.teacher)
    spec = build_spec(job, model)
    prior = check_cache(job, spec)
    encoder = Encoder(job, model, spec.tokenizer)
    if encoder.chat is not None and encoder.chat.prints_date:  # one day a cache, whenever its shards are made
        job = encoder.set_date(prior.date or today())
    return Prepared(job, model, spec, encoder, make_plan(job, encoder, spec.digest, prior, exact=exact))


def _make_pool(prepared: Prepared, plan_digest: str, observe: Observe | None) -> Pool:
    job = prepared.job
    if job.run.executor == "inline":
        from pipeline.running.worker import ShardWorker

        gpus = float(job.teacher.gpus_per_actor or job.teacher.tensor_parallel)
        return InlinePool(lambda: ShardWorker(job, prepared.model, prepared.spec, plan_digest=plan_digest), gpus)
    from pipeline.running.ray_pool import RayPool, connect

    connect()
    size = min(job.run.actors, len(prepared.planned.plan.shards))
    return RayPool(job, str(prepared.model), prepared.spec, plan_digest, size, observe)


def run_job(
    job: JobConfig,
    *,
    on_planned: Callable[[Prepared], None] | None = None,
    on_progress: Callable[[Tally, PoolState], None] | None = None,
    on_event: Callable[[str, dict[str, Any]], None] | None = None,
    observe: Observe | None = None,
    say: Callable[[str], None] = print,
    stop: threading.Event | None = None,
) -> Result:
    """Run a whole job. Running it again resumes it: committed shards are skipped.

    observe: makes an observer of an actor from its ShardWorker, inside the actor (watching.metrics.ActorMetrics). Raises
    UsageError (nothing was started) or another TeacherCacheError (what is committed stays committed).
    """
    prepared = prepare(job, exact=True)
    job = prepared.job
    if on_planned is not None:
        on_planned(prepared)
    plan = prepared.planned.plan
    store = Store.open(job.cache)
    writer = CacheWriter(store, prepared.spec)
    job = _with_reuse_settled(job, writer, plan)
    prepared.job = job
    stop = stop or threading.Event()

    def begin() -> None:
        teachercache.create(job.cache, prepared.spec, tokenizer_files=prepared.model, probe=False)
        writer.put_plan(plan)

    driver = Driver(
        job.run,
        writer,
        plan.shards,
        lambda: _make_pool(prepared, plan.digest, observe),
        leases=StoreLeases(writer.store) if job.run.leases else None,
        on_progress=on_progress,
        on_event=on_event,
        stop=stop,
        begin=begin,
    )
    known = {} if job.run.retry_quarantined else writer.quarantined()
    skip = {shard for shard, entry in known.items() if entry.scope == "shard"}
    for shard in skip & driver.shards.keys():
        driver.quarantined[shard] = known[shard].message
    with stop_on_signals(stop, lambda name: say(f"{name}: giving back the shards in progress")), _no_trace(store):
        store.probe()  # before a teacher starts
        outcome = driver.run(skip)
    manifest, published = None, False
    complete = outcome.reason == "done" and not outcome.quarantined
    if complete or job.run.allow_partial:
        before = writer.ledger.manifest_numbers()
        manifest = writer.publish(
            allow_partial=job.run.allow_partial, allow_repeated_content=job.run.allow_repeated_content
        )
        published = manifest.number not in before
    return Result(outcome, manifest, published)


@contextmanager
def _no_trace(store: Store) -> Iterator[None]:
    """Remove the empty folders that a probe leaves on a local disk, where nothing was written after it."""
    root = Path(store.root)
    new = store.is_local and not root.exists()
    try:
        yield
    finally:
        for folder in (root / PROBES, *([root] if new else [])) if store.is_local else ():
            with suppress(OSError):
                folder.rmdir()


def _with_reuse_settled(job: JobConfig, writer: CacheWriter, plan: Plan) -> JobConfig:
    """Resolve `run.reuse: auto`: on only if another plan has commits in this cache (shards of one plan share no rows)."""
    if job.run.reuse != "auto":
        return job
    others = writer.committed() - {shard.shard_id for shard in plan.shards}
    run = job.run.model_copy(update={"reuse": "on" if others else "off"})
    return job.model_copy(update={"run": run})
