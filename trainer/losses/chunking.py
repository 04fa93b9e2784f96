"""How many rows of logits live at a time."""

from __future__ import annotations

import torch

# Rows whose logits stay within this much memory are one chunk: fewer, larger products.
CPU_CHUNK_BYTES = 48 << 20
CUDA_SINGLE_CHUNK_BYTES = 1 << 30
# A product with d columns fills the GPU's multiprocessors best when its rows are a multiple of this.
CUDA_ROW_MULTIPLE = 128


def default_chunk_size(rows: int, hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows per chunk.

    On CUDA the last step of a loss holds the head's gradient twice, in float32 and in the head's dtype, after
    the chunk of logits is gone. A chunk of d rows is exactly as large as that second copy, so it is free.
    """
    row_bytes = vocab_size * dtype.itemsize
    if device.type != "cuda":
        return max(1, min(rows, CPU_CHUNK_BYTES // row_bytes))
    if rows * row_bytes <= CUDA_SINGLE_CHUNK_BYTES:
        return max(1, rows)
    limit = max(CUDA_ROW_MULTIPLE, hidden_size // CUDA_ROW_MULTIPLE * CUDA_ROW_MULTIPLE)
    return min(rows, limit)
