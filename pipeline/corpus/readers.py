"""Raw documents of a range of an input file, one at a time, memory bounded by the largest document allowed.

A range of a line file owns the lines that *start* inside it, so any cut of a file into ranges gives each line once,
without an index. Ranges of a compressed file are ranges of its text: there are no seek points, so what precedes a
range is decompressed (0.16 GB/s of text on a busy core) and thrown away. Ranges of a JSON array are bytes too: its items
have no marks, so what precedes a range is parsed. Parquet ranges are rows.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Literal

from pipeline.config import CorpusConfig, StorageConfig
from pipeline.corpus.inputs import READ_AHEAD, open_binary, store_errors
from pipeline.errors import InputDamaged
from teachercache.errors import UsageError

MAX_DOCUMENT_BYTES = 64 << 20
OPEN_END = 1 << 62  # end of the last range of a file whose length of text is not known
_BETWEEN = re.compile("[ \t\r\n,\ufeff]*")  # items of an array
PARQUET_BUFFER = 8 << 20  # bytes of a column chunk held at a time
ZSTD_WINDOW = 1 << 31  # dumps packed with `zstd --long=31` need it; allocated only where a frame asks for it

Unit = Literal["bytes", "rows", "file", "items"]  # items: of a JSON array
Compression = Literal["none", "gzip", "zstd"]
COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
FORMATS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    ".parquet": "parquet",
    **dict.fromkeys((".txt", ".text", ".md", ".rst", ".py"), "text"),
}


@dataclass(slots=True)
class RawDocument:
    """One document of a file, or the reason why it is none. `ordinal`: byte offset of a line or item, or row number."""

    ordinal: int
    value: dict[str, Any] | None
    problem: str | None = None
    end: int = 0  # of a line or item: the offset behind it
    arrow: bool = False  # from Parquet: structs have a null for every key that another row has


def file_format(url: str, corpus: CorpusConfig) -> tuple[str, str]:
    """Return (format, compression) of a file, by the job file or the file's name. Raises UsageError where neither tells."""
    name, compression = url.lower(), corpus.compression
    if name.startswith(("http://", "https://")):
        name = name.split("?", 1)[0].split("#", 1)[0]
    for suffix, kind in COMPRESSIONS.items():
        if name.endswith(suffix):
            name, compression = name.removesuffix(suffix), compression or kind
            break
    found: str | None = corpus.format or next((kind for suffix, kind in FORMATS.items() if name.endswith(suffix)), None)
    if found is not None:
        return found, compression or "none"
    raise UsageError(f"{url}: cannot tell the format from the name; set format: jsonl, parquet or text in the corpus")


def unit_of(url: str, corpus: CorpusConfig) -> Unit:
    """Return how a file is cut into ranges."""
    kind, compression = file_format(url, corpus)
    if kind == "parquet":
        return "rows"
    whole_text = kind == "text" and corpus.text_unit == "file"
    if compression != "none" or whole_text or corpus.limit_documents is not None:
        return "file"
    return "bytes"


def decompressor(compression: str) -> Any:
    """Return what decompresses one gzip member or zstd frame."""
    if compression == "gzip":
        return zlib.decompressobj(31)
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj()


class _Frames(io.RawIOBase):
    """Decompressed bytes of gzip members or zstd frames. What precedes a cut or damage is given before the error.

    Library readers raise at the cut and lose what was in their buffer, and with it the last good document.
    """

    def __init__(self, raw: IO[bytes], compression: str) -> None:
        self._raw, self._compression = raw, compression
        self._codec: Any = None
        self._plain = b""
        self._error: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._plain:
            if self._error is not None:
                raise self._error
            try:
                if not self._advance():
                    return 0
            except Exception as error:
                self._error = error
        count = min(len(buffer), len(self._plain))
        buffer[:count], self._plain = self._plain[:count], self._plain[count:]
        return count

    def _advance(self) -> bool:
        """Decompress one more piece of the file; return False at its clean end."""
        data = self._raw.read(1 << 16)
        if not data:
            if self._codec is not None:
                raise EOFError("it ends before the end-of-stream marker")
            return False
        pieces = []
        try:
            while data:
                if self._codec is None:
                    if self._compression == "gzip" and not data.strip(b"\0"):
                        break  # padding after the last member
                    self._codec = decompressor(self._compression)
                pieces.append(self._codec.decompress(data))
                if not self._codec.eof:
                    break
                data, self._codec = self._codec.unused_data, None
        finally:
            self._plain = b"".join(pieces)
        return True


@contextlib.contextmanager
def _decompressed(
    url: str, compression: str, read_ahead: int, storage: StorageConfig | None = None
) -> Iterator[IO[bytes]]:
    with open_binary(url, read_ahead, storage) as raw:
        # also where nothing is packed: fsspec's remote files have no readline with a limit, and a slow one without
        source: Any = raw if compression == "none" else _Frames(raw, compression)
        yield io.BufferedReader(source, 1 << 16)


def _skip(handle: IO[bytes], count: int) -> None:
    """Move a fresh handle `count` bytes on, decompressing them where it cannot jump."""
    if handle.seekable():
        handle.seek(count)
        return
    while count > 0 and (data := handle.read(min(count, 1 << 20))):
        count -= len(data)


def _lines(handle: IO[bytes], start: int, stop: int | None) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield (offset, end, line without its end mark) of lines that start in [start, stop); None for an oversized line."""
    position = start
    if start > 0:
        _skip(handle, start - 1)
        position = start - 1
        while True:  # the line that holds byte start-1 belongs to the range before
            rest = handle.readline(MAX_DOCUMENT_BYTES)
            position += len(rest)
            if not rest or rest.endswith(b"\n"):
                break
    while stop is None or position < stop:
        line = handle.readline(MAX_DOCUMENT_BYTES)
        if not line:
            return
        offset, position = position, position + len(line)
        if len(line) >= MAX_DOCUMENT_BYTES and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = handle.readline(MAX_DOCUMENT_BYTES)
                position += len(line)
            yield offset, position, None
        else:
            yield offset, position, (line if offset else line.removeprefix(codecs.BOM_UTF8)).rstrip(b"\r\n")


class _Broken(ValueError):
    """A JSON array that cannot be read any further."""


def _items(handle: IO[bytes], start: int, stop: int) -> Iterator[RawDocument]:
    """Yield the items of a JSON array that start in [start, stop), bytes from the file's beginning.

    Memory is bounded by the largest item. Arrays that follow one another are read as one. Raises _Broken.
    """
    decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
    scan = json.JSONDecoder(strict=False).raw_decode
    text, place, offset, at_end, inside = "", 0, 0, False, False

    def more() -> None:
        nonlocal text, place, at_end
        rest = text[place:]
        if len(rest) > MAX_DOCUMENT_BYTES:
            raise _Broken(f"the item at byte {offset} is longer than {MAX_DOCUMENT_BYTES >> 20} MiB")
        data = handle.read(max(1 << 16, min(len(rest), 1 << 24)))
        text, place, at_end = rest + decode(data, not data), 0, not data

    def move(to: int) -> None:
        nonlocal place, offset
        offset += len(text[place:to].encode("utf-8", "surrogateescape"))
        place = to

    while True:
        gap = _BETWEEN.match(text, place)
        move(gap.end() if gap else place)
        if place == len(text):
            if not at_end:
                more()
                continue
            if inside:
                raise _Broken("it ends inside the array")
            return
        if not inside or text[place] == "]":
            if text[place] != ("]" if inside else "["):
                raise _Broken(f"byte {offset} is behind the array's end")
            inside = not inside
            move(place + 1)
            continue
        if offset >= stop:
            return
        try:
            value, end = scan(text, place)
        except (ValueError, RecursionError) as error:
            said = getattr(error, "msg", "nested too deeply")
            cut_off = "Unterminated" in said or getattr(error, "pos", 0) > len(text) - 16
            if at_end or not cut_off:
                raise _Broken(f"the item at byte {offset} is no JSON: {said}") from error
            more()
            continue
        if end == len(text) and not at_end and not isinstance(value, (dict, list, str)):
            more()  # a number may go on
            continue
        first = offset
        move(end)
        if first >= start:
            known = isinstance(value, dict)
            yield RawDocument(first, value if known else None, None if known else "wrong_type", offset)


def _parse(offset: int, data: bytes | None, kind: str, text_column: str) -> RawDocument:
    if data is None:
        return RawDocument(offset, None, "oversized")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return RawDocument(offset, None, "invalid_utf8")
    if kind == "text":
        return RawDocument(offset, {text_column: text})
    if not text.strip():
        return RawDocument(offset, None, "empty_line")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return RawDocument(offset, None, "invalid_json")
    if not isinstance(value, dict):
        return RawDocument(offset, None, "wrong_type")
    return RawDocument(offset, value)


def read_documents(
    url: str, corpus: CorpusConfig, start: int, stop: int, unit: str, read_ahead: int = READ_AHEAD
) -> Iterator[RawDocument]:
    """Yield the documents of one range.

    Raises InputDamaged when the file ends early or cannot be decoded any further, and what `store_errors` raises.
    """
    with store_errors(url, corpus.storage):
        yield from _read(url, corpus, start, stop, unit, read_ahead)


def _read(url: str, corpus: CorpusConfig, start: int, stop: int, unit: str, read_ahead: int) -> Iterator[RawDocument]:
    kind, compression = file_format(url, corpus)
    if kind == "parquet":
        yield from _read_parquet(url, corpus, start, stop)
        return
    last_good: int | None = None
    count = 0
    try:
        with _decompressed(url, compression, read_ahead, corpus.storage) as handle:
            if kind == "text" and corpus.text_unit == "file":
                data = handle.read(MAX_DOCUMENT_BYTES + 1)
                yield _parse(0, data if len(data) <= MAX_DOCUMENT_BYTES else None, kind, corpus.fields.text_column)
                return
            if unit == "items":
                for document in _items(handle, start, stop):
                    yield document
                    last_good, count = document.ordinal, count + 1
                return
            for offset, end, line in _lines(handle, start, stop if unit == "bytes" else None):
                if line == b"" and kind == "jsonl":
                    continue
                document = _parse(offset, line, kind, corpus.fields.text_column)
                document.end = end
                yield document
                last_good, count = offset, count + 1
    except Exception as error:
        damaged = isinstance(error, (EOFError, zlib.error, _Broken)) or type(error).__name__ == "ZstdError"
        if (compression == "none" and not isinstance(error, _Broken)) or not damaged:
            raise
        raise InputDamaged(url, last_good, count, " ".join(str(error).split())) from error


def wanted_columns(corpus: CorpusConfig) -> list[str]:
    """Return the columns that a Parquet reader needs."""
    fields = corpus.fields
    named = [fields.text_column if fields.kind == "text" else None, fields.messages, fields.input_ids, fields.prompt]
    named += [fields.id, fields.loss_mask, fields.tools, fields.continuation, *corpus.meta]
    return list(dict.fromkeys(name for name in named if name is not None))


def _read_parquet(url: str, corpus: CorpusConfig, start: int, stop: int) -> Iterator[RawDocument]:
    import pyarrow.parquet as pq

    with open_binary(url, 0, corpus.storage) as handle:
        # a row group may hold a million rows: its pages are streamed, and nothing behind the range is read
        file = pq.ParquetFile(handle, buffer_size=PARQUET_BUFFER, pre_buffer=False)
        present = set(file.schema_arrow.names)
        columns = [name for name in wanted_columns(corpus) if name in present]
        first = 0
        for group in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if first + rows > start and first < stop:
                row = first
                for batch in file.iter_batches(batch_size=512, row_groups=[group], columns=columns):
                    if row + batch.num_rows > start and row < stop:
                        low, high = max(start - row, 0), min(stop - row, batch.num_rows)
                        for index, value in enumerate(batch.slice(low, high - low).to_pylist()):
                            yield RawDocument(row + low + index, value, arrow=True)
                    row += batch.num_rows
                    if row >= stop:
                        return
            first += rows


def parquet_shape(url: str, storage: StorageConfig | None = None) -> tuple[int, int, list[str]]:
    """Return (rows, uncompressed bytes, column names) from the footer alone."""
    import pyarrow.parquet as pq

    with store_errors(url, storage), open_binary(url, 0, storage) as handle:
        file = pq.ParquetFile(handle)
        meta = file.metadata
        total = sum(meta.row_group(g).total_byte_size for g in range(meta.num_row_groups))
        return meta.num_rows, total, list(file.schema_arrow.names)
