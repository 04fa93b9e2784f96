"""Build the documentation's site: README, docs/, deploy/ and the public Python API, with search; warnings are errors.

    python scripts/make_site.py [--out build/site]        `make docs`

Pages are copied as they lie in the repository, so that their links hold, together with the files that they link to.
The API's pages come from docstrings: of every name in `__all__` of the packages in API. Pages can be read from disk;
the search needs a server: `python -m http.server -d build/site`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import griffe
import yaml

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
API = ("teachercache", "trainer.losses", "trainer.data")
NAV: list[tuple[str, list[str]]] = [
    ("Start", ["README.md", "docs/TUTORIAL.md"]),
    ("Use", ["docs/TRAINING.md", "docs/INTEGRATIONS.md", "docs/MODELS.md", "docs/CONFIG.md"]),
    ("Operate", ["docs/OPERATIONS.md", "deploy/README.md", "deploy/images/README.md", "deploy/storage/README.md"]),
    ("Understand", ["docs/ARCHITECTURE.md", "docs/FORMAT.md", "docs/LOSSES.md"]),
    ("Judge", ["docs/RESULTS.md", "docs/PARITY.md", "docs/LOG.md", "CHANGELOG.md"]),
    ("Contribute", ["CONTRIBUTING.md", "SECURITY.md"]),
    ("Python API", [f"api/{name}.md" for name in API]),
]


def scheme(preferred: str, name: str, icon: str) -> dict[str, object]:
    """Return one of the two colour schemes, and the button to the other."""
    toggle = {"icon": f"material/{icon}", "name": "other colours"}
    return {"media": f"(prefers-color-scheme: {preferred})", "scheme": name, "toggle": toggle}


SETTINGS = {
    "site_name": "teachercache",
    "theme": {
        "name": "material",
        "font": False,  # no request to another server
        "features": ["navigation.tabs", "navigation.top", "search.suggest", "search.highlight", "content.code.copy"],
        "palette": [scheme("light", "default", "weather-night"), scheme("dark", "slate", "weather-sunny")],
    },
    "markdown_extensions": ["tables", "attr_list", "pymdownx.superfences", "pymdownx.highlight"],
    "validation": {"links": dict.fromkeys(("anchors", "unrecognized_links", "absolute_links"), "warn")},
    "use_directory_urls": False,  # pages can be read from disk; the search needs a server
    "strict": True,
}
HANDLER = {
    "paths": [str(ROOT)],
    "options": {
        "docstring_style": None,  # plain text: see Columns
        "extensions": [f"{Path(__file__)}:Columns"],
        "show_source": False,
        "heading_level": 2,
        "show_root_heading": True,
        "show_signature_annotations": True,
        "separate_signature": True,
        "filters": ["!^_", "!^model_"],
        "members_order": "source",
    },
}  # fmt: skip


class Columns(griffe.Extension):
    """Show the paragraphs of a docstring that are columns (a name, two blanks, what it is) as they were typed."""

    def on_instance(self, *, obj: griffe.Object | griffe.Alias, **_: object) -> None:
        if not obj.is_alias and obj.docstring is not None:
            parts = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join(f"```text\n{part}\n```" if columns(part) else part for part in parts)


def columns(paragraph: str) -> bool:
    """Return whether any line of a paragraph has a gap of two blanks inside."""
    return re.search(r"^ *\S.*?\S {2,}\S", paragraph, re.M) is not None


def copy_page(page: Path, stage: Path, waiting: list[Path]) -> None:
    """Copy a page and the files that it links to; folders become a list of their files."""
    text = page.read_text(encoding="utf-8")
    target = stage / page.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    for link in LINK.findall(FENCE.sub("", text)):
        linked = (page.parent / link).resolve()
        there = stage / linked.relative_to(ROOT)
        if linked.is_dir() and not (linked / "README.md").exists():
            files = sorted(path for path in linked.iterdir() if path.is_file())
            for file in files:
                copy_file(file, stage)
            lines = "".join(f"- [{file.name}]({file.name})\n" for file in files)
            (there / "README.md").write_text(f"# {linked.relative_to(ROOT)}\n\n{lines}", encoding="utf-8")
            target.write_text(
                re.sub(rf"\]\({re.escape(link)}\)", f"]({link.rstrip('/')}/README.md)", target.read_text())
            )
        elif linked.is_file() and linked.suffix != ".md":
            copy_file(linked, stage)
        elif linked.is_file() and not there.exists() and linked not in waiting:
            waiting.append(linked)


def copy_file(path: Path, stage: Path) -> None:
    """Copy a file to its place in the stage."""
    target = stage / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, target)


def api_page(package: str) -> str:
    """Return the page of a package: what it is for, and a directive for each public name."""
    module = griffe.load(package, search_paths=[str(ROOT)])
    names = [str(name).strip("'\"") for name in module.exports or []]
    assert names, f"{package} has no __all__"
    said = module.docstring.value if module.docstring else ""
    blocks = "".join(f"\n::: {package}.{name}\n" for name in sorted(names, key=str.lower))
    return f"# {package}\n\n{said}\n{blocks}"


def make(out: Path) -> None:
    """Write the site into a folder. Raises SystemExit with the output of mkdocs where it warns."""
    stage = out.parent / f"{out.name}-pages"
    shutil.rmtree(stage, ignore_errors=True)
    nav = [
        (title, [page for page in pages if page.startswith("api/") or (ROOT / page).exists()]) for title, pages in NAV
    ]
    waiting = [ROOT / page for _, pages in nav for page in pages if not page.startswith("api/")]
    for page in waiting:  # it grows
        copy_page(page, stage, waiting)
    (stage / "api").mkdir()
    for package in API:
        (stage / "api" / f"{package}.md").write_text(api_page(package), encoding="utf-8")
    settings = SETTINGS | {
        "docs_dir": str(stage),
        "site_dir": str(out),
        "nav": [{title: pages} for title, pages in nav],
        "plugins": ["search", {"mkdocstrings": {"handlers": {"python": HANDLER}}}],
    }
    config = out.parent / f"{out.name}.yml"
    config.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config)]
    # Not --quiet: mkdocs does not count warnings that it does not print.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{done.stderr}\nthe site has warnings or errors; they are above")


def main() -> None:
    """Build the site."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build/site")
    out = parser.parse_args().out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    make(out)
    print(f"written: {out}/index.html")


if __name__ == "__main__":
    main()
