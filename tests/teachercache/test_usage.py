"""What the report and the pages offer to copy runs."""

from __future__ import annotations

import contextlib
import io

import pytest
import yaml

import teachercache
from teachercache.store.store import Store
from teachercache.views.usage import usage
from tests.teachercache.caches import page_cache
from trainer.config import load_config


@pytest.fixture
def cache(tmp_path):
    return page_cache(tmp_path / "cache")


def test_what_is_to_be_copied_runs(cache, tmp_path):
    texts = dict(usage(cache))
    (tmp_path / "train.yaml").write_text(texts.pop("Train a student: teachercache fit train.yaml"))
    config = load_config(tmp_path / "train.yaml")
    assert (config.cache, config.manifest, config.split) == (cache.url, 1, "train")
    assert config.eval.split == "heldout"
    for title, text in texts.items():
        out, names = io.StringIO(), {}
        with contextlib.redirect_stdout(out):
            exec(text, names)
        if title == "DuckDB":
            assert "perplexity" in out.getvalue()
        if title == "Hugging Face datasets":
            assert sum(1 for _ in names["rows"]) == 40
    odd = teachercache.Cache(Store(cache.store.fs, "/x", "s3://b/a\"\nb'c"), cache.spec, cache.manifest)
    assert yaml.safe_load(usage(odd)[0][1])["cache"] == odd.url
    compile(usage(odd)[1][1], "loop", "exec")
