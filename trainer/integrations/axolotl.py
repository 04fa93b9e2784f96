"""An axolotl plugin: a cache in place of `datasets`, its loss in place of cross-entropy. Written for axolotl 0.19.

    plugins: [trainer.integrations.axolotl.CachePlugin]
    teachercache: {url: s3://bucket/cache, heldout: heldout}
    datasets: [{path: unused, type: completion}]     # axolotl wants the key; nothing of it is read
    micro_batch_size: 1
    max_steps: 1000

`sequence_len`, `seed` and `num_epochs` are axolotl's. The trainer is DistillationMixin over axolotl's own, so resuming is
exact, and what DistillationMixin refuses is refused.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

import teachercache
from teachercache.errors import UsageError
from trainer.data import PackedCache
from trainer.integrations.transformers import DistillationMixin
from trainer.losses.options import Objective
from trainer.model import Model, attention

try:
    from axolotl.core.trainers.base import AxolotlTrainer
    from axolotl.integrations.base import BasePlugin
except ImportError as error:
    raise UsageError(f"CachePlugin needs axolotl 0.19, but: {error}; pip install axolotl") from error


class CacheSettings(BaseModel):
    """The key `teachercache` of an axolotl file; an unknown key in it is an error."""

    model_config = ConfigDict(extra="forbid")
    url: str
    manifest: int | None = None
    split: str = "train"
    heldout: str | None = None
    pad: bool = False
    objective: dict[str, Any] = Field(default_factory=dict)  # fields of trainer.losses.options.Objective


class CacheArguments(BaseModel):
    """What the plugin adds to axolotl's configuration."""

    teachercache: CacheSettings


class CachePlugin(BasePlugin):  # type: ignore[misc]  # axolotl is optional
    """Trains on a cache; see the module."""

    def get_input_args(self) -> str:
        """Return where axolotl finds the schema of the plugin's keys."""
        return f"{__name__}.{CacheArguments.__name__}"

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> Any:
        """Return the packed sequences of the cache, with the fields of axolotl's TrainDatasetMeta."""
        if not cfg.max_steps:
            raise UsageError(
                "a cache needs max_steps, which the learning rate follows; num_epochs may end the run earlier"
            )
        if cfg.val_set_size:
            raise UsageError(
                "val_set_size splits no cache: leave it out, and name a held-out split as teachercache.heldout"
            )
        if cfg.num_epochs and cfg.num_epochs != int(cfg.num_epochs):
            raise UsageError(f"num_epochs counts passes over a cache and is a whole number, found {cfg.num_epochs}")
        settings = CacheSettings(**cfg.teachercache)
        cache = teachercache.open(settings.url, settings.manifest)
        common = {"seq_len": cfg.sequence_len, "pad": settings.pad}
        train = PackedCache(
            cache,
            split=settings.split,
            seed=cfg.seed or 0,
            epochs=int(cfg.num_epochs) if cfg.num_epochs else None,
            **common,
        )
        heldout = PackedCache(cache, split=settings.heldout, shuffle=False, **common) if settings.heldout else None
        return SimpleNamespace(train_dataset=train, eval_dataset=heldout, total_num_steps=cfg.max_steps)

    def post_model_load(self, cfg: Any, model: Model) -> None:
        """Give the student the attention that keeps packed documents apart."""
        model.set_attn_implementation(attention.NAME)

    def get_trainer_cls(self, cfg: Any) -> type:
        """Return axolotl's trainer with the loss of the cache."""
        objective = Objective(**CacheSettings(**cfg.teachercache).objective)

        class CacheTrainer(DistillationMixin, AxolotlTrainer):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, objective=objective, **kwargs)

        return CacheTrainer
