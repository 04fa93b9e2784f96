"""Bytes a row and decode rate of every encoding that we considered, on real teacher rows.

    python benchmarks/encodings.py CACHE_URL [--rows 24000] [--quick] [--sampled CACHE_URL]

CACHE_URL is any cache with K = 100; `make demo` leaves one in build/demo/s3/teachercache-demo/smollm2-135m. Every variant
writes the same records, all columns counted, footer included. The large vocabulary is the same rows with their ids
mapped one-to-one at random into 262,144: no locality of ids is left, so it is the worst case for such a teacher.
`--sampled` is a sampled cache (of a job with `rows: {kind: sampled, entries: 100}`, or what `benchmarks/parity.py` leaves
in OUT/models/cache/sampled-100): both layouts of its rows and of rows of 24 and 12 entries that are thinned from it.
Decoding is timed in process CPU seconds on one thread, from local disk to numpy arrays, best of three.
Results: benchmarks/results/encodings.json.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import teachercache
from benchmarks.report import RESULTS, parser, write
from teachercache.format.record import Record, check_record
from teachercache.format.spec import Rows, SampledRows
from teachercache.parquet.block import Block
from teachercache.parquet.codecs import get_codec
from teachercache.parquet.columns import LEAF
from teachercache.parquet.open import OpenCodec
from teachercache.upkeep.thin import thin_record, thinned_spec

IDS = f"topk_ids.{LEAF}.{LEAF}"
LOGPROBS = f"topk_logprobs.{LEAF}.{LEAF}"
LARGE_VOCAB = 262_144


def groups_of(records: Iterable[Record], rows: int) -> list[list[Record]]:
    """Cut records into groups of at least `rows` rows; the last may have fewer."""
    groups: list[list[Record]] = [[]]
    held = 0
    for record in records:
        if held >= rows:
            groups.append([])
            held = 0
        groups[-1].append(record)
        held += len(record.row_pos)
    return groups


def measure(codec: Any, records: list[Record], folder: Path, group: int = 16_384, **override: Any) -> dict[str, float]:
    """Write, count, read back; `override` replaces options of the Parquet writer."""
    rows = sum(len(r.row_pos) for r in records)
    path = folder / "x.parquet"
    began = time.process_time()
    tables = [codec.encode(Block.from_records(part)) for part in groups_of(records, group)]
    schema = tables[0].schema.with_metadata(codec.opening_metadata())
    options = codec.writer_options(schema)
    encodings = options["column_encoding"] | override.pop("column_encoding", {})
    options |= override
    dictionary = options["use_dictionary"] or ()
    options["column_encoding"] = {name: kind for name, kind in encodings.items() if name not in dictionary}
    with pq.ParquetWriter(path, schema, **options) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=len(table))
    encode = time.process_time() - began
    best = math.inf
    for _ in range(3):
        file = pq.ParquetFile(pa.memory_map(str(path)))
        began = time.process_time()
        for i in range(file.num_row_groups):
            codec.decode(file.read_row_group(i, use_threads=False))
        best = min(best, time.process_time() - began)
    rates = {"encode_rows_per_s": round(rows / encode), "decode_rows_per_s": round(rows / best)}
    return {"bytes_per_row": round(path.stat().st_size / rows, 2), **rates}


def columns_of(records: list[Record], spec: teachercache.CacheSpec, codec_name: str, folder: Path) -> dict[str, float]:
    """Bytes a row of each column in the layout as shipped."""
    codec = get_codec(codec_name, spec.rows, spec.tokenizer.vocab_size)
    measure(codec, records, folder)
    footer, rows = pq.read_metadata(folder / "x.parquet"), sum(len(r.row_pos) for r in records)
    sizes: Counter[str] = Counter()
    for g, c in itertools.product(range(footer.num_row_groups), range(footer.num_columns)):
        column = footer.row_group(g).column(c)
        sizes[column.path_in_schema.split(".")[0]] += column.total_compressed_size
    return {name: round(size / rows, 2) for name, size in sizes.most_common()}


class RecastCodec(OpenCodec):
    """The open codec with other types of its lists of K: the types of topk_ids and topk_logprobs in a row."""

    def __init__(self, rows: Rows, **types: pa.DataType) -> None:
        super().__init__(rows)
        self.types = types

    def encode(self, block: Block, meta_types: Any = None) -> pa.Table:
        table = super().encode(block, meta_types)
        for name, kind in self.types.items():
            i = table.schema.get_field_index(name)
            table = table.set_column(i, name, table.column(i).cast(pa.list_(kind)))
        return table


def packed_ids(records: list[Record], vocab_size: int) -> dict[str, float]:
    """What DistillKit does with ids: ceil(log2 V) bits each, in rank order, no entropy coding; and that through zstd."""
    import zstandard

    bits = math.ceil(math.log2(vocab_size))
    ids = np.concatenate([r.topk_ids for r in records])
    spread = (ids[..., None] >> np.arange(bits)) & 1
    packed = np.packbits(spread.astype(np.uint8).reshape(len(ids), -1), axis=1)
    squeezed = len(zstandard.ZstdCompressor(3).compress(packed.tobytes()))
    plain = packed.nbytes / len(ids)
    return {"bits": bits, "bytes_per_row": plain, "bytes_per_row_zstd3": round(squeezed / len(ids), 2)}


def compact_loss(spec: teachercache.CacheSpec, records: list[Record]) -> dict[str, float]:
    """What the compact codec changes, over all rows."""
    codec = get_codec("compact", spec.rows, spec.tokenizer.vocab_size)
    block = Block.from_records(records)
    back = codec.decode(codec.encode(block))
    ours, theirs = (np.argsort(b.topk_ids, axis=1) for b in (block, back))
    p = np.exp(np.take_along_axis(block.topk_logprobs, ours, 1).astype(np.float64))
    q = np.exp(np.take_along_axis(back.topk_logprobs, theirs, 1).astype(np.float64))
    error = np.abs(p - q).sum(1)
    return {
        "worst_row_l1": round(float(error.max()), 5),
        "mean_row_l1": round(float(error.mean()), 5),
        "worst_mass_error": round(float(np.abs(p.sum(1) - q.sum(1)).max()), 6),
        "mean_kl_nats": float(f"{np.mean((p * np.log(p / q)).sum(1)):.3e}"),
        "top1_agreement": round(float((block.topk_ids[:, 0] == back.topk_ids[:, 0]).mean()), 5),
    }


def study(spec: teachercache.CacheSpec, records: list[Record], folder: Path, quick: bool) -> dict[str, Any]:
    k, vocab = spec.top_k, spec.tokenizer.vocab_size
    lists = {"topk_ids": pa.list_(pa.int32()), "topk_logprobs": pa.list_(pa.float32())}
    dictionary = {"dictionary_pagesize_limit": 2**22}
    shipped = {
        "open (as shipped)": (OpenCodec(spec.rows), {}),
        "compact (as shipped)": (get_codec("compact", spec.rows, vocab), {}),
    }
    options: dict[str, dict[str, Any]] = {
        **{f"zstd {level}": {"compression_level": level} for level in (1, 3, 9, 15)},
        "snappy": {"compression": "snappy", "compression_level": None},
        "no compression": {"compression": "none", "compression_level": None},
        "ids plain": {"column_encoding": {IDS: "PLAIN"}},
        "ids delta": {"column_encoding": {IDS: "DELTA_BINARY_PACKED"}},
        "ids dictionary": {"use_dictionary": [IDS], **dictionary},
        "log-probabilities plain": {"column_encoding": {LOGPROBS: "PLAIN"}},
        "log-probabilities dictionary": {"use_dictionary": [LOGPROBS], **dictionary},
        **{f"pages of {size // 1024} KiB": {"data_page_size": size} for size in (2**16, 2**18, 2**20, 2**24)},
        **{f"row groups of {group} rows": {"group": group} for group in (4096, 8192, 65536)},
    }
    others = {
        "real float16": (RecastCodec(spec.rows, topk_logprobs=pa.list_(pa.float16(), k)), {}),
        "list of lists": (RecastCodec(spec.rows, **lists), {}),
        **{name: (OpenCodec(spec.rows), option) for name, option in options.items()},
    }
    variants: dict[str, tuple[Any, dict[str, Any]]] = shipped | ({} if quick else others)
    found = {}
    for name, (codec, options) in variants.items():
        found[name] = measure(codec, records, folder, **options)
        size, rate = found[name]["bytes_per_row"], found[name]["decode_rows_per_s"]
        print(f"{vocab:7,}  {name:32} {size:7.1f} B/row  {rate:9,} rows/s", flush=True)
    return {
        "vocab_size": vocab,
        "variants": found,
        "columns_open": columns_of(records, spec, "open", folder),
        "columns_compact": columns_of(records, spec, "compact", folder),
        "distillkit_id_packing": packed_ids(records, vocab),
        "compact_loss": compact_loss(spec, records),
    }


def sampled_study(url: str, rows: int, folder: Path) -> dict[str, Any]:
    """Bytes a row of sampled rows, as they are and thinned, in both vocabularies and layouts."""
    cache = teachercache.open(url)
    if not isinstance(cache.spec.rows, SampledRows):
        raise SystemExit(f"--sampled needs a sampled cache, found top-{cache.spec.top_k} rows in {url}")
    plain = [dataclasses.replace(r, split="train", source="all", meta={}) for r in cache.records()]
    kept, found = groups_of(plain, rows)[0], {}
    for entries in sorted({cache.spec.top_k, 24, 12}, reverse=True):
        if entries > cache.spec.top_k:
            continue
        spec = cache.spec if entries == cache.spec.top_k else thinned_spec(cache, entries, None)
        drawn = kept
        if spec is not cache.spec:
            drawn = [dataclasses.replace(thin_record(r, spec), content_key=r.content_key) for r in kept]
        mapped = f", ids at random in {LARGE_VOCAB:,}"
        for note, (kind, records) in (("", (spec, drawn)), (mapped, large_vocabulary(spec, drawn))):
            for record in records:
                check_record(record, kind)
            vocab = kind.tokenizer.vocab_size
            for name in ("open", "compact"):
                measured = measure(get_codec(name, kind.rows, vocab), records, folder)
                what = f"sampled {entries}, {name}{note}"
                found[what] = measured
                print(f"{vocab:7,}  {what:50} {measured['bytes_per_row']:7.1f} B/row", flush=True)
    return found


def large_vocabulary(
    spec: teachercache.CacheSpec, records: list[Record]
) -> tuple[teachercache.CacheSpec, list[Record]]:
    """Return spec and records with ids mapped into LARGE_VOCAB; drawn ids are sorted again, as the format has them."""
    tokenizer = spec.tokenizer.model_copy(update={"vocab_size": LARGE_VOCAB})
    to = np.random.default_rng(0).permutation(LARGE_VOCAB)[: spec.tokenizer.vocab_size].astype(np.int32)

    def mapped(record: Record) -> Record:
        ids = to[record.topk_ids]
        if record.exact is not None:
            drawn = np.arange(ids.shape[1]) >= record.exact[:, None]
            order = np.argsort(np.where(drawn, ids, -1), axis=1, kind="stable")
            ids = np.take_along_axis(ids, order, axis=1)
        return dataclasses.replace(record, topk_ids=ids, input_ids=to[record.input_ids])

    return spec.model_copy(update={"tokenizer": tokenizer}), [mapped(record) for record in records]


def main() -> None:
    line = parser(__doc__, rows=24_000, out=RESULTS / "encodings.json")
    line.add_argument("url")
    line.add_argument("--quick", action="store_true", help="only the two layouts as shipped")
    line.add_argument("--sampled", help="a sampled cache of the same teacher: its bytes a row too")
    args = line.parse_args()
    load_before = round(os.getloadavg()[0], 1)
    cache = teachercache.open(args.url)
    spec = cache.spec
    plain = (dataclasses.replace(r, split="train", source="all", meta={}) for r in cache.records())
    records = groups_of(plain, args.rows)[0]  # without what the corpus says of them
    for record in records:
        check_record(record, spec)
    rows = sum(len(r.row_pos) for r in records)
    large, remapped = large_vocabulary(spec, records)
    with tempfile.TemporaryDirectory() as name:
        result = {
            "teacher": spec.teacher.name,
            "rows": rows,
            "records": len(records),
            "top_k": spec.top_k,
            "machine": f"{platform.machine()}, {platform.processor() or 'CPU'}, pyarrow {pa.__version__}, numpy {np.__version__}",
            "load_before": load_before,
            "taken": time.strftime("%Y-%m-%d"),
            "real": study(spec, records, Path(name), args.quick),
            "large_vocabulary": study(large, remapped, Path(name), True),
            **({"sampled": sampled_study(args.sampled, args.rows, Path(name))} if args.sampled else {}),
        }
    write(args.out, result)
    print(json.dumps({k: v for k, v in result["real"].items() if k != "variants"}, indent=2))


if __name__ == "__main__":
    main()
