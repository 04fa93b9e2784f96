"""Other readers, without our code: they get the files that `teachercache ls --files` prints, and see the same rows."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pytest

import teachercache
from teachercache.testing import synthetic_records, synthetic_spec

SPEC = synthetic_spec(vocab_size=50_000, top_k=100)
S3_TEMPLATE = "s3://"


@pytest.fixture(scope="module")
def cache(s3_server):
    """A cache on S3 with two splits, and what our reader says: {(doc_id, position): (top-1 id, log-probability)}."""
    server = s3_server("moto")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.env().items():
            patch.setenv(name, value)
        url = server.new_bucket() + "/cache"
        writer = teachercache.create(url, SPEC)
        writer.commit("a", synthetic_records(SPEC, 12, seed=1, prefix="a"))
        writer.commit("b", synthetic_records(SPEC, 5, seed=2, prefix="b", split="heldout"))
        writer.publish()
        expected = {
            (r.doc_id, int(p)): (int(r.topk_ids[i, 0]), float(r.topk_logprobs[i, 0]))
            for r in teachercache.open(url).records()
            for i, p in enumerate(r.row_pos)
        }
        yield server, url, expected


@pytest.fixture
def files(cache):
    server, url, _ = cache
    command = [sys.executable, "-m", "teachercache.cli", "ls", "--files", url]
    done = subprocess.run(
        command, env=os.environ | server.env(), capture_output=True, text=True, check=True, timeout=120
    )
    paths = done.stdout.split()
    assert len(paths) == 2
    assert all(p.startswith("s3://") for p in paths)
    return paths


@pytest.fixture
def local_files(cache, files, tmp_path):
    """The same objects, fetched with boto3: a stand-in for readers whose S3 extension is a download."""
    client, out = cache[0].client(), []
    for i, path in enumerate(files):
        bucket, key = path.removeprefix("s3://").split("/", 1)
        out.append(str(tmp_path / f"{i}.parquet"))
        client.download_file(bucket, key, out[-1])
    return out


def test_duckdb_reads_the_rows(cache, local_files):
    rows = duckdb.sql(
        f"""
        with windows as (select doc_id, unnest(row_pos) as pos, unnest(topk_ids) as ids, unnest(topk_logprobs) as lps
                         from read_parquet({local_files}))
        select doc_id, pos, ids[1], lps[1] from windows
        """
    ).fetchall()
    assert {(doc, pos): (top, lp) for doc, pos, top, lp in rows} == cache[2]


def test_polars_reads_the_rows_from_s3(cache, files):
    server, _, expected = cache
    options = {
        "aws_endpoint_url": server.endpoint,
        "aws_access_key_id": server.env()["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": server.env()["AWS_SECRET_ACCESS_KEY"],
        "aws_region": "us-east-1",
        "aws_allow_http": "true",
    }
    frame = pl.scan_parquet(files, storage_options=options, hive_partitioning=False).select(
        "doc_id", "row_pos", pl.col("topk_ids").list.eval(pl.element().arr.get(0)).alias("top"),
        pl.col("topk_logprobs").list.eval(pl.element().arr.get(0)).alias("lp"),
    ).collect().explode("row_pos", "top", "lp")  # fmt: skip
    assert {(doc, pos): (top, lp) for doc, pos, top, lp in frame.iter_rows()} == expected


def test_pandas_reads_the_rows_from_s3(cache, files, monkeypatch):
    server, _, expected = cache
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    found = {}
    for path in files:
        frame = pd.read_parquet(path, columns=["doc_id", "row_pos", "topk_ids", "topk_logprobs"])
        for row in frame.itertuples():
            for pos, ids, lps in zip(row.row_pos, row.topk_ids, row.topk_logprobs, strict=True):
                found[row.doc_id, int(pos)] = (int(ids[0]), float(lps[0]))
    assert found == expected


def test_hugging_face_datasets_reads_the_rows(cache, local_files, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    table = datasets.load_dataset("parquet", data_files=local_files, split="train", cache_dir=str(tmp_path / "arrow"))
    found = {
        (row["doc_id"], pos): (ids[0], lps[0])
        for row in table.select_columns(["doc_id", "row_pos", "topk_ids", "topk_logprobs"])
        for pos, ids, lps in zip(row["row_pos"], row["topk_ids"], row["topk_logprobs"], strict=True)
    }
    assert found == cache[2]


def test_spark_reads_the_rows(cache, local_files, tmp_path):
    sql = pytest.importorskip("pyspark.sql", reason="pyspark is not installed")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java 17 or newer on the PATH")
    builder = sql.SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    # 127.0.0.1: Spark otherwise asks for the address of the host's name, which a sandbox may not have.
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    spark = builder.config("spark.sql.warehouse.dir", str(tmp_path / "warehouse")).getOrCreate()
    try:
        frame = spark.read.parquet(*local_files).selectExpr(
            "doc_id", "inline(arrays_zip(row_pos, topk_ids, topk_logprobs))"
        )
        rows = frame.selectExpr("doc_id", "row_pos", "topk_ids[0]", "topk_logprobs[0]").collect()
    finally:
        spark.stop()
    assert {(doc, pos): (top, lp) for doc, pos, top, lp in rows} == cache[2]


def test_stored_log_probabilities_are_float16_values(cache, local_files):
    values = pl.read_parquet(local_files[0])["topk_logprobs"].explode().explode().to_numpy()
    assert values.dtype == np.float32
    assert np.array_equal(values, values.astype(np.float16).astype(np.float32))


def test_iceberg_takes_the_files_without_a_copy(tmp_path):
    """The recipe of docs/FORMAT.md, run twice: a later manifest adds its new files."""
    pytest.importorskip("pyiceberg", reason="pyiceberg is not installed (pip install 'pyiceberg[sql-sqlite]')")
    text = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text(encoding="utf-8")
    recipe = re.search(r"^Iceberg\n.*?```python\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    assert recipe is not None
    code = re.sub(r"sqlite:///[^\"]*", f"sqlite:///{tmp_path}/catalog.db", recipe[1])
    code = re.sub(r"file:///[^\"]*", f"file://{tmp_path}/warehouse", code)
    writer = teachercache.create(tmp_path / "cache", SPEC)
    for name in ("a", "b"):
        writer.commit(name, synthetic_records(SPEC, 4, prefix=name))
        writer.publish()
        cache = teachercache.open(tmp_path / "cache")
        known: dict[str, Any] = {"files": [cache.file_url(entry) for entry in cache.files()]}
        exec(code, known)
    rows = known["table"].scan(selected_fields=("doc_id", "topk_ids")).to_arrow()
    assert sorted(rows["doc_id"].to_pylist()) == sorted(r.doc_id for r in cache.records(columns={"doc_id"}))


# ---- the recipes as they are written, on files that differ in their meta columns ------------------------------------

FORMAT = (Path(__file__).resolve().parents[2] / "docs/FORMAT.md").read_text(encoding="utf-8")


def recipe(heading: str, language: str) -> str:
    found = re.search(rf"^{heading}\n```{language}\n(.*?)```", FORMAT, re.S | re.M)
    assert found is not None, f"docs/FORMAT.md has no recipe of {heading}"
    return found[1]


@pytest.fixture(params=["one way", "the other way"])
def mixed(request, tmp_path):
    """Two sources, `meta: [url]` and `meta: [score]`: their files in both orders, and our reader's rows."""
    writer = teachercache.create(tmp_path / "cache", SPEC)
    for seed, (source, meta) in enumerate({"web": {"url": "http://x"}, "books": {"score": 3}}.items()):
        records = synthetic_records(SPEC, 4, seed=seed, prefix=source, source=source)
        writer.commit(source, [dataclasses.replace(record, meta=meta) for record in records])
    writer.publish()
    cache = teachercache.open(tmp_path / "cache")
    rows = {
        (r.doc_id, int(p)): (int(r.topk_ids[i, 0]), float(r.topk_logprobs[i, 0]))
        for r in cache.records()
        for i, p in enumerate(r.row_pos)
    }
    files = [cache.file_url(entry) for entry in cache.files()]
    return files if request.param == "one way" else files[::-1], rows


def last_value(code: str, names: dict[str, Any]) -> Any:
    """The value of a block's last expression."""
    tree = ast.parse(code)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    exec(compile(tree, "recipe", "exec"), names)
    return eval(compile(ast.Expression(last.value), "recipe", "eval"), names)


def as_rows(rows) -> dict[tuple[str, int], tuple[int, float]]:
    return {(doc, int(pos)): (int(top), float(lp)) for doc, pos, top, lp in rows}


def test_the_recipe_for_duckdb(mixed):
    files, rows = mixed
    sql = recipe("DuckDB", "sql").replace("['s3://bucket/cache/data/…parquet']", str(files))
    assert as_rows(duckdb.sql(sql).fetchall()) == rows


def test_the_recipe_for_polars(mixed):
    files, rows = mixed
    assert as_rows(last_value(recipe("Polars", "python"), {"files": files}).iter_rows()) == rows


def test_the_recipe_for_pandas(mixed, capsys):
    files, rows = mixed
    exec(recipe("pandas", "python"), {"files": files})
    printed = (line.split() for line in capsys.readouterr().out.splitlines())
    assert as_rows((doc, pos, top, np.float32(lp)) for doc, pos, top, lp in printed) == rows


def test_the_recipe_for_datasets(mixed, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    files, rows = mixed
    table = last_value(recipe("Hugging Face datasets", "python"), {"files": files})
    found = {
        (row["doc_id"], pos): (ids[0], lps[0])
        for row in table
        for pos, ids, lps in zip(row["row_pos"], row["topk_ids"], row["topk_logprobs"], strict=True)
    }
    assert found == rows


def test_the_command_of_the_help_of_ls(mixed):
    """`duckdb -c` itself is another download; its SQL is run here."""
    from teachercache.cli import ls

    files, rows = mixed
    sql = re.search(r'duckdb -c "(.*)"$', str(ls.__doc__), re.M)
    assert sql is not None
    listed = re.sub(r"\$\(.*\)\]", ",".join(f"'{file}'" for file in files) + "]", sql[1])
    found = duckdb.sql(listed)
    assert {"meta_url", "meta_score"} <= set(found.columns)
    assert sum(len(row[0]) for row in found.select("row_pos").fetchall()) == len(rows)


def test_the_least_versions_of_readers_are_those_of_the_development_tools():
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    said = re.search(r"Least versions: DuckDB ([0-9.]+) .*?Polars ([0-9.]+), pandas ([0-9.]+)", FORMAT, re.S)
    assert said is not None
    for name, version in zip(("duckdb", "polars", "pandas"), said.groups(), strict=True):
        assert f'"{name}>={version}"' in text
