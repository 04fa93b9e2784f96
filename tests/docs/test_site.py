"""`make docs`: every page and every public name has its place, the search finds them, and a warning is an error."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests import browser
from tests.deploy.manifests import ROOT

pytest.importorskip("mkdocs", reason="the site needs the dependency group docs")
sys.path.insert(0, str(ROOT / "scripts"))
import make_site


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    """Serve a folder over HTTP; gives its address."""
    servers: list[ThreadingHTTPServer] = []

    def start(folder: Path) -> str:
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("docs") / "site"
    make_site.make(out)
    return out


def test_every_page_and_every_public_name_is_there(site: Path) -> None:
    for page in [*ROOT.glob("docs/*.md"), ROOT / "CHANGELOG.md", *ROOT.glob("deploy/**/README.md")]:
        name = page.relative_to(ROOT).with_suffix(".html")
        assert (site / (name.parent / "index.html" if name.stem == "README" else name)).exists(), name
    found = {entry["location"] for entry in json.loads((site / "search/search_index.json").read_text())["docs"]}
    for package in make_site.API:
        missing = [
            name
            for name in importlib.import_module(package).__all__
            if f"api/{package}.html#{package}.{name}" not in found and name != "errors"
        ]
        assert missing == [], package


def test_columns_of_a_docstring_stay_columns(site: Path) -> None:
    page = (site / "api/trainer.losses.html").read_text()
    assert "head_weight  [V, d]  same dtype" in page


@pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.MISSING)
def test_the_search_finds_a_function(site: Path, serve: Callable[[Path], str]) -> None:
    with browser.browser() as chromium:
        page = chromium.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"{serve(site)}/index.html")
        page.get_by_role("textbox", name="Search").press_sequentially("kl_loss")  # the page listens to keys
        page.locator(".md-search-result__link").first.wait_for()
        links = [link.get_attribute("href") or "" for link in page.locator(".md-search-result__link").all()]
        assert any("api/trainer.losses.html" in link for link in links), links
        assert problems == []


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text("# Start\n\n[gone](#nowhere)\n")
    monkeypatch.setattr(make_site, "ROOT", tmp_path)
    monkeypatch.setattr(make_site, "NAV", [("Start", ["README.md"])])
    monkeypatch.setattr(make_site, "API", ())
    with pytest.raises(SystemExit, match="nowhere"):
        make_site.make(tmp_path / "build/site")
