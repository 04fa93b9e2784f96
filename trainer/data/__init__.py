"""Training data: stream a cache and pack it into sequences."""

from trainer.data.dataset import PackedCache
from trainer.data.mean import MeanCache
from trainer.data.mixed import MixedCaches
from trainer.data.prefetch import Interrupted, Prefetcher
from trainer.data.sequence import PackedSequence

__all__ = ["Interrupted", "MeanCache", "MixedCaches", "PackedCache", "PackedSequence", "Prefetcher"]
