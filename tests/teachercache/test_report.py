"""The report and the catalog as text: self-contained, right numbers, and names of any kind inert."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import yaml

import teachercache
from teachercache.cli import app
from teachercache.console import run_cli
from teachercache.format.spec import SampledRows
from teachercache.store.store import Store
from teachercache.testing import synthetic_record, synthetic_records, synthetic_spec
from teachercache.upkeep.optimize import optimize
from teachercache.views.report import report
from teachercache.views.statistics import calibration_bins, costs, losses_by_length, take_sample
from teachercache.views.usage import usage
from tests.teachercache.caches import PAGE_SPEC, page_cache
from tests.teachercache.sites import HOSTILE, make_cache, make_team, register
from trainer.config import load_config


@pytest.fixture
def cache(tmp_path):
    return page_cache(tmp_path / "cache")


class Page(HTMLParser):
    """Tags, attributes and visible text, as a browser would take them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_answers_in_order_and_asks_the_network_for_nothing(cache):
    text = report(cache)
    assert not re.search(r"""(src|href)=(?!["']?data:)|\burl\(|@import""", text)
    assert text.count("<script") == 1
    assert "<b>teacher & co</b>" not in text
    assert "&lt;b&gt;teacher &amp; co&lt;/b&gt;" in text
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles == [
        "Use it", "Teacher, licence, cost", "Three documents", "Which seq_len", "Quality by split and source",
        "Students trained from it", "Left out and repeated", "Bytes by column, codec open", "Identity",
    ]  # fmt: skip
    assert text.count("<svg") == 6
    for words in ("Mass in the top 100", "too_long", "heldout", "topk_logprobs", "synthetic 1", "CC0"):
        assert words in text


def test_an_empty_cache_has_a_page_too(tmp_path):
    writer = teachercache.create(tmp_path, PAGE_SPEC)
    writer.commit("a", [record := synthetic_records(PAGE_SPEC, 1, seed=1)[0]])
    writer.publish()
    optimize(writer, without=[record.doc_id])  # all was taken down
    page = report(teachercache.open(tmp_path))
    assert "There are no rows" in page
    assert "Bytes by column" not in page


def hostile_cache(url) -> teachercache.Cache:
    """A hostile string in every field that a string may be in."""
    spec = synthetic_spec(name=HOSTILE, engine=HOSTILE)
    overrides = {"revision": HOSTILE, "dtype": HOSTILE, "head_dtype": HOSTILE, "overrides": {HOSTILE: HOSTILE}}
    spec = spec.model_copy(update={"teacher": spec.teacher.model_copy(update=overrides)})
    writer = teachercache.create(url, spec, probe=False)
    rng = np.random.default_rng(0)
    meta = {"licence": HOSTILE, "url": HOSTILE}
    record = dataclasses.replace(synthetic_record(rng, spec, HOSTILE, length=40), meta=meta)
    said = {"shard_seconds": 1.0, "engine": HOSTILE, "device": HOSTILE}
    writer.commit("a", [record], drops={HOSTILE: 3}, provenance=said)
    writer.publish()
    cache = teachercache.open(url)
    register(cache, HOSTILE, 0.5)
    return cache


def assert_inert(text: str, harmless: str) -> None:
    page, known = Page(text), {name for name, _ in Page(harmless).tags}
    assert {name for name, _ in page.tags} <= known | {"a", "form", "input", "output", "label"}
    assert sum(name == "script" for name, _ in page.tags) == 1
    assert not [key for _, attrs in page.tags for key in attrs if key.startswith("on") or key == "src"]
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "<script>alert(1)</script>" in "".join(page.words)  # shown as it is, and as text


@pytest.mark.parametrize("kind", ["report", "catalog"])
def test_hostile_names_stay_text_in_every_field(tmp_path, kind, cache):
    hostile = hostile_cache(tmp_path / "team" / 'x"><script>alert(1)</script>' / "c")
    if kind == "report":
        text = report(hostile)
        assert text.count("alert(1)") >= 14  # title, heading, facts, documents, licence, drops, students, identity
    else:
        assert run("catalog", tmp_path / "team", "--out", tmp_path / "site")[0] == 0
        text = (tmp_path / "site/index.html").read_text(encoding="utf-8")
        (made,) = (tmp_path / "site/caches").iterdir()
        assert re.fullmatch(r"[A-Za-z0-9_.-]+\.html", made.name)
    assert_inert(text, report(cache))


def test_what_is_to_be_copied_runs(cache, tmp_path):
    texts = dict(usage(cache))
    (tmp_path / "train.yaml").write_text(texts.pop("Train a student: teachercache fit train.yaml"))
    config = load_config(tmp_path / "train.yaml")
    assert (config.cache, config.manifest, config.train.register) == (cache.url, 1, True)
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


# ---- statistics ------------------------------------------------------------------------------------------------


def test_statistics_are_those_of_a_naive_count(cache):
    sample = take_sample(cache, 64)
    for (split, source), part in sample.parts.items():
        hits, losses, mass, positions = [], [], [], []
        for record in cache.records(split, source):
            for i, p in enumerate(record.row_pos):
                mass.append(np.exp(record.topk_logprobs[i, :10].astype(np.float64)).sum())
                if record.loss_mask[i]:
                    hits.append(record.topk_ids[i, 0] == record.input_ids[p + 1])
                    positions.append(p)
                    if not np.isnan(record.target_logprob[i]):
                        losses.append(-record.target_logprob[i])
        assert part.values("hit").tolist() == hits
        assert part.values("position").tolist() == positions
        np.testing.assert_allclose(part.values("loss"), losses, rtol=1e-6)
        np.testing.assert_allclose(part.values("mass10"), mass, rtol=1e-5)
        assert part.licences == {"CC0": len(list(cache.records(split, source)))}


def test_a_small_source_is_sampled_and_weighs_by_its_rows(tmp_path):
    spec = synthetic_spec()
    writer = teachercache.create(tmp_path, spec)
    for i in range(6):
        writer.commit(f"s{i}", synthetic_records(spec, 20, seed=i, prefix=f"s{i}"))
    writer.commit("small", synthetic_records(spec, 1, seed=9, prefix="x", source="small", length=7))
    writer.publish()
    sample = take_sample(teachercache.open(tmp_path), 3)
    assert sample.files == 3
    assert len(sample.parts["train", "small"].values("top1")) == 7
    _, weights = sample.weighted("top1")
    assert weights.sum() == pytest.approx(teachercache.open(tmp_path).manifest.rows)


def test_lengths_say_what_each_setting_loses(tmp_path):
    spec, rng = synthetic_spec(), np.random.default_rng(0)
    writer = teachercache.create(tmp_path, spec)
    writer.commit("s", [synthetic_record(rng, spec, f"d{i}", length=n) for i, n in enumerate((8, 8, 8, 40))])
    writer.publish()
    lines = losses_by_length(take_sample(teachercache.open(tmp_path), 1))
    # learnt rows: 7 + 7 + 7 + 39; of the long record those at positions 8 to 38, 16 to 38, 32 to 38
    expected = [
        (8, 1 / 4, 31 / 60, 39 / 60),
        (16, 1 / 4, 23 / 60, 39 / 60),
        (32, 1 / 4, 7 / 60, 39 / 60),
        (64, 0, 0, 0),
    ]
    np.testing.assert_allclose(lines, expected, atol=1e-6)


def test_calibration_of_known_rows():
    believed, hit = np.array([0.15, 0.15, 0.95, 1.0]), np.array([0.0, 1.0, 1.0, 1.0])
    points, error = calibration_bins(believed, hit, np.ones(4))
    assert points == [(0.15, 0.5, 2), (pytest.approx(0.975), 1.0, 2)]
    assert error == pytest.approx((0.35 + 0.025) / 2)


def test_a_cost_needs_plausible_seconds(tmp_path):
    spec = synthetic_spec()
    writer = teachercache.create(tmp_path, spec)
    good = {"shard_seconds": 9.0, "teacher_seconds": 3.6, "tensor_parallel": 2}
    for i, said in enumerate([good, {}, *({"shard_seconds": value} for value in ("2", True, -1.0, 1e300, [1]))]):
        writer.commit(f"s{i}", synthetic_records(spec, 2, seed=i, prefix=f"s{i}"), provenance=said)
    (line,) = costs(teachercache.Ledger.open(tmp_path).commits())
    assert line.hours == pytest.approx(2 * 3.6 / 3600)
    assert line.median_rate == pytest.approx(line.rows / 9)


# ---- catalog ---------------------------------------------------------------------------------------------------


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
