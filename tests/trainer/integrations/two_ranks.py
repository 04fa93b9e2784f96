"""One of two ranks that train on a CPU: RANK=0 … python -m tests.trainer.integrations.two_ranks STUDENT CACHE OUTPUT"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

import teachercache
from tests.trainer.integrations.conftest import LR, SEQ_LEN, STEPS
from trainer.data import PackedCache
from trainer.integrations.lightning import CacheDataModule, DistillationModule, pl
from trainer.integrations.transformers import CacheTrainer, DistillationMixin
from trainer.model.student import load_student


class Watching(DistillationMixin):
    """Keeps the documents of each sequence that was trained on, and counts rows."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if inputs["counts"]:
            self.seen = [*getattr(self, "seen", []), inputs["sequence"].documents]
            self.rows = getattr(self, "rows", 0) + inputs["sequence"].num_rows
        return super().training_step(model, inputs, *args, **kwargs)


class WatchedTrainer(Watching, CacheTrainer): ...


def arguments_of(output: Path, kind: type = TrainingArguments, **options: Any) -> Any:
    settings = {
        "max_steps": 500, "per_device_train_batch_size": 1, "learning_rate": LR, "lr_scheduler_type": "constant",
        "adam_beta2": 0.95, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False,
        "disable_tqdm": True, **options,
    }  # fmt: skip
    return kind(str(output), **settings)


class WatchedModule(DistillationModule):
    """Keeps the loss and the documents of each step."""

    def training_step(self, sequence: Any, index: int) -> Any:
        loss = super().training_step(sequence, index)
        self.seen = [*getattr(self, "seen", []), (loss.item(), sequence.documents)]
        return loss


def lightning_run(
    student: Path, url: str, output: Path, resume: str | None = None, data: dict[str, Any] | None = None, **options: Any
) -> WatchedModule:
    cache = teachercache.open(url)
    module = WatchedModule(load_student(student, dtype=torch.float32, device=torch.device("cpu")), cache, lr=LR)
    settings = {"max_steps": STEPS, "logger": False, "enable_checkpointing": False, **options}
    trainer = pl.Trainer(
        accelerator="cpu", default_root_dir=output, gradient_clip_val=1.0, enable_progress_bar=False,
        enable_model_summary=False, **settings,
    )  # fmt: skip
    trainer.fit(module, CacheDataModule(cache, seq_len=SEQ_LEN, **(data or {})), ckpt_path=resume)
    return module


def losses(trainer: Any) -> list[float]:
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def main(student: str, url: str, output: str) -> None:
    faulthandler.dump_traceback_later(150, exit=True)  # a hang says where
    torch.set_num_threads(1)
    trainer = WatchedTrainer(
        load_student(Path(student), dtype=torch.float32, device=torch.device("cpu")),
        arguments_of(Path(output), ddp_backend="gloo"),
        train_dataset=PackedCache(teachercache.open(url), seq_len=SEQ_LEN),
    )
    trainer.train()
    result = {
        "seen": trainer.seen,
        "rows": trainer.rows,
        "losses": losses(trainer),
        "weights": list(trainer.model.parameters()),
    }
    torch.distributed.destroy_process_group()
    os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]
    module = lightning_run(
        Path(student), url, Path(output), data={"epochs": None}, max_steps=5, devices=2, strategy="ddp"
    )
    result["lightning"] = module.seen
    torch.save(result, Path(output) / f"rank-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
