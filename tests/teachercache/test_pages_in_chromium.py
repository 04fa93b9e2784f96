"""The report and the catalog in a real browser: nothing in the console, nothing cut off, usable by keyboard, axe."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from teachercache.console import printable
from teachercache.store.store import Store
from teachercache.views.catalog import catalog, find_caches, index
from tests import browser
from tests.teachercache.sites import HOSTILE, hostile_cache, make_team

pytestmark = pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.MISSING)
MANY = 200


@pytest.fixture(scope="module")
def chromium():
    with browser.browser() as found:
        yield found


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A catalog of every state, both kinds of rows and a hostile cache."""
    folder = tmp_path_factory.mktemp("site")
    make_team(folder / "team")
    hostile_cache(folder / "team/hostile")
    store = Store.open(folder / "team")
    out = Store.open(folder / "out")
    entries = catalog(store.url, find_caches(store, 4), out, sample_files=4, progress=lambda done, total: None)
    many = [
        dataclasses.replace(entry, name=f"{entry.name}-{i}")
        for i in range(MANY // len(entries) + 1)
        for entry in entries
    ]
    (folder / "out/many.html").write_text(index(store.url, many[:MANY]), encoding="utf-8")
    return folder / "out"


@pytest.fixture
def tab(chromium):
    """Give a new tab of a width and scheme; afterwards nothing was written to a console and no dialog opened."""
    said, contexts = [], []

    def open_tab(path: Path, width: int = 1400, scheme: str = "light"):
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        for event in ("console", "pageerror", "dialog", "requestfailed"):
            page.on(event, lambda what, event=event: said.append(f"{event}: {getattr(what, 'text', what)}"))
        page.goto(path.as_uri())
        return page

    yield open_tab
    for context in contexts:
        context.close()
    assert said == []


def path_of(site: Path, name: str) -> Path:
    """Return the page of a cache, or the catalog."""
    if name == "catalog":
        return site / "index.html"
    (path,) = (path for path in site.glob("caches/*") if path.name.startswith(name))
    return path


@pytest.mark.parametrize(
    ("width", "scheme", "names"),
    [
        (1400, "light", ["catalog", "llama", "hostile"]),
        (1400, "dark", ["catalog", "qwen3-32b-chats"]),
        (400, "light", ["catalog", "qwen3-32b-chats"]),
        (400, "dark", ["catalog", "llama"]),
    ],
)
def test_pages_fit_and_axe_finds_nothing_serious(site, tab, width, scheme, names):
    from axe_playwright_python.sync_playwright import Axe

    for name in names:
        page = tab(path_of(site, name), width, scheme)
        measured = page.evaluate("""() => {
            for (const folded of document.querySelectorAll('details')) folded.open = true;
            const outside = e => !e.closest('.scroll, svg, caption') && e.getBoundingClientRect().right > innerWidth + 1;
            return {scroll: document.documentElement.scrollWidth,
                    cut: [...document.querySelectorAll('main *')].filter(outside).length,
                    flat: [...document.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().height < 90).length}; }""")
        assert measured == {"scroll": width, "cut": 0, "flat": 0}, name
        found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
        assert [(v["id"], v["nodes"][0]["html"][:200]) for v in found if v["impact"] in ("serious", "critical")] == []


# What a heading says of its order, and the values of its column from the top.
COLUMN = """button => {
    const head = button.parentNode, numeric = head.classList.contains('n');
    const cells = [...head.closest('table').tBodies[0].rows].map(row => row.cells[head.cellIndex]);
    const values = cells.map(c => numeric ? (c.dataset.v === undefined ? null : Number(c.dataset.v)) : c.textContent);
    return [numeric, head.ariaSort, values, head.parentNode.querySelectorAll('[aria-sort]').length]; }"""


@pytest.mark.parametrize(("width", "names"), [(1400, ["catalog", "qwen3-32b-chats"]), (400, ["catalog"])])
def test_every_table_sorts_by_the_keyboard_alone(site, tab, width, names):
    for name in names:
        page = tab(path_of(site, name), width)
        buttons = page.query_selector_all("th button")
        assert len(buttons) == page.evaluate("document.querySelectorAll('table th').length") >= 10
        for button in buttons:
            button.focus()
            seen = []
            for key in ("Enter", "Space"):
                page.keyboard.press(key)
                numeric, order, values, sorted_by = button.evaluate(COLUMN)
                known = [value for value in values if value is not None]
                assert values[: len(known)] == known, "what is not known comes last"
                assert sorted_by == 1
                seen.append(order)
                if numeric:
                    assert known == sorted(known, reverse=order == "descending")
            assert seen == (["descending", "ascending"] if numeric else ["ascending", "descending"])


def test_the_tab_key_reaches_filter_headings_and_links_and_the_filter_keeps_matching_caches(site, tab):
    page = tab(site / "index.html")
    reached = []
    for _ in range(16):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.tagName + ' ' + document.activeElement.textContent"))
    assert reached[0].startswith("INPUT")
    assert {"BUTTON teacher", "BUTTON state", "A llama-3.1-8b/web"} <= set(reached)
    page.get_by_label("Filter").fill("qwen3 complete")
    shown = page.evaluate(
        "[...document.querySelectorAll('tbody tr')].filter(r => !r.hidden).map(r => r.querySelector('a').textContent)"
    )
    assert shown == ["qwen3-32b/chats-24", "qwen3-32b/code"]  # `incomplete` holds it too
    assert page.locator("output").text_content() == "2 of 7"


def test_hostile_names_run_nothing_and_injected_markup_would_not_either(site, tab, chromium):
    page = tab(path_of(site, "hostile"))  # `tab` fails where a dialog opens or the console speaks
    assert printable(HOSTILE) in page.locator("h1").text_content()
    assert page.evaluate("[document.scripts.length, document.querySelectorAll('main :is(img, script)').length]") == [
        1,
        0,
    ]
    context = chromium.new_context()  # not `tab`: the console must speak
    page = context.new_page()
    page.goto(path_of(site, "hostile").as_uri())
    blocked = page.evaluate("""() => new Promise(done => {
        document.addEventListener('securitypolicyviolation', event => done(event.violatedDirective));
        document.querySelector('main').insertAdjacentHTML('beforeend', '<b onclick="document.title=1" id=evil>x</b>');
        document.getElementById('evil').click(); setTimeout(() => done('ran'), 2000); })""")
    assert blocked == "script-src-attr"
    context.close()


def test_copy_puts_the_text_on_the_clipboard(site, chromium):
    context = chromium.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(path_of(site, "llama").as_uri())
    button = page.get_by_role("button", name="Copy: DuckDB")
    button.click()
    page.get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").startswith("import duckdb, teachercache")
    context.close()


def test_two_hundred_caches_show_and_sort_at_once(site, tab):
    began = time.perf_counter()
    page = tab(site / "many.html")
    page.locator("output").get_by_text(f"{MANY} of {MANY}").wait_for()
    opened = time.perf_counter() - began
    page.locator("th button").nth(3).click()
    page.get_by_label("Filter").fill("llama")
    took = time.perf_counter() - began
    print(f"{MANY} caches: open in {opened:.2f} s, sorted and filtered after {took:.2f} s")
    assert page.evaluate("[...document.querySelectorAll('tbody tr')].filter(r => !r.hidden).length") >= MANY // 8
