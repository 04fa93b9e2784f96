"""Where a run's numbers go: metrics.jsonl, TensorBoard, Weights & Biases if asked, and the screen."""

from __future__ import annotations

import json
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from teachercache.errors import UsageError
from trainer.checkpoint import CheckpointFolder
from trainer.config import TrainerConfig

METRICS = "metrics.jsonl"
WANDB_ID = "wandb_id"


class MetricsLog:
    """Writes one JSON object a line, to a local file that is copied along with the checkpoints of a remote run.

    A resumed run drops the lines of steps that it is about to take again, so the file reads like an uninterrupted one.
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
            folder.put_text(WANDB_ID, run_id)
            self._wandb = wandb.init(
                id=run_id,
                name=folder.url.rstrip("/").rsplit("/", 1)[-1],
                config=config.model_dump(mode="json"),
                resume="allow",
                dir=str(self._workdir),
            )

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
        self._folder.put_text(METRICS, self._path.read_text(encoding="utf-8"))
        if self._board:
            self._board.flush()
            for path in sorted((self._workdir / "tensorboard").iterdir()):
                self._folder.put_file(f"tensorboard/{path.name}", path)

    def close(self) -> None:
        self._file.close()
        if self._board:
            self._board.close()
        if self._wandb:
            self._wandb.finish()


def _is_before(line: str, resumed_step: int) -> bool:
    try:
        return json.loads(line)["step"] <= resumed_step
    except (ValueError, KeyError):
        return False  # the half line of a run that was killed while writing


class Screen:
    """Progress for people: a bar on a terminal, a plain line every few seconds elsewhere; all on standard error."""

    def __init__(self, *, every_s: float = 5.0) -> None:
        self._console = Console(stderr=True)
        self._every_s, self._last = every_s, 0.0
        self._bar: Progress | None = None
        self._task: Any = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step {task.fields[step]}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=1.0, step=0, text="")
            self._bar.start()

    def say(self, text: str) -> None:
        if self._bar:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def update(self, step: int, progress: float, text: str, *, remaining_s: float | None) -> None:
        if self._bar:
            self._bar.update(self._task, completed=progress, step=step, text=text)
        elif time.monotonic() - self._last >= self._every_s or step == 1:
            self._last = time.monotonic()
            left = f", {remaining_s:.0f} s left" if remaining_s is not None else ""
            self.say(f"step {step} ({progress:.0%}{left}): {text}")

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
