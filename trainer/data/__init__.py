"""Training data: stream a cache and pack it into sequences."""

from trainer.data.dataset import Interrupted, PackedCache, PackedSequence, Prefetcher

__all__ = ["Interrupted", "PackedCache", "PackedSequence", "Prefetcher"]
