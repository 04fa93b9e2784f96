"""A teacher with everything around it that a shard needs: read, tokenise, score, encode, upload, commit.

    worker = ShardWorker(job, model_path, spec)
    receipt = worker.run(ShardTask(shard))

Ray, a test, and one GPU without Ray call the same. Calls of `run` may overlap (threads): while one shard is encoded and
uploaded, the next is in the engine.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config import JobConfig, StorageConfig
from pipeline.corpus.encode import Encoder
from pipeline.corpus.inputs import fingerprint
from pipeline.errors import InputChanged
from pipeline.running.engine_loop import EngineLoop
from pipeline.running.scratch import Scratch
from pipeline.running.shard_run import CommittedRows, Journal, ShardRun
from pipeline.running.tasks import Receipt, ShardTask, TooManyDrops, too_many
from pipeline.teachers.base import RowsWanted, Teacher
from pipeline.teachers.canary import check_teacher
from pipeline.teachers.start import start_teacher
from teachercache import CacheSpec, CacheWriter, PlanShard, Store, check_record, fingerprint_config
from teachercache.errors import InvalidRecord, UsageError

MAX_INFLIGHT_TOKENS = 65_536  # given to the engine at a time; bounds memory
QUARANTINE_NAMES = 100  # documents named in one quarantine entry


class ShardWorker:
    """A running teacher, a writer and an encoder; `run` does one shard. Raises UsageError where it cannot start.

    journal: called with the documents of retried shards as they enter and leave the engine.
    start: makes the teacher, for tests; by default the one that the job file names. max_inflight_tokens: given to the
    engine at a time.
    """

    def __init__(
        self,
        job: JobConfig,
        model_path: str | Path,
        spec: CacheSpec,
        *,
        plan_digest: str = "",
        journal: Journal | None = None,
        start: Callable[[], Teacher] | None = None,
        max_inflight_tokens: int = MAX_INFLIGHT_TOKENS,
    ) -> None:
        self.job, self.spec, self.plan_digest, self.journal = job, spec, plan_digest, journal
        self.encoder = Encoder(job, model_path, spec.tokenizer)
        if job.teacher.engine != "noop" and fingerprint_config(model_path) != spec.teacher.config_digest:
            raise UsageError(
                f"{model_path} on {socket.gethostname()} holds another config.json than the job was planned with"
            )
        self.writer = CacheWriter(Store.open(job.cache), spec)
        self.scratch = Scratch()
        self.committed = CommittedRows(self.writer.reuse_index(), spec.digest) if job.run.reuse == "on" else None
        self.loop = EngineLoop(start or (lambda: self._start(str(model_path))), max_inflight_tokens)
        self.name = f"{socket.gethostname()}:{os.getpid()}"

    def _start(self, model_path: str) -> Teacher:
        teacher = start_teacher(self.job.teacher, model_path, RowsWanted.of(self.spec))
        if self.job.teacher.canary:
            teacher.provenance["canary"] = check_teacher(teacher, self.job.teacher, model_path, self.encoder)
        else:
            teacher.accelerate()
        return teacher

    def run(self, task: ShardTask) -> Receipt:
        """Do a shard and commit it. Whatever is raised, nothing that a reader can see was written.

        Raises TooManyDrops where the task does not allow what would be left out.
        """
        began, shard = time.monotonic(), task.shard
        busy, scored_before = self.loop.busy_s, self.loop.tokens
        _check_input(shard, self.job.corpora[shard.corpus].storage)
        run = ShardRun(task, self.job, self.encoder, self.loop, committed=self.committed, journal=self.journal)
        if task.trial:
            documents = int(run.first_usable())
            return Receipt(shard.shard_id, documents=documents, drops=dict(run.drops), details=run.details)
        with self.writer.new_attempt(shard.shard_id, self.scratch.folder) as attempt:
            seen: set[tuple[str, str]] = set()
            for record in run.records():
                try:
                    if (record.split, record.source) not in seen:  # an empty file would be left behind otherwise
                        check_record(record, self.spec)
                        seen.add((record.split, record.source))
                    attempt.add(record)
                except InvalidRecord as error:
                    if error.reason == "duplicate":
                        run.drops["duplicate_id"] += 1
                    else:
                        run.mark_broken(error.reason, record.split, record.doc_id, str(error))
            for split, doc_id in run.lost:
                attempt.discard(split, doc_id)
            attempt.finish()
            kept = sum(entry.documents for entry in attempt.entries)
            if too_many(kept, run.drops, task.max_drop_share, least=1):  # the driver judges more shards than this one
                raise TooManyDrops(Receipt(shard.shard_id, documents=kept, drops=dict(run.drops), details=run.details))
            attempt.upload()
            # shards overlap: engine time is divided by tokens
            scored_tokens = sum(e.tokens for e in attempt.entries) - run.reused["tokens"]
            share = scored_tokens / max(1, self.loop.tokens - scored_before)
            provenance = self._provenance(time.monotonic() - began, min(1.0, share) * (self.loop.busy_s - busy))
            if run.reused:
                provenance["reused"] = dict(run.reused)
            result = attempt.commit(drops=run.drops, provenance=provenance)
        if result.won:
            self._name_broken(shard.shard_id, run.broken, run.details)
        counts = {name: getattr(result, name) for name in ("won", "documents", "tokens", "rows", "bytes")}
        seconds = time.monotonic() - began
        return Receipt(
            shard.shard_id, **counts, reused_rows=run.reused["rows"], drops=dict(run.drops), details=run.details,
            seconds=seconds,
        )  # fmt: skip

    def _name_broken(self, shard_id: str, broken: dict[str, list[str]], details: dict[str, str]) -> None:
        """Name the documents whose rows were no good, next to the commit that counts them; advisory."""
        for reason, names in broken.items():
            self.writer.quarantine(
                shard_id,
                scope="document",
                reason=reason,
                message=f"{len(names)} documents of a committed shard were left out: {reason}"
                + (f" (first: {details[reason]})" if details.get(reason) else ""),
                documents=names[:QUARANTINE_NAMES],
            )

    def _provenance(self, seconds: float, teacher_seconds: float) -> dict[str, Any]:
        return {
            **self.loop.teacher.provenance,
            "plan": self.plan_digest,
            "host": platform.node(),
            "python": platform.python_version(),
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "shard_seconds": round(seconds, 3),
            "teacher_seconds": round(teacher_seconds, 3),
            "max_model_len": self.job.teacher.max_model_len,
        }

    def state(self) -> dict[str, Any]:
        """Return what a live view shows of this worker: seconds of its engine, tokens, whether it is dead."""
        loop = self.loop
        return {"name": self.name, "busy_s": loop.busy_s, "tokens": loop.tokens, "dead": loop.dead}

    def close(self) -> None:
        """Free the teacher and remove the scratch folder."""
        self.loop.stop()
        self.scratch.close()


def _check_input(shard: PlanShard, storage: StorageConfig | None) -> None:
    try:
        now = fingerprint(shard.input, storage)
    except FileNotFoundError as error:
        raise InputChanged(f"{shard.input}: it was planned and is gone; run the job again without it") from error
    if now.digest != shard.input_digest:
        raise InputChanged(
            f"{shard.input}: expected the content that was planned ({shard.input_digest[:20]}…), found another "
            f"({now.digest[:20]}…); run the job again to plan the new content"
        )
