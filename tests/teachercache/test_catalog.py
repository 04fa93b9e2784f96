"""The catalog as text: what it lists, where it writes, and that names stay names."""

from __future__ import annotations

import contextlib
import io
import json
import re

import pytest

from teachercache.cli import app
from teachercache.console import run_cli
from teachercache.format.spec import SampledRows
from teachercache.store.store import Store
from tests.teachercache.sites import hostile_cache, make_cache, make_team
from tests.teachercache.test_page import assert_inert


def run(*arguments) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), pytest.raises(SystemExit) as done:
        run_cli(app, [str(argument) for argument in arguments])
    return int(str(done.value.code)), out.getvalue()


def test_a_catalog_lists_what_can_be_read_and_says_what_cannot(tmp_path):
    make_team(tmp_path / "team")
    status, out = run("catalog", tmp_path / "team", "--out", tmp_path / "site", "--json")
    assert status == 1  # one is damaged
    listed = {line["url"].rsplit("/team/")[1]: line for line in json.loads(out[out.index("{\n") :])["caches"]}
    assert {name: line["state"] for name, line in listed.items()} == {
        "gemma-3-27b/new": "not published", "gpt-oss-20b/mixed": "complete", "gpt-oss-20b/old": "unreadable",
        "llama-3.1-8b/web": "complete", "qwen3-32b/chats-24": "complete", "qwen3-32b/code": "incomplete",
    }  # fmt: skip
    assert "TC-E102" in listed["gpt-oss-20b/old"]["error"]
    assert listed["llama-3.1-8b/web"]["runs"] == 3
    index = (tmp_path / "site/index.html").read_text(encoding="utf-8")
    links = re.findall(r'href="(caches/[^"]+)"', index)
    assert len(links) == 4
    assert all('href="../index.html"' in (tmp_path / "site" / link).read_text(encoding="utf-8") for link in links)
    assert "0.1877" in index
    (tmp_path / "team/gpt-oss-20b/mixed").rename(tmp_path / "elsewhere")
    status, out = run("catalog", tmp_path / "team", "--out", tmp_path / "site")
    assert "1 pages belong to no cache that was found: caches/gpt-oss-20b-mixed-" in out


def test_a_site_on_an_object_store_is_served_as_html(s3_url, tmp_path):
    make_cache(tmp_path / "team/one", "one", rows=SampledRows(entries=24))
    assert run("catalog", tmp_path / "team", "--out", f"{s3_url}/site")[0] == 0
    assert run("catalog", tmp_path / "team", "--out", f"{s3_url}/site")[0] == 0  # again: pages are replaced
    store = Store.open(f"{s3_url}/site")
    (page,) = store.list("caches/")
    for path in ("index.html", page.path):
        assert store.fs.info(f"{store.root}/{path}")["ContentType"] == "text/html"


def test_a_catalog_of_nothing_is_misuse(tmp_path):
    status, out = run("catalog", tmp_path, "--out", tmp_path / "site")
    assert (status, "there is no cache" in out) == (2, True)
    assert not (tmp_path / "site").exists()


def test_hostile_names_stay_text_and_files_have_plain_names(tmp_path):
    hostile_cache(tmp_path / "team" / 'x"><script>alert(1)</script>' / "c")
    assert run("catalog", tmp_path / "team", "--out", tmp_path / "site")[0] == 0
    assert_inert((tmp_path / "site/index.html").read_text(encoding="utf-8"))
    (made,) = (tmp_path / "site/caches").iterdir()
    assert re.fullmatch(r"[A-Za-z0-9_.-]+\.html", made.name)
