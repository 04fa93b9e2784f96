"""The caches that are mutated: each codec, and each kind of rows."""

from __future__ import annotations

from teachercache.testing import synthetic_spec

SPECS = {
    "open": (synthetic_spec(vocab_size=1000, top_k=8), "open"),
    "compact": (synthetic_spec(vocab_size=1000, top_k=8), "compact"),
}
