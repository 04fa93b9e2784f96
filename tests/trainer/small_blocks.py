"""Packing in small blocks, so that a short run crosses borders of blocks and empties the packer within an epoch.

As a program, `python -m tests.trainer.small_blocks fit …` is `python -m trainer` with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trainer.cli import main


@contextmanager
def small_blocks(block_sequences: int = 2, blocks_per_flush: int = 2) -> Iterator[None]:
    """Change PackedCache's defaults for a while."""
    from trainer.data import PackedCache

    with pytest.MonkeyPatch.context() as patch:
        defaults = PackedCache.__init__.__kwdefaults__
        patch.setitem(defaults, "block_sequences", block_sequences)
        patch.setitem(defaults, "blocks_per_flush", blocks_per_flush)
        yield


if __name__ == "__main__":
    with small_blocks():
        main()
