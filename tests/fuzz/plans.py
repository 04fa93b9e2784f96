"""Hypothesis strategies of whole plans: which object, what is done to it, who reads it."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.fuzz.mutations import BYTES, PLACE, TREE
from tests.fuzz.specs import SPECS
from tests.fuzz.tables import ENCODINGS, TYPES

SEALED = ("spec.json", "commits/", "manifests/", "plans/", "quarantine/", "runs/", "tokenizer/")
CACHE = ("data", "footer", "table", "manifests/keys/", *SEALED, "job")
TRAINER = ("checkpoints", "state", "train")

_table = st.lists(
    st.one_of(
        st.tuples(st.just("drop"), PLACE, st.none()),
        st.tuples(st.just("twice"), PLACE, st.none()),
        st.tuples(st.just("meta"), PLACE, st.integers(0, 9)),
        st.tuples(st.just("rows"), PLACE, st.integers(0, 39)),
        st.tuples(st.just("type"), PLACE, st.sampled_from(sorted(TYPES))),
        st.tuples(st.just("nulls"), PLACE, st.integers(0, 2)),
        st.tuples(st.just("value"), PLACE, st.integers(0, 10_000)),
        st.tuples(st.just("bomb"), PLACE, st.integers(0, 1999)),
    ),
    max_size=2,
)
_writer = st.fixed_dictionaries(
    {
        "reader": st.integers(0, 9), "sealed": st.just(True), "raw": st.just(False), "agree": st.booleans(),
        "compression": st.sampled_from(["zstd", "none", "snappy", "gzip", "brotli", "lz4"]), "dictionary": st.booleans(),
        "page_version": st.sampled_from(["1.0", "2.0"]), "page_size": st.sampled_from([1, 100, 2**20]),
        "checksum": st.booleans(), "claims": st.booleans(), "number": st.integers(0, 20), "group": st.integers(0, 12),
        "encoding": st.none() | st.integers(0, len(ENCODINGS) - 1),
    }
)  # fmt: skip


def plan(kind: str) -> st.SearchStrategy[Any]:
    """Return the strategy of a kind's plans, as `worker.Cache.run` or `worker.Trainer.run` takes them."""
    if kind in ("job", "train"):
        return st.one_of(st.tuples(BYTES, st.just(True)), st.tuples(TREE, st.just(False)))
    if kind in TRAINER:
        number = st.integers(0, 9)
        return st.one_of(st.tuples(number, BYTES, st.just(True)), st.tuples(number, TREE, st.just(False)))
    case, number = st.sampled_from(sorted(SPECS)), st.integers(0, 9)
    if kind == "table":
        return st.tuples(case, number, _table, _writer)

    def options(raw: bool) -> st.SearchStrategy[dict[str, Any]]:
        how = {
            "reader": st.just(2) if kind == "manifests/keys/" else st.integers(0, 9),
            "sealed": st.booleans(),
            "raw": st.just(raw),
            "agree": st.booleans(),
        }
        return st.fixed_dictionaries(how)

    raw = st.tuples(case, number, BYTES, options(True))
    return (
        raw
        if kind in ("data", "footer", "manifests/keys/")
        else st.one_of(raw, st.tuples(case, number, TREE, options(False)))
    )
