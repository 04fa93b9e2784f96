"""`fit`: open the cache, check that it fits, resume or start, step until done, checkpoint, evaluate."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from teachercache import Cache
from teachercache.console import say, stop_on_signals
from teachercache.errors import TeacherCacheError, UsageError
from teachercache.read.cache import made_up_message
from trainer import limits, resume, setup
from trainer.checkpoint import CheckpointFolder, discard, resolve_model_folder, wait_for_store
from trainer.config import CacheConfig, TrainerConfig
from trainer.data.dataset import DataCounts, PackedCache
from trainer.data.lengths import describe_lengths
from trainer.data.mean import MeanCache
from trainer.data.mixed import MixedCaches
from trainer.data.prefetch import Interrupted, Prefetcher
from trainer.data.sequence import PackedSequence, no_rows
from trainer.evaluate import evaluate_caches
from trainer.lease import Lease
from trainer.metrics import Meter, MetricsLog, Screen
from trainer.model import parallel, student
from trainer.optim import accumulate_in_float32, build_optimizer, lr_factor
from trainer.register import register
from trainer.step import Step


class Stopped(TeacherCacheError):
    """A signal ended the run; it saved itself and the same command resumes it."""

    code = "TC-T102"
    alike = True
    remedy = "Run the same command to resume."


def fit(config: TrainerConfig) -> dict[str, Any]:
    """Train; the same call again continues from the newest checkpoint of `output`.

    Returns a summary: steps, rows, tokens, mean loss, where checkpoint and model are. Of several ranks, rank 0 does.
    Raises UsageError before any weight is loaded when the cache, the student or the output cannot be used, and Stopped
    after SIGTERM or SIGINT.
    """
    if config.output is None:
        raise UsageError("fit needs output=FOLDER (or s3://…) for checkpoints and logs")
    compute = setup.choose_compute(config.train)
    with parallel.joined(compute.device) as device:
        beginning = _Beginning(config, CheckpointFolder(config.output))
        summary, manifests, source, saved, models = parallel.first(beginning.check)
        if summary is not None:
            return summary if parallel.rank() == 0 else {}
        caches = beginning.caches or setup.open_caches(config, manifests)
        setup.configure_torch(config.train)
        folder, lease = beginning.folder, beginning.lease
        parallel.first(partial(beginning.take, saved))
        try:
            with limits.explained(config, folder.disk, 0):
                run = _Run(config, caches, folder, source, saved, replace(compute, device=device), lease, models)
            discard(source)  # everything of it is loaded; of a large student it is tens of GB
            with limits.explained(config, folder.disk, run.checkpoint_bytes):
                return run.train()
        finally:
            lease.release()


class _Beginning:
    """What is done before a weight is loaded: of several ranks, by rank 0."""

    def __init__(self, config: TrainerConfig, folder: CheckpointFolder) -> None:
        self.config, self.folder = config, folder
        self.lease = Lease(folder.store, take_over=config.take_over)
        self.caches: list[Cache] = []

    def check(self) -> tuple[dict[str, Any] | None, list[int], Path, resume.Saved | None, dict[str, dict[str, str]]]:
        """Return the summary of a finished run; the manifests, the model's folder and what else a run begins with."""
        config, folder = self.config, self.folder
        wait_for_store(self.lease.peek, f"opening {config.output}")
        saved = resume.newest(folder)
        pinned = [then["manifest"] for then in saved.state["caches"]] if saved else None
        self.caches = caches = setup.open_caches(config, pinned)
        manifests = [cache.manifest.number for cache in caches]
        source = saved.folder if saved else resolve_model_folder(config.student)
        student.check_fits(source, caches[0])
        if saved:
            resume.check_resumable(saved.state, config, caches)
        models = resume.begun_from(config, source, saved)
        if saved and folder.index().finished and resume.ends_alike(saved.state, config.train):
            say(f"{config.output} is finished: step {saved.state['step']:,}; for another run choose another output")
            summary: dict[str, Any] = json.loads(folder.get_text("summary.json"))
            if config.train.register:
                register(config, caches, folder, summary)
            return summary, manifests, source, saved, models
        setup.check_names(config, caches)
        setup.check_ranks(config)
        return None, manifests, source, saved, models

    def take(self, saved: resume.Saved | None) -> None:
        """Take the lease, unless another run did meanwhile, and sweep up what a killed run left."""
        self.lease.acquire()
        try:
            latest = self.folder.index().latest
            if (latest.step if latest else None) != (saved.state["step"] if saved else None):
                raise UsageError(f"another run saved to {self.folder.url} just now: run the same command again")
            self.folder.sweep()
        except BaseException:
            self.lease.release()
            raise


class _Run:
    """One process's run of `fit`: what it holds, and the loop."""

    def __init__(
        self,
        config: TrainerConfig,
        caches: list[Cache],
        folder: CheckpointFolder,
        source: Path,
        saved: resume.Saved | None,
        compute: setup.Compute,
        lease: Lease,
        models: dict[str, dict[str, str]],
    ) -> None:
        self.config, self.caches, self.folder, self.compute, self.lease = config, caches, folder, compute, lease
        torch.manual_seed(config.seed)
        self.model = setup.load_for_training(config, source, compute, resumed=saved is not None)
        optimizer = build_optimizer(self.model, config.optim)
        if setup.sums_in_float32(config, compute.dtype, parallel.count()):
            accumulate_in_float32(self.model)
        teacher = setup.load_teacher(config, compute, caches[0]) if config.loss.method == "online" else None
        self.vocab_size = caches[0].spec.tokenizer.vocab_size
        self.kernels = setup.kernels_line(config, self.model, optimizer, compute)
        self.checkpoint_bytes = limits.checkpoint_bytes(
            self.model, config.optim, adapters=config.lora is not None, ranks=parallel.count()
        )
        parallel.first(partial(limits.check_room, folder.disk, self.checkpoint_bytes))
        self.step = Step(
            self.model, optimizer, config, attention_kind=compute.attention, vocab_size=self.vocab_size, teacher=teacher
        )
        self.progress = progress = resume.Progress.start(config.train, saved.state if saved else None)
        self.dataset = self._data()
        progress.total_tokens = self.dataset.total_tokens
        progress.data = self.dataset.state()
        self.checkpoints = resume.Checkpointer(folder, source, self.model, optimizer, progress, caches, config, models)
        self.changed = resume.changed_settings(saved.state, config) if saved else ""
        if saved:
            self.checkpoints.restore(saved.folder)

    def _data(self) -> MixedCaches:
        """Return the run's sequences from its progress on; one cache is a mixture of one."""
        config, progress, entries = self.config, self.progress, self.config.caches
        weights, caches = [entry.weight for entry in entries], self.caches
        if config.data.combine is not None:
            splits = [entry.split or config.split for entry in entries]
            mean = partial(MeanCache, caches, splits=splits, weights=weights)
            caches, weights = [wait_for_store(mean, "reading the caches' document ids")], [1.0]

        def length(c: int, counts: DataCounts) -> int:
            tokens, sequences = self.dataset.whole_run(c, counts)
            return config.data.length_at(progress.share(tokens, sequences / config.data.sequences_per_step))

        parts = [
            PackedCache(
                cache,
                split=entry.split or config.split,
                seq_len=partial(length, c),
                seed=config.seed,
                epochs=progress.epochs,
                pad=self.compute.on_gpu,
                long_documents=config.data.long_documents,
                weights=config.data.weights,
                entropy_above=config.data.rows.entropy_above,
                entropy_below=config.data.rows.entropy_below,
            )
            for c, (entry, cache) in enumerate(zip(config.parts, caches, strict=True))
        ]
        ranks = {"rank": parallel.rank(), "world_size": parallel.count()}
        return MixedCaches(parts, weights=weights, seed=config.seed, **ranks, state=progress.data or None)

    def train(self) -> dict[str, Any]:
        """Step until done; return the summary, of several ranks on rank 0 alone."""
        config, progress, stop, first = self.config, self.progress, threading.Event(), parallel.rank() == 0
        opening = self._opening() if first else []
        log: Any = MetricsLog(self.folder, config, resumed_step=progress.step) if first else _Nothing()
        with (
            closing(log),
            closing(cast("Any", Screen() if first else _Nothing())) as screen,
            closing(Prefetcher(self.dataset, pin=self.compute.on_gpu, stop=stop)) as prefetcher,
            stop_on_signals(stop),
        ):
            for line in opening:
                screen.say(line)
            meter = Meter(self.model, self.compute.device)
            while not progress.done and not self._ended(stop):
                waited = time.perf_counter()
                sequences, begins, ends = self._next_batch(prefetcher)
                if not sequences:
                    break
                started = time.perf_counter()
                lr = config.optim.lr * lr_factor(config.optim, progress.step, progress.share(begins))
                result = self.step.run(sequences, lr=lr, loss_limit=progress.loss_limit(config.train.spike_factor))
                seconds = time.perf_counter() - started
                progress.count(loss=result.loss, rows=result.rows, tokens=result.tokens)
                if progress.step % config.log.every_steps == 0:
                    share = progress.share(ends)
                    values = {"loss": result.loss, "lr": lr, "grad_norm": result.grad_norm, "rows": result.rows}
                    values |= {"progress": share, "epoch": max(part["epoch"] for part in progress.data["caches"])}
                    for entry, (loss, rows) in zip(config.parts, result.by_cache, strict=True):
                        values |= {f"loss{entry.suffix}": loss, f"rows{entry.suffix}": rows} if rows else {}
                    if config.data.rows.chooses:
                        values["rows_left_out"] = MixedCaches.counts_of(progress.data).rows_left_out
                    values |= meter.measure(sequences, seconds, data_wait_s=started - waited)
                    log.write("train", progress.step, values)
                    screen.update(progress.step, share, meter.line(values), remaining_s=meter.remaining(share))
                if _due(config.eval.every_steps, progress.step):
                    self._evaluate(log, screen, stop)
                if _due(config.checkpoint.every_steps, progress.step):
                    self._save(log)
            if (
                config.eval.every_steps
                and not self._ended(stop)
                and parallel.first(self.checkpoints.heldout_kl)[0] is None
            ):
                self._evaluate(log, screen, stop)
            self._save(log)
            if _agreed(stop):
                raise Stopped(
                    f"stopped by a signal: saved step {progress.step} in {self.folder.url}; the same command continues"
                )
            summary = self.checkpoints.finish()
            if config.train.register:
                parallel.first(partial(register, config, self.caches, self.folder, summary))
            return summary

    def _ended(self, stop: threading.Event) -> bool:
        """Return whether a signal came or another run took the output over, on any rank."""
        return any(parallel.gathered(stop.is_set() or self.lease.lost))

    def _save(self, log: MetricsLog) -> None:
        """Write log and checkpoint, unless another run has taken the output over: then LeaseLost."""
        parallel.first(partial(wait_for_store, self.lease.check, f"asking {self.folder.url}"))
        log.sync()
        self.checkpoints.save()

    def _next_batch(self, prefetcher: Prefetcher) -> tuple[list[PackedSequence], int, int]:
        """Return this rank's micro-batches of a step, and the tokens done after the first and the last of all ranks'.

        Fewer at the end of the data, none after it or once a signal came. Every rank gets as many, some without rows.
        """
        sequences: list[PackedSequence] = []
        before, interrupted = self.progress.data, False
        while len(sequences) < self.config.data.sequences_per_step // parallel.count():
            try:
                pair = next(prefetcher, None)
            except Interrupted:
                interrupted = True
                break
            if pair is None:
                break
            sequences.append(pair[0])
            self.progress.data = pair[1]
        of_ranks = parallel.gathered((interrupted, [sequence.tokens_done for sequence in sequences]))
        done = [count for _, counts in of_ranks for count in counts]
        if not done or any(stopped for stopped, _ in of_ranks):
            self.progress.data = before
            return [], 0, 0
        idle = no_rows(self.caches[0].spec.rows, self.config.data.seq_len if self.compute.on_gpu else 2)
        sequences += [idle] * (max(len(counts) for _, counts in of_ranks) - len(sequences))
        return sequences, min(done), max(done)

    def _evaluate(self, log: MetricsLog, screen: Screen, stop: threading.Event) -> None:
        """Measure on the held-out split, unless a signal comes meanwhile: half a minute is left to save then."""
        config, step = self.config, self.progress.step
        result = evaluate_caches(
            self.model, self.caches, config, config.eval.split, self.compute, only=partial(_until, stop)
        )
        if _agreed(stop):
            return
        log.write("eval", step, result)
        for entry in config.caches:
            found = {
                key.removesuffix(entry.suffix): value for key, value in result.items() if key.endswith(entry.suffix)
            }
            error = f" ± {found['heldout_kl_standard_error']:.4f}" if "heldout_kl_standard_error" in found else ""
            screen.say(
                f"step {step:,}{f', {entry.name}' if entry.name else ''}: held-out KL {found['heldout_kl']:.4f}{error} nats, "
                f"top-1 agreement {found['top1_agreement']:.1%}, perplexity {found['perplexity']:,.2f} "
                f"({found['rows']:,} rows)"
            )
        each = {entry.name: result[f"heldout_kl{entry.suffix}"] for entry in config.caches if entry.name}
        self.checkpoints.evaluated = (step, result["heldout_kl"], each)

    def _opening(self) -> list[str]:
        """Return what to say before the first step."""
        step, parameters = self.progress.step, sum(parameter.numel() for parameter in self.model.parameters())
        lines = [
            f"{f'resuming after step {step:,}' if step else 'starting'}: {parameters / 1e6:,.1f} M parameters on "
            f"{self.compute.device}, "
            + ", ".join(f"manifest {cache.manifest.number} of {cache.url}" for cache in self.caches),
            self.kernels,
            "the loss is the mean over teacher rows in nats; it is 0 where the student agrees with its teacher",
        ]
        for entry, cache in zip(self.config.caches, self.caches, strict=True):
            lines.append(wait_for_store(partial(self._describe, entry, cache), "reading the cache"))
        lines += self._mixture()
        if self.changed:
            lines.append(self.changed)
        lines += [f"note: {line}" for line in self.config.without_effect]
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and positions < self.config.data.seq_len:
            lines.append(
                f"note: the student knows {positions:,} positions (max_position_embeddings); documents of up to "
                f"data.seq_len = {self.config.data.seq_len:,} tokens go beyond them"
            )
        for cache in self.caches:
            if not cache.manifest.complete:
                lines.append(
                    f"note: manifest {cache.manifest.number} of {cache.url} is of an incomplete cache; the job that writes it "
                    "has not finished"
                )
            if cache.made_up:
                lines.append(f"note: {made_up_message(cache)}")
        return lines

    def _describe(self, entry: CacheConfig, cache: Cache) -> str:
        data = self.config.data
        line = describe_lengths(cache, entry.split or self.config.split, data.seq_len, data.long_documents)
        return line.replace("data:", f"data of {entry.name}:", 1) if entry.name else line

    def _mixture(self) -> list[str]:
        """Return a line about the shares of several caches and how much of each is read, or about their mean."""
        entries, passes, cache = self.config.parts, self.dataset.passes(), self.dataset.parts[0].cache
        if isinstance(cache, MeanCache):
            return [cache.describe()]
        if len(entries) == 1:
            return []
        total = sum(entry.weight for entry in entries)
        shares = (
            f"{entry.name} {entry.weight / total:.1%} ({each:.0%} read)"
            for entry, each in zip(entries, passes, strict=True)
        )
        first = entries[passes.index(1.0)].name
        return [f"mixture: {', '.join(shares)} of the sequences; an epoch ends when about all of {first} is read"]


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _until(stop: threading.Event, sequences: Iterable[PackedSequence]) -> Iterator[PackedSequence]:
    """Yield the sequences, up to the first after which `stop` is set."""
    for sequence in sequences:
        yield sequence
        if _agreed(stop):
            return


def _agreed(stop: threading.Event) -> bool:
    """Return whether a signal came to any rank; then it holds for this one, too."""
    if agreed := any(parallel.gathered(stop.is_set())):
        stop.set()
    return agreed


class _Nothing:
    """What ranks behind the first have for a log and a screen: whatever is asked of it, it does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments, **_options: None
