"""What the beginning of an input file says about the whole: its shape, a sample, and the estimate for the preview."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.config import CorpusConfig, JobConfig
from pipeline.corpus.documents import BY_WISH, Document, Dropped, extract, id_hash
from pipeline.corpus.encode import ENDS_WITH_ASSISTANT, Encoder
from pipeline.corpus.inputs import InputFile, open_binary, store_errors
from pipeline.corpus.readers import (
    OPEN_END,
    Unit,
    decompressor,
    file_format,
    parquet_shape,
    read_documents,
    unit_of,
    wanted_columns,
)
from pipeline.corpus.sniff import head_of, is_json_array, what_it_is
from teachercache.errors import StoreUnavailable, UsageError

SAMPLE_BYTES = 32 << 10
SAMPLE_ROWS = 64  # of a Parquet file
SAMPLE_READ_AHEAD = 256 << 10
MISSING_FIELD = "missing_field"  # as documents.py drops it
ENOUGH_TO_JUDGE = 8  # documents of a sample that, all unfit for the job, mean that the job file is wrong


@dataclass(frozen=True, slots=True)
class InputShape:
    """What a file's name and footer say: how it is cut and how much there is.

    total: bytes of the file, or rows that are wanted. bytes_per_unit: 1, or uncompressed bytes a row.
    """

    kind: str
    compression: str
    unit: Unit
    total: int
    bytes_per_unit: float = 1.0


@dataclass(slots=True)
class Sample:
    """Counts over the beginning of a file; `units` are the bytes of text or rows that were looked at."""

    documents: int = 0
    tokens: int = 0
    rows: int = 0
    units: int = 0
    drops: Counter[str] = field(default_factory=Counter)
    fields: set[str] = field(default_factory=set)  # names that documents without a wanted field do have
    columns: set[str] = field(default_factory=set)  # names that any of the documents has
    details: dict[str, str] = field(default_factory=dict)  # of the first drop of each reason
    unprinted: Counter[str] = field(default_factory=Counter)  # what the chat template leaves out
    ids: list[bytes] = field(default_factory=list)
    whole: bool = False  # the sample is the file
    identity: str | None = None  # what a file is that cannot be read, by its first bytes

    @property
    def failures(self) -> int:
        """Return how many documents were dropped although the job did not ask for it."""
        return sum(count for reason, count in self.drops.items() if reason not in BY_WISH)

    def drop(self, drop: Dropped) -> None:
        """Count a document that is left out."""
        self.drops[drop.reason] += 1
        self.details.setdefault(drop.reason, drop.detail)

    @property
    def tokens_per_unit(self) -> float:
        """Return tokens a byte of text, or a row."""
        return self.tokens / self.units if self.units else 0.0


@dataclass(slots=True)
class SourceEstimate:
    """One line of the plan's preview; every number but files, bytes and shards is an estimate from samples."""

    source: str
    files: int = 0
    bytes: int = 0
    shards: int = 0
    documents: float = 0.0
    tokens: float = 0.0
    rows: float = 0.0
    drops: Counter[str] = field(default_factory=Counter)

    def add(self, other: SourceEstimate) -> None:
        """Add the counts of another file."""
        for name in ("files", "bytes", "shards", "documents", "tokens", "rows"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.drops.update(other.drops)


def shape_of(file: InputFile, corpus: CorpusConfig) -> InputShape:
    """Return a file's shape. Raises UsageError for a Parquet file that is unreadable or lacks a wanted column."""
    unit = unit_of(file.url, corpus)
    kind, compression = file_format(file.url, corpus)
    if kind == "jsonl" and is_json_array(head_of(file.url, corpus, compression)[1]):
        return InputShape("json", compression, "items", file.size)
    if unit != "rows":
        return InputShape(kind, compression, unit, file.size)
    try:
        rows, plain, columns = parquet_shape(file.url, corpus.storage)
    except (OSError, ValueError) as error:
        found = what_it_is(*head_of(file.url, corpus, "none"), kind, "none")
        said = f"it is {found}" if found else str(error).splitlines()[0]
        raise UsageError(f"{file.url}: not a readable Parquet file: {said}") from error
    missing = [c for c in wanted_columns(corpus) if c not in columns]
    if missing:
        raise UsageError(f"{file.url}: expected columns {missing}, found {columns}; check `fields` and `meta`")
    total = min(rows, corpus.limit_documents or rows)
    return InputShape(kind, compression, unit, total, max(1.0, plain / max(rows, 1)))


def take_sample(file: InputFile, shape: InputShape, corpus: CorpusConfig, job: JobConfig, encoder: Encoder) -> Sample:
    """Read the beginning of a file as a shard would, and count."""
    sample = Sample()
    documents, last = _read(file, shape, corpus, job, sample)
    whole = [len(document.text) for document in documents]
    for document in documents:
        document.text = document.text[: 4 * SAMPLE_BYTES]
    longest, generates = 1, job.recipe.mode == "generate"
    for document, tokens, chars in zip(documents, encoder.tokens(documents), whole, strict=True):
        scale = chars / len(document.text) if document.text else 1.0
        try:
            if isinstance(tokens, Dropped):
                raise tokens
            sample.unprinted.update(tokens.unprinted)
            windows = [] if generates else list(encoder.windows(document, tokens))
            sample.documents += 1
            longest = max(longest, round(len(document.text.encode()) * scale))
            if generates:  # what the teacher will write is not known; it is counted at its longest
                most = job.recipe.generate.max_tokens
                count = min(len(tokens.ids) + int(tokens.bos) + most, job.window_size)
                sample.tokens += count
                sample.rows += most if job.recipe.chat.rows == "masked" else count
                continue
            for window in windows:
                sample.tokens += round(len(window.input_ids) * scale)
                sample.rows += round(len(window.row_pos) * scale)
        except Dropped as drop:
            sample.drop(drop)
    if not sample.documents and sample.failures:
        sample.identity = what_it_is(*head_of(file.url, corpus, shape.compression), shape.kind, shape.compression)
    if shape.unit == "rows":
        sample.units = max(min(shape.total, SAMPLE_ROWS), 1)
    else:
        one_document = corpus.text_unit == "file" and shape.kind == "text"
        sample.units = longest if one_document else max(last, longest)
    return sample


def _read(
    file: InputFile, shape: InputShape, corpus: CorpusConfig, job: JobConfig, sample: Sample
) -> tuple[list[Document], int]:
    """Return the sampled documents and the end of the last one; count in `sample` what is dropped."""
    documents, last = [], 0
    limit = min(shape.total, SAMPLE_ROWS) if shape.unit == "rows" else SAMPLE_BYTES
    stop = OPEN_END if shape.unit == "items" else limit
    try:
        for raw in read_documents(file.url, corpus, 0, stop, shape.unit, SAMPLE_READ_AHEAD):
            if shape.unit in ("file", "items") and raw.ordinal > limit:
                break
            last = raw.end
            sample.columns.update(raw.value or {})
            try:
                documents.append(extract(raw, corpus, job.recipe.filters, file.digest, file.url))
                sample.ids.append(id_hash(documents[-1]))
            except Dropped as drop:
                sample.drop(drop)
                if drop.reason == MISSING_FIELD:
                    sample.fields.update(raw.value or {})
        else:
            sample.whole = limit >= shape.total if shape.unit in ("rows", "bytes") else True
    except (StoreUnavailable, UsageError):
        raise
    except Exception as error:  # damaged input is reported by its shard, with the file and the last good document
        sample.drop(Dropped(f"unreadable ({type(error).__name__})", " ".join(str(error).split())[:300]))
    return documents, last


USUAL_NAMES = {
    "messages": ("messages", "conversations", "conversation", "chat", "dialog"),
    "text": ("text", "content", "raw_content", "body", "document"),
    "input_ids": ("input_ids", "token_ids", "tokens"),
    "prompt": ("prompt", "question", "instruction"),
}


def check_sample(file: InputFile, corpus: CorpusConfig, sample: Sample, *, lenient: bool) -> str | None:
    """Return a warning where nothing of a sample can be used. Raises UsageError where job file or input must be wrong.

    lenient: the job allows any share of drops, so only what no document of the sample can be right about is refused.
    """
    if sample.documents or not sample.failures:
        return None
    if sample.identity and not lenient:
        raise UsageError(f"{file.url} gives no document: it is {sample.identity}")
    lost = Counter({k: n for k, n in sample.drops.items() if k not in BY_WISH})
    enough = sample.whole or lost.total() >= ENOUGH_TO_JUDGE
    if lost.keys() == {MISSING_FIELD} and enough:
        named = corpus.fields.model_dump(exclude_none=True) or {"text": corpus.fields.text_column}
        missing = {key: name for key, name in named.items() if name not in sample.fields}
        usual = ((key, name) for key, names in USUAL_NAMES.items() for name in names if name in sample.fields)
        hint = next((f", for example `fields: {{{key}: {name}}}`" for key, name in usual), "")
        raise UsageError(
            f"{file.url}: all {lost.total()} documents of a sample lack a field that source {corpus.source!r} names: "
            f"expected {missing or named}, found {sorted(sample.fields)}; correct `fields`{hint}"
        )
    if lost.keys() == {ENDS_WITH_ASSISTANT} and enough:
        raise UsageError(
            f"{file.url}: recipe.mode generate answers the last turn of a conversation, but all {lost.total()} of a "
            f"sample of source {corpus.source!r} end with the assistant's answer; leave that turn out, or score it as "
            "it is with recipe.mode=score"
        )
    return f"{file.url}: nothing of the sample can be used: {reasons(sample)}"


def reasons(sample: Sample) -> str:
    """Return why documents were dropped, with counts and what is known of the first of each reason."""
    return ", ".join(
        f"{reason} {count}" + (f" (first: {sample.details[reason]})" if sample.details.get(reason) else "")
        for reason, count in sample.drops.most_common(4)
    )


def check_source(corpus: CorpusConfig, samples: Sequence[tuple[InputFile, Sample]], *, lenient: bool) -> None:
    """Raise UsageError for a source that gives no document, as far as its samples show it; see check_sample.

    Where samples are not whole files, that takes ENOUGH_TO_JUDGE documents that are not left out on purpose.
    """
    if any(sample.documents for _, sample in samples):
        return
    whole = all(sample.whole for _, sample in samples)
    failures = sum(sample.failures for _, sample in samples)
    if not whole and (lenient or failures < ENOUGH_TO_JUDGE):
        return
    total = Sample()
    for _, sample in samples:
        total.drops.update(sample.drops)
        total.details = sample.details | total.details
    first = next((file for file, sample in samples if sample.drops), samples[0][0]).url if samples else ""
    identity = next((sample.identity for _, sample in samples if sample.identity), None)
    lost = total.drops.total()
    what = "none of its" if whole else "of a sample none of"
    said = f"{what} {lost} documents can be used: {reasons(total)}" if lost else "its files hold no document"
    hint = (
        f"; it is {identity}" if identity else "" if failures else "; the job's filters leave them out" if lost else ""
    )
    raise UsageError(f"source {corpus.source!r} gives no document ({first}): {said}{hint}")


def share_warning(corpus: CorpusConfig, samples: Sequence[tuple[InputFile, Sample]], most: float) -> list[str]:
    """Return a warning where more than the share `most` of a source's sampled documents cannot be used."""
    failures: Counter[str] = Counter()
    for _, sample in samples:
        failures.update({r: n for r, n in sample.drops.items() if r not in BY_WISH})
    lost, seen = failures.total(), failures.total() + sum(sample.documents for _, sample in samples)
    if not lost or lost <= most * seen:
        return []
    said = ", ".join(f"{reason} {count}" for reason, count in failures.most_common(4))
    return [
        f"source {corpus.source!r}: {lost} of {seen} documents of a sample cannot be used ({said}); a run stops at "
        f"more than {most:.0%} (run.max_drop_share)"
    ]


def column_warnings(corpus: CorpusConfig, samples: Sequence[tuple[InputFile, Sample]]) -> list[str]:
    """Return a warning where no document of the samples has a column that a document may lack: `meta` and `fields.tools`."""
    known = set().union(*(sample.columns for _, sample in samples))
    optional = [
        *corpus.meta,
        *([corpus.fields.tools] if corpus.fields.tools and corpus.fields.kind == "messages" else []),
    ]
    absent = [name for name in optional if known and name not in known]
    found = ", ".join(sorted(known))
    return [
        f"source {corpus.source!r}: no document of a sample has the column {name}; found: {found}" for name in absent
    ]


NOT_PRINTED = {  # reasons of chat_spans.py, and the key of a turn
    "template_drops_call": "tool_calls",
    "template_drops_turn": "content",
    "template_drops_thought": "the thoughts (reasoning_content, reasoning or thinking)",
}


def template_warnings(corpus: CorpusConfig, samples: Sequence[tuple[InputFile, Sample]]) -> list[str]:
    """Return a warning for everything that the chat template does not print, as far as the samples show it."""
    dropped, unprinted, seen = Counter[str](), Counter[str](), 0
    for _, sample in samples:
        dropped.update({reason: count for reason, count in sample.drops.items() if reason in NOT_PRINTED})
        unprinted.update(sample.unprinted)
        seen += sample.failures + sample.documents
    ways = "use a template that prints it (recipe.chat.template)"
    lost = [
        f"source {corpus.source!r}: the chat template does not print {NOT_PRINTED[reason]} of some turns; {count} of {seen} "
        f"sampled documents are dropped ({reason}): {ways}"
        for reason, count in dropped.items()
    ]
    silent = [
        f"source {corpus.source!r}: the chat template does not print {key} in {count} of {seen} sampled documents, so "
        f"teacher and students never see it: {ways}, or leave it out of the corpus"
        for key, count in unprinted.items()
    ]
    return lost + silent


def text_units(file: InputFile, shape: InputShape, corpus: CorpusConfig, sample: Sample) -> float:
    """Return the estimated length of what is read of a file: bytes of text, or rows."""
    if shape.unit not in ("file", "items"):
        return shape.total
    units = shape.total * _inflation(file, shape.compression, corpus)
    if corpus.limit_documents is None or not sample.units:
        return units
    in_file = (sample.documents + sample.drops.total()) / sample.units * units
    return units * min(1.0, corpus.limit_documents / max(in_file, 1.0))


def _inflation(file: InputFile, compression: str, corpus: CorpusConfig) -> float:
    """Return bytes of text per byte of file, from the beginning of the file."""
    if compression == "none" or not file.size:
        return 1.0
    with store_errors(file.url, corpus.storage), open_binary(file.url, SAMPLE_READ_AHEAD, corpus.storage) as handle:
        head = handle.read(SAMPLE_READ_AHEAD)
    try:
        plain = len(decompressor(compression).decompress(head))
    except Exception:  # a damaged file is reported by its shard; here 4 is a fair guess
        return 4.0
    return max(1.0, plain / len(head))


def estimate(file: InputFile, shape: InputShape, corpus: CorpusConfig, sample: Sample, units: float) -> SourceEstimate:
    """Scale a sample to the `units` of the whole file."""
    scale = units / sample.units if sample.units else 0.0
    one_document = shape.kind == "text" and corpus.text_unit == "file"
    return SourceEstimate(
        corpus.source,
        files=1,
        bytes=file.size,
        documents=float(sample.documents) if one_document else sample.documents * scale,
        tokens=sample.tokens * scale,
        rows=sample.rows * scale,
        drops=Counter({reason: round(count * scale) or 1 for reason, count in sample.drops.items()}),
    )
