"""Does one shard: read, tokenise, score, encode, upload, commit.  Ray, a test, or one GPU without Ray call the same.

    worker = ShardWorker(job, model_path, spec)
    receipt = worker.run(ShardTask(shard))

Several calls of `run` may overlap (threads): while one shard is encoded and uploaded, the next is in the engine.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import JobConfig
from pipeline.corpus.documents import Document, Dropped, extract
from pipeline.corpus.encode import Encoder, Tokens, Window
from pipeline.corpus.inputs import fingerprint
from pipeline.corpus.readers import InputDamaged, read_documents
from pipeline.running.engine_loop import EngineLoop
from pipeline.running.scratch import Scratch
from pipeline.teachers import start_teacher
from pipeline.teachers.base import Prompt, Scored, Teacher
from teachercache import (
    CacheSpec,
    CacheWriter,
    PlanShard,
    Record,
    Store,
    check_record,
    fingerprint_config,
)
from teachercache.errors import InvalidRecord, TeacherCacheError, UsageError
from teachercache.format.record import content_key

ENCODE_BATCH = 64  # documents tokenised at a time
GENERATE_BATCH = 256  # prompts continued at a time: the engine decodes them side by side
QUARANTINE_NAMES = 100  # documents named in one quarantine entry


class InputChanged(TeacherCacheError):
    """The input file is not the one that was planned."""

    code = "TC-E302"


@dataclass(frozen=True, slots=True)
class ShardTask:
    """A shard and what earlier attempts taught: documents to leave out, documents to score alone (by ordinal)."""

    shard: PlanShard
    attempt: int = 0
    exclude: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()


@dataclass(slots=True)
class Receipt:
    """What became of a shard; small, because it is all that travels back."""

    shard_id: str
    won: bool = False
    documents: int = 0
    records: int = 0
    tokens: int = 0
    rows: int = 0
    bytes: int = 0
    reused_rows: int = 0  # of `rows`: copied from commits of other plans
    drops: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    worker: str = ""


Journal = Callable[[str, str, Sequence[int]], None]  # (shard id, "in" | "out", ordinals)


def _no_journal(shard_id: str, event: str, ordinals: Sequence[int]) -> None:
    return None


class ShardWorker:
    """A teacher with everything around it that a shard needs.  Raises UsageError where it cannot start."""

    def __init__(
        self,
        job: JobConfig,
        model_path: str | Path,
        spec: CacheSpec,
        *,
        plan_digest: str = "",
        journal: Journal = _no_journal,
        start: Callable[[], Teacher] | None = None,
    ) -> None:
        self.job, self.spec, self.plan_digest, self.journal = job, spec, plan_digest, journal
        self.encoder = Encoder(job, model_path, spec.tokenizer)
        if job.teacher.engine != "noop" and fingerprint_config(model_path) != spec.teacher.config_digest:
            raise UsageError(
                f"{model_path} on {socket.gethostname()} holds another config.json than the job was planned with"
            )
        self.writer = CacheWriter(Store.open(job.cache), spec)
        self.scratch = Scratch()
        self._reuse = self.writer.reuse_index() if job.run.reuse == "on" else None
        self._reuse_lock = threading.Lock()
        self._spec_digest = spec.digest
        self.loop = EngineLoop(start or (lambda: self._start(str(model_path))), job.teacher.max_inflight_tokens)
        self.name = f"{socket.gethostname()}:{os.getpid()}"

    def _start(self, model_path: str) -> Teacher:
        from pipeline.teachers.canary import check_teacher

        teacher = start_teacher(self.job.teacher, model_path, self.spec.tokenizer.vocab_size)
        if self.job.teacher.canary:
            teacher.provenance["canary"] = check_teacher(teacher, self.job.teacher, model_path, self.encoder)
        else:
            teacher.accelerate()
        return teacher

    # -- one shard -----------------------------------------------------------------------------------------------

    def run(self, task: ShardTask) -> Receipt:
        """Does a shard and commits it.  Whatever is raised, nothing that a reader can see was written."""
        began, shard = time.monotonic(), task.shard
        busy, scored_before = self.loop.busy_s, self.loop.tokens
        drops: Counter[str] = Counter()
        reused: Counter[str] = Counter()
        broken: dict[str, list[str]] = {}
        provenance: dict[str, Any] = {}
        self._check_input(shard)
        with self.writer.new_attempt(shard.shard_id, self.scratch.folder) as attempt:
            seen: set[tuple[str, str]] = set()
            for record in self._records(task, drops, broken, reused):
                try:
                    if (record.split, record.source) not in seen:  # an empty file would be left behind otherwise
                        check_record(record, vocab_size=self.spec.tokenizer.vocab_size, top_k=self.spec.top_k)
                        seen.add((record.split, record.source))
                    attempt.add(record)
                except InvalidRecord as error:
                    reason = "duplicate_id" if error.reason == "duplicate" else error.reason
                    drops[reason] += 1
                    broken.setdefault(reason, []).append(record.doc_id)
            attempt.finish()
            attempt.upload()
            # shards overlap: engine time is shared out by tokens
            scored_tokens = sum(e.tokens for e in attempt.entries) - reused["tokens"]
            share = scored_tokens / max(1, self.loop.tokens - scored_before)
            teacher_seconds = min(1.0, share) * (self.loop.busy_s - busy)
            provenance.update(self._provenance(time.monotonic() - began, teacher_seconds))
            if reused:
                provenance["reused"] = dict(reused)
            result = attempt.commit(drops=drops, provenance=provenance)
        if result.won:
            self._name_broken(shard.shard_id, broken)
        return Receipt(
            shard_id=shard.shard_id,
            won=result.won,
            documents=result.documents,
            records=result.records,
            tokens=result.tokens,
            rows=result.rows,
            bytes=result.bytes,
            reused_rows=reused["rows"],
            drops=dict(drops),
            seconds=time.monotonic() - began,
            worker=self.name,
        )

    def _check_input(self, shard: PlanShard) -> None:
        try:
            now = fingerprint(shard.input)
        except FileNotFoundError as error:
            raise InputChanged(f"{shard.input}: it was planned and is gone; run the job again without it") from error
        if now.digest != shard.input_digest:
            raise InputChanged(
                f"{shard.input}: expected the content that was planned ({shard.input_digest[:20]}…), found another "
                f"({now.digest[:20]}…); run the job again to plan the new content"
            )

    def _records(
        self, task: ShardTask, drops: Counter[str], broken: dict[str, list[str]], reused: Counter[str]
    ) -> Iterator[Record]:
        suspects = set(task.suspects)
        for alone in (False, True) if suspects else (False,):
            windows = self._windows(task, drops, broken, alone, suspects)
            known: deque[Window] = deque()  # filled by the reader's thread, emptied here
            gone: list[Window] = []
            for record in self._scored(task, self._without_known(windows, known), alone, drops, broken):
                yield record
                yield from self._copies(known, gone, reused)
            yield from self._copies(known, gone, reused)
            yield from self._scored(task, iter(gone), alone, drops, broken)

    def _scored(
        self, task: ShardTask, windows: Iterator[Window], alone: bool, drops: Counter[str], broken: dict[str, list[str]]
    ) -> Iterator[Record]:
        """Records of what the teacher scores; windows without usable rows are counted."""
        watched = task.attempt > 0
        if watched:
            windows = self._journalled(task.shard.shard_id, windows)
        for window, scored in self.loop.score(windows, alone=alone):
            if watched:
                self.journal(task.shard.shard_id, "out", [window.ordinal])
            if scored.rows is None:
                reason = scored.error.reason if scored.error else "no_rows"
                drops[reason] += 1
                broken.setdefault(reason, []).append(window.doc_id)
                continue
            yield record_of(window, scored)

    def _key(self, window: Window) -> bytes:
        return content_key(self._spec_digest, np.asarray(window.input_ids, dtype=np.int32), window.row_pos)

    def _without_known(self, windows: Iterator[Window], known: deque[Window]) -> Iterator[Window]:
        """The windows that the teacher must score; those with committed rows go to `known` (tokens only: small)."""
        for window in windows:
            if self._reuse is not None and self._key(window) in self._reuse:
                known.append(window)
            else:
                yield window

    def _copies(self, known: deque[Window], gone: list[Window], reused: Counter[str]) -> Iterator[Record]:
        """Records of `known` windows out of the cache; a file collected since then puts its windows into `gone`."""
        while known:
            window = known.popleft()
            assert self._reuse is not None
            with self._reuse_lock:  # shards overlap, and the index keeps decoded row groups
                found = self._reuse.get(self._key(window))
            if found is None:
                gone.append(window)
                continue
            reused.update(records=1, rows=len(found.row_pos), tokens=len(found.input_ids))
            yield replace(
                found,
                doc_id=window.doc_id,
                window=window.window,
                start=window.start,
                split=window.split,
                source=window.source,
                loss_mask=window.loss_mask,
                meta=window.meta,
            )

    def _journalled(self, shard_id: str, windows: Iterator[Window]) -> Iterator[Window]:
        for window in windows:
            self.journal(shard_id, "in", [window.ordinal])
            yield window

    def _windows(
        self, task: ShardTask, drops: Counter[str], broken: dict[str, list[str]], alone: bool, suspects: set[int]
    ) -> Iterator[Window]:
        """Windows of the shard's documents: the suspects (`alone`), or all others."""
        excluded = set(task.exclude)
        # the file is read again for the suspects; what it drops is counted the first time
        documents = self._documents(task.shard, Counter() if alone else drops)
        size = GENERATE_BATCH if self.job.recipe.mode == "generate" else ENCODE_BATCH
        while batch := list(islice(documents, size)):
            chosen = [d for d in batch if d.ordinal not in excluded and (d.ordinal in suspects) == alone]
            if not alone:
                for document in (d for d in batch if d.ordinal in excluded):
                    drops["kills_engine"] += 1
                    broken.setdefault("kills_engine", []).append(document.doc_id)
            encoded = list(zip(chosen, self.encoder.tokens(chosen), strict=True))
            if self.job.recipe.mode == "generate":
                encoded = self._continue(encoded)
            for document, tokens in encoded:
                if isinstance(tokens, Dropped):
                    drops[tokens.reason] += 1
                    continue
                try:
                    yield from self.encoder.windows(document, tokens)
                except Dropped as drop:
                    drops[drop.reason] += 1

    def _continue(self, encoded: list[tuple[Document, Tokens | Dropped]]) -> list[tuple[Document, Tokens | Dropped]]:
        """Generate mode: the teacher writes on; prompt and continuation are scored, the mask is on the continuation."""
        config, limit = self.job.recipe.generate, self.job.window_size
        prompts: dict[int, Prompt] = {}
        for place, (_, tokens) in enumerate(encoded):
            if isinstance(tokens, Dropped):
                continue
            first = [self.encoder.bos_id] if tokens.bos else []
            ids = np.concatenate([np.asarray(first, dtype=np.int32), tokens.ids])
            if len(ids) + 1 > limit:
                encoded[place] = (encoded[place][0], Dropped("prompt_too_long"))
            else:
                seed = generation_seed(encoded[place][0].content_hash, config.seed)
                prompts[place] = Prompt(ids, seed, min(config.max_tokens, limit - len(ids)))
        if not prompts:
            return encoded
        chosen, stops = list(prompts.values()), self.encoder.stop_ids
        made = self.loop.call(lambda teacher: teacher.generate(chosen, config, stops))
        for (place, prompt), answer in zip(prompts.items(), made, strict=True):
            document, tokens = encoded[place]
            assert not isinstance(tokens, Dropped)
            written = answer.ids
            if not len(written):
                encoded[place] = (document, Dropped("empty_continuation"))
                continue
            learn = np.concatenate([np.zeros(len(tokens.ids), dtype=bool), np.ones(len(written), dtype=bool)])
            document.meta = {**document.meta, "finish_reason": answer.finish_reason, "generate_seed": prompt.seed}
            encoded[place] = (document, Tokens(np.concatenate([tokens.ids, written]), learn, tokens.bos))
        return encoded

    def _documents(self, shard: PlanShard, drops: Counter[str]) -> Iterator[Document]:
        corpus = self.job.corpora[int(shard.detail.get("corpus", 0))]
        filters = self.job.recipe.filters
        duplicates = set(shard.detail.get("duplicates", ()))
        seen: set[bytes] = set()
        raws = read_documents(shard.input, corpus, shard.start, shard.stop, shard.unit, filters.invalid_utf8)
        if corpus.limit_documents is not None and shard.unit == "file":  # Parquet ranges end at the limit already
            raws = islice(raws, corpus.limit_documents)
        try:
            for raw in raws:
                try:
                    document = extract(raw, corpus, filters, shard.input_digest)
                    if raw.ordinal in duplicates or (filters.dedup != "none" and document.content_hash in seen):
                        raise Dropped("duplicate")
                except Dropped as drop:
                    drops[drop.reason] += 1
                    continue
                if filters.dedup != "none":
                    seen.add(document.content_hash)
                yield document
        except InputDamaged:
            if self.job.run.on_truncated == "quarantine":
                raise
            drops["input_truncated"] += 1

    def _name_broken(self, shard_id: str, broken: dict[str, list[str]]) -> None:
        """Documents whose rows were no good are named beside the commit that counts them; advisory."""
        for reason, names in broken.items():
            self.writer.quarantine(
                shard_id,
                reason=f"document:{reason}",
                message=f"{len(names)} documents of a committed shard were left out: {reason}",
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
        """What a live view shows of this worker."""
        loop = self.loop
        return {
            "name": self.name,
            "busy_s": loop.busy_s,
            "starved_s": loop.starved_s,
            "tokens": loop.tokens,
            "dead": loop.dead,
        }

    def close(self) -> None:
        self.loop.stop()
        self.scratch.close()


def generation_seed(content_hash: bytes, seed: int) -> int:
    """One seed per document, the same in every attempt."""
    return (
        int.from_bytes(
            hashlib.blake2b(content_hash, digest_size=4, key=seed.to_bytes(8, "big", signed=True)).digest(), "big"
        )
        >> 1
    )


def record_of(window: Window, scored: Scored) -> Record:
    """A record from a window and its rows."""
    rows = scored.rows
    assert rows is not None
    return Record(
        doc_id=window.doc_id,
        window=window.window,
        start=window.start,
        split=window.split,
        source=window.source,
        input_ids=np.asarray(window.input_ids, dtype=np.int32),
        row_pos=window.row_pos,
        topk_ids=rows.topk_ids,
        topk_logprobs=rows.topk_logprobs,
        tail_logprob=rows.tail_logprob,
        target_logprob=rows.target_logprob,
        loss_mask=window.loss_mask,
        meta=window.meta,
    )
