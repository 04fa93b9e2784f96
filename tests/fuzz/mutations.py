"""What can be done to a file: hypothesis strategies that give plain data, and the functions that apply it to bytes."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

ODD_NUMBERS = [-1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**40 + 1, 2**63, 10**400, -(2**63) - 1]
ODD_NAMES = [
    "", ".", "..", "/", "/etc/passwd", "../x", "a/b", "a\n", "\0", "\x1b[2J", "\u202e", "٠", "\ud800", "x" * 300, "-rf", "~",
    "final", "step-00000001", "s3://evil/x", "spec.json", "0" * 64, "train", "default", "open", "compact",
]  # fmt: skip
ODD_VALUES: list[Any] = [
    None, True, False, 553.0, 1e308, float("nan"), [], {}, [[[[]]]], {"a": {"b": 1}}, "5", [1, "a", None],
    *ODD_NUMBERS, *ODD_NAMES,
]  # fmt: skip

PLACE = st.floats(0, 1, exclude_max=True)  # of a file, so that one plan fits files of every size

BYTES = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), PLACE, st.integers(1, 255)),
        st.tuples(st.just("set"), PLACE, st.sampled_from([0, 1, 127, 128, 255])),
        st.tuples(st.just("cut"), PLACE, st.integers(1, 64)),
        st.tuples(st.just("repeat"), PLACE, st.integers(1, 64)),
        st.tuples(st.just("insert"), PLACE, st.binary(min_size=1, max_size=12)),
        st.tuples(st.just("end"), PLACE, st.just(0)),
    ),
    min_size=1,
    max_size=4,
)

TREE = st.lists(
    st.one_of(
        st.tuples(st.just("replace"), PLACE, st.sampled_from(ODD_VALUES)),
        st.tuples(st.just("remove"), PLACE, st.none()),
        st.tuples(st.just("add"), PLACE, st.sampled_from(ODD_VALUES)),
        st.tuples(st.just("rename"), PLACE, st.sampled_from(ODD_NAMES)),
        st.tuples(st.just("double"), PLACE, st.none()),
        st.tuples(st.just("number"), PLACE, st.integers(-(2**70), 2**70)),
        st.tuples(st.just("text"), PLACE, st.text(max_size=20)),
    ),
    min_size=1,
    max_size=3,
)


def apply_bytes(data: bytes, plan: list[tuple[str, float, Any]]) -> bytes:
    """Return the bytes after each change, at its place."""
    for kind, place, what in plan:
        at = int(place * len(data))
        if kind in ("flip", "set") and data:
            value = data[at] ^ what if kind == "flip" else what
            data = data[:at] + bytes([value]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at] + data[at + what :]
        elif kind == "repeat":
            data = data[: at + what] + data[at:]
        elif kind == "insert":
            data = data[:at] + what + data[at:]
        elif kind == "end":
            data = data[:at]
    return data


def apply_tree(value: Any, plan: list[tuple[str, float, Any]]) -> Any:
    """Return JSON-able data after each change, at the place-th of its nodes."""
    value = json.loads(json.dumps(value))
    for kind, place, shared in plan:
        what = copy.deepcopy(shared)  # a value that is put in twice must not hold itself
        nodes = list(_nodes(value))
        if not nodes:
            return value
        parent, key = nodes[int(place * len(nodes))]
        if kind in ("replace", "number", "text"):
            parent[key] = what
        elif kind == "remove":
            del parent[key]
        elif kind == "add" and isinstance(parent, dict):
            parent["surprise"] = what
        elif kind == "add":
            parent.append(what)
        elif kind == "rename" and isinstance(parent, dict):
            parent[what] = parent.pop(key)
        elif kind == "double" and isinstance(parent, list):
            parent.append(parent[key])
    return value


def _nodes(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(items):
        yield value, key
        yield from _nodes(child)
