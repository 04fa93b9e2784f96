"""Lightning over a cache: a LightningDataModule, and a LightningModule with the loss.

    data = CacheDataModule(cache, seq_len=4096, heldout="heldout")
    lightning.Trainer(max_steps=1000).fit(DistillationModule(model, cache), data)

A packed sequence is a batch. The loss of a batch is the mean over its valid rows on all ranks. Under
`accumulate_grad_batches` Lightning averages those means, where `fit` has one mean over all rows. Where the data are is in
every checkpoint, so `fit(ckpt_path=…)` repeats and skips no sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from teachercache import Cache
from teachercache.errors import UsageError
from trainer.data import PackedCache, PackedSequence
from trainer.evaluate import evaluate
from trainer.integrations.loss import SequenceLoss
from trainer.losses.options import Objective
from trainer.model import Model
from trainer.model.attention import choose_kind

try:
    import lightning.pytorch as pl
except ModuleNotFoundError:
    try:
        import pytorch_lightning as pl
    except ModuleNotFoundError as error:
        raise UsageError(
            "CacheDataModule needs Lightning, which is not installed: pip install lightning, or pytorch-lightning"
        ) from error


class CacheDataModule(pl.LightningDataModule):  # type: ignore[misc]  # Lightning is optional
    """Packed sequences of a cache, one a batch, shared by ranks and workers; resumes exactly with DistillationModule.

    heldout  a split that `validation_step` measures, or None;  options  of PackedCache, for training
    """

    def __init__(
        self, cache: Cache, *, seq_len: int, heldout: str | None = None, num_workers: int = 0, **options: Any
    ) -> None:
        super().__init__()
        self.cache, self.num_workers = cache, num_workers
        self.dataset = PackedCache(cache, seq_len=seq_len, **options)
        self.heldout = PackedCache(cache, split=heldout, seq_len=seq_len, shuffle=False) if heldout else None

    def train_dataloader(self) -> DataLoader[Any]:
        """Return this rank's sequences."""
        ranks = self.trainer.world_size
        if ranks > 1 and self.dataset.epochs is not None:
            raise UsageError(
                f"where the data end, some of {ranks} ranks may have no sequence, and Lightning would wait for ever; set "
                "epochs=None here, and max_steps in Lightning's Trainer"
            )
        self.dataset.rank, self.dataset.world_size = self.trainer.global_rank, ranks
        return DataLoader(self.dataset, batch_size=None, num_workers=self.num_workers)

    def val_dataloader(self) -> Any:
        """Return the held-out split as one batch, so that its figures are means over all of its rows."""
        return DataLoader([self.heldout], batch_size=None) if self.heldout is not None else []  # type: ignore[arg-type]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a packed sequence; the held-out split is read where it is measured."""
        return batch.to(device) if isinstance(batch, PackedSequence) else batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the sequence that was trained on last."""
        return {"data": self.trainer.lightning_module.data_position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue there."""
        if state_dict["data"] is not None:
            self.dataset.load_state(state_dict["data"])


class DistillationModule(pl.LightningModule):  # type: ignore[misc]
    """A student and its loss; override `configure_optimizers` for another optimiser than AdamW at `lr`.

    Raises UsageError for a student whose attention or tokenizer does not fit.
    """

    def __init__(self, model: Model, cache: Cache, *, objective: Objective | None = None, lr: float = 1e-4) -> None:
        super().__init__()
        self.model, self.lr, self.sequence_loss = model.train(), lr, SequenceLoss(cache, objective)
        self.sequence_loss.check(model)
        self.data_position: dict[str, Any] | None = None

    def training_step(self, sequence: PackedSequence, index: int) -> torch.Tensor:
        """Return the sum of the sequence's losses / the mean number of rows of a rank, whose gradients are averaged."""
        count = torch.tensor(float(self.sequence_loss.count(sequence)), device=self.device)
        loss = self.sequence_loss(self.model, sequence, self.all_gather(count).mean())
        self.data_position = sequence.state
        self.log("loss", loss.detach(), sync_dist=True, batch_size=1)
        return loss

    def validation_step(self, heldout: PackedCache, index: int) -> None:
        """Log `heldout_kl`, `top1_agreement` and `perplexity` of a split."""
        found = evaluate(
            self.model,
            (sequence for sequence, _ in heldout.with_states()),
            vocab_size=self.sequence_loss.vocab_size,
            attention_kind=choose_kind(self.device),
        )
        for name in ("heldout_kl", "top1_agreement", "perplexity"):
            self.log(name, found[name], batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return torch's AdamW, with the moments that `fit` has."""
        return torch.optim.AdamW(self.model.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.0)
