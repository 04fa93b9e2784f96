"""The report and the export: self-contained, readable, and what their tools expect."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess

import polars as pl
import pytest

import teachercache
from teachercache.errors import UsageError
from teachercache.testing import synthetic_records, synthetic_spec
from teachercache.views.export import export
from teachercache.views.report import report

SPEC = synthetic_spec(vocab_size=5000, top_k=100, name="<b>teacher & co</b>")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.fixture
def cache(tmp_path):
    writer = teachercache.create(tmp_path / "cache", SPEC)
    provenance = {"shard_seconds": 2.0, "engine": "synthetic 1", "device": "cpu"}
    writer.commit(
        "a", synthetic_records(SPEC, 40, seed=1, prefix="a"), drops={"too_long": 3, "empty": 1}, provenance=provenance
    )
    writer.commit("b", synthetic_records(SPEC, 9, seed=2, prefix="b", split="heldout", source="web"))
    writer.publish()
    return teachercache.open(tmp_path / "cache")


def test_the_page_asks_the_network_for_nothing_and_escapes_what_it_shows(cache):
    page = report(cache)
    assert not re.search(r"""(src|href)=(?!["']?data:)|url\(|@import|<script""", page)
    assert "<b>teacher & co</b>" not in page
    assert "&lt;b&gt;teacher &amp; co&lt;/b&gt;" in page
    assert page.count("<svg") == 5
    for text in (
        "Mass in the top 100",
        "too_long",
        "heldout",
        "topk_logprobs",
        "synthetic 1 on cpu",
        'name="viewport"',
    ):
        assert text in page


def test_an_empty_cache_has_a_page_too(tmp_path):
    writer = teachercache.create(tmp_path, SPEC)
    writer.publish()
    assert "There are no rows" in report(teachercache.open(tmp_path))


@pytest.mark.skipif(CHROMIUM is None, reason="headless Chromium is not installed (apt-get install chromium)")
@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desktop"])
def test_the_page_renders_in_headless_chromium_without_an_error(cache, tmp_path, width):
    page, picture = tmp_path / "report.html", tmp_path / "shot.png"
    # What the browser measured is written into the page's title by a probe that only this test adds.
    probe = """<script>onload = () => {
      const outside = e => !e.closest('.scroll') && e.getBoundingClientRect().right > innerWidth + 1;
      const wide = [...document.querySelectorAll('main *')].filter(outside).length;
      document.body.dataset.probe = JSON.stringify({scroll: document.documentElement.scrollWidth, inner: innerWidth, wide,
        plots: [...document.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().height > 60).length});
    }</script>"""
    plain = report(cache)
    page.write_text(plain, encoding="utf-8")
    frame = tmp_path / "frame.html"  # a phone's width: a window cannot be narrower than 500, a frame can
    frame.write_text(
        f'<body style="margin:0"><iframe src="report.html" width="{width}" height="2400" style="border:0"></iframe>'
    )
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--v=0",
             "--host-resolver-rules=MAP * ~NOTFOUND", f"--window-size={max(width, 500)},2400", "--virtual-time-budget=4000",
             f"--user-data-dir={tmp_path / 'profile'}"]  # fmt: skip
    shot = subprocess.run(
        [CHROMIUM, *flags, f"--screenshot={picture}", frame.as_uri()], capture_output=True, text=True, timeout=90
    )
    assert picture.stat().st_size > 20_000, shot.stderr[-2000:]
    assert "CONSOLE" not in shot.stderr, shot.stderr
    image = pixels(picture)
    assert len(image) > 20, "the picture is more than a blank page"

    loose = plain.replace("default-src 'none'; ", "default-src 'none'; script-src 'unsafe-inline'; ")
    page.write_text(loose.replace("</body>", probe + "</body>"), encoding="utf-8")
    dump = tmp_path / "dump.html"
    dump.write_text(
        f"""<body><iframe id=f src="report.html" width="{width}" height="2400" style="border:0"></iframe><script>
        onload = () => document.title = document.getElementById('f').contentDocument.body.dataset.probe</script>"""
    )
    flags.append("--allow-file-access-from-files")
    done = subprocess.run([CHROMIUM, *flags, "--dump-dom", dump.as_uri()], capture_output=True, text=True, timeout=90)
    found = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert found, done.stdout[:500] + done.stderr[-500:]
    import json

    seen = json.loads(found[1])
    assert seen["inner"] == width
    assert seen["scroll"] <= width, "nothing is cut off sideways"
    assert seen["wide"] == 0
    assert seen["plots"] == 5, "each plot has a height"


def pixels(path) -> set[tuple[int, ...]]:
    from PIL import Image

    with Image.open(path) as image:
        small = image.convert("RGB").resize((160, 400))
        return {colour for _, colour in small.getcolors(maxcolors=64_000)}


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
    writer = teachercache.create(tmp_path / "cache", SPEC)
    writer.rows_per_group = 100
    records = [
        dataclasses.replace(r, meta={"stars": 5} if i in (7, 8) else {})
        for i, r in enumerate(synthetic_records(SPEC, 12))
    ]
    writer.commit("a", records)
    writer.commit("b", synthetic_records(SPEC, 3, seed=4, prefix="b", split="heldout"))
    writer.publish()
    written = export(teachercache.open(tmp_path / "cache"), tmp_path / "export")
    assert len(written) == 2, "one file for each split"
    assert {str(pl.read_parquet_schema(path)["meta_stars"]) for path in written} == {"Int64"}
