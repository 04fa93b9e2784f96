"""Cutting an input file into ranges, each of which is a shard. The cut depends on the file, the recipe and the size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import pairwise

from pipeline.config import CorpusConfig, RunConfig
from pipeline.corpus.readers import OPEN_END, Unit
from pipeline.planning.sample import InputShape

USUAL_TOKENS_PER_BYTE = 0.25  # where a sample holds nothing that can be used
CUT_COMPRESSED_ABOVE = 16 << 20
MOST_CUTS_OF_COMPRESSED = 64  # then decompressing up to a range costs about 3 % of the teacher's time over it
LARGE_WHOLE_FILE = 256 << 20

Cut = tuple[Unit, int, int]  # unit, start, stop


def shard_id(input_digest: str, start: int, stop: int, unit: str, recipe: str) -> str:
    """Return 32 hex digits of sha256(input digest, range, recipe digest)."""
    return hashlib.sha256(f"{input_digest}\n{unit}:{start}:{stop}\n{recipe}".encode()).hexdigest()[:32]


def equal_ranges(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield equal ranges of about `size` that cover [0, total)."""
    count = max(1, round(total / size))
    edges = [total * i // count for i in range(count + 1)]
    yield from ((a, b) for a, b in pairwise(edges) if b > a)


def cut(
    shape: InputShape, corpus: CorpusConfig, run: RunConfig, tokens_per_unit: float, text_units: float
) -> list[Cut]:
    """Return the ranges of a file. `text_units`: estimated length in bytes of text or rows."""
    if run.shard_bytes is not None:
        size = run.shard_bytes / shape.bytes_per_unit
    else:
        size = run.shard_tokens / (tokens_per_unit or USUAL_TOKENS_PER_BYTE * shape.bytes_per_unit)
    if shape.unit == "items" or (shape.unit == "file" and may_cut_compressed(shape, corpus)):
        total = max(1, round(text_units))
        most = total if corpus.limit_documents is not None else total // MOST_CUTS_OF_COMPRESSED
        ranges = list(equal_ranges(total, max(1, int(size), most)))
        ranges[-1] = (ranges[-1][0], OPEN_END)  # the length of the text is an estimate
        return [("items" if shape.unit == "items" else "bytes", start, stop) for start, stop in ranges]
    if shape.unit == "file":
        return [("file", 0, shape.total)] if shape.total else []
    return [(shape.unit, start, stop) for start, stop in equal_ranges(shape.total, max(1, int(size)))]


def may_cut_compressed(shape: InputShape, corpus: CorpusConfig) -> bool:
    """Return whether a file without seek points is worth cutting: lines, large, and not only its beginning is wanted."""
    lines = shape.kind == "jsonl" or (shape.kind == "text" and corpus.text_unit == "line")
    large = shape.total > CUT_COMPRESSED_ABOVE
    return shape.compression != "none" and lines and large and corpus.limit_documents is None
