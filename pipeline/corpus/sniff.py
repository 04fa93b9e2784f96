"""What a file really is, by its first bytes: a JSON array that is read as such, or something that no reader can use."""

from __future__ import annotations

import json
import re

from pipeline.config import CorpusConfig
from pipeline.corpus.inputs import open_binary, store_errors
from pipeline.corpus.readers import decompressor

HEAD_BYTES = 64 << 10
_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"PAR1", "a Parquet file: set format: parquet"),
    (b"\x1f\x8b", "packed by gzip: set compression: gzip"),
    (b"\x28\xb5\x2f\xfd", "packed by zstd: set compression: zstd"),
    (b"BZh", "packed by bzip2: unpack it, or pack it by gzip or zstd"),
    (b"\xfd7zXZ\0", "packed by xz: unpack it, or pack it by gzip or zstd"),
    (b"PK\x03\x04", "a zip archive: unpack it"),
    (b"ARROW1", "an Arrow file: write it as Parquet"),
    (b"Obj\x01", "an Avro file: write it as Parquet"),
    (b"SQLite format 3\0", "an SQLite database: export its table as Parquet or JSON lines"),
    (b"%PDF", "a PDF: extract its text"),
)
_LFS = b"version https://git-lfs.github.com/spec/"
_UTF16 = "UTF-16 text, expected UTF-8: convert it with `iconv -f UTF-16 -t UTF-8`"


def head_of(url: str, corpus: CorpusConfig, compression: str) -> tuple[bytes, bytes]:
    """Return the first bytes of a file, as stored and unpacked (empty where they cannot be)."""
    with store_errors(url, corpus.storage), open_binary(url, HEAD_BYTES, corpus.storage) as handle:
        raw = handle.read(HEAD_BYTES)
    if compression == "none":
        return raw, raw
    try:
        return raw, decompressor(compression).decompress(raw)[:HEAD_BYTES]
    except Exception:
        return raw, b""


def is_json_array(text: bytes) -> bool:
    """Return whether a file is one JSON array, over many lines or on one; lines that are lists are none."""
    start = _text(text).lstrip()
    if not start.startswith("["):
        return False
    line, _, rest = start.partition("\n")
    following = rest.lstrip()[:1]
    return not (following == "[" and isinstance(_parsed(line), list))


def what_it_is(raw: bytes, text: bytes, kind: str, compression: str) -> str | None:
    """Return what a file is that cannot be read as `kind`, and what to do; None where its bytes do not tell.

    raw, text: the first bytes, as stored and unpacked.
    """
    if raw.startswith(_LFS):
        return "a Git LFS pointer in place of the file: fetch the file itself with `git lfs pull`"
    if compression != "none" and not text:
        known = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd"}[compression]
        if raw.startswith(known):
            return None
        return f"not packed by {compression}, whatever its name says: set compression: none, or the right one"
    for magic, what in _MAGIC:
        if text.startswith(magic) and not (kind == "parquet" and magic == b"PAR1"):
            return what
    if text[257:262] == b"ustar":
        return "a tar archive: unpack it"
    if text.startswith((b"\xff\xfe", b"\xfe\xff")) or _every_other_zero(text):
        return _UTF16
    start = _text(text).lstrip()
    if re.match(r"<(!doctype|html|head|\?xml)", start, re.IGNORECASE):
        return "an HTML or XML page, as a failed download leaves one: fetch the file again"
    if kind == "json" and re.match(r"\[\s*\[", start):
        return "an array of arrays, expected an array of objects: flatten it with `jq -c '.[][]'`"
    return _of_lines(start) if kind == "jsonl" else None


def _of_lines(start: str) -> str | None:
    lines = [line for line in start.splitlines() if line.strip()][:20]
    if not lines:
        return None
    values = [_parsed(line) for line in lines[: -1 if len(lines) > 1 else None]]
    if all(isinstance(value, str) for value in values):
        if isinstance(_parsed(str(values[0])), dict):
            return "lines of strings that hold JSON, written twice over: `jq -c fromjson` undoes one of them"
        return "lines of strings, expected objects: `jq -c '{text: .}'` makes them"
    if all(isinstance(value, list) for value in values):
        return "lines of lists, expected objects: `jq -c '{messages: .}'` makes them of lists of messages"
    if all(value is None for value in values):
        if start.startswith(("{'", "['")):
            return "text of Python's dictionaries, which are not JSON: write it again with json.dumps"
        if start.startswith("{"):
            inner = re.match(r'\{\s*"([^"]{1,60})"\s*:\s*\[', start)
            key = f"`jq -c '.{inner[1]}[]'`" if inner else "`jq -c .`"
            return f"a JSON object over several lines, expected one object a line: {key} makes them"
        for mark, name in ((",", "commas (CSV)"), ("\t", "tabs (TSV)"), (";", "semicolons (CSV)")):
            if len(lines) > 1 and lines[0].count(mark) >= 1 and lines[0].count(mark) == lines[1].count(mark):
                return f"a table with {name}: write it as Parquet or JSON lines, for example with DuckDB"
        return "no JSON: set format: text where it is plain text"
    whole = _parsed(start)
    if len(lines) == 1 and isinstance(whole, dict):
        lists = [
            key for key, value in whole.items() if isinstance(value, list) and value and isinstance(value[0], dict)
        ]
        if lists and not {"messages", "conversations"} & set(lists):
            return f"one JSON object whose key {lists[0]!r} holds a list: `jq -c '.{lists[0]}[]'` makes lines of it"
    return None


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace").removeprefix("\ufeff")


def _parsed(line: str) -> object:
    """Return the value of a line, None where it is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _every_other_zero(text: bytes) -> bool:
    """Return whether bytes look like UTF-16 of Latin letters without a mark."""
    half = text[: 2 * (min(len(text), 200) // 2)]
    zeros = max(half[0::2].count(0), half[1::2].count(0))
    return len(half) >= 8 and zeros > 0.9 * (len(half) // 2)
