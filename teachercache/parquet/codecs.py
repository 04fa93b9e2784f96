"""The codecs by their names. One is chosen for each file, and named in its path and manifest."""

from __future__ import annotations

from teachercache.errors import UnsupportedFormat
from teachercache.format.spec import Rows
from teachercache.parquet.columns import Codec
from teachercache.parquet.compact import CompactCodec
from teachercache.parquet.open import OpenCodec

CODECS = ("open", "compact")


def get_codec(name: str, rows: Rows, vocab_size: int) -> Codec:
    """Return the codec called `name`; UnsupportedFormat where this version does not have it."""
    if name == "open":
        return OpenCodec(rows)
    if name == "compact":
        return CompactCodec(rows, vocab_size)
    raise UnsupportedFormat(
        f"codec {name!r} is unknown to this version, which has {', '.join(CODECS)}; upgrade teachercache."
    )
