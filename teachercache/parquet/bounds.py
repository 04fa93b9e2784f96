"""Bound what a Parquet file makes a reader allocate, from its footer and page headers, before anything is decoded.

A file of 9 KB can hold a billion values: dictionaries and run lengths repeat one value for nothing, and zstd repeats zeros.
Arrow allocates what the footer and the page headers claim, so both are checked: the footer once a file, against the
entry of the manifest; the page headers of a column chunk against the footer each time it is read (some 30 microseconds
a page, two or three pages a column of a row group).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from teachercache.errors import CorruptFile, UnsafeManifest
from teachercache.format.objects import FileEntry
from teachercache.parquet.types import A_RECORD, A_ROW, A_TOKEN

MAX_GROUP_BYTES = 3 * 2**27  # decoded; a record of 256 MiB after a row group that is nearly full
MAX_TEXT_BYTES = 2**28  # of a row group's strings, each repetition counted
MAX_FOOTER_BYTES = 2**22  # Arrow takes up to 300 bytes of memory for one byte of a crafted footer
MAX_GROUPS = 1024  # of a file that we write: its footer is then about 2.5 MB at most
MAX_HEADER_BYTES = 2**18  # of a page
MAX_PAGES = 4096  # of a column chunk; ours are of 4 MiB
OBJECT_BYTES = 120  # a Python string or bytes object, and the place that holds it
WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}
# PLAIN, PLAIN_DICTIONARY, RLE, DELTA_BINARY_PACKED, RLE_DICTIONARY, BYTE_STREAM_SPLIT. DELTA_BYTE_ARRAY is not among
# them: each of its strings can repeat the one before it.
ENCODINGS = {0, 2, 3, 5, 8, 9}
DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2 = 0, 2, 3


class Chunk(NamedTuple):
    """One column chunk of one row group, as the footer describes it."""

    name: str  # of the leaf, such as topk_ids.list.element.list.element
    start: int  # first byte in the file
    size: int  # compressed bytes
    num_values: int
    plain_size: int  # uncompressed bytes, page headers included


def chunks_of(footer: pq.FileMetaData, group: int, leaves: Iterable[int]) -> list[Chunk]:
    """Return the chunks of the given leaf columns in a row group."""
    found = []
    for i in leaves:
        column = footer.row_group(group).column(i)
        start = column.data_page_offset
        if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
            start = column.dictionary_page_offset
        sizes = (column.total_compressed_size, column.num_values, column.total_uncompressed_size)
        found.append(Chunk(column.path_in_schema, start, *sizes))
    return found


def leaves_of(footer: pq.FileMetaData, names: Iterable[str]) -> dict[str, list[int]]:
    """Return column -> its leaf columns, for the named columns that there are."""
    wanted = set(names)
    found: dict[str, list[int]] = {}
    for i in range(footer.num_columns):
        name = footer.schema.column(i).path.split(".", 1)[0]
        if name in wanted:
            found.setdefault(name, []).append(i)
    return found


def group_bytes(footer: pq.FileMetaData, group: int, leaves: Iterable[int]) -> int:
    """Return an upper bound of what the given columns of a row group take in memory, without repeated strings."""
    total = 0
    for i in leaves:
        schema, column = footer.schema.column(i), footer.row_group(group).column(i)
        kind = schema.physical_type
        width = schema.length if kind == "FIXED_LEN_BYTE_ARRAY" else WIDTHS.get(kind, 16)
        if kind in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"):
            width += OBJECT_BYTES
            total += max(0, column.total_uncompressed_size)
        total += max(0, column.num_values) * width
    return total


def check_groups(footer: pq.FileMetaData, entry: FileEntry, values: Mapping[str, int], others: Iterable[str]) -> None:
    """Raise UnsafeManifest for a row group beyond MAX_GROUP_BYTES, CorruptFile where counts and the entry disagree.

    `values` says how many values each column has, as `teachercache.parquet.types` does; `others` are the corpus's
    columns, with one a record.
    """
    leaves = leaves_of(footer, [*values, *others])
    everything = [i for found in leaves.values() for i in found]
    tokens = rows = records = 0
    for g in range(footer.num_row_groups):
        group = footer.row_group(g)
        size = group_bytes(footer, g, everything)
        stored = sum(group.column(i).total_compressed_size for i in everything)
        if max(size, stored, group.num_rows * OBJECT_BYTES) > MAX_GROUP_BYTES:
            raise UnsafeManifest(
                f"{entry.path}: row group {g} claims {max(size, stored):,} bytes in memory, limit {MAX_GROUP_BYTES:,}; "
                "it was made to harm its reader, or by another program."
            )
        counted = {name: group.column(found[0]).num_values for name, found in leaves.items()}
        of_rows = counted["row_pos"]
        expected = {A_RECORD: group.num_rows, A_TOKEN: counted["input_ids"], A_ROW: of_rows}
        for name, found in counted.items():
            each = values.get(name, A_RECORD)
            if found != (wanted := expected.get(each, of_rows * each)):
                raise CorruptFile(
                    f"{entry.path}: column {name} of row group {g} has {found:,} values, expected {wanted:,}."
                )
        records, tokens, rows = records + group.num_rows, tokens + counted["input_ids"], rows + of_rows
    for what, held, said in (
        ("records", records, entry.records), ("tokens", tokens, entry.tokens), ("rows", rows, entry.rows),
    ):  # fmt: skip
        if held != said:
            raise CorruptFile(f"{entry.path} holds {held:,} {what}, its entry says {said:,}.")


def merged(chunks: Iterable[Chunk], gap: int = 2**16) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of byte ranges that hold the chunks, joined where less than `gap` lies between."""
    start = stop = -1
    for chunk in sorted(chunks, key=lambda c: c.start):
        if start >= 0 and chunk.start <= stop + gap:
            stop = max(stop, chunk.start + chunk.size)
            continue
        if start >= 0:
            yield start, stop
        start, stop = chunk.start, chunk.start + chunk.size
    if start >= 0:
        yield start, stop


def check_pages(data: memoryview, chunk: Chunk) -> None:
    """Raise ValueError unless the pages in a chunk's bytes hold the values and bytes of the footer."""
    at = values = plain = pages = 0
    while values < chunk.num_values:
        begin, pages = at, pages + 1
        page, size_of_header = _struct(data[at : at + MAX_HEADER_BYTES], 0, PAGE)
        at += size_of_header
        kind, size, stored = (_number(page, field) for field in (1, 2, 3))
        if kind == DICTIONARY_PAGE and begin == 0:
            encoding, count = _number(page[7], 2), _number(page[7], 1)
            values_here = 0
        elif kind in (DATA_PAGE, DATA_PAGE_V2):
            header = page[5 if kind == DATA_PAGE else 8]
            encoding, count = _number(header, 2 if kind == DATA_PAGE else 4), _number(header, 1)
            values_here = count
        else:
            raise ValueError(f"column {chunk.name} has a page of kind {kind}")
        if encoding not in ENCODINGS:
            raise ValueError(f"column {chunk.name} has a page of encoding {encoding}, which FORMAT excludes")
        if min(size, stored, count) < 0 or stored > len(data) - at or pages > MAX_PAGES:
            raise ValueError(f"column {chunk.name} has a page that does not fit its column chunk")
        at += stored
        values += values_here
        plain += size
        if values > chunk.num_values or plain > max(chunk.plain_size, 0):
            raise ValueError(
                f"column {chunk.name} has pages of {values:,} values and {plain:,} bytes, its footer says "
                f"{chunk.num_values:,} and {chunk.plain_size:,}"
            )


def check_column_chunks(data: memoryview, schema: pq.ParquetSchema) -> None:
    """Raise ValueError for a footer with column chunks at which Arrow would end the process.

    pyarrow does not catch what Arrow throws as it opens a column chunk's metadata: for one that is encrypted, and for
    size statistics that do not fit the column. The column's name in it must be the schema's, too. Cost: some 60
    microseconds a column chunk, once a file.
    """
    for group in _struct(data, 0, FILE)[0].get(4, ()):
        for column, chunk in enumerate(group.get(1, ())):
            if column >= len(schema) or not chunk.keys() <= {3}:
                raise ValueError(f"column chunk {column} of a row group is encrypted or of no column")
            described, known = chunk.get(3, {}), schema.column(column)
            sizes = described.get(16, {})
            levels = {2: known.max_repetition_level + 1, 3: known.max_definition_level + 1}
            wrong = [field for field, count in levels.items() if sizes.get(field, 0) not in (0, count)]
            if wrong or (1 in sizes and known.physical_type != "BYTE_ARRAY"):
                raise ValueError(f"the size statistics of column {known.path} are about another column")
            if b".".join(described.get(3, ())) != known.path.encode():
                raise ValueError(f"the column chunk of {known.path} is named as another column")


# ---- Thrift's compact protocol, as far as footers and page headers need it -------------------------------------

_BYTE, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 3, 5, 6, 7, 8, 9, 10, 12
_BOOLS = (1, 2)
MAX_DEPTH = 10
# struct -> field -> its kind: a number; a struct, whose fields do not matter where it is empty; [kind], what a list
# holds; COUNT, the length of a list. What is not listed is skipped.
Fields = dict[int, Any]
COUNT: list[Any] = []
STATISTICS: Fields = {}
DATA: Fields = {1: _I32, 2: _I32, 3: _I32, 4: _I32, 5: STATISTICS}
DICTIONARY: Fields = {1: _I32, 2: _I32}
DATA_V2: Fields = {1: _I32, 2: _I32, 3: _I32, 4: _I32, 5: _I32, 6: _I32, 8: STATISTICS}
PAGE: Fields = {1: _I32, 2: _I32, 3: _I32, 5: DATA, 7: DICTIONARY, 8: DATA_V2}
SIZES: Fields = {1: _I64, 2: COUNT, 3: COUNT}
ENCRYPTION: Fields = {}
COLUMN_CHUNK: Fields = {3: {3: [_BINARY], 16: SIZES}, 8: ENCRYPTION, 9: _BINARY}
FILE: Fields = {4: [{1: [COLUMN_CHUNK]}]}


def _number(fields: Mapping[int, object], field: int) -> int:
    value = fields.get(field)
    if not isinstance(value, int):
        raise ValueError(f"a page header lacks field {field}")
    return value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("a header holds an endless number")


def _struct(data: memoryview, at: int, known: Fields, depth: int = 0) -> tuple[Fields, int]:
    """Return the fields of a struct, and where it ends; ValueError for what no header or footer can hold."""
    fields: Fields = {}
    number = 0
    while head := data[at]:
        at += 1
        kind, delta = head & 15, head >> 4
        if delta:
            number += delta
        else:
            raw, at = _varint(data, at)
            number = (raw >> 1) ^ -(raw & 1)
        wanted = known.get(number)
        value, at = (kind == 1, at) if kind in _BOOLS else _value(data, at, kind, wanted, depth)
        if wanted is not None:
            expected = wanted if isinstance(wanted, int) else _STRUCT if isinstance(wanted, dict) else _LIST
            if number in fields or kind != expected:
                raise ValueError(f"a header holds field {number} twice or in another type")
            fields[number] = value
    return fields, at + 1


def _value(data: memoryview, at: int, kind: int, wanted: Any, depth: int) -> tuple[Any, int]:
    if kind in (4, _I32, _I64):
        raw, at = _varint(data, at)
        value = (raw >> 1) ^ -(raw & 1)
        if kind == _I32 and not -(2**31) <= value < 2**31:
            raise ValueError("a header holds a number beyond 32 bits")
        return value, at
    if kind == _BINARY:
        size, at = _varint(data, at)
        return bytes(data[at : at + size]) if wanted == _BINARY else None, at + size
    if kind in (_BYTE, *_BOOLS):  # of a list
        return None, at + 1
    if kind == _DOUBLE:
        return None, at + 8
    if depth == MAX_DEPTH:
        raise ValueError("a header is nested too deeply")
    if kind == _STRUCT:
        return _struct(data, at, wanted if isinstance(wanted, dict) else {}, depth + 1)
    if kind not in (_LIST, _SET):
        raise ValueError(f"a header holds a field of kind {kind}")
    head, at = data[at], at + 1
    count, of = head >> 4, head & 15
    if count == 15:
        count, at = _varint(data, at)
    each = wanted[0] if isinstance(wanted, list) and wanted else None
    if each is not None and of != (_STRUCT if isinstance(each, dict) else each):
        raise ValueError("a header holds a list of another type")
    found = []
    for _ in range(count):
        value, at = _value(data, at, of, each, depth + 1)
        if each is not None:
            found.append(value)
    return (found if each is not None else count), at
