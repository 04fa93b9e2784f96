"""One shard: from its range of an input file to records with rows, counting what is left out on the way.

run = ShardRun(task, job, encoder, loop)
for record in run.records(): ...
run.drops, run.broken, run.reused
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from pipeline.config import JobConfig
from pipeline.corpus.documents import Document, Dropped, extract
from pipeline.corpus.encode import Encoder, Tokens, Window
from pipeline.corpus.readers import read_documents
from pipeline.errors import InputDamaged
from pipeline.running.engine_loop import EngineLoop
from pipeline.running.tasks import ENOUGH_TO_JUDGE, ShardTask, failures
from pipeline.teachers.base import Prompt, Scored
from teachercache import Record
from teachercache.format.record import content_key
from teachercache.write.reuse import ReuseIndex

ENCODE_BATCH = 64  # documents tokenised at a time
TRIAL_BATCH = 4
GENERATE_BATCH = 256  # prompts continued at a time: the engine decodes them together

Journal = Callable[[str, str, Sequence[int]], None]  # (shard id, "in" | "out", ordinals)


class CommittedRows:
    """Rows that other plans have committed, found by a window's content. Thread-safe: shards overlap."""

    def __init__(self, index: ReuseIndex, spec_digest: str) -> None:
        self._index, self._spec_digest = index, spec_digest
        self._lock = threading.Lock()  # the index keeps decoded row groups

    def _key(self, window: Window) -> bytes:
        return content_key(self._spec_digest, np.asarray(window.input_ids, dtype=np.int32), window.row_pos)

    def __contains__(self, window: Window) -> bool:
        """Return whether the window's rows were committed when the index was made."""
        return self._key(window) in self._index

    def copy(self, window: Window) -> Record | None:
        """Return the window's record with rows out of the cache; None where their file was collected since."""
        with self._lock:
            found = self._index.get(self._key(window))
        if found is None:
            return None
        return replace(found, **_of_window(window))


class ShardRun:
    """One attempt at one shard: its records, and counts of what was dropped, broken and re-used.

    drops: documents left out, by reason; details: what is known of the first of each. broken: ids of documents whose rows
    were no good, by reason; lost: their (split, doc_id), of which no window may stay. reused: records, rows and tokens
    copied from commits of other plans.
    """

    def __init__(
        self,
        task: ShardTask,
        job: JobConfig,
        encoder: Encoder,
        loop: EngineLoop,
        *,
        committed: CommittedRows | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.task, self.job, self.encoder, self.loop = task, job, encoder, loop
        self.drops: Counter[str] = Counter()
        self.details: dict[str, str] = {}
        self.broken: dict[str, list[str]] = {}
        self.lost: set[tuple[str, str]] = set()
        self.reused: Counter[str] = Counter()
        self._committed = committed
        self._journal = journal if task.attempt > 0 else None  # only a retried shard is watched
        self._known: deque[Window] = deque()  # filled by the reader's thread, emptied by records()
        self._gone: list[Window] = []  # known, but collected since

    def records(self) -> Iterator[Record]:
        """Yield the shard's records: all documents but the suspects, then the suspects one at a time."""
        for alone in (False, True) if self.task.suspects else (False,):
            for record in self._scored(self._unknown(self.windows(alone)), alone):
                yield record
                yield from self._copies()
            yield from self._copies()
            gone, self._gone = self._gone, []
            yield from self._scored(iter(gone), alone)

    def first_usable(self) -> bool:
        """Score documents one at a time, only their first window, until one is good; return whether there is one.

        Gives up after ENOUGH_TO_JUDGE documents that cannot be used, unless the job allows any share of drops.
        """
        before = -1
        for window in self.windows():
            if window.ordinal == before:
                continue
            before = window.ordinal
            for _, scored in self.loop.score(iter([window])):
                if scored.rows is not None:
                    return True
                self._mark_unscored(window, scored)
            if self._hopeless():
                return False
        return False

    def mark_broken(self, reason: str, split: str, doc_id: str, detail: str = "") -> None:
        """Count a document that is left out because of its rows, once, and keep its name."""
        if (split, doc_id) in self.lost:
            return
        self.lost.add((split, doc_id))
        self.drops[reason] += 1
        self.details.setdefault(reason, detail)
        self.broken.setdefault(reason, []).append(doc_id)

    def _mark_unscored(self, window: Window, scored: Scored) -> None:
        where = f"window {window.window}, which begins at token {window.start}"
        said = f"{where}: {scored.error}" if scored.error else where
        self.mark_broken(scored.error.reason if scored.error else "no_rows", window.split, window.doc_id, said)

    # -- windows → records ---------------------------------------------------------------------------------------

    def _scored(self, windows: Iterator[Window], alone: bool) -> Iterator[Record]:
        for window, scored in self.loop.score(self._note_entries(windows), alone=alone):
            if self._journal is not None:
                self._journal(self.task.shard.shard_id, "out", [window.ordinal])
            if scored.rows is None:
                self._mark_unscored(window, scored)
            elif (window.split, window.doc_id) not in self.lost:
                yield record_of(window, scored)

    def _note_entries(self, windows: Iterator[Window]) -> Iterator[Window]:
        for window in windows:
            if self._journal is not None:
                self._journal(self.task.shard.shard_id, "in", [window.ordinal])
            yield window

    def _unknown(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Yield the windows that the teacher must score; those with committed rows wait in `_known` (tokens only)."""
        for window in windows:
            if self._committed is not None and window in self._committed:
                self._known.append(window)
            else:
                yield window

    def _copies(self) -> Iterator[Record]:
        while self._known and self._committed is not None:
            window = self._known.popleft()
            record = self._committed.copy(window)
            if record is None:
                self._gone.append(window)
                continue
            if (window.split, window.doc_id) in self.lost:
                continue
            self.reused.update(records=1, rows=len(record.row_pos), tokens=len(record.input_ids))
            yield record

    # -- documents → windows -------------------------------------------------------------------------------------

    def windows(self, alone: bool = False) -> Iterator[Window]:
        """Yield windows of the suspects (`alone`), or of all other documents."""
        generates = self.job.recipe.mode == "generate"
        exclude, suspects = set(self.task.exclude), set(self.task.suspects)
        # the file is read again for the suspects; what it drops is counted the first time
        documents = self._documents(Counter() if alone else self.drops)
        size = TRIAL_BATCH if self.task.trial else GENERATE_BATCH if generates else ENCODE_BATCH
        while batch := list(islice(documents, size)):
            if not alone:
                for document in (d for d in batch if d.ordinal in exclude):
                    self.mark_broken("kills_engine", document.split, document.doc_id)
            chosen = [d for d in batch if d.ordinal not in exclude and (d.ordinal in suspects) == alone]
            encoded = list(zip(chosen, self.encoder.tokens(chosen), strict=True))
            for document, tokens in self._continue(encoded) if generates else encoded:
                try:
                    if isinstance(tokens, Dropped):
                        raise tokens
                    yield from self.encoder.windows(document, tokens)
                except Dropped as drop:
                    self.drops[drop.reason] += 1
                    self.details.setdefault(drop.reason, drop.detail)
            if self._hopeless():
                return

    def _hopeless(self) -> bool:
        """Return whether a trial has seen enough."""
        strict = self.task.trial and self.job.run.max_drop_share < 1
        return strict and failures(self.drops) >= ENOUGH_TO_JUDGE

    def _documents(self, drops: Counter[str]) -> Iterator[Document]:
        shard, filters = self.task.shard, self.job.recipe.filters
        corpus = self.job.corpora[shard.corpus]
        duplicates, repeated = set(shard.duplicates), set(shard.repeated_ids)
        seen: set[bytes] = set()
        ids: set[tuple[str, str]] = set()
        raws = read_documents(shard.input, corpus, shard.start, shard.stop, shard.unit)
        # Parquet ranges end at the limit already
        if corpus.limit_documents is not None and shard.unit in ("file", "items"):
            raws = islice(raws, corpus.limit_documents)
        try:
            for raw in raws:
                try:
                    document = extract(raw, corpus, filters, shard.input_digest, shard.input)
                    if raw.ordinal in duplicates or (filters.dedup != "none" and document.content_hash in seen):
                        raise Dropped("duplicate")
                    if corpus.fields.id is not None:
                        if raw.ordinal in repeated or (document.split, document.doc_id) in ids:
                            raise Dropped("duplicate_id", document.doc_id)
                        ids.add((document.split, document.doc_id))
                except Dropped as drop:
                    drops[drop.reason] += 1
                    self.details.setdefault(drop.reason, drop.detail)
                    if self._hopeless():
                        return
                    if drop.reason == "doc_id" and drops is self.drops:
                        self.broken.setdefault(drop.reason, []).append(f"{shard.input}@{raw.ordinal}")
                    continue
                if filters.dedup != "none":
                    seen.add(document.content_hash)
                yield document
        except InputDamaged:
            if self.job.run.on_truncated == "quarantine":
                raise
            drops["input_truncated"] += 1

    def _continue(self, encoded: list[tuple[Document, Tokens | Dropped]]) -> list[tuple[Document, Tokens | Dropped]]:
        """Let the teacher continue the prompts: both parts are scored, the mask is on the continuation."""
        config, limit = self.job.recipe.generate, self.job.window_size
        prompts: dict[int, Prompt] = {}
        for place, (document, tokens) in enumerate(encoded):
            if isinstance(tokens, Dropped):
                continue
            first = [self.encoder.bos_id] if tokens.bos else []
            ids = np.concatenate([np.asarray(first, dtype=np.int32), tokens.ids])
            if len(ids) + 1 > limit:
                encoded[place] = (document, Dropped("prompt_too_long"))
            else:
                seed = generation_seed(document.content_hash, config.seed)
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


def generation_seed(content_hash: bytes, seed: int) -> int:
    """Return one seed per document, the same in every attempt."""
    key = seed.to_bytes(8, "big", signed=True)
    return int.from_bytes(hashlib.blake2b(content_hash, digest_size=4, key=key).digest(), "big") >> 1


def record_of(window: Window, scored: Scored) -> Record:
    """Return the record of a window and its rows."""
    rows = scored.rows
    assert rows is not None
    return Record(
        input_ids=np.asarray(window.input_ids, dtype=np.int32),
        row_pos=window.row_pos,
        topk_ids=rows.topk_ids,
        topk_logprobs=rows.topk_logprobs,
        tail_logprob=rows.tail_logprob,
        target_logprob=rows.target_logprob,
        entropy=rows.entropy,
        exact=rows.exact,
        **_of_window(window),
    )


def _of_window(window: Window) -> dict[str, Any]:
    """Return what a record has of its window alone, whoever made its rows."""
    return {
        name: getattr(window, name) for name in ("doc_id", "window", "start", "split", "source", "loss_mask", "meta")
    }
