"""catalog: a static site about the caches below a URL: one page that lists them, and the report of each behind it."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import filesize

from teachercache.errors import (
    CorruptFile,
    InvalidRecord,
    MissingObject,
    TeacherCacheError,
    UnsafeManifest,
    UnsupportedFormat,
)
from teachercache.format import layout
from teachercache.format.objects import Manifest, Run
from teachercache.format.sealed import utc_now
from teachercache.format.spec import CacheSpec
from teachercache.read.cache import Cache
from teachercache.store.ledger import Ledger
from teachercache.store.store import Store
from teachercache.views.page import Cell, Number, page, table, tag, tiles
from teachercache.views.report import hours, report
from teachercache.views.statistics import costs, per_million_rows

THREADS = 16  # folders and caches looked into at the same time
REPORTS = 4  # reports made at the same time: each holds a row group
COMMITS = 32  # of a cache, whose provenance says what rows cost
BROKEN = (CorruptFile, InvalidRecord, MissingObject, UnsafeManifest, UnsupportedFormat)  # a cache's own fault


@dataclass
class Entry:
    """A cache as the catalog lists it. Without a manifest it is not published; with an error it is unreadable."""

    store: Store
    name: str  # below the catalog's URL
    spec: CacheSpec | None = None
    manifest: Manifest | None = None
    hours: float | None = None  # of one accelerator for a million rows
    device: str = ""
    runs: list[Run] = field(default_factory=list)
    error: TeacherCacheError | None = None

    @property
    def state(self) -> str:
        """Return what `ls` says of it."""
        if self.error:
            return "unreadable"
        return "not published" if self.manifest is None else "complete" if self.manifest.complete else "incomplete"

    @property
    def file(self) -> str:
        """Return the name of its report: readable, of plain letters, and no other cache's."""
        plain = re.sub("[^A-Za-z0-9_.-]+", "-", self.name).strip("-.")[:80] or "cache"
        return f"caches/{plain}-{hashlib.sha256(self.name.encode(errors='surrogatepass')).hexdigest()[:8]}.html"

    def line(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        spec, m = self.spec, self.manifest
        return {
            "url": self.store.url, "state": self.state, "error": self.error and f"{self.error} [{self.error.code}]",
            "teacher": spec and spec.teacher.name, "rows_kind": spec and spec.rows.model_dump(mode="json"),
            "manifest": m and m.number, "rows": m.rows if m else 0, "bytes": _size(m), "hours_per_million_rows": self.hours,
            "runs": len(self.runs), "report": self.file if m and not self.error else None,
        }  # fmt: skip


def find_caches(
    store: Store, depth: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Store]:
    """Return the roots of caches at or below a store's root, sorted by URL; never looks inside a cache.

    Cost: one request a folder, sixteen at a time. `progress` gets how many folders were looked into, and are known.
    """
    found: list[Store] = []
    level, done, known = [store], 0, 1
    with ThreadPoolExecutor(THREADS) as pool:
        while level:
            below: list[Store] = []
            for at, (objects, folders) in zip(level, pool.map(lambda at: at.level(""), level), strict=True):
                if layout.SPEC in objects:
                    found.append(at)
                elif depth > 0:
                    below += [at.child(name) for name in folders]
                done += 1
                progress(done, known)
            level, depth, known = below, depth - 1, known + len(below)
    return sorted(found, key=lambda at: at.url)


def describe(store: Store, url: str) -> Entry:
    """Return a cache as the catalog of `url` lists it. Cost: its spec, newest manifest, 32 commits, the entries of runs."""
    entry, ledger = Entry(store, store.url.removeprefix(url).strip("/") or store.url.rsplit("/", 1)[-1]), Ledger(store)
    try:
        entry.spec, entry.manifest = ledger.spec(), ledger.newest_manifest()
        lines = costs(ledger.commits(COMMITS))
        entry.hours, entry.device = per_million_rows(lines), lines[0].device if lines else ""
        entry.runs = ledger.runs()[0]
    except BROKEN as error:
        entry.error = error
    return entry


def catalog(
    url: str, caches: Sequence[Store], out: Store, *, sample_files: int, progress: Callable[[int, int], None]
) -> list[Entry]:
    """Write index.html and caches/*.html to `out`, replacing what is there; return what they list.

    Cost: of each cache what `describe` and `report` read. A cache that cannot be read is listed with the reason.
    """

    def write(entry: Entry) -> None:
        if entry.manifest is None or entry.spec is None or entry.error:
            return
        try:
            made = report(
                Cache(entry.store, entry.spec, entry.manifest), sample_files=sample_files, back="../index.html"
            )
        except BROKEN as error:
            entry.error = error
        else:
            put(out, entry.file, made)

    with ThreadPoolExecutor(THREADS) as pool:
        entries = list(pool.map(lambda store: describe(store, url.rstrip("/")), caches))
    with ThreadPoolExecutor(REPORTS) as pool:
        for done, _ in enumerate(pool.map(write, entries), 1):
            progress(done, len(entries))
    put(out, "index.html", index(url, entries))
    return entries


def put(out: Store, path: str, text: str) -> None:
    """Write a page from a file of its name, from which an object store takes the content type."""
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder, "page.html")
        local.write_text(text, encoding="utf-8")
        out.replace(path, local)


def index(url: str, entries: Sequence[Entry]) -> str:
    """Return the page that lists caches."""
    head = (
        "cache", "teacher", "a row", "rows", "size", "cost of a million rows", "students", "best KL, nats", "manifest", "state",
    )  # fmt: skip
    published = [entry.manifest for entry in entries if entry.manifest]
    listed = tag(
        "section",
        tag(
            "form",
            tag("label", "Filter", for_="filter"),
            tag("input", type="search", id="filter", placeholder="a teacher, a split, complete …"),
            tag("output", for_="filter"),
            hidden="",
        ),
        table("Caches", head, [_row(entry) for entry in entries]),
    )
    numbers = [
        ("caches", f"{len(entries):,}"),
        ("rows", f"{sum(m.rows for m in published):,}"),
        ("size", filesize.decimal(sum(map(_size, published)))),
        ("students", f"{sum(len(entry.runs) for entry in entries):,}"),
    ]
    lead = tag("p", tag("code", url), class_="lead")
    foot = f"Written by `teachercache catalog` at {utc_now()[:16].replace('T', ' ')} UTC."
    return page("Teacher caches", [lead, tiles(numbers), listed], foot=foot)


def _size(manifest: Manifest | None) -> int:
    return sum(f.size for f in manifest.files) if manifest else 0


def _row(entry: Entry) -> list[Cell]:
    spec, m, runs = entry.spec, entry.manifest, entry.runs
    link = tag("a", entry.name, href=entry.file) if m and not entry.error else tag("b", entry.name)
    splits = ", ".join(sorted({f.split for f in m.files})) if m else ""
    said = f"{entry.error} [{entry.error.code}]"[:300] if entry.error else splits
    if spec and spec.teacher.engine == "noop":
        said = f"made-up rows; {said}"
    name = tag("div", link, tag("span", said, class_="note"), class_="wide")
    state = tag("span", entry.state, class_=f"badge {'good' if entry.state == 'complete' else 'bad'}")
    if spec is None:
        return [name, "", "", *[Number(None)] * 6, state]
    tokenizer = tag("span", f"tokenizer {spec.tokenizer.digest[:8]}", class_="note")
    kind = f"{'sampled' if spec.rows.kind == 'sampled' else 'top'}\u00a0{spec.rows.entries}"
    best = min((run.heldout_kl for run in runs if run.heldout_kl is not None), default=None)
    spent = "" if entry.hours is None else hours(entry.hours)
    return [
        name,
        tag("div", spec.teacher.name, tokenizer, class_="wide"),
        kind,
        Number(m.rows if m else None),
        Number(_size(m) if m else None, filesize.decimal(_size(m))),
        Number(entry.hours, spent, entry.device),
        Number(len(runs)),
        Number(best, "" if best is None else f"{best:.4f}"),
        Number(m.number if m else None, f"{m.number}" if m else "", m.created[:10] if m else ""),
        state,
    ]
