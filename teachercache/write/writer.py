"""CacheWriter: create a cache or append to it, commit shards, publish."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from teachercache.errors import CommitConflict, Exists, NotACache, SpecMismatch
from teachercache.format import layout
from teachercache.format.objects import Manifest, Plan, Quarantine
from teachercache.format.record import Record
from teachercache.format.sealed import seal, utc_now
from teachercache.format.spec import CacheSpec
from teachercache.parquet.datafile import ROWS_PER_GROUP
from teachercache.store.ledger import Ledger
from teachercache.store.store import Store
from teachercache.urls import refuse_read_only
from teachercache.write.attempt import GRACE_SECONDS, CommitResult, ShardAttempt
from teachercache.write.publish import publish
from teachercache.write.reuse import ReuseIndex
from teachercache.write.tokenizer import upload_tokenizer


def create(
    url: str | os.PathLike[str],
    spec: CacheSpec,
    *,
    tokenizer_files: Path | str | None = None,
    codec: str = "open",
    storage_options: Mapping[str, Any] | None = None,
    probe: bool = True,
) -> CacheWriter:
    """Create a cache, or append to an existing one whose spec is equal; returns its writer.

    Probes the store first (StoreUnsafe where it ignores conditional writes). A cache of another teacher raises
    SpecMismatch, which names every field that differs; nothing is written then. `tokenizer_files` is a folder whose
    tokenizer files go into the cache, so that a reader needs nothing else.
    """
    refuse_read_only(os.fspath(url))
    store = Store.open(url, storage_options)
    try:
        existing = Ledger(store).spec()
    except NotACache:
        existing = None
    if existing is not None and existing != spec:
        raise SpecMismatch(store.url, spec.differences(existing))
    if probe:
        store.probe()
    if existing is None:
        try:
            store.create(layout.SPEC, seal(spec))
        except Exists:
            theirs = Ledger(store).spec()
            if theirs != spec:
                raise SpecMismatch(store.url, spec.differences(theirs)) from None
    if tokenizer_files is not None:
        upload_tokenizer(store, spec.tokenizer, Path(tokenizer_files))
    return CacheWriter(store, spec, codec=codec)


class CacheWriter:
    """Commit shards of one cache. Any number of writers, in any number of processes, may work on one cache."""

    def __init__(
        self,
        store: Store,
        spec: CacheSpec,
        *,
        codec: str = "open",
        grace_seconds: float = GRACE_SECONDS,
        rows_per_group: int = ROWS_PER_GROUP,
    ) -> None:
        """Write to the cache at a store's root, whose spec is `spec`; `create` checks that and probes the store.

        Every writer and collector of a cache must have the same `grace_seconds`.
        """
        refuse_read_only(store.url)
        self.store, self.spec, self.ledger = store, spec, Ledger(store, spec)
        self.codec, self.grace_seconds, self.rows_per_group = codec, grace_seconds, rows_per_group

    @property
    def url(self) -> str:
        """Return where the cache is."""
        return self.store.url

    def put_plan(self, plan: Plan) -> str:
        """Store a plan and return its digest; storing an equal one again changes nothing."""
        if plan.spec_digest != self.spec.digest:
            raise CommitConflict(
                f"the plan was made for spec {plan.spec_digest[:12]}, this cache has {self.spec.digest[:12]}."
            )
        with suppress(Exists):  # an equal plan made at another time: the digest leaves `created` out
            self.store.create(layout.plan_path(plan.digest), seal(plan))
        return plan.digest

    def committed(self) -> set[str]:
        """Return the ids of the shards that have a commit: one listing, nothing is read."""
        return self.ledger.committed()

    def new_attempt(self, shard_id: str, folder: Path | None = None) -> ShardAttempt:
        """Begin one execution of a shard; its files are built below `folder` (TMPDIR by default)."""
        return ShardAttempt(
            self.store, self.spec, shard_id, codec=self.codec, grace_seconds=self.grace_seconds, folder=folder,
            rows_per_group=self.rows_per_group,
        )  # fmt: skip

    def commit(
        self,
        shard_id: str,
        records: Iterable[Record],
        *,
        drops: Mapping[str, int] | None = None,
        provenance: Mapping[str, Any] | None = None,
        attempt: ShardAttempt | None = None,
        replaces: Iterable[str] = (),
    ) -> CommitResult:
        """Build, verify, upload and commit one shard; `won` is False where another attempt had been first.

        An exception anywhere, also one that `records` raises, leaves nothing that a reader can see.
        """
        with attempt or self.new_attempt(shard_id) as work:
            work.build(records)
            work.upload()
            return work.commit(drops=drops, provenance=provenance, replaces=replaces)

    def quarantine(
        self,
        shard_id: str,
        *,
        reason: str,
        message: str,
        documents: Sequence[str] = (),
        scope: Literal["shard", "document"] = "shard",
    ) -> None:
        """Record that a shard keeps failing, or (`scope` document) which documents of a committed one were left out.

        Advisory: a shard may be tried again, and a commit wins over it.
        """
        attempt = uuid.uuid4().hex
        entry = Quarantine(
            shard_id=shard_id, attempt=attempt, scope=scope, reason=reason, message=_as_unicode(message)[:4000],
            documents=[_as_unicode(name)[:4096] for name in documents], created=utc_now(),
        )  # fmt: skip
        self.store.create(layout.quarantine_path(shard_id, attempt), seal(entry))

    def quarantined(self) -> dict[str, Quarantine]:
        """Return the last quarantine of every shard that has one and no commit."""
        committed = self.committed()
        return {shard: entry for shard, entry in self.ledger.quarantines().items() if shard not in committed}

    def reuse_index(self) -> ReuseIndex:
        """Return content_key -> the committed record with those rows; see `teachercache.write.reuse`."""
        return ReuseIndex(self.store, self.spec)

    def publish(self, *, allow_partial: bool = False, allow_repeated_content: bool = False) -> Manifest:
        """Make everything that is committed visible as the next manifest; see `teachercache.write.publish.publish`."""
        return publish(
            self.store,
            self.spec,
            allow_partial=allow_partial,
            allow_repeated_content=allow_repeated_content,
            grace_seconds=self.grace_seconds,
        )


def _as_unicode(text: str) -> str:
    """Return a text that UTF-8 can hold: half a surrogate pair is spelt as its escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
