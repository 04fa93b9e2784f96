"""TRL's SFTTrainer over a cache: its arguments, adapters and logging, with the teacher's rows for a loss.

    args = SFTConfig("run", max_steps=1000, per_device_train_batch_size=1)
    CacheSFTTrainer(model, args, train_dataset=PackedCache(cache, seq_len=4096)).train()

TRL has no trainer that reads stored log-probabilities: its distillation trainers ask a live teacher.
"""

from __future__ import annotations

from typing import Any

from teachercache.errors import UsageError
from trainer.data import PackedCache
from trainer.integrations.transformers import DistillationMixin

try:
    import datasets
    import trl
except ModuleNotFoundError as error:
    raise UsageError(f"CacheSFTTrainer needs TRL, but {error.name} is not installed: pip install trl") from error


class CacheSFTTrainer(DistillationMixin, trl.SFTTrainer):  # type: ignore[misc,name-defined]  # trl loads lazily
    """TRL's SFTTrainer that learns a cache; see DistillationMixin.

    Options of SFTConfig that prepare text have no effect: the cache holds tokens. Those that would change what is learnt
    are refused (`ignored`), others (packing, columns of a data set) change nothing here.
    """

    ignored = (
        *(*DistillationMixin.ignored, "formatting_func", "loss_type", "max_length", "chat_template_path"),
        *("completion_only_loss", "assistant_only_loss"),
    )

    def shown(self, dataset: PackedCache | None) -> Any:
        """Return one row of tokens: SFTTrainer prepares what it is given, and takes `datasets` objects alone."""
        return None if dataset is None else datasets.Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]]})
