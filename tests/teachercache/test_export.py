"""export: a folder that readers of data sets take."""

from __future__ import annotations

import dataclasses

import polars as pl
import pytest

import teachercache
from teachercache.errors import UsageError
from teachercache.testing import synthetic_records
from teachercache.upkeep.optimize import optimize
from teachercache.views.export import export
from teachercache.write.writer import CacheWriter
from tests.teachercache.caches import PAGE_SPEC, page_cache


@pytest.fixture
def cache(tmp_path):
    return page_cache(tmp_path / "cache")


def test_an_export_is_a_folder_that_readers_of_data_sets_take(cache, tmp_path):
    folder = tmp_path / "export"
    written = export(cache, folder)
    assert sorted(str(p.relative_to(folder)) for p in written) == [
        "data/heldout/web-00000.parquet", "data/train/default-00000.parquet",
    ]  # fmt: skip
    frame = pl.read_parquet(folder / "data" / "train" / "*.parquet")
    assert frame["doc_id"].to_list() == [r.doc_id for r in cache.records(split="train")]
    card = (folder / "README.md").read_text()
    assert card.startswith("---\n")
    assert "| heldout | web | 9 |" in card
    import yaml

    head = yaml.safe_load(card.split("---")[1])
    assert head["configs"][0]["data_files"][1] == {"split": "train", "path": "data/train/*.parquet"}
    with pytest.raises(UsageError, match="not empty"):
        export(cache, folder)


def test_an_export_has_one_type_for_each_column_whatever_a_row_group_holds(tmp_path):
    """A rare meta value makes some row groups all null; readers of a data set want the same columns in every file."""
    writer = teachercache.create(tmp_path / "cache", PAGE_SPEC)
    writer.rows_per_group = 100
    records = [
        dataclasses.replace(r, meta={"stars": 5} if i in (7, 8) else {})
        for i, r in enumerate(synthetic_records(PAGE_SPEC, 12))
    ]
    writer.commit("a", records)
    writer.commit("b", synthetic_records(PAGE_SPEC, 3, seed=4, prefix="b", split="heldout"))
    writer.publish()
    written = export(teachercache.open(tmp_path / "cache"), tmp_path / "export")
    assert len(written) == 2, "one file for each split"
    assert {str(pl.read_parquet_schema(path)["meta_stars"]) for path in written} == {"Int64"}


def make(url, count: int = 5, **options) -> teachercache.Cache:
    writer = teachercache.CacheWriter(teachercache.create(url, PAGE_SPEC, probe=False).store, PAGE_SPEC, **options)
    writer.commit("s", synthetic_records(PAGE_SPEC, count))
    writer.publish()
    return teachercache.open(url)


def test_an_empty_cache_is_exported_as_an_empty_data_set(tmp_path):
    cache = make(tmp_path / "cache", 1)
    optimize(CacheWriter(cache.store, cache.spec), without=[record.doc_id for record in cache.records()])
    assert export(teachercache.open(tmp_path / "cache"), tmp_path / "folder") == []
    assert (tmp_path / "folder" / "README.md").exists()
