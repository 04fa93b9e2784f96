"""export: write a plain-Parquet data set, for a user who wants a folder and not a cache, or has another trainer."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from teachercache.errors import UsageError
from teachercache.format.objects import MAX_FILE_BYTES, ManifestFile
from teachercache.parquet.codecs import get_codec
from teachercache.read.cache import Cache
from teachercache.views.card import data_card
from teachercache.views.formats import columns_of, trainer_columns

TARGET_BYTES = 500 * 2**20
THREADS = 16  # footers read at the same time


def export(
    cache: Cache,
    folder: Path,
    *,
    format: str | None = None,
    target_bytes: int = TARGET_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Write `folder`/data/<split>/<source>-NNNNN.parquet, README.md (the data card), the tokenizer; return the files.

    The columns are those of the open layout, or of a trainer (`format`, teachercache/views/formats.py). The folder must
    be empty or absent. It is what `datasets.load_dataset(folder)` and a hub upload expect.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty; give a new folder to export to.")
    if target_bytes > MAX_FILE_BYTES:
        raise UsageError(f"files of {target_bytes:,} bytes exceed the limit of {MAX_FILE_BYTES:,}.")
    codec = get_codec("open", cache.spec.rows, cache.spec.tokenizer.vocab_size)
    types = {} if format else _meta_types(cache)
    make = columns_of(format) if format else lambda block: codec.encode(block, types)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    done = 0
    for split, source in sorted({(f.split, f.source) for f in cache.manifest.files}):
        writer: pq.ParquetWriter | None = None
        number = itertools.count()
        for entry in cache.files(split, source):
            with cache.open_file(entry) as file:
                for block in file.blocks():
                    table = make(block)
                    if writer is not None and written[-1].stat().st_size > target_bytes:
                        writer.close()
                        writer = None
                    if writer is None:
                        path = folder / "data" / split / f"{source}-{next(number):05d}.parquet"
                        path.parent.mkdir(parents=True, exist_ok=True)
                        options = {"compression": "zstd"} if format else codec.writer_options(table.schema)
                        writer = pq.ParquetWriter(path, table.schema, **options)
                        written.append(path)
                    writer.write_table(table, row_group_size=len(table))
            done += 1
            if progress:
                progress(done, len(cache.manifest.files))
        if writer is not None:
            writer.close()
    paths = {split: [f"data/{split}/*.parquet"] for split in cache.splits}
    columns = trainer_columns(format, cache.spec.rows) if format else None
    (folder / "README.md").write_text(data_card(cache, {"default": paths}, columns=columns), encoding="utf-8")
    identity = json.dumps(cache.spec.model_dump(mode="json"), indent=2)
    (folder / "teacher.json").write_text(identity + "\n", encoding="utf-8")
    with suppress(UsageError):  # the cache holds no tokenizer, which is allowed
        shutil.copytree(cache.tokenizer_path(), folder / "tokenizer")
    return written


def _meta_types(cache: Cache) -> dict[str, pa.DataType]:
    """Return one type for each column of the corpus in all files of the data set; text where the cache's files disagree."""

    def of_file(entry: ManifestFile) -> dict[str, pa.DataType]:
        with cache.open_file(entry) as file:
            return file.meta_types()

    types: dict[str, pa.DataType] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(of_file, cache.manifest.files):
            for name, kind in found.items():
                types[name] = kind if types.get(name, kind) == kind else pa.string()
    return types
