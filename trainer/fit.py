"""`fit`: open the cache, check that it fits, resume or start, step until done, checkpoint, evaluate."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import teachercache
from teachercache.errors import TeacherCacheError, UsageError
from trainer import checkpoint
from trainer.config import TrainerConfig
from trainer.data.dataset import (
    Interrupted,
    PackedCache,
    PackedSequence,
    Prefetcher,
)
from trainer.evaluate import evaluate, heldout_sequences
from trainer.flops import matmul_parameters, measured_matmul_rate, step_flops
from trainer.metrics import MetricsLog, Screen
from trainer.model import (
    activation,
    attention,
    lora,
    student,
)
from trainer.model.liger import apply_liger
from trainer.model.types import Model
from trainer.optim import accumulate_in_float32, build_optimizer, lr_factor
from trainer.patience import patiently
from trainer.step import Step, StepResult

RESUME_MUST_MATCH = ("split", "seed", "loss", "lora")
RESUME_DATA_MAY_DIFFER = {"prefetch"}


class Stopped(TeacherCacheError):
    """The run was told to stop, saved itself and can be resumed by the same command."""

    code = "TC-T102"
    remedy = "Run the same command to resume."


def fit(config: TrainerConfig) -> dict[str, Any]:
    """Train; running it again continues where the newest checkpoint of `output` stands.

    Returns a summary: step, rows, tokens, last loss, where the checkpoint is.
    Raises UsageError before any weight is loaded when the cache, the student or the output cannot be used.
    """
    if config.output is None:
        raise UsageError("fit needs output=FOLDER (or s3://…) for checkpoints and logs")
    device, dtype = choose_device(config)
    attention_kind = choose_attention(config, device)
    run = checkpoint.CheckpointFolder(config.output, patience_s=config.train.store_patience_s)
    index = run.index()
    saved_folder = run.fetch(index.latest) if index.latest else None
    saved = checkpoint.read_state(saved_folder) if saved_folder else None
    cache = open_cache(config, manifest=saved["manifest_number"] if saved else config.manifest)
    source = saved_folder or checkpoint.resolve_model_folder(config.student)
    student.check_fits(source, cache)
    if saved:
        _check_resumable(saved, config, cache)
    if index.finished and saved and _same_end(saved, config):
        print(f"{config.output} is finished: step {saved['step']}; nothing to do", file=sys.stderr)
        return json.loads(run.get_text("summary.json"))
    _check_names(config, cache)
    _pin_threads(config)
    run.sweep()
    started = _Fit(config, cache, run, source, saved, device, dtype, attention_kind)
    checkpoint.discard(source)  # everything of it is loaded; of a large student it is tens of GB
    return started.run()


class _Fit:
    """One process's run of `fit`: what it holds, and the loop."""

    def __init__(
        self,
        config: TrainerConfig,
        cache: Any,
        run: checkpoint.CheckpointFolder,
        source: Path,
        saved: dict[str, Any] | None,
        device: torch.device,
        dtype: torch.dtype,
        attention_kind: str,
    ) -> None:
        self.config, self.cache, self.folder = config, cache, run
        self.tokenizer_files = student.tokenizer_files(source)
        self.device, self.attention_kind = device, attention_kind
        self.step_number = saved["step"] if saved else 0
        self.rows: int = saved["rows"] if saved else 0
        self.tokens: int = saved["tokens"] if saved else 0
        self.mean_loss: float | None = saved["mean_loss"] if saved else None
        self.evaluated: tuple[int, float] | None = None
        """The last evaluation: step and held-out KL."""
        torch.manual_seed(config.seed)
        self.model = load_for_training(config, source, saved is not None, device, dtype)
        self.optimizer = build_optimizer(self.model, config.optim)
        if _sums_in_float32(config, dtype):
            accumulate_in_float32(self.model)
        teacher = None
        if config.loss.method == "online":
            teacher = load_teacher(config, device, dtype)
        self.vocab_size = cache.spec.tokenizer.vocab_size
        self.step = Step(
            self.model, self.optimizer, config, attention_kind=attention_kind, vocab_size=self.vocab_size,
            teacher=teacher,
        )  # fmt: skip
        if saved:
            self._load_optimizer(source)
        self.total_tokens = sum(entry.tokens for entry in cache.files(split=config.split))
        epochs = config.train.epochs or (None if config.train.max_steps else 1)
        self.epochs = epochs
        self.dataset = PackedCache(
            cache,
            split=config.split,
            seq_len=self._seq_len,
            seed=config.seed,
            epochs=epochs,
            pad=config.data.pad == "seq_len" or (config.data.pad == "auto" and device.type == "cuda"),
            long_documents=config.data.long_documents,
            block_sequences=config.data.block_sequences,
            blocks_per_flush=config.data.blocks_per_flush,
            weights=config.data.weights,
            state=saved["data"] if saved else None,
        )
        self.data_state = self.dataset.state()
        self.finished_data = False

    def run(self) -> dict[str, Any]:
        config = self.config
        log = MetricsLog(self.folder, config, resumed_step=self.step_number)
        screen = Screen()
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        start = f"resuming after step {self.step_number}" if self.step_number else "starting"
        screen.say(
            f"{start}: {parameters / 1e6:.1f} M parameters on {self.device}, manifest {self.cache.manifest.number} of "
            f"{self.cache.url}, {self.total_tokens:,} tokens in split {config.split}, attention {self.attention_kind}"
        )
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and positions < config.data.seq_len:
            screen.say(
                f"note: the student knows {positions:,} positions (max_position_embeddings); documents of up to "
                f"data.seq_len = {config.data.seq_len:,} tokens go beyond them"
            )
        if not self.cache.manifest.complete:
            screen.say("note: this manifest is of an incomplete cache; the job that writes it has not finished")
        prefetcher = Prefetcher(
            self.dataset, depth=config.data.prefetch, pin=self.device.type == "cuda",
            patience_s=config.train.store_patience_s,
        )  # fmt: skip
        try:
            with _stop_on_signal() as stop:
                prefetcher.interrupted = stop.is_set
                self._loop(prefetcher, log, screen, stop)
        finally:
            prefetcher.close()
            screen.close()
            log.close()
        return self._summary()

    def _loop(self, prefetcher: Prefetcher, log: MetricsLog, screen: Screen, stop: threading.Event) -> None:
        config = self.config
        meter = _Meter(self.model, self.device)
        while not self._done():
            waited = time.perf_counter()
            sequences = self._next_batch(prefetcher)
            if not sequences:
                if stop.is_set():  # while the store was away
                    self._save_and_stop(log)
                break
            data_wait_s = time.perf_counter() - waited
            lr = config.optim.lr * lr_factor(config.optim, self.step_number, self._progress(sequences[0].tokens_done))
            limit = None
            if config.train.spike_factor is not None and self.mean_loss is not None and self.step_number >= 20:
                limit = config.train.spike_factor * self.mean_loss
            started = time.perf_counter()
            result = self.step.run(sequences, lr=lr, loss_limit=limit)
            seconds = time.perf_counter() - started
            self._count(result)
            if self.step_number % config.log.every_steps == 0:
                progress = self._progress(sequences[-1].tokens_done)
                values = {"loss": result.loss, "lr": lr, "grad_norm": result.grad_norm, "rows": result.rows}
                values |= {"progress": progress, "epoch": self.data_state["epoch"]}
                values |= meter.measure(sequences, seconds, data_wait_s)
                log.write("train", self.step_number, values)
                screen.update(
                    self.step_number,
                    progress,
                    meter.line(result, values),
                    remaining_s=meter.remaining(progress),
                )
            if _due(config.eval.every_steps, self.step_number):
                self._evaluate(log, screen, stop)
            if stop.is_set():
                self._save_and_stop(log)
            if _due(config.checkpoint.every_steps, self.step_number):
                self._save(log)
        if config.eval.every_steps and self._heldout_kl_here() is None:
            self._evaluate(log, screen, stop)
        self._save(log)
        log.sync()
        # Before the run counts as finished: the same command then prints it.
        self.folder.put_text("summary.json", json.dumps(self._summary(), indent=1))
        self.folder.finish(self._write_final)

    def _next_batch(self, prefetcher: Prefetcher) -> list[PackedSequence]:
        """The micro-batches of one step; fewer at the end of the data, none after it or when told to stop meanwhile."""
        sequences: list[PackedSequence] = []
        before = self.data_state
        while len(sequences) < self.config.data.sequences_per_step:
            try:
                pair = next(prefetcher, None)
            except Interrupted:
                self.data_state = before
                return []
            if pair is None:
                break
            sequences.append(pair[0])
            self.data_state = pair[1]
        return sequences

    def _seq_len(self, tokens_done: int) -> int:
        """The length to pack to now (data.length_curriculum)."""
        length = self.config.data.seq_len
        if self.config.data.length_curriculum:
            progress = self._progress(tokens_done)
            for share, stage in self.config.data.length_curriculum:
                if progress >= share:
                    length = stage
        return length

    def _progress(self, tokens_done: int) -> float:
        """Share of the run: by tokens where it ends with the data, by steps where it ends with max_steps first."""
        shares = []
        if self.config.train.max_steps:
            shares.append(self.step_number / self.config.train.max_steps)
        if self.epochs:
            shares.append(tokens_done / max(1, self.epochs * self.total_tokens))
        return min(1.0, max(shares))

    def _done(self) -> bool:
        return self.config.train.max_steps is not None and self.step_number >= self.config.train.max_steps

    def _count(self, result: StepResult) -> None:
        self.step_number += 1
        self.rows += result.rows
        self.tokens += result.tokens
        self.mean_loss = result.loss if self.mean_loss is None else 0.95 * self.mean_loss + 0.05 * result.loss

    def _heldout_kl_here(self) -> float | None:
        """What this step's evaluation found, in this process or in the one that saved its checkpoint."""
        if self.evaluated and self.evaluated[0] == self.step_number:
            return self.evaluated[1]
        saved = [entry.heldout_kl for entry in self.folder.index().checkpoints if entry.step == self.step_number]
        return saved[0] if saved else None

    def _evaluate(self, log: MetricsLog, screen: Screen, stop: threading.Event) -> None:
        """Measure on the held-out split, unless told to stop meanwhile: a run has half a minute to save itself then."""
        config = self.config
        sequences = heldout_sequences(
            self.cache, config.eval.split, config.data.seq_len, config.eval.max_rows, pad=self.device.type == "cuda"
        )
        result = evaluate(
            self.model,
            _until(stop, sequences),
            vocab_size=self.vocab_size,
            attention_kind=self.attention_kind,
            autocast_to=config.train.autocast,
            chunk_size=config.eval.chunk_size,
        )
        if stop.is_set():
            return
        log.write("eval", self.step_number, result)
        screen.say(
            f"step {self.step_number}: held-out KL {result['heldout_kl']:.4f} nats, top-1 agreement "
            f"{result['top1_agreement']:.1%}, perplexity {result['perplexity']:.2f} ({result['rows']} rows)"
        )
        self.evaluated = (self.step_number, result["heldout_kl"])

    def _save(self, log: MetricsLog) -> None:
        log.sync()
        self.folder.save(
            self.step_number,
            self._write_checkpoint,
            heldout_kl=self._heldout_kl_here(),
            keep_last=self.config.checkpoint.keep_last,
            keep_best=self.config.checkpoint.keep_best,
        )

    def _save_and_stop(self, log: MetricsLog) -> NoReturn:
        self._save(log)
        raise Stopped(f"told to stop: saved step {self.step_number} in {self.folder.url}; the same command continues")

    def _write_model(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        if self.config.lora:  # the adapter alone was saved: what it adapts is told by the configuration
            self.model.get_base_model().config.save_pretrained(folder)
        student.write_files(self.tokenizer_files, folder)

    def _write_final(self, folder: Path) -> None:
        (lora.merged(self.model) if self.config.lora else self.model).save_pretrained(folder)
        student.write_files(self.tokenizer_files, folder)

    def _write_checkpoint(self, folder: Path) -> None:
        self._write_model(folder)
        state = {
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if self.device.type == "cuda" else None,
        }
        torch.save(state, folder / checkpoint.OPTIMIZER)
        checkpoint.write_state(
            folder,
            {
                "step": self.step_number,
                "rows": self.rows,
                "tokens": self.tokens,
                "mean_loss": self.mean_loss,
                "manifest_number": self.cache.manifest.number,
                "spec_digest": self.cache.spec.digest,
                "data": self.data_state,
                "config": self.config.model_dump(mode="json"),
            },
        )

    def _load_optimizer(self, folder: Path) -> None:
        state = torch.load(folder / checkpoint.OPTIMIZER, map_location="cpu", weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"])

    def _summary(self) -> dict[str, Any]:
        index = self.folder.index()
        latest, best = index.latest, index.best
        measured: dict[str, Any] = {"heldout_kl": latest.heldout_kl if latest else None} if best else {}
        if best and self.config.checkpoint.keep_best:
            measured["best"] = f"step {best.step}: {best.heldout_kl:.4f} nats, {self.folder.url}/{best.folder}"
        return {
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "steps": self.step_number,
            "rows": self.rows,
            "tokens": self.tokens,
            "loss_mean": self.mean_loss,
            **measured,
            "checkpoint": f"{self.folder.url}/{latest.folder}" if latest else None,
            "model": f"{self.folder.url}/final",
            "data": vars(PackedCache.counts_of(self.data_state)),
        }


class _Meter:
    """Speed of the steps: tokens/s, TFLOP/s of model work, share of this GPU's matrix rate, memory, time left."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self._config, self._device = model.config.get_text_config(), device
        self._parameters = matmul_parameters(model)
        self._peak = measured_matmul_rate(device) if device.type == "cuda" else None
        self._started = time.monotonic()
        self._first_progress: float | None = None

    def measure(self, sequences: list[PackedSequence], seconds: float, data_wait_s: float) -> dict[str, float]:
        lengths = [length for s in sequences for length in s.document_lengths[: len(s.documents)]]
        flops = step_flops(self._config, self._parameters, lengths)
        values = {
            "padding": sum(s.num_padding for s in sequences) / sum(s.input_ids.numel() for s in sequences),
            "seconds": seconds,
            "data_wait_s": data_wait_s,
            "tokens": sum(lengths),
            "tokens_per_s": sum(lengths) / seconds,
            "tflops": flops / seconds / 1e12,
        }
        if self._peak:
            values["matmul_share"] = flops / seconds / self._peak
            values["memory_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        return values

    def line(self, result: StepResult, values: dict[str, float]) -> str:
        text = f"loss {result.loss:.4f}, {values['tokens_per_s']:,.0f} tokens/s, {values['tflops']:.2f} TFLOP/s"
        if "matmul_share" in values:
            text += f" ({values['matmul_share']:.0%} of the matrix rate), {values['memory_gib']:.1f} GiB"
        return text

    def remaining(self, progress: float) -> float | None:
        if self._first_progress is None:
            self._first_progress, self._started = progress, time.monotonic()
            return None
        gained = progress - self._first_progress
        return (time.monotonic() - self._started) * (1 - progress) / gained if gained > 0 else None


def open_cache(config: TrainerConfig, *, manifest: int | None) -> Any:
    """The cache at one manifest, waiting for a store that is away; wrong paths and credentials are refused at once."""
    return patiently(
        lambda: teachercache.open(config.cache, manifest=manifest),
        patience_s=config.train.store_patience_s,
        what=f"opening {config.cache}",
    )


def choose_device(config: TrainerConfig) -> tuple[torch.device, torch.dtype]:
    name = config.train.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("train.device=cuda, but torch finds no CUDA device; use train.device=cpu or auto")
    dtype = config.train.dtype
    if dtype == "auto":
        dtype = "bfloat16" if name == "cuda" else "float32"
    return torch.device(name), getattr(torch, dtype)


def choose_attention(config: TrainerConfig, device: torch.device) -> str:
    try:
        return attention.choose_kind(device, config.train.attention)
    except ValueError as error:
        raise UsageError(str(error)) from error


def load_for_training(
    config: TrainerConfig, folder: Path, resumed: bool, device: torch.device, dtype: torch.dtype
) -> Model:
    """The student as the configuration trains it: adapters, fused layers, checkpointing, tiling, compilation."""
    base = checkpoint.resolve_model_folder(config.student) if config.lora and resumed else folder
    model = student.load_student(base, dtype=dtype, device=device, trust_remote_code=config.trust_remote_code)
    # torch.compile fuses the same layers itself, and torch 2.11 cannot trace liger's.
    wanted = "off" if config.train.compile and config.train.liger == "auto" else config.train.liger
    apply_liger(model, wanted, device)
    if config.lora:
        model = lora.add(model, config.lora, saved=folder if resumed else None)
    _name, layers = student.layer_stack(model)
    if config.train.mlp_tile:
        activation.tile_mlps(layers, config.train.mlp_tile)
    policy: str = config.train.checkpointing
    if policy == "auto":
        policy = _auto_policy(model, config, device, dtype)
    activation.apply_policy(model, layers, policy)
    if config.train.compile:
        # Attention follows each batch's documents: traced into a layer, it would be compiled again for every batch.
        ALL_ATTENTION_FUNCTIONS.register(attention.NAME, torch.compiler.disable(attention.document_attention))
        for layer in layers:
            layer.compile(dynamic=True)
    return model.train()


def _auto_policy(model: Model, config: TrainerConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Recompute as little as fits: free memory less gradients and optimiser state, which do not exist yet."""
    if device.type != "cuda":
        return "none"
    free, _total = torch.cuda.mem_get_info(device)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    moments = {"float32": 8, "bfloat16": 4, "8bit": 2, "offload": 0}[config.optim.state]
    low = {"auto": 2, "split": 2, "float32": 4, "stochastic": 0}[config.optim.master] if dtype == torch.bfloat16 else 0
    reserved = trained * (moments + low + dtype.itemsize + (4 if _sums_in_float32(config, dtype) else 0))
    return activation.choose_policy(
        model.config.get_text_config(), config.data.seq_len, free - reserved, element_size=dtype.itemsize
    )


def _sums_in_float32(config: TrainerConfig, dtype: torch.dtype) -> bool:
    """Whether micro-batches add up in float32 buffers beside the gradients."""
    wanted = config.optim.grad_dtype
    return wanted == "float32" or (wanted == "auto" and dtype == torch.bfloat16 and config.data.sequences_per_step > 1)


def load_teacher(config: TrainerConfig, device: torch.device, dtype: torch.dtype) -> Model:
    """The live teacher, frozen, in evaluation mode."""
    assert config.teacher is not None
    folder = checkpoint.resolve_model_folder(config.teacher)
    model = student.load_student(folder, dtype=dtype, device=device, trust_remote_code=config.trust_remote_code)
    return model.eval().requires_grad_(False)


def _check_names(config: TrainerConfig, cache: Any) -> None:
    """Refuse splits and sources that the cache lacks, before the first of some hundred steps."""
    sources = {entry.source for entry in cache.files(split=config.split)}
    if config.eval.every_steps:
        cache.files(split=config.eval.split)
    unknown = sorted(config.data.weights.keys() - sources)
    if unknown:
        raise UsageError(
            f"data.weights names {', '.join(unknown)}, but split {config.split} of {cache.url} has the sources "
            f"{', '.join(sorted(sources))}"
        )
    left_out = sorted(sources - config.data.weights.keys()) if config.data.weights else []
    if left_out:
        print(f"note: data.weights leaves out the sources {', '.join(left_out)}", file=sys.stderr)


def _check_resumable(saved: dict[str, Any], config: TrainerConfig, cache: Any) -> None:
    """Refuse to continue a run as something else, naming what differs."""
    if saved["spec_digest"] != cache.spec.digest:
        raise UsageError(
            f"{config.output} was trained from another cache (identity {saved['spec_digest'][:12]}, this one has "
            f"{cache.spec.digest[:12]}): choose another output"
        )
    if config.manifest is not None and config.manifest != saved["manifest_number"]:
        raise UsageError(
            f"{config.output} is pinned to manifest {saved['manifest_number']}, the configuration asks for "
            f"{config.manifest}: choose another output, or leave manifest out"
        )
    then, now = saved["config"], config.model_dump(mode="json")
    for section in RESUME_MUST_MATCH:
        if then[section] != now[section]:
            raise UsageError(
                f"cannot resume {config.output}: it was started with {section} = {then[section]}, found {now[section]}"
            )
    held = [{**section["optim"], "dtype": section["train"]["dtype"]} for section in (then, now)]
    for options in held:  # the same numbers, kept in different places
        options["state"] = "float32" if options["state"] == "offload" else options["state"]
    for key in ("state", "master", "dtype"):
        if held[0][key] != held[1][key]:
            name = "train.dtype" if key == "dtype" else f"optim.{key}"
            raise UsageError(
                f"cannot resume {config.output}: its optimiser states were kept with {name} = {held[0][key]}, found "
                f"{held[1][key]}"
            )
    for key in now["data"]:
        if key not in RESUME_DATA_MAY_DIFFER and then["data"][key] != now["data"][key]:
            raise UsageError(
                f"cannot resume {config.output}: it was started with data.{key} = {then['data'][key]}, "
                f"found {now['data'][key]}"
            )


def _same_end(saved: dict[str, Any], config: TrainerConfig) -> bool:
    then = saved["config"]["train"]
    return (then["epochs"], then["max_steps"]) == (config.train.epochs, config.train.max_steps)


def _pin_threads(config: TrainerConfig) -> None:
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    if config.train.deterministic:
        # torch refuses cuBLAS otherwise, whose split products share workspaces; read when CUDA starts, which is later.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _until(stop: threading.Event, sequences: Iterable[PackedSequence]) -> Iterator[PackedSequence]:
    """The sequences, up to the first after which `stop` is set."""
    for sequence in sequences:
        yield sequence
        if stop.is_set():
            return


@contextmanager
def _stop_on_signal() -> Iterator[threading.Event]:
    """SIGTERM and SIGINT ask the loop to save after the running step; a second one kills."""
    stop = threading.Event()
    previous: dict[int, Any] = {}

    def ask(number: int, _frame: Any) -> None:
        stop.set()
        signal.signal(number, previous[number])

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            previous[number] = signal.signal(number, ask)
    try:
        yield stop
    finally:
        for sent, handler in previous.items():
            signal.signal(sent, handler)
