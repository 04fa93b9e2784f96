"""Where a run's numbers come from and go: speed; metrics.jsonl, TensorBoard, Weights & Biases, the screen."""

from __future__ import annotations

import json
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from teachercache.console import note, say, text_console
from teachercache.errors import UsageError
from teachercache.format.layout import check_name
from trainer.checkpoint import CheckpointFolder
from trainer.config import MlflowConfig, TrainerConfig
from trainer.data.sequence import PackedSequence
from trainer.flops import matmul_parameters, measured_matmul_rate, step_flops
from trainer.model import Model, parallel

METRICS = "metrics.jsonl"
WANDB_ID = "wandb_id"
MLFLOW_ID = "mlflow_run_id"


class MetricsLog:
    """Write one JSON object a line, to a local file that is copied along with the checkpoints of a remote run.

    A resumed run drops the lines of steps that it is about to take again, so the file reads like an uninterrupted one.
    Raises UsageError for log.wandb and log.mlflow without their packages.
    """

    def __init__(self, folder: CheckpointFolder, config: TrainerConfig, *, resumed_step: int) -> None:
        self._folder = folder
        self._workdir = folder.local or Path(tempfile.mkdtemp(prefix="trainer-logs-"))
        self._workdir.mkdir(parents=True, exist_ok=True)
        self._path = self._workdir / METRICS
        kept = [line for line in folder.get_text(METRICS).splitlines() if _is_before(line, resumed_step)]
        self._path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        self._file = self._path.open("a", encoding="utf-8")
        self._board: Any = None
        if config.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._workdir / "tensorboard"), purge_step=resumed_step + 1)
        name, settings = folder.url.rstrip("/").rsplit("/", 1)[-1], config.model_dump(mode="json")
        self._wandb: Any = None
        if config.log.wandb is not None:
            try:
                import wandb
            except ImportError as error:
                raise UsageError("log.wandb needs the package wandb (pip install wandb)") from error
            where = {key: value for key, value in config.log.wandb.model_dump().items() if value}
            where |= {"name": name} if not os.environ.get("WANDB_NAME") else {}  # an argument wins over the environment
            # The id lies with the run: the same command, resumed on another machine, continues the same page.
            asked = os.environ.get("WANDB_RUN_ID")
            run_id = folder.kept_id(WANDB_ID) or (check_name(asked, "WANDB_RUN_ID") if asked else uuid.uuid4().hex[:12])
            folder.put(WANDB_ID, run_id.encode())
            self._wandb = wandb.init(id=run_id, config=settings, resume="allow", dir=str(self._workdir), **where)
        self._mlflow = _MlflowRun(folder, config.log.mlflow, name, settings) if config.log.mlflow is not None else None

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Add one line {"kind": ..., "step": ..., **values} and the same numbers elsewhere."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        numbers = {f"{kind}/{key}": value for key, value in values.items() if isinstance(value, (int, float))}
        if self._board:
            for key, value in numbers.items():
                self._board.add_scalar(key, value, step)
        if self._wandb:
            self._wandb.log(numbers, step=step)
        if self._mlflow:
            self._mlflow.log(numbers, step)

    def sync(self) -> None:
        """Copy the log, and TensorBoard's files, to the run's folder if that is remote."""
        if self._folder.local is not None:
            return
        self._folder.put(METRICS, self._path)
        if self._board:
            self._board.flush()
            for path in sorted((self._workdir / "tensorboard").iterdir()):
                self._folder.put(f"tensorboard/{path.name}", path)

    def close(self) -> None:
        """Close the file and the boards."""
        self._file.close()
        if self._board:
            self._board.close()
        if self._wandb:
            self._wandb.finish()
        if self._mlflow:
            self._mlflow.finish()


class _MlflowRun:
    """One run in MLflow through its client, which leaves the process's global state alone.

    A server that does not answer costs the figures of those steps there and a line, not the run.
    """

    def __init__(self, folder: CheckpointFolder, config: MlflowConfig, name: str, settings: dict[str, Any]) -> None:
        try:
            from mlflow.entities import Metric, Param
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise UsageError("log.mlflow needs the package mlflow (pip install mlflow-skinny)") from error
        self._metric, self._missed = Metric, False
        try:
            self._client = MlflowClient(tracking_uri=config.tracking_uri)
            self._run_id = folder.kept_id(MLFLOW_ID)
            if self._run_id:
                self._client.update_run(self._run_id, status="RUNNING")
                return
            experiment = config.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
            found = self._client.get_experiment_by_name(experiment)
            number = found.experiment_id if found is not None else self._client.create_experiment(experiment)
            self._run_id = self._client.create_run(number, run_name=name).info.run_id
            folder.put(MLFLOW_ID, self._run_id.encode())
            flat = [Param(key, str(value)[:500]) for key, value in _flat(settings)]
            for start in range(0, len(flat), 100):  # the most that one request may hold
                self._client.log_batch(self._run_id, params=flat[start : start + 100])
        except Exception as error:
            raise UsageError(f"log.mlflow: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error

    def log(self, numbers: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        try:
            metrics = [self._metric(key, float(value), now, step) for key, value in numbers.items()]
            self._client.log_batch(self._run_id, metrics=metrics)
        except Exception as error:
            if not self._missed:
                note(f"MLflow took no figures at step {step:,} ({type(error).__name__}); {METRICS} has them all")
            self._missed = True

    def finish(self) -> None:
        with suppress(Exception):
            self._client.set_terminated(self._run_id)


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_before(line: str, resumed_step: int) -> bool:
    try:
        return int(json.loads(line)["step"]) <= resumed_step
    except (ValueError, KeyError):
        return False  # the half line of a run that was killed while writing


class Meter:
    """Speed of the steps: tokens/s, TFLOP/s of model work, share of a GPU's matrix rate, memory, time left.

    Of several ranks: tokens of all, TFLOP/s and share of each GPU, the memory of the fullest.
    """

    def __init__(self, model: Model, device: torch.device) -> None:
        self._config, self._device = model.config.get_text_config(), device
        self._parameters = matmul_parameters(model)
        self._peak = measured_matmul_rate(device) if device.type == "cuda" else None
        self._start: tuple[float, float] | None = None  # progress and time of the first step

    def measure(self, sequences: Sequence[PackedSequence], seconds: float, data_wait_s: float) -> dict[str, float]:
        """Return one step's figures by name; padding is a share of the tokens and counts as no work. Every rank asks."""
        lengths = [length for s in sequences for length in s.document_lengths[: len(s.documents)]]
        held = [s for s in sequences if s.documents]  # not those of a rank that had none left
        padding, tokens = sum(s.num_padding for s in held), sum(s.input_ids.numel() for s in held)
        flops = step_flops(self._config, self._parameters, lengths)
        memory = torch.cuda.max_memory_allocated(self._device) if self._peak else 0
        of_ranks = parallel.gathered((padding, tokens, sum(lengths), flops, memory))
        padding, tokens, trained, flops = (sum(each) for each in list(zip(*of_ranks, strict=True))[:4])
        rate = flops / len(of_ranks) / seconds
        values = {
            "padding": padding / tokens,
            "seconds": seconds,
            "data_wait_s": data_wait_s,
            "tokens": trained,
            "tokens_per_s": trained / seconds,
            "tflops": rate / 1e12,
        }
        if self._peak:
            values["matmul_share"] = rate / self._peak
            values["memory_gib"] = max(each[-1] for each in of_ranks) / 2**30
        return values

    def line(self, values: dict[str, float]) -> str:
        """Return a step's figures, its loss among them, as a line for people."""
        text = f"loss {values['loss']:.4f}, {values['tokens_per_s']:,.0f} tokens/s"
        text += f", {values['tflops']:,.0f} TFLOP/s" if values["tflops"] >= 1 else ""  # on a CPU it says nothing
        if "matmul_share" in values:
            text += f" ({values['matmul_share']:.0%} of the matrix rate), {values['memory_gib']:.1f} GiB"
        return text

    def remaining(self, progress: float) -> float | None:
        """Return the seconds that the rest of the run takes at the rate so far; None after the first step."""
        if self._start is None:
            self._start = progress, time.monotonic()
            return None
        first, started = self._start
        return (time.monotonic() - started) * (1 - progress) / (progress - first) if progress > first else None


class Screen:
    """Progress for people: a bar on a terminal, a plain line every few seconds elsewhere; all on standard error."""

    def __init__(self, *, every_s: float = 5.0) -> None:
        self._console = text_console(stderr=True)
        self._every_s, self._last = every_s, 0.0
        self._waiting = ""  # the newest step's line where it was not printed: the last one is
        self._bar: Progress | None = None
        self._task: Any = None
        if self._console.is_terminal:
            step, text = TextColumn("step {task.fields[step]}"), TextColumn("{task.fields[text]}")
            columns = (step, BarColumn(), TaskProgressColumn(), text, TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("", total=1.0, step=0, text="")
            self._bar.start()

    def say(self, text: str) -> None:
        """Print a line."""
        if self._bar:
            self._bar.console.print(text)
        else:
            say(text)

    def update(self, step: int, progress: float, text: str, *, remaining_s: float | None) -> None:
        """Show a step: the share of the run in [0, 1], a text, and the seconds left if they are known."""
        if self._bar:
            self._bar.update(self._task, completed=progress, step=step, text=text)
            return
        left = f", {_duration(remaining_s)} left" if remaining_s is not None and progress < 1 else ""
        self._waiting = f"step {step:,} ({progress:.0%}{left}): {text}"
        if time.monotonic() - self._last >= self._every_s or step == 1:
            self._last = time.monotonic()
            self.say(self._waiting)
            self._waiting = ""

    def close(self) -> None:
        """Leave the bar as it is, or print the last step's line if it was not."""
        if self._bar:
            self._bar.stop()
        elif self._waiting:
            self.say(self._waiting)
            self._waiting = ""


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s" if rest >= 60 else f"{rest} s"
