"""Lightning on a cache: `python examples/lightning_fit.py CACHE STUDENT OUTPUT [STEPS]`."""

import sys
from pathlib import Path

import torch

import teachercache
from trainer.integrations.lightning import CacheDataModule, DistillationModule, pl
from trainer.model.student import load_student


def main(url: str, student: str, output: str, steps: int = 100) -> tuple[float, float]:
    """Train, and return the held-out KL before and after, in nats."""
    cache = teachercache.open(url)
    module = DistillationModule(
        load_student(Path(student), dtype=torch.float32, device=torch.device("cpu")), cache, lr=1e-2
    )
    data = CacheDataModule(cache, seq_len=128, epochs=None, heldout="heldout")
    trainer = pl.Trainer(
        max_steps=steps, default_root_dir=output, gradient_clip_val=1.0, logger=False, enable_progress_bar=False
    )
    before = trainer.validate(module, data)[0]["heldout_kl"]
    trainer.fit(module, data)
    after = trainer.validate(module, data)[0]["heldout_kl"]
    print(f"held-out KL {before:.4f} -> {after:.4f} nats after {steps} steps")
    return before, after


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
