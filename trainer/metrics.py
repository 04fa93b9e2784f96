"""Where a run's numbers come from and go: speed; metrics.jsonl, TensorBoard, Weights & Biases, the screen."""

from __future__ import annotations

import json
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from teachercache.console import say, text_console
from teachercache.errors import UsageError
from trainer.checkpoint import CheckpointFolder
from trainer.config import TrainerConfig
from trainer.data.sequence import PackedSequence
from trainer.flops import matmul_parameters, measured_matmul_rate, step_flops
from trainer.model import Model

METRICS = "metrics.jsonl"
WANDB_ID = "wandb_id"


class MetricsLog:
    """Write one JSON object a line, to a local file that is copied along with the checkpoints of a remote run.

    A resumed run drops the lines of steps that it is about to take again, so the file reads like an uninterrupted one.
    Raises UsageError for log.wandb without the package.
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
        self._wandb: Any = None
        if config.log.wandb:
            try:
                import wandb
            except ImportError as error:
                raise UsageError("log.wandb=true needs the package wandb (pip install wandb)") from error
            # The id lies with the run: the same command, resumed on another machine, continues the same page.
            run_id = folder.get_text(WANDB_ID) or uuid.uuid4().hex[:12]
            folder.put(WANDB_ID, run_id.encode())
            name, settings = folder.url.rstrip("/").rsplit("/", 1)[-1], config.model_dump(mode="json")
            self._wandb = wandb.init(id=run_id, name=name, config=settings, resume="allow", dir=str(self._workdir))

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


def _is_before(line: str, resumed_step: int) -> bool:
    try:
        return int(json.loads(line)["step"]) <= resumed_step
    except (ValueError, KeyError):
        return False  # the half line of a run that was killed while writing


class Meter:
    """Speed of the steps: tokens/s, TFLOP/s of model work, share of this GPU's matrix rate, memory, time left."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self._config, self._device = model.config.get_text_config(), device
        self._parameters = matmul_parameters(model)
        self._peak = measured_matmul_rate(device) if device.type == "cuda" else None
        self._start: tuple[float, float] | None = None  # progress and time of the first step

    def measure(self, sequences: Sequence[PackedSequence], seconds: float, data_wait_s: float) -> dict[str, float]:
        """Return one step's figures by name; padding is a share of the tokens and counts as no work."""
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

    def line(self, values: dict[str, float]) -> str:
        """Return a step's figures, its loss among them, as a line for people."""
        text = f"loss {values['loss']:.4f}, {values['tokens_per_s']:,.0f} tokens/s, {values['tflops']:.2f} TFLOP/s"
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
        elif time.monotonic() - self._last >= self._every_s or step == 1:
            self._last = time.monotonic()
            left = f", {remaining_s:.0f} s left" if remaining_s is not None else ""
            self.say(f"step {step} ({progress:.0%}{left}): {text}")

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar:
            self._bar.stop()
