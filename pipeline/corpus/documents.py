"""Raw documents → documents that may be tokenised, or a reason why not. Every drop has one short reason."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.config import CorpusConfig, FiltersConfig
from pipeline.corpus.conversations import check_text, read_messages, read_tools
from pipeline.corpus.dropped import BY_WISH, Dropped
from pipeline.corpus.readers import RawDocument
from teachercache.format.record import is_unicode

__all__ = ["BY_WISH", "Document", "Dropped", "ascii_json", "choose_split", "extract", "fraction_of"]


@dataclass(slots=True)
class Document:
    """One document before tokenisation. `kind` says which of text, messages and input_ids is set."""

    doc_id: str
    ordinal: int
    source: str
    split: str
    kind: str
    content_hash: bytes
    text: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Any] | None = None
    input_ids: np.ndarray | None = None
    given_mask: np.ndarray | None = None
    continuation: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)


def ascii_json(value: Any) -> str:
    """Return one spelling per value, for digests of recipes and conversations.

    ASCII, where teachercache.format.spec.canonical_json is UTF-8: a conversation may hold half of a surrogate pair, which
    UTF-8 cannot spell. The two give other digests for any text beyond ASCII, so neither can replace the other.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _is_conversations(value: dict[str, Any]) -> bool:
    """Return whether a row is ShareGPT's: its messages have another name and other keys."""
    found = value.get("conversations")
    return isinstance(found, list) and bool(found) and isinstance(found[0], dict) and "from" in found[0]


def _array(value: Any, name: str) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError:  # lists of unequal lengths
        raise Dropped("wrong_type", name) from None


def _ids_value(value: Any, name: str) -> np.ndarray:
    array = _array(value, name)
    if array.ndim == 1 and array.dtype.kind == "f" and np.array_equal(array, np.rint(array)):
        array = array.astype(np.int64)  # 1.0 and 2.0: integers that went through a table of floats
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        found = {"U": "text", "f": "fractions", "b": "booleans"}.get(array.dtype.kind, "something else")
        raise Dropped("wrong_type", f"{name} should be a list of integers, found {found}")
    if not array.size:
        raise Dropped("empty")
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise Dropped("id_out_of_range", name)
    return array.astype(np.int32)


def _mask_value(value: Any, ids: np.ndarray) -> np.ndarray:
    mask = _array(value, "loss_mask")
    if mask.shape != ids.shape or mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all():
        raise Dropped("wrong_type", "loss_mask needs one boolean (or 0 and 1) per token")
    return mask.astype(bool)


def fraction_of(content_hash: bytes, salt: str) -> float:
    """Return a number in [0, 1) that depends on the content and the salt alone."""
    return int.from_bytes(hashlib.blake2b(content_hash, digest_size=8, key=salt.encode()[:64]).digest(), "big") / 2**64


def id_hash(document: Document) -> bytes:
    """Return 16 bytes; equal ones are one document to a cache."""
    named = f"{document.split}\0{document.source}\0{document.doc_id}"
    return hashlib.blake2b(named.encode(), digest_size=16).digest()


def choose_split(corpus: CorpusConfig, content_hash: bytes) -> str:
    """Return the split of a document: fixed, or by hash of its content, decided before windowing."""
    if corpus.splits is None:
        return corpus.split
    point, edge = fraction_of(content_hash, "split"), 0.0
    for name, share in corpus.splits.items():
        edge += share
        if point < edge:
            return name
    return list(corpus.splits)[-1]


def extract(
    raw: RawDocument, corpus: CorpusConfig, filters: FiltersConfig, input_digest: str, url: str = ""
) -> Document:
    """Return the document that a raw one holds, by the corpus's `fields`. Raises Dropped."""
    if raw.problem is not None or raw.value is None:
        raise Dropped(raw.problem or "wrong_type")
    value, fields, kind = raw.value, corpus.fields, corpus.fields.kind

    def wanted(column: str | None) -> tuple[Any, str]:
        """Return the value of a column that must be there, and its name."""
        name = str(column)
        if value.get(name) is None:
            raise Dropped("missing_field", name)
        return value[name], name

    text, messages, ids, mask, tools, continuation = "", [], None, None, None, None
    if kind in ("text", "prompt"):
        text = check_text(*wanted(fields.text_column if kind == "text" else fields.prompt))
        if not text.strip():
            raise Dropped("blank" if text else "empty")
        hashed = text.encode()
        if fields.continuation is not None:
            continuation = check_text(*wanted(fields.continuation))
            if not continuation:
                raise Dropped("empty_continuation")
            hashed += b"\0" + continuation.encode()
    elif kind == "messages":
        if value.get(str(fields.messages)) is None and _is_conversations(value):
            messages = read_messages(value["conversations"], "conversations", value, arrow=raw.arrow)
        else:
            column, name = wanted(fields.messages)
            messages = read_messages(column, name, value, arrow=raw.arrow)
        tools = read_tools(value.get(fields.tools), fields.tools, arrow=raw.arrow) if fields.tools else None
        try:
            hashed = ascii_json([messages, tools]).encode()
        except (TypeError, ValueError):
            raise Dropped("wrong_type", "messages hold values that JSON cannot") from None
    else:
        ids = _ids_value(*wanted(fields.input_ids))
        hashed = ids.tobytes()
        if fields.loss_mask is not None:
            mask = _mask_value(value.get(fields.loss_mask), ids)
    content_hash = hashlib.blake2b(hashed, digest_size=16).digest()
    if corpus.sample < 1.0 and fraction_of(content_hash, "sample0") >= corpus.sample:
        raise Dropped("sampled_out")
    if fields.id is not None:
        given, name = wanted(fields.id)
        if given == "":
            raise Dropped("missing_field", name)
        if isinstance(given, float) and given.is_integer():  # a column of integers that once held a null
            given = int(given)
        if not isinstance(given, (str, int)) or isinstance(given, bool):
            raise Dropped("wrong_type", f"{name} should be a string or an integer")
        doc_id = str(given)
        if corpus.id_scope == "file":
            doc_id = f"{url.split('?', 1)[0].rsplit('/', 1)[-1].split('.', 1)[0]}/{doc_id}"
        if len(doc_id) > 4096 or not is_unicode(doc_id):
            said = "more than 4096 characters" if len(doc_id) > 4096 else "half a surrogate pair, which is no text"
            raise Dropped("doc_id", f"{name} {doc_id[:60]!a} holds {said}")
    else:  # the content; and the place, unless equal documents are dropped
        place = hashlib.blake2b(f"{input_digest}:{raw.ordinal}".encode(), digest_size=6).hexdigest()
        doc_id = content_hash.hex() + ("" if filters.dedup == "corpus" else f"-{place}")
    return Document(
        doc_id=doc_id,
        ordinal=raw.ordinal,
        source=corpus.source,
        split=choose_split(corpus, content_hash),
        kind=kind,
        content_hash=content_hash,
        text=text,
        messages=messages,
        tools=tools,
        input_ids=ids,
        given_mask=mask,
        continuation=continuation,
        meta={name: value.get(name) for name in corpus.meta},
    )
