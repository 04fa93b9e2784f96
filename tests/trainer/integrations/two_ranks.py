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
from tests.trainer.integrations.conftest import LR, SEQ_LEN
from trainer.data import PackedCache
from trainer.integrations.transformers import CacheTrainer, DistillationMixin
from trainer.model.student import load_student


class Watching(DistillationMixin):
    """Keeps the documents of each sequence that was trained on."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if inputs["counts"]:
            self.seen = [*getattr(self, "seen", []), inputs["sequence"].documents]
        return super().training_step(model, inputs, *args, **kwargs)


class WatchedTrainer(Watching, CacheTrainer): ...


def arguments_of(output: Path, kind: type = TrainingArguments, **options: Any) -> Any:
    settings = {
        "max_steps": 500, "per_device_train_batch_size": 1, "learning_rate": LR, "lr_scheduler_type": "constant",
        "adam_beta2": 0.95, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False,
        "disable_tqdm": True, **options,
    }  # fmt: skip
    return kind(str(output), **settings)


def losses(trainer: Any) -> list[float]:
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def main(student: str, url: str, output: str) -> None:
    faulthandler.dump_traceback_later(60, exit=True)  # a hang says where
    torch.set_num_threads(1)
    trainer = WatchedTrainer(
        load_student(Path(student), dtype=torch.float32, device=torch.device("cpu")),
        arguments_of(Path(output), ddp_backend="gloo"),
        train_dataset=PackedCache(teachercache.open(url), seq_len=SEQ_LEN),
    )
    trainer.train()
    result = {"seen": trainer.seen, "losses": losses(trainer), "weights": list(trainer.model.parameters())}
    torch.save(result, Path(output) / f"rank-{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
