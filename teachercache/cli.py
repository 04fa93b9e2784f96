"""The command line: `teachercache ls|show|head|verify|report|export|optimize|gc URL`.

Exit status: 0 fine, 1 something is wrong with the cache, 2 the command was misused. `--json` prints one JSON value.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from teachercache.errors import (
    CorruptFile,
    MissingObject,
    NotACache,
    TeacherCacheError,
    UnsafeManifest,
    UnsupportedFormat,
    UsageError,
)
from teachercache.format import layout
from teachercache.iceberg import register
from teachercache.parquet.codecs import CODECS
from teachercache.read.cache import Cache, IncompleteCacheWarning
from teachercache.read.cache import open as open_cache
from teachercache.store.ledger import Ledger
from teachercache.store.store import Store
from teachercache.upkeep.gc import collect
from teachercache.upkeep.optimize import optimize as run_optimize
from teachercache.upkeep.verify import verify as run_verify
from teachercache.views import show
from teachercache.views.export import export as run_export
from teachercache.views.report import SAMPLE_FILES
from teachercache.views.report import report as make_report
from teachercache.write.attempt import GRACE_SECONDS
from teachercache.write.writer import CacheWriter

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at, check and look after caches of a teacher's log-probabilities on S3 or local disk.",
    epilog="URL: s3://bucket/prefix, file:///folder or a plain path. S3 endpoint and keys: AWS_ENDPOINT_URL and the usual chain.",
)
out = Console(highlight=False, width=None if sys.stdout.isatty() else 160)  # a log is no 80-column terminal
err = Console(stderr=True, highlight=False)

Url = Annotated[
    str, typer.Argument(help="The cache: s3://bucket/prefix, file:///folder or a path.", show_default=False)
]
ManifestNumber = Annotated[
    int | None, typer.Option("--manifest", "-m", help="Pin this manifest instead of the newest.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]
Split = Annotated[str | None, typer.Option(help="Only this split.")]
Source = Annotated[str | None, typer.Option(help="Only this source.")]


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def opened(url: str, manifest: int | None = None) -> Cache:
    """Open a cache; an incomplete one is said so on stderr, once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", IncompleteCacheWarning)
        cache = open_cache(url, manifest)
    for warning in caught:
        err.print(f"[yellow]warning:[/] {escape(str(warning.message))}", soft_wrap=True)
    return cache


@contextmanager
def progress_bar(what: str) -> Iterator[Any]:
    """A callable (done, total): a bar on a terminal, a line every tenth elsewhere."""
    if err.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=err, transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    last = [-1]

    def line(done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if tenth > last[0] and total >= 10:
            last[0] = tenth
            err.print(f"{what}: {done} of {total}")

    yield line


@app.command()
def ls(
    url: Url,
    files: Annotated[
        bool, typer.Option("--files", help="Print the data files of the cache at URL, one a line.")
    ] = False,
    manifest: ManifestNumber = None,
    split: Split = None,
    source: Source = None,
    depth: Annotated[int, typer.Option(help="Levels below URL to look for caches in.")] = 4,
    json_: Json = False,
) -> None:
    """List the caches below URL, or with --files the Parquet files of one.

    The files are plain Parquet: hand them to DuckDB, Polars, pandas or Spark.

        duckdb -c "select * from read_parquet([$(teachercache ls --files URL | sed "s/.*/'&'/" | paste -sd,)])"

    Example: teachercache ls s3://bucket --files
    """
    if files:
        cache = opened(url, manifest)
        entries = cache.files(split, source)
        if json_:
            print_json([{"url": cache.file_url(e), **e.model_dump(mode="json")} for e in entries])
        else:
            for entry in entries:
                print(cache.file_url(entry))
        return
    found = [describe(store) for store in find_caches(Store.open(url), depth)]
    broken = any(item["state"] == "unreadable" for item in found)
    if json_:
        print_json(found)
        raise typer.Exit(int(broken))
    if not found:
        raise NotACache(f"there is no cache at {url} or up to {depth} levels below; check the URL, or raise --depth.")
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("cache", "teacher"):
        table.add_column(name, overflow="fold")
    for name in ("K", "manifest", "rows", "bytes"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for item in found:
        number = "" if item["manifest"] is None else str(item["manifest"])
        table.add_row(
            Text(item["url"]),
            Text(item["teacher"]),
            str(item["top_k"] or ""),
            number,
            f"{item['rows']:,}",
            f"{item['bytes']:,}",
            item["state"],
        )
    out.print(table)
    raise typer.Exit(int(broken))


def find_caches(store: Store, depth: int) -> Iterator[Store]:
    """Roots of caches at or below a store's root; never looks inside a cache."""
    if store.exists(layout.SPEC):
        yield store
    elif depth > 0:
        for name in store.folders(""):
            yield from find_caches(store.child(name), depth - 1)


def describe(store: Store) -> dict[str, Any]:
    """One line of `ls`. A cache that cannot be read is said so on stderr, and does not hide the others."""
    try:
        return _described(store)
    except (CorruptFile, MissingObject, UnsafeManifest, UnsupportedFormat) as error:
        err.print(f"[yellow]warning:[/] {escape(f'{store.url}: {error} [{error.code}]')}", soft_wrap=True)
        unknown: dict[str, Any] = {"url": store.url, "teacher": "", "top_k": None, "manifest": None}
        return unknown | {"rows": 0, "bytes": 0, "state": "unreadable"}


def _described(store: Store) -> dict[str, Any]:
    ledger = Ledger(store)
    spec, numbers = ledger.spec(), ledger.manifest_numbers()
    line: dict[str, Any] = {"url": store.url, "teacher": spec.teacher.name, "top_k": spec.top_k, "manifest": None}
    if not numbers:
        return line | {"rows": 0, "bytes": 0, "state": "not published"}
    manifest = ledger.manifest(numbers[-1])
    state = "complete" if manifest.complete else "incomplete"
    return line | {
        "manifest": manifest.number,
        "rows": manifest.rows,
        "bytes": sum(f.size for f in manifest.files),
        "state": state,
    }


@app.command("show")
def show_(url: Url, manifest: ManifestNumber = None, json_: Json = False) -> None:
    """Say who the teacher is and what a cache holds, by split and source.

    Example: teachercache show s3://bucket/cache
    """
    cache = opened(url, manifest)
    if json_:
        print_json(show.summary(cache))
    else:
        show.print_summary(cache, out)


@app.command()
def head(
    url: Url,
    records: Annotated[int, typer.Option("--records", "-n", min=1, help="How many records.")] = 1,
    positions: Annotated[int, typer.Option("--positions", "-p", min=1, help="How many positions of each.")] = 20,
    top: Annotated[int, typer.Option(min=1, help="How many of the teacher's best next tokens.")] = 5,
    split: Split = None,
    source: Source = None,
    manifest: ManifestNumber = None,
    json_: Json = False,
) -> None:
    """Show the first records as text, with the teacher's best next tokens and their probabilities.

    A blank is shown as a middle dot. `next` is what really followed, dim where the loss leaves it out.

    Example: teachercache head s3://bucket/cache --split heldout --positions 8
    """
    cache = opened(url, manifest)
    cache.files(split, source)  # a wrong name ends here, in one line
    text = show.TokenText(cache)
    if text.note:
        err.print(f"[yellow]note:[/] {escape(text.note)}", soft_wrap=True)
    top = min(top, cache.spec.top_k)
    shown = []
    for record in cache.records(split, source, limit=records):
        rows = show.head_rows(record, text, positions=positions, top=top)
        shown.append(
            {
                "doc_id": record.doc_id,
                "window": record.window,
                "split": record.split,
                "source": record.source,
                "rows": rows,
            }
        )
        if not json_:
            out.print(show.head_table(record, rows, top))
    if json_:
        print_json(shown)


@app.command()
def verify(
    url: Url,
    manifest: ManifestNumber = None,
    sample: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Share of the files to read; others: presence, size."),
    ] = 1.0,
    threads: Annotated[int, typer.Option(min=1, help="Files read at the same time.")] = 4,
    json_: Json = False,
) -> None:
    """Read everything and check it: seals, checksums, counts, every invariant of every row, no document twice.

    Exit status 1 and a list of what is wrong, or 0.

    Example: teachercache verify s3://bucket/cache --sample 0.1
    """
    store = Store.open(url)
    spec = Ledger(store).spec()
    pinned = None if manifest is None else opened(url, manifest).manifest
    with progress_bar("verifying") as progress:
        found = run_verify(store, spec, pinned, sample=sample, threads=threads, progress=progress)
    if json_:
        print_json(dataclasses.asdict(found) | {"ok": found.ok})
    else:
        for problem in found.problems:
            print(f"{problem.code} {problem.message}")
        what = f"{found.files_read} of {found.files} files read, {found.records:,} records, {found.rows:,} rows"
        number = "no manifest" if found.manifest is None else f"manifest {found.manifest}"
        print(f"{'ok' if found.ok else f'{len(found.problems)} problems'}: {number}, {what}")
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def doctor(
    url: Annotated[str | None, typer.Argument(help="Also check this store: s3://bucket/prefix or a path.")] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Do not probe conditional writes.")] = False,
    json_: Json = False,
) -> None:
    """Check this machine and, with a URL, its store: what was found and what to do. Exit status 1 where it cannot work.

    Example: teachercache doctor s3://bucket/cache     Ray and vLLM: python -m pipeline doctor
    """
    from teachercache.doctor import (
        as_json,
        examine,
        print_findings,
        verdict,
    )

    findings = examine(url, write=not read_only)
    if json_:
        print_json(as_json(findings))
    else:
        print_findings(findings, out)
    raise typer.Exit(verdict(findings))


@app.command()
def report(
    url: Url,
    to: Annotated[Path, typer.Option("--to", help="Where to write the page.")] = Path("report.html"),
    files: Annotated[int, typer.Option(min=1, help="How many files to take the distributions from.")] = SAMPLE_FILES,
    manifest: ManifestNumber = None,
    json_: Json = False,
) -> None:
    """Write one self-contained HTML page: the teacher, corpora, drops, distributions, bytes by column, throughput.

    Example: teachercache report s3://bucket/cache --to report.html
    """
    if not to.parent.is_dir():  # said before the reading, not after it
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(to))
    cache = opened(url, manifest)
    with progress_bar("reading") as progress:
        page = make_report(cache, sample_files=files, progress=progress)
    to.write_text(page, encoding="utf-8")
    if json_:
        print_json({"report": str(to), "manifest": cache.manifest.number})
    else:
        print(to)


@app.command()
def export(
    url: Url,
    to: Annotated[Path | None, typer.Option("--to", help="Copy into this new folder.", show_default=False)] = None,
    iceberg: Annotated[
        str | None, typer.Option(help="Register in an Iceberg catalog instead: CATALOG:NAMESPACE.TABLE.")
    ] = None,
    manifest: ManifestNumber = None,
    megabytes: Annotated[int, typer.Option(min=1, help="Size of one file.")] = 500,
    json_: Json = False,
) -> None:
    """Write a plain Parquet data set with a Hugging Face data card into a new folder, or register the files in Iceberg.

    Registration copies nothing: the table's files are the cache's. The catalog is one that pyiceberg's configuration names.

    Example: teachercache export s3://bucket/cache --to folder
    """
    if (to is None) == (iceberg is None):
        raise UsageError("give either --to FOLDER or --iceberg CATALOG:NAMESPACE.TABLE.")
    cache = opened(url, manifest)
    if iceberg is not None:
        catalog, _, table = iceberg.partition(":")
        registered = register(cache, catalog, table)
        if json_:
            print_json({"table": iceberg, "registered": registered, "manifest": cache.manifest.number})
        else:
            print(f"{registered} files registered in {iceberg}")
        return
    assert to is not None
    with progress_bar("exporting") as progress:
        written = run_export(cache, to, target_bytes=megabytes * 2**20, progress=progress)
    if json_:
        print_json({"files": [str(path) for path in written], "manifest": cache.manifest.number})
    else:
        print(f"{len(written)} files in {to}")


@app.command()
def optimize(
    url: Url,
    codec: Annotated[str | None, typer.Option(help=f"Rewrite into this codec: {', '.join(CODECS)}.")] = None,
    megabytes: Annotated[int, typer.Option(min=1, help="Merge shards smaller than this up to about this size.")] = 256,
    without: Annotated[list[str] | None, typer.Option(help="Leave out this doc_id; may be repeated.")] = None,
    allow_partial: Annotated[
        bool, typer.Option("--allow-partial", help="Publish although planned shards are missing.")
    ] = False,
    allow_repeated_content: Annotated[
        bool, typer.Option("--allow-repeated-content", help="Publish although two splits share content.")
    ] = False,
    json_: Json = False,
) -> None:
    """Rewrite small files into large ones, into another codec, or without given documents, and publish the result.

    Nothing is changed in place: older manifests keep reading what they read. To take a document down for good, run
    `teachercache gc URL --keep-manifests 1 --delete` afterwards.

    Example: teachercache optimize s3://bucket/cache --codec compact
    """
    store = Store.open(url)
    writer = CacheWriter(store, Ledger(store).spec())
    with progress_bar("rewriting") as progress:
        done = run_optimize(
            writer,
            codec=codec,
            target_bytes=megabytes * 2**20,
            without=without or (),
            allow_partial=allow_partial,
            allow_repeated_content=allow_repeated_content,
            progress=progress,
        )
    if json_:
        print_json({**dataclasses.asdict(done), "manifest": done.manifest.number})
        return
    print(
        f"manifest {done.manifest.number}: {done.files_before} files of {done.bytes_before:,} bytes are now "
        f"{done.files_after} of {done.bytes_after:,}; {done.removed} records removed"
    )


@app.command()
def gc(
    url: Url,
    delete: Annotated[bool, typer.Option("--delete", help="Really remove; without it nothing is touched.")] = False,
    keep_manifests: Annotated[
        int | None, typer.Option(min=1, help="Expire all but the newest so many manifests.")
    ] = None,
    grace_days: Annotated[float, typer.Option(help="Age at which an upload without a commit goes.")] = GRACE_SECONDS
    / 86400,
    json_: Json = False,
) -> None:
    """Remove what no reader and no writer can need: orphaned uploads, files of replaced shards. A dry run unless --delete.

    A grace period shorter than the default is only safe while no job writes to the cache.

    Example: teachercache gc s3://bucket/cache --keep-manifests 5
    """
    store = Store.open(url)
    found = collect(
        store, Ledger(store).spec(), grace_seconds=grace_days * 86400, keep_manifests=keep_manifests, dry_run=not delete
    )
    if json_:
        paths = {
            name: [o.path for o in getattr(found, name)]
            for name in ("manifests", "void", "orphans", "replaced", "scratch")
        }
        print_json(
            {"deleted": delete, "bytes": found.bytes, "kept_files": found.kept_files, "waiting": found.waiting, **paths}
        )
        return
    for item in found.objects:
        print(f"{'deleted' if delete else 'would delete'} {item.path} {item.size:,}")
    print(
        f"{len(found.objects)} objects, {found.bytes:,} bytes; {found.kept_files} data files kept, "
        f"{found.waiting} uploads without a commit still within {grace_days:g} days"
    )


def main() -> None:
    """Entry point: one line for an error that a user can understand, and its exit status."""
    try:
        app()
    except TeacherCacheError as error:
        print(f"error: {error} [{error.code}]", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:  # of local files; what a store answers has become an error of ours
        named = "" if error.filename is None else f"{error.filename}: "
        print(f"error: {named}{error.strerror or error}; check the path and its rights.", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
