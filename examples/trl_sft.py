"""TRL's SFTTrainer on a cache: `python examples/trl_sft.py CACHE STUDENT OUTPUT [STEPS]`."""

import sys
from pathlib import Path

import torch
from trl import SFTConfig

import teachercache
from trainer.data import PackedCache
from trainer.integrations.trl import CacheSFTTrainer
from trainer.losses.options import Objective
from trainer.model.student import load_student


def main(url: str, student: str, output: str, steps: int = 100) -> tuple[float, float]:
    """Train, and return the held-out KL before and after, in nats."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cache = teachercache.open(url)
    trainer = CacheSFTTrainer(
        load_student(Path(student), dtype=torch.float32, device=device),
        SFTConfig(
            output,
            max_steps=steps,
            per_device_train_batch_size=1,
            learning_rate=1e-2,
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=PackedCache(cache, seq_len=128, epochs=None),
        eval_dataset=PackedCache(cache, split="heldout", seq_len=128, shuffle=False),
        objective=Objective(ce_weight=0.1),  # a tenth of the loss is the text's own next token
    )
    before = trainer.evaluate()["eval_heldout_kl"]
    trainer.train()
    after = trainer.evaluate()["eval_heldout_kl"]
    print(f"held-out KL {before:.4f} -> {after:.4f} nats after {steps} steps")
    return before, after


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
