"""The caches that are mutated: each codec, and each kind of rows."""

from __future__ import annotations

from teachercache.format.spec import SampledRows
from teachercache.testing import synthetic_spec

TOP_K, SAMPLED = synthetic_spec(), synthetic_spec(rows=SampledRows(entries=8, exact=2))
SPECS = {
    "open": (TOP_K, "open"),
    "compact": (TOP_K, "compact"),
    "open-sampled": (SAMPLED, "open"),
    "compact-sampled": (SAMPLED, "compact"),
}
