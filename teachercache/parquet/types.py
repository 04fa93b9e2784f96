"""The types of the columns of a data file, as FORMAT §3 fixes them, and the check that a file has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa

from teachercache.errors import CorruptFile

META_TYPES = (pa.string(), pa.int64(), pa.float64(), pa.bool_())
A_RECORD, A_TOKEN, A_ROW = 0, -1, -2  # how many values a column has; K > 0 means K a row
COMMON = {
    "doc_id": (pa.string(), A_RECORD),
    "window": (pa.int32(), A_RECORD),
    "start": (pa.int32(), A_RECORD),
    "content_key": (pa.binary(16), A_RECORD),
    "input_ids": (pa.int32(), A_TOKEN),
    "row_pos": (pa.int32(), A_ROW),
    "tail_logprob": (pa.float32(), A_ROW),
    "target_logprob": (pa.float32(), A_ROW),
    "loss_mask": (pa.bool_(), A_ROW),
    "entropy": (pa.float32(), A_ROW),
}
SAMPLED = {"exact": (pa.uint16(), A_ROW)}  # in files of sampled rows alone
MAY_BE_NULL = {"target_logprob", "entropy"}


def column_type(value: pa.DataType, each: int) -> pa.DataType:
    """Return the Arrow type of a column with `each` values: one a record, a list of one a token or row, of K a row."""
    if each == A_RECORD:
        return value
    return pa.list_(value if each in (A_TOKEN, A_ROW) else pa.list_(value, each))


def check_types(
    path: str, found: pa.Schema, columns: Mapping[str, tuple[pa.DataType, int]], meta: Iterable[str]
) -> None:
    """Raise CorruptFile unless each of our columns is there once, in its type, and each of the corpus's in one it may have."""
    for name, (value, each) in columns.items():
        here = found.get_all_field_indices(name)
        expected = column_type(value, each)
        if len(here) != 1 or not _same(found.field(here[0]).type, expected):
            said = ", ".join(_shown(found.field(i).type) for i in here) or "no such column"
            raise CorruptFile(f"{path}: column {name} must be {_shown(expected)}, found {said}.")
    for name in meta:
        here = found.get_all_field_indices(name)
        if len(here) != 1 or found.field(here[0]).type not in META_TYPES:
            said = ", ".join(_shown(found.field(i).type) for i in here)
            raise CorruptFile(
                f"{path}: column {ascii(name)[1:-1][:80]} must be string, int64, double or bool, found {said}."
            )


def _same(found: pa.DataType, expected: pa.DataType) -> bool:
    """Return whether two types are equal, whatever the items of their lists are called."""
    if pa.types.is_list(expected) or pa.types.is_fixed_size_list(expected):
        same_kind = found.id == expected.id and getattr(found, "list_size", 0) == getattr(expected, "list_size", 0)
        return same_kind and _same(found.value_type, expected.value_type)
    return bool(found == expected)


def _shown(kind: pa.DataType) -> str:
    return ascii(str(kind))[1:-1].replace("element: ", "").replace("item: ", "")[:120]
