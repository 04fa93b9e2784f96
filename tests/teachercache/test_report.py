"""The report and the export: self-contained, readable, and what their tools expect."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

import teachercache
from teachercache.testing import synthetic_records, synthetic_spec
from teachercache.upkeep.optimize import optimize
from teachercache.views.report import report
from tests.teachercache.caches import PAGE_SPEC, page_cache

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.fixture
def cache(tmp_path):
    return page_cache(tmp_path / "cache")


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


def test_a_name_like_a_hole_of_the_template_or_with_control_characters_is_only_shown(tmp_path):
    writer = teachercache.create(tmp_path, synthetic_spec(name="{{body}}{{foot}}\x1b[2J"))
    writer.commit(
        "a", synthetic_records(writer.spec, 1), provenance={"shard_seconds": 1.0, "engine": "e\x1b\x9b\u202e"}
    )
    writer.publish()
    page = report(teachercache.open(tmp_path))
    assert page.count("<section>") == 6
    assert r"{{body}}{{foot}}\x1b[2J" in page
    assert r"e\x1b\x9b\u202e on ?" in page
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", page)


def test_an_empty_cache_has_a_page_too(tmp_path):
    writer = teachercache.create(tmp_path, PAGE_SPEC)
    writer.commit("a", [record := synthetic_records(PAGE_SPEC, 1, seed=1)[0]])
    writer.publish()
    optimize(writer, without=[record.doc_id])  # all was taken down
    page = report(teachercache.open(tmp_path))
    assert "There are no rows" in page
    assert "Bytes by column" not in page


def pixels(path) -> set[tuple[int, ...]]:
    from PIL import Image

    with Image.open(path) as image:
        small = image.convert("RGB").resize((160, 400))
        return {colour for _, colour in small.getcolors(maxcolors=64_000)}


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
