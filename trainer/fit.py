"""`fit`: open the cache, check that it fits, resume or start, step until done, checkpoint, evaluate."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from teachercache import Cache
from teachercache.console import say, stop_on_signals
from teachercache.errors import TeacherCacheError, UsageError
from teachercache.read.cache import made_up_message
from trainer import limits, resume, setup
from trainer.checkpoint import CheckpointFolder, discard, resolve_model_folder, wait_for_store
from trainer.config import TrainerConfig
from trainer.data.dataset import PackedCache
from trainer.data.lengths import describe_lengths
from trainer.data.prefetch import Interrupted, Prefetcher
from trainer.data.sequence import PackedSequence
from trainer.evaluate import evaluate, heldout_sequences
from trainer.lease import Lease
from trainer.metrics import Meter, MetricsLog, Screen
from trainer.model import student
from trainer.optim import accumulate_in_float32, build_optimizer, lr_factor
from trainer.register import register
from trainer.step import Step


class Stopped(TeacherCacheError):
    """A signal ended the run; it saved itself and the same command resumes it."""

    code = "TC-T102"
    remedy = "Run the same command to resume."


def fit(config: TrainerConfig) -> dict[str, Any]:
    """Train; the same call again continues from the newest checkpoint of `output`.

    Returns a summary: steps, rows, tokens, mean loss, where checkpoint and model are.
    Raises UsageError before any weight is loaded when the cache, the student or the output cannot be used, and Stopped
    after SIGTERM or SIGINT.
    """
    if config.output is None:
        raise UsageError("fit needs output=FOLDER (or s3://…) for checkpoints and logs")
    compute = setup.choose_compute(config.train)
    folder = CheckpointFolder(config.output)
    lease = Lease(folder.store, take_over=config.take_over)
    wait_for_store(lease.peek, f"opening {config.output}")
    saved = resume.newest(folder)
    cache = setup.open_cache(config.cache, saved.state["manifest_number"] if saved else config.manifest)
    source = saved.folder if saved else resolve_model_folder(config.student)
    student.check_fits(source, cache)
    if saved:
        resume.check_resumable(saved.state, config, cache)
    models = resume.begun_from(config, source, saved)
    if saved and folder.index().finished and resume.ends_alike(saved.state, config.train):
        say(f"{config.output} is finished: step {saved.state['step']:,}; for another run choose another output")
        summary: dict[str, Any] = json.loads(folder.get_text("summary.json"))
        if config.train.register:
            register(config, cache, folder, summary)
        return summary
    setup.check_names(config, cache)
    setup.configure_torch(config.train)
    lease.acquire()
    try:
        latest = folder.index().latest
        if (latest.step if latest else None) != (saved.state["step"] if saved else None):
            raise UsageError(f"another run saved to {config.output} just now: run the same command again")
        folder.sweep()
        with limits.explained(config, folder.disk, 0):
            run = _Run(config, cache, folder, source, saved, compute, lease, models)
        discard(source)  # everything of it is loaded; of a large student it is tens of GB
        with limits.explained(config, folder.disk, run.checkpoint_bytes):
            return run.train()
    finally:
        lease.release()


class _Run:
    """One process's run of `fit`: what it holds, and the loop."""

    def __init__(
        self,
        config: TrainerConfig,
        cache: Cache,
        folder: CheckpointFolder,
        source: Path,
        saved: resume.Saved | None,
        compute: setup.Compute,
        lease: Lease,
        models: dict[str, dict[str, str]],
    ) -> None:
        self.config, self.cache, self.folder, self.compute, self.lease = config, cache, folder, compute, lease
        torch.manual_seed(config.seed)
        self.model = setup.load_for_training(config, source, compute, resumed=saved is not None)
        optimizer = build_optimizer(self.model, config.optim)
        if setup.sums_in_float32(config, compute.dtype):
            accumulate_in_float32(self.model)
        teacher = setup.load_teacher(config, compute) if config.loss.method == "online" else None
        self.vocab_size = cache.spec.tokenizer.vocab_size
        self.kernels = setup.kernels_line(config, self.model, optimizer, compute)
        self.checkpoint_bytes = limits.checkpoint_bytes(self.model, config.optim, adapters=config.lora is not None)
        limits.check_room(folder.disk, self.checkpoint_bytes)
        self.step = Step(
            self.model, optimizer, config, attention_kind=compute.attention, vocab_size=self.vocab_size, teacher=teacher
        )
        total_tokens = sum(entry.tokens for entry in cache.files(split=config.split))
        self.progress = progress = resume.Progress.start(config.train, total_tokens, saved.state if saved else None)
        self.dataset = PackedCache(
            cache,
            split=config.split,
            seq_len=lambda tokens_done: config.data.length_at(progress.share(tokens_done)),
            seed=config.seed,
            epochs=progress.epochs,
            pad=compute.on_gpu,
            long_documents=config.data.long_documents,
            weights=config.data.weights,
            entropy_above=config.data.rows.entropy_above,
            entropy_below=config.data.rows.entropy_below,
            state=progress.data or None,
        )
        progress.data = self.dataset.state()
        self.checkpoints = resume.Checkpointer(folder, source, self.model, optimizer, progress, cache, config, models)
        self.changed = resume.changed_settings(saved.state, config) if saved else ""
        if saved:
            self.checkpoints.restore(saved.folder)

    def train(self) -> dict[str, Any]:
        """Step until done; return the summary."""
        config, progress, stop, opening = self.config, self.progress, threading.Event(), self._opening()
        with (
            closing(MetricsLog(self.folder, config, resumed_step=progress.step)) as log,
            closing(Screen()) as screen,
            closing(Prefetcher(self.dataset, pin=self.compute.on_gpu, stop=stop)) as prefetcher,
            stop_on_signals(stop),
        ):
            for line in opening:
                screen.say(line)
            meter = Meter(self.model, self.compute.device)
            while not progress.done and not stop.is_set() and not self.lease.lost:
                waited = time.perf_counter()
                sequences = self._next_batch(prefetcher)
                if not sequences:
                    break
                started = time.perf_counter()
                lr = config.optim.lr * lr_factor(config.optim, progress.step, progress.share(sequences[0].tokens_done))
                result = self.step.run(sequences, lr=lr, loss_limit=progress.loss_limit(config.train.spike_factor))
                seconds = time.perf_counter() - started
                progress.count(loss=result.loss, rows=result.rows, tokens=result.tokens)
                if progress.step % config.log.every_steps == 0:
                    share = progress.share(sequences[-1].tokens_done)
                    values = {"loss": result.loss, "lr": lr, "grad_norm": result.grad_norm, "rows": result.rows}
                    values |= {"progress": share, "epoch": progress.data["epoch"]}
                    if config.data.rows.chooses:
                        values["rows_left_out"] = PackedCache.counts_of(progress.data).rows_left_out
                    values |= meter.measure(sequences, seconds, data_wait_s=started - waited)
                    log.write("train", progress.step, values)
                    screen.update(progress.step, share, meter.line(values), remaining_s=meter.remaining(share))
                if _due(config.eval.every_steps, progress.step):
                    self._evaluate(log, screen, stop)
                if _due(config.checkpoint.every_steps, progress.step):
                    self._save(log)
            if (
                config.eval.every_steps
                and not stop.is_set()
                and not self.lease.lost
                and self.checkpoints.heldout_kl() is None
            ):
                self._evaluate(log, screen, stop)
            self._save(log)
            if stop.is_set():
                raise Stopped(
                    f"stopped by a signal: saved step {progress.step} in {self.folder.url}; the same command continues"
                )
            summary = self.checkpoints.finish()
            if config.train.register:
                register(config, self.cache, self.folder, summary)
            return summary

    def _save(self, log: MetricsLog) -> None:
        """Write log and checkpoint, unless another run has taken the output over: then LeaseLost."""
        wait_for_store(self.lease.check, f"asking {self.folder.url}")
        log.sync()
        self.checkpoints.save()

    def _next_batch(self, prefetcher: Prefetcher) -> list[PackedSequence]:
        """Return the micro-batches of a step: fewer at the end of the data, none after it or once a signal came."""
        sequences: list[PackedSequence] = []
        before = self.progress.data
        while len(sequences) < self.config.data.sequences_per_step:
            try:
                pair = next(prefetcher, None)
            except Interrupted:
                self.progress.data = before
                return []
            if pair is None:
                break
            sequences.append(pair[0])
            self.progress.data = pair[1]
        return sequences

    def _evaluate(self, log: MetricsLog, screen: Screen, stop: threading.Event) -> None:
        """Measure on the held-out split, unless a signal comes meanwhile: half a minute is left to save then."""
        config, step = self.config, self.progress.step
        sequences = heldout_sequences(
            self.cache, config.eval.split, config.data.seq_len, config.eval.max_rows, pad=self.compute.on_gpu
        )
        result = evaluate(
            self.model, _until(stop, sequences), vocab_size=self.vocab_size, attention_kind=self.compute.attention
        )
        if stop.is_set():
            return
        log.write("eval", step, result)
        error = f" ± {result['heldout_kl_standard_error']:.4f}" if "heldout_kl_standard_error" in result else ""
        screen.say(
            f"step {step:,}: held-out KL {result['heldout_kl']:.4f}{error} nats, top-1 agreement "
            f"{result['top1_agreement']:.1%}, perplexity {result['perplexity']:,.2f} ({result['rows']:,} rows)"
        )
        self.checkpoints.evaluated = (step, result["heldout_kl"])

    def _opening(self) -> list[str]:
        """Return what to say before the first step."""
        step, parameters = self.progress.step, sum(parameter.numel() for parameter in self.model.parameters())
        lines = [
            f"{f'resuming after step {step:,}' if step else 'starting'}: {parameters / 1e6:,.1f} M parameters on "
            f"{self.compute.device}, manifest {self.cache.manifest.number} of {self.cache.url}",
            self.kernels,
            "the loss is the mean over teacher rows in nats; it is 0 where the student agrees with its teacher",
        ]
        data = (self.cache, self.config.split, self.config.data.seq_len, self.config.data.long_documents)
        lines.append(wait_for_store(lambda: describe_lengths(*data), "reading the cache"))
        if self.changed:
            lines.append(self.changed)
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and positions < self.config.data.seq_len:
            lines.append(
                f"note: the student knows {positions:,} positions (max_position_embeddings); documents of up to "
                f"data.seq_len = {self.config.data.seq_len:,} tokens go beyond them"
            )
        if not self.cache.manifest.complete:
            lines.append("note: this manifest is of an incomplete cache; the job that writes it has not finished")
        if self.cache.made_up:
            lines.append(f"note: {made_up_message(self.cache)}")
        return lines


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _until(stop: threading.Event, sequences: Iterable[PackedSequence]) -> Iterator[PackedSequence]:
    """Yield the sequences, up to the first after which `stop` is set."""
    for sequence in sequences:
        yield sequence
        if stop.is_set():
            return
