"""Figures of the documentation are those that docs/figures/make_figures.py draws, and each is on a page."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.deploy.manifests import ROOT

FIGURES = sorted((ROOT / "docs/figures").glob("*.svg"))


def test_figures_are_current() -> None:
    command = [sys.executable, "docs/figures/make_figures.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.name)
def test_a_figure_has_a_title_and_a_page(path: Path) -> None:
    assert ElementTree.parse(path).getroot().find("{http://www.w3.org/2000/svg}title") is not None
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert any(f"figures/{path.name}" in page.read_text(encoding="utf-8") for page in pages)


def test_figures_and_pages_have_one_palette() -> None:
    text = (ROOT / "teachercache/templates/page.css").read_text(encoding="utf-8")
    figures = runpy.run_path(str(ROOT / "docs/figures/make_figures.py"))
    for colours, block in zip(
        (figures["LIGHT"], figures["DARK"]), re.findall(r":root \{(.*?)\}", text, re.DOTALL), strict=True
    ):
        page = dict(re.findall(r"--(\w+): (#\w+);", block))
        assert {name: colours[name] for name in page.keys() & colours.keys() - {"card"}} == {
            name: page[name] for name in page.keys() & colours.keys() - {"card"}
        }
        assert {page["page"], page["card"]} == {colours["bg"], colours["card"]}
