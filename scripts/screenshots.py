"""Make a catalog of a few caches and pictures of its pages: 1400 and 400 pixels wide, light and dark.

    python scripts/screenshots.py [--out build/screenshots]

Two caches are of a real teacher (SmolLM2-135M, where `make model` has put it), made once and kept: text in top-100 rows,
and chats in sampled rows. The others are synthetic. Needs Chromium (`apt-get install chromium`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import teachercache
from pipeline.config import parse_job
from pipeline.running.job import run_job
from scripts.demo_corpus import reference
from teachercache.store.store import Store
from teachercache.views.catalog import catalog, find_caches
from tests import browser
from tests.teachercache.sites import make_team, register

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "build/models/smollm2-135m"
CHATS = [
    ("What is the capital of Australia?", "The capital of Australia is Canberra. It was chosen in 1908."),
    ("Sort a list of words by length in Python.", "Use `sorted(words, key=len)`. It keeps the order of equal words."),
    ("How do I make tea?", "Boil water, pour it over the leaves, wait four minutes and take the leaves out."),
    ("Name a prime between 20 and 30.", "23 is one; the other is 29."),
]
WIDTHS = (1400, 400)


def make_real(folder: Path) -> None:
    """Run the real teacher over a few texts and chats, unless that was done."""
    texts = [{"text": text} for _, text in list(reference())[:6]]
    chats = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in CHATS]
    for name, lines, rows in (
        ("reference", texts, {"kind": "top_k", "entries": 100}),
        ("chats", chats, {"kind": "sampled", "entries": 24}),
    ):
        cache, corpus = folder / "smollm2-135m" / name, folder.parent / f"{name}.jsonl"
        if cache.exists():
            continue
        named = [line | {"id": f"{name}/{i}", "licence": "PSF-2.0"} for i, line in enumerate(lines)]
        corpus.write_text("".join(json.dumps(line) + "\n" for line in named), encoding="utf-8")
        source = {"source": name, "files": str(corpus), "meta": ["licence"], "splits": {"train": 0.7, "heldout": 0.3}}
        source["fields"] = {"id": "id", **dict.fromkeys(lines[0], next(iter(lines[0])))}
        teacher = {"model": str(MODEL), "name": "SmolLM2-135M-Instruct", "engine": "hf", "dtype": "float32"}
        job = {
            "cache": str(cache), "teacher": teacher | {"max_model_len": 257}, "rows": rows, "corpora": [source],
            "recipe": {"windows": {"policy": "truncate", "size": 256}}, "run": {"executor": "inline"},
        }  # fmt: skip
        run_job(parse_job(job))
        register(teachercache.open(cache), "SmolLM2-135M, every second layer", 0.7193, parameters=81_000_000)


def main() -> None:
    """Make caches, site and pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build/screenshots")
    out = parser.parse_args().out
    if browser.CHROMIUM is None:
        raise SystemExit(browser.MISSING)
    team, site = out / "team", out / "site"
    for name in ("llama-3.1-8b", "qwen3-32b", "gpt-oss-20b", "gemma-3-27b"):
        shutil.rmtree(team / name, ignore_errors=True)
    make_team(team)
    if MODEL.exists():
        make_real(team)
    shutil.rmtree(site, ignore_errors=True)
    store = Store.open(team)
    entries = catalog(
        store.url, find_caches(store, 4), Store.open(site), sample_files=8, progress=lambda done, total: None
    )
    wanted = {"smollm2-135m/reference": "report", "smollm2-135m/chats": "report-sampled"}
    pages = {"catalog": "index.html"} | {wanted[e.name]: e.file for e in entries if e.name in wanted}
    with browser.browser() as chromium:
        for width in WIDTHS:
            for scheme in ("light", "dark"):
                context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
                tab = context.new_page()
                for name, file in pages.items():
                    tab.goto((site / file).as_uri())
                    picture = out / f"{name}-{width}-{scheme}.png"
                    tab.screenshot(path=picture, full_page=True)
                    print(picture)
                context.close()


if __name__ == "__main__":
    main()
