"""The plan: which ranges of which input files are shards. Deterministic, made without a teacher or a cluster.

A shard's id is a hash of (input file's digest, range, row recipe), so the same input is the same shard whatever else
the corpus holds: adding a file adds shards, changing the number of actors changes nothing. The cut of a file depends
on that file and the recipe alone. Token counts come from a sample of each file and are called estimates.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pipeline.config import CorpusConfig, JobConfig, canonical_json
from pipeline.corpus.documents import Dropped, extract
from pipeline.corpus.encode import ENDS_WITH_ASSISTANT, Encoder
from pipeline.corpus.inputs import (
    InputFile,
    expand,
    fingerprint_all,
    open_binary,
)
from pipeline.corpus.readers import (
    OPEN_END,
    ZSTD_WINDOW,
    file_format,
    parquet_shape,
    read_documents,
    unit_of,
)
from pipeline.corpus.readers import wanted_columns as parquet_columns
from pipeline.planning.prior_plans import Cut, Earlier
from teachercache import Plan, PlanShard
from teachercache.errors import StoreUnavailable, UsageError
from teachercache.format.sealed import utc_now

RECIPE_VERSION = 1  # raise when the code makes other rows from the same recipe: every shard then gets another id
SAMPLE_BYTES = 32 << 10
SAMPLE_READ_AHEAD = 256 << 10
USUAL_TOKENS_PER_BYTE = 0.25  # where a sample holds nothing that can be used
CUT_COMPRESSED_ABOVE = 16 << 20
MOST_CUTS_OF_COMPRESSED = 64  # then decompressing up to a range costs about 3 % of the teacher's time over it
LARGE_WHOLE_FILE = 256 << 20
MISSING_FIELD = "missing_field"  # as documents.py drops it
ENOUGH_TO_JUDGE = 8  # documents of a sample that, all unfit for the job, mean that the job file is wrong


@dataclass(slots=True)
class Density:
    """What a sample of a file says: documents and tokens per byte of text (or per row), and drops by reason."""

    documents: int = 0
    tokens: int = 0
    rows: int = 0
    units: int = 0  # bytes or rows that were looked at
    drops: Counter[str] = field(default_factory=Counter)
    fields: set[str] = field(default_factory=set)  # names that documents without a wanted field do have


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


@dataclass(slots=True)
class Planned:
    """A plan with what a person wants to know before paying for it."""

    plan: Plan
    estimates: list[SourceEstimate]
    warnings: list[str]


def recipe_of(job: JobConfig, corpus: CorpusConfig, template: str | None, *, brief: bool = False) -> dict[str, Any]:
    """Everything that turns this corpus's bytes into rows. `template`: the text that renders its conversations.

    brief: only what differs from the defaults. Digests are taken of that, so that an option which a later version
    adds changes no shard of a job that does not use it; who changes a default must raise RECIPE_VERSION.
    """
    recipe = job.recipe.model_dump(mode="json", exclude_defaults=brief)
    recipe.setdefault("windows", {})["size"] = job.window_size
    chat = recipe.setdefault("chat", {})
    if corpus.fields.kind == "messages":
        chat["template"] = hashlib.sha256((template or "").encode()).hexdigest()
    else:  # of the options for conversations, this one alone acts on others
        recipe["chat"] = {"rows": chat["rows"]} if chat.get("rows", "all") != "all" else {}
    if job.recipe.mode != "generate":
        recipe.pop("generate", None)
    return {
        "version": RECIPE_VERSION,
        "recipe": recipe,
        "corpus": corpus.model_dump(mode="json", exclude={"files"}, exclude_defaults=brief),
    }


def recipe_digest(job: JobConfig, corpus: CorpusConfig, template: str | None) -> str:
    return hashlib.sha256(canonical_json(recipe_of(job, corpus, template, brief=True)).encode()).hexdigest()


def shard_id(input_digest: str, start: int, stop: int, unit: str, recipe: str) -> str:
    """32 hex digits of sha256(input digest, range, recipe digest)."""
    return hashlib.sha256(f"{input_digest}\n{unit}:{start}:{stop}\n{recipe}".encode()).hexdigest()[:32]


def cut(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Equal ranges of about `size` that cover [0, total)."""
    count = max(1, round(total / size))
    edges = [total * i // count for i in range(count + 1)]
    yield from ((a, b) for a, b in pairwise(edges) if b > a)


def _inflation(url: str, compression: str, size: int) -> float:
    """Bytes of text per byte of file, from the beginning of the file."""
    if compression == "none" or not size:
        return 1.0
    with open_binary(url, SAMPLE_READ_AHEAD) as handle:
        head = handle.read(SAMPLE_READ_AHEAD)
    try:
        if compression == "gzip":
            plain = len(zlib.decompressobj(31).decompress(head))
        else:
            import zstandard

            plain = len(zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj().decompress(head))
    except Exception:  # a damaged file is the shard's business, which names it; here 4 is a fair guess
        return 4.0
    return max(1.0, plain / len(head))


def sample_density(file: InputFile, corpus: CorpusConfig, job: JobConfig, encoder: Encoder, rows: int = 0) -> Density:
    """Reads the beginning of a file as a shard would and counts. `rows` > 0: a Parquet file of so many rows."""
    density = Density()
    unit = unit_of(file.url, corpus)
    filters = job.recipe.filters
    documents = []
    limit = min(rows, 64) if unit == "rows" else SAMPLE_BYTES
    last = 0
    try:
        for raw in read_documents(file.url, corpus, 0, limit, unit, filters.invalid_utf8, SAMPLE_READ_AHEAD):
            if unit == "file" and raw.ordinal > limit:
                break
            last = raw.end
            try:
                documents.append(extract(raw, corpus, filters, file.digest))
            except Dropped as drop:
                density.drops[drop.reason] += 1
                if drop.reason == MISSING_FIELD:
                    density.fields.update(raw.value or {})
    except (StoreUnavailable, UsageError):
        raise
    except Exception as error:  # damaged input is reported by its shard, with the file and the last good document
        density.drops[f"unreadable ({type(error).__name__})"] += 1
    whole = [len(document.text) for document in documents]
    for document in documents:
        document.text = document.text[: 4 * SAMPLE_BYTES]
    longest = 0
    for document, tokens, chars in zip(documents, encoder.tokens(documents), whole, strict=True):
        if isinstance(tokens, Dropped):
            density.drops[tokens.reason] += 1
            continue
        density.documents += 1
        longest = max(longest, round(len(document.text.encode()) * (chars / max(len(document.text), 1))))
        if job.recipe.mode == "generate":  # what the teacher will write is not known; it is counted at its longest
            count = min(len(tokens.ids) + int(tokens.bos) + job.recipe.generate.max_tokens, job.window_size)
            density.tokens += count
            density.rows += job.recipe.generate.max_tokens if job.recipe.chat.rows == "masked" else count
            continue
        try:
            scale = chars / len(document.text) if document.text else 1.0
            for window in encoder.windows(document, tokens):
                density.tokens += round(len(window.input_ids) * scale)
                density.rows += round(len(window.row_pos) * scale)
        except Dropped as drop:
            density.drops[drop.reason] += 1
    if unit == "rows":
        density.units = max(limit, 1)
    elif corpus.text_unit == "file" and file_format(file.url, corpus)[0] == "text":
        density.units = max(longest, 1)
    else:
        density.units = max(last, longest, 1)
    return density


def _check_sample(file: InputFile, corpus: CorpusConfig, density: Density, whole: bool) -> list[str]:
    """A warning where nothing of a sample can be used. Raises UsageError where the job file must be wrong."""
    lost = Counter({k: n for k, n in density.drops.items() if k != "sampled_out"})
    if density.documents or not lost:
        return []
    enough = whole or lost.total() >= ENOUGH_TO_JUDGE
    if lost.keys() == {MISSING_FIELD} and enough:
        named = corpus.fields.model_dump(exclude_none=True) or {"text": corpus.fields.text_column}
        missing = {key: name for key, name in named.items() if name not in density.fields}
        raise UsageError(
            f"{file.url}: all {lost.total()} documents of a sample lack a field that source {corpus.source!r} names: "
            f"expected {missing or named}, found {sorted(density.fields)}; correct `fields`"
        )
    if lost.keys() == {ENDS_WITH_ASSISTANT} and enough:
        raise UsageError(
            f"{file.url}: recipe.mode generate answers the last turn of a conversation, but all {lost.total()} of a "
            f"sample of source {corpus.source!r} end with the assistant's answer; leave that turn out, or score it as "
            "it stands with recipe.mode=score"
        )
    return [f"{file.url}: nothing of the sample can be used: {', '.join(f'{k} {n}' for k, n in lost.items())}"]


def _may_cut_compressed(file: InputFile, corpus: CorpusConfig) -> bool:
    """Whether a file that has no seek points is worth cutting: lines, large, and not only its beginning is wanted."""
    kind, compression = file_format(file.url, corpus)
    lines = kind == "jsonl" or (kind == "text" and corpus.text_unit == "line")
    return compression != "none" and lines and corpus.limit_documents is None and file.size > CUT_COMPRESSED_ABOVE


def _shards_of(
    file: InputFile, corpus: CorpusConfig, job: JobConfig, encoder: Encoder, digest: str, given: list[Cut] | None
) -> tuple[list[PlanShard], SourceEstimate, list[str]]:
    """Shards of one input file, its estimate, and warnings. `given`: the cut that an earlier job began to work by."""
    unit, warnings = unit_of(file.url, corpus), []
    kind, compression = file_format(file.url, corpus)
    total, parquet_rows, bytes_per_unit = file.size, 0, 1.0
    if unit == "rows":
        try:
            parquet_rows, plain, columns = parquet_shape(file.url)
        except (OSError, ValueError) as error:
            raise UsageError(f"{file.url}: not a readable Parquet file: {str(error).splitlines()[0]}") from error
        missing = [c for c in parquet_columns(corpus) if c not in columns]
        if missing:
            raise UsageError(f"{file.url}: expected columns {missing}, found {columns}; check `fields` and `meta`")
        bytes_per_unit = max(1.0, plain / max(parquet_rows, 1))
        parquet_rows = min(parquet_rows, corpus.limit_documents or parquet_rows)
        total = parquet_rows
    density = sample_density(file, corpus, job, encoder, parquet_rows)
    text_units = total * (_inflation(file.url, compression, file.size) if unit == "file" else 1.0)
    if corpus.limit_documents is not None and unit == "file" and density.units:  # Parquet's rows are cut above
        in_file = (density.documents + density.drops.total()) / density.units * text_units
        text_units *= min(1.0, corpus.limit_documents / max(in_file, 1.0))
    warnings += _check_sample(file, corpus, density, whole=density.units >= total)
    per_unit = density.tokens / density.units if density.units else 0.0
    estimate = SourceEstimate(
        corpus.source,
        files=1,
        bytes=file.size,
        documents=density.documents / density.units * text_units if density.units else 0,
        tokens=per_unit * text_units,
        rows=density.rows / density.units * text_units if density.units else 0,
        drops=Counter({k: round(v / density.units * text_units) or 1 for k, v in density.drops.items()}),
    )
    if kind == "text" and corpus.text_unit == "file":
        estimate.documents = float(density.documents)
    if job.run.shard_bytes is not None:
        size = job.run.shard_bytes / bytes_per_unit
    else:
        size = job.run.shard_tokens / (per_unit or USUAL_TOKENS_PER_BYTE * bytes_per_unit)
    if unit == "file" and _may_cut_compressed(file, corpus):
        unit, total = "bytes", max(1, round(text_units))
        ranges = list(cut(total, max(1, int(size), total // MOST_CUTS_OF_COMPRESSED)))
        ranges[-1] = (ranges[-1][0], OPEN_END)
    elif unit == "file":
        ranges = [(0, total)] if total else []
        if total > LARGE_WHOLE_FILE and compression != "none":
            warnings.append(
                f"{file.url}: {total / 2**20:.0f} MiB without seek points is one shard; split it to share it"
            )
    else:
        ranges = list(cut(total, max(1, int(size))))
    cuts = given or [(unit, start, stop) for start, stop in ranges]
    extent = max(1, round(text_units) if cuts and cuts[-1][2] == OPEN_END else total)
    shards = [
        PlanShard(
            shard_id=shard_id(file.digest, start, stop, unit, digest),
            source=corpus.source,
            input=file.url,
            input_digest=file.digest,
            start=start,
            stop=stop,
            unit=unit,
            estimated_tokens=round(estimate.tokens * max(0, min(stop, extent) - start) / extent),
        )
        for unit, start, stop in cuts
    ]
    estimate.shards = len(shards)
    return shards, estimate, warnings


def make_plan(
    job: JobConfig, encoder: Encoder, spec_digest: str, earlier: Earlier | None = None, threads: int = 8
) -> Planned:
    """Plans a whole job. Cost: one head (or local hash) and a sample of 32 KiB of every file.

    `earlier`: what the cache holds; inputs that have committed shards keep their cut, and, in corpus-wide
    de-duplication, their copy of a document. Raises UsageError where they stand there under another recipe.
    """
    earlier = earlier or Earlier()
    shards: list[PlanShard] = []
    estimates: list[SourceEstimate] = []
    warnings: list[str] = []
    seen: dict[str, str] = {}
    for index, corpus in enumerate(job.corpora):
        digest = recipe_digest(job, corpus, encoder.chat_template)
        tree = recipe_of(job, corpus, encoder.chat_template)
        tree.pop("version")
        files = []
        for file in fingerprint_all(expand(job.patterns(corpus))):
            first = seen.setdefault(f"{file.digest}:{digest}", file.url)
            if first != file.url:
                warnings.append(f"{file.url} has the same content as {first}; it is cached once")
                continue
            if not file.size:
                warnings.append(f"{file.url} is empty")
                continue
            earlier.use(file.url, file.digest, digest, tree)
            files.append(file)
        total = SourceEstimate(corpus.source)
        with ThreadPoolExecutor(max_workers=threads) as pool:
            made = pool.map(
                lambda file, c=corpus, d=digest: _shards_of(file, c, job, encoder, d, earlier.cut_of(file.digest, d)),
                files,
            )
            for part, estimate, notes in made:
                shards += [s.model_copy(update={"detail": {"corpus": index}}) for s in part]
                warnings += notes
                for name in ("files", "bytes", "shards", "documents", "tokens", "rows"):
                    setattr(total, name, getattr(total, name) + getattr(estimate, name))
                total.drops.update(estimate.drops)
        estimates.append(total)
    if not shards:
        raise UsageError("the corpora hold no data: every input file is empty")
    if job.recipe.filters.dedup == "corpus":
        from pipeline.planning.dedup import mark_duplicates

        shards = mark_duplicates(job, shards, earlier.committed)
    stored = {
        "corpora": [c.model_dump(mode="json") for c in job.corpora],
        "recipes": [recipe_of(job, c, encoder.chat_template)["recipe"] for c in job.corpora],
        "recipe_digests": [recipe_digest(job, c, encoder.chat_template) for c in job.corpora],
    }
    plan = Plan(spec_digest=spec_digest, created=utc_now(), job=stored, shards=shards)
    return Planned(plan, estimates, warnings)
