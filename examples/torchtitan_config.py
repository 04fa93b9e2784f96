"""A torchtitan configuration on a cache, for a config registry: `torchtitan.train --module … --config llama3_from_cache`."""

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import TrainingConfig
from torchtitan.models.llama3 import model_registry

from trainer.integrations.torchtitan import CacheDataLoader, CacheLoss, CacheTrainer


def llama3_from_cache(
    url: str = "s3://bucket/cache", flavor: str = "8B", seq_len: int = 4096, steps: int = 1000
) -> CacheTrainer.Config:
    """Return a run of `steps` steps; `hf_assets_path` is the student's folder, whose tokenizer is the cache's."""
    return CacheTrainer.Config(
        dataloader=CacheDataLoader.Config(url=url),
        loss=CacheLoss.Config(),
        model_spec=model_registry(flavor, attn_backend="flex"),
        hf_assets_path="build/student",
        optimizer=default_adamw(lr=2e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=100),
        training=TrainingConfig(local_batch_size=1, seq_len=seq_len, steps=steps, disable_cuda_graphs=True),
    )
