"""The command line: look at, check and look after caches; and the commands that other packages add.

Exit status: 0 fine, 1 something is wrong with the cache, 2 the command was misused. `--json` prints one JSON value.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from typer.core import TyperGroup

from teachercache.console import (
    local_path,
    missing_module,
    note,
    print_json,
    print_unfolded,
    progress_bar,
    run_cli,
    say,
    text_console,
)
from teachercache.errors import CorruptFile, MissingObject, NotACache, UnsafeManifest, UnsupportedFormat, UsageError
from teachercache.parquet.codecs import CODECS
from teachercache.read.cache import Cache, IncompleteCacheWarning, made_up_message
from teachercache.read.cache import open as open_cache
from teachercache.store.ledger import Ledger
from teachercache.store.store import Store
from teachercache.upkeep.gc import collect
from teachercache.upkeep.optimize import optimize as run_optimize
from teachercache.upkeep.repeats import publish_without_repeats
from teachercache.upkeep.thin import thin as run_thin
from teachercache.upkeep.verify import verify as run_verify
from teachercache.urls import refuse_credentials, refuse_read_only
from teachercache.views import show
from teachercache.views.catalog import THREADS, find_caches
from teachercache.views.catalog import catalog as make_catalog
from teachercache.views.export import export as run_export
from teachercache.views.formats import FORMATS
from teachercache.views.push import push as run_push
from teachercache.views.report import SAMPLE_FILES
from teachercache.views.report import report as make_report
from teachercache.write.attempt import GRACE_SECONDS
from teachercache.write.writer import CacheWriter

GRACE_DAYS = GRACE_SECONDS / 86400
ADDED = "teachercache.commands"  # entry points: name of a command -> the typer app that has it


class Commands(TyperGroup):
    """The commands below, and those that installed packages add under `teachercache.commands`.

    An added command's app is imported when the command is called, completed or listed. An app imports no engine by
    itself; one that cannot be imported is listed with the reason.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return [*super().list_commands(ctx), *(name for name in added_commands() if name not in self.commands)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name, or None."""
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in added_commands():
            return load_command(added_commands()[cmd_name])
        return found


@cache
def added_commands() -> dict[str, EntryPoint]:
    """Return what installed packages add, by the name of the command."""
    return {entry.name: entry for entry in sorted(entry_points(group=ADDED), key=lambda entry: entry.value)}


def load_command(entry: EntryPoint) -> Any:
    """Return an added command; or, where its package lacks something, one that says what to install."""
    try:
        app: typer.Typer = entry.load()
    except ModuleNotFoundError as error:
        said = missing_module(error)
        app = typer.Typer()

        @app.command(help=f"Not available: {said}.", context_settings={"ignore_unknown_options": True})
        def unavailable(arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
            raise UsageError(said)

    command = typer.main.get_command(app)
    command = getattr(command, "commands", {}).get(entry.name, command)
    command.rich_help_panel = f"Commands of {entry.value.split('.')[0]}"
    return command


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Make caches of a teacher's log-probabilities on S3 or local disk, look after them, train students from them.",
    epilog="URL: s3://bucket/prefix, file:///folder, a plain path; to read, hf://datasets/ORG/NAME@REVISION too. "
    "S3: AWS_ENDPOINT_URL for the endpoint; keys from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role.",
)

Url = Annotated[
    str,
    typer.Argument(
        help="s3://bucket/prefix, file:///folder or a path; to read, hf://datasets/ORG/NAME too.", show_default=False
    ),
]
ManifestNumber = Annotated[int | None, typer.Option("--manifest", "-m", help="Pin this manifest, not the newest.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]
Split = Annotated[str | None, typer.Option(help="Only this split.")]
Source = Annotated[str | None, typer.Option(help="Only this source.")]


def opened(url: str, manifest: int | None = None) -> Cache:
    """Open a cache. If its manifest is incomplete, print one warning to stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", IncompleteCacheWarning)
        cache = open_cache(url, manifest)
    for warning in caught:
        note(str(warning.message))
    if cache.made_up:
        note(made_up_message(cache))
    return cache


def answer(text: str, value: Any, as_json: bool) -> None:
    """Print a command's answer: as text, or the value as JSON."""
    if as_json:
        print_json(value)
    elif text:
        say(text, stderr=False)


@app.command()
def ls(
    url: Url,
    files: Annotated[bool, typer.Option("--files", help="Print the data files of one cache, one a line.")] = False,
    manifest: ManifestNumber = None,
    split: Split = None,
    source: Source = None,
    depth: Annotated[int, typer.Option(help="Levels below URL to look for caches in.")] = 4,
    json_: Json = False,
) -> None:
    """List the caches below URL, or with --files the Parquet files of one.

    The files are plain Parquet: hand them to DuckDB, Polars, pandas or Spark.

        duckdb -c "from read_parquet([$(teachercache ls --files URL | sed "s/.*/'&'/" | paste -sd,)], union_by_name=true)"

    Example: teachercache ls s3://bucket --files
    """
    if files:
        cache = opened(url, manifest)
        named = {cache.file_url(entry): entry for entry in cache.files(split, source)}
        answer("\n".join(named), [{"url": at} | entry.model_dump(mode="json") for at, entry in named.items()], json_)
        return
    if any(value is not None for value in (manifest, split, source)):
        raise UsageError("--manifest, --split and --source choose among the files of one cache: give --files too.")
    with progress_bar("folders looked into") as progress:
        caches = find_caches(Store.open(url), depth, progress)
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(describe, caches))
    broken = any(item["state"] == "unreadable" for item in found)
    if json_:
        print_json(found)
        raise typer.Exit(int(broken))
    if not found:
        raise NotACache(f"there is no cache at {url} or up to {depth} levels below; check the URL, or raise --depth.")
    numbers = [Column(name, justify="right") for name in ("K", "manifest", "rows", "bytes")]
    table = Table("cache", "teacher", *numbers, "state", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for item in found:
        sampled = item["rows_kind"] and item["rows_kind"]["kind"] == "sampled"
        width = f"{item['top_k'] or ''}{' sampled' if sampled else ''}"
        counts = (width, str(item["manifest"] or ""), f"{item['rows']:,}", f"{item['bytes']:,}")
        table.add_row(item["url"], item["teacher"], *counts, item["state"])
    print_unfolded(table)  # a URL is there to be copied
    raise typer.Exit(int(broken))


def describe(store: Store) -> dict[str, Any]:
    """Return one line of `ls`. An unreadable cache becomes one warning on stderr; the others are still listed."""
    line: dict[str, Any] = {"url": store.url, "teacher": "", "top_k": None, "rows_kind": None}
    line |= {"manifest": None, "rows": 0, "bytes": 0}
    try:
        ledger = Ledger(store)
        spec, manifest = ledger.spec(), ledger.newest_manifest()
    except (CorruptFile, MissingObject, UnsafeManifest, UnsupportedFormat) as error:
        note(f"{store.url}: {error} [{error.code}]")
        return line | {"state": "unreadable"}
    line |= {"teacher": spec.teacher.name, "top_k": spec.top_k, "rows_kind": spec.rows.model_dump(mode="json")}
    if manifest is None:
        return line | {"state": "not published"}
    line |= {"manifest": manifest.number, "rows": manifest.rows, "bytes": sum(f.size for f in manifest.files)}
    return line | {"state": "complete" if manifest.complete else "incomplete"}


@app.command("show")
def show_(url: Url, manifest: ManifestNumber = None, json_: Json = False) -> None:
    """Show which teacher made a cache, and what it holds by split and source.

    Example: teachercache show s3://bucket/cache
    """
    cache = opened(url, manifest)
    if json_:
        print_json(show.summary(cache))
    else:
        show.print_summary(cache, text_console())


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
        note(text.note, "note")
    top, console = min(top, cache.spec.top_k), text_console()
    shown = []
    for record in cache.records(split, source, limit=records):
        rows = show.head_rows(record, text, positions=positions, top=top)
        named = {"doc_id": record.doc_id, "window": record.window, "split": record.split, "source": record.source}
        shown.append(named | {"rows": rows})
        if not json_:
            console.print(show.head_table(record, rows, top))
    if json_:
        print_json(shown)


@app.command()
def verify(
    url: Url,
    manifest: ManifestNumber = None,
    sample: Annotated[
        int | None, typer.Option(min=0, help="Read only this many files; of the others check presence and size.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Files read at the same time.")] = 4,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Remember here what was read, so that an interrupted run goes on.", parser=local_path, metavar="path"
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Read everything and check it: seals, checksums, counts, every invariant of every row, no document twice.

    Exit status 1 and a list of what is wrong, or 0.

    Example: teachercache verify s3://bucket/cache --sample 10
    """
    store = Store.open(url)
    spec = Ledger(store).spec()
    pinned = None if manifest is None else opened(url, manifest).manifest
    with progress_bar("verifying") as progress:
        found = run_verify(store, spec, pinned, sample=sample, threads=threads, state=state, progress=progress)
    lines = [f"{problem.code} {problem.message}" for problem in found.problems]
    if found.strange:
        note(f"{len(found.strange):,} objects with strange names were ignored: {', '.join(found.strange[:10])}", "note")
    number = "no manifest" if found.manifest is None else f"manifest {found.manifest}"
    what = f"{found.files_read:,} of {found.files:,} files read, {found.records:,} records, {found.rows:,} rows"
    if found.files_skipped:
        what += f"; {found.files_skipped:,} were read before"
    if found.sampled:
        what += "; a sample, which finds no document twice and checks no drops"
    lines.append(f"{'ok' if found.ok else f'{len(found.problems)} problems'}: {number}, {what}")
    answer("\n".join(lines), dataclasses.asdict(found) | {"ok": found.ok}, json_)
    raise typer.Exit(int(not found.ok))


@app.command()
def doctor(
    url: Annotated[str | None, typer.Argument(help="Also check this store: s3://bucket/prefix or a path.")] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Do not probe conditional writes.")] = False,
    json_: Json = False,
) -> None:
    """Check this machine and, with a URL, its store: what was found and what to do. Exit status 1 where it cannot work.

    Example: teachercache doctor s3://bucket/cache     Ray and vLLM: python -m pipeline doctor
    """
    from teachercache.doctor import examine, print_findings

    raise typer.Exit(print_findings(examine(url, write=not read_only), as_json=json_))


@app.command()
def report(
    url: Url,
    to: Annotated[
        Path, typer.Option("--to", help="Where to write the page.", parser=local_path, metavar="path")
    ] = Path("report.html"),
    files: Annotated[int, typer.Option(min=1, help="How many files to take the statistics from.")] = SAMPLE_FILES,
    manifest: ManifestNumber = None,
    json_: Json = False,
) -> None:
    """Write one self-contained HTML page: how to use it, licence and cost, three documents, lengths, quality, students.

    Example: teachercache report s3://bucket/cache --to report.html
    """
    if not to.parent.is_dir():  # said before the reading, not after it
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(to))
    cache = opened(url, manifest)
    with progress_bar("reading") as progress:
        page = make_report(cache, sample_files=files, progress=progress)
    to.write_text(page, encoding="utf-8")
    answer(str(to), {"report": str(to), "manifest": cache.manifest.number}, json_)


@app.command()
def catalog(
    url: Annotated[str, typer.Argument(help="Where the caches are: s3://bucket/team or a folder.", show_default=False)],
    out: Annotated[str, typer.Option(help="Where to write the site: a folder or s3://….", show_default=False)],
    depth: Annotated[int, typer.Option(min=0, help="Look this many folders deep.")] = 4,
    files: Annotated[int, typer.Option(min=1, help="How many files of each cache its report reads.")] = 8,
    json_: Json = False,
) -> None:
    """Write a static site: a page that lists the caches below a URL, and the report of each. Needs no server.

    The page sorts and filters in the browser. It has what rows cost and which students were registered (train.register).
    A report shows three documents of its cache: whoever sees the site sees them. Exit status 1 where a cache cannot be
    read; it is listed with the reason.

    Example: teachercache catalog s3://bucket/team --out site
    """
    refuse_read_only(out)
    site = Store.open(out)
    with progress_bar("looking into folders") as progress:
        found = find_caches(Store.open(url), depth, progress)
    if not found:
        raise NotACache(f"there is no cache at {url} or up to {depth} levels below; check the URL, or raise --depth.")
    with progress_bar("reports") as progress:
        entries = make_catalog(Store.open(url).url, found, site, sample_files=files, progress=progress)
    made = {entry.file for entry in entries}
    if stale := [page.path for page in site.list("caches/") if page.path not in made]:
        note(f"{len(stale):,} pages belong to no cache that was found: {', '.join(stale[:5])}; remove them", "note")
    for entry in entries:
        if entry.error:
            note(f"{entry.store.url}: {entry.error} [{entry.error.code}]")
    broken = any(entry.error for entry in entries)
    lines = [entry.line() for entry in entries]
    answer(
        f"{site.url}/index.html lists {len(entries):,} caches",
        {"index": f"{site.url}/index.html", "caches": lines},
        json_,
    )
    raise typer.Exit(int(broken))


@app.command()
def export(
    url: Url,
    to: Annotated[
        Path,
        typer.Option("--to", help="Copy into this new folder.", show_default=False, parser=local_path, metavar="path"),
    ],
    manifest: ManifestNumber = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", help=f"Columns of another trainer: {', '.join(FORMATS)}.", show_default=False),
    ] = None,
    megabytes: Annotated[int, typer.Option(min=1, help="Size of one file.")] = 500,
    json_: Json = False,
) -> None:
    """Write a plain Parquet data set with a Hugging Face data card into a new folder.

    Example: teachercache export s3://bucket/cache --to folder

    Example: teachercache export s3://bucket/cache --to folder --format axolotl
    """
    cache = opened(url, manifest)
    with progress_bar("exporting") as progress:
        written = run_export(cache, to, format=format_, target_bytes=megabytes * 2**20, progress=progress)
    value = {"files": [str(path) for path in written], "manifest": cache.manifest.number}
    answer(f"{len(written)} files in {to}", value, json_)


@app.command()
def push(
    url: Url,
    to: Annotated[str, typer.Argument(help="hf://datasets/ORG/NAME; made where it is missing.", show_default=False)],
    manifest: ManifestNumber = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new data set public; else it is private.")] = False,
    json_: Json = False,
) -> None:
    """Copy one manifest to a data set on the Hugging Face Hub, with a data card, as one commit.

    The same command again completes a push that was ended, sends only what lacks, and adds a later manifest. Plans and
    commits go along: they name input files and hosts. HF_TOKEN holds the token.

    Example: teachercache push s3://bucket/cache hf://datasets/org/name
    """
    refuse_credentials(to)
    cache = opened(url, manifest)
    with progress_bar("uploading") as progress:
        done = run_push(cache, to, public=public, progress=progress)
    sent = f"{done.files} files of {done.bytes:,} bytes and {done.objects} small objects"
    what = sent if done.objects else "nothing was lacking"
    at = f"{to.rstrip('/')}@{done.commit}"
    answer(f"manifest {cache.manifest.number} is at {at}: {what}", dataclasses.asdict(done) | {"url": at}, json_)


@app.command()
def optimize(
    url: Url,
    codec: Annotated[str | None, typer.Option(help=f"Rewrite into this codec: {', '.join(CODECS)}.")] = None,
    megabytes: Annotated[int, typer.Option(min=1, help="Merge shards smaller than this up to about this size.")] = 256,
    without: Annotated[list[str] | None, typer.Option(help="Leave out this doc_id; may be repeated.")] = None,
    without_repeats: Annotated[
        bool,
        typer.Option("--without-repeats", help="Keep the first copy of documents that are committed twice (TC-E106)."),
    ] = False,
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
    if without_repeats:
        if codec or without:
            raise UsageError("--without-repeats does nothing else: give --codec and --without to a second call.")
        with progress_bar("rewriting") as progress:
            allowed = {"allow_partial": allow_partial, "allow_repeated_content": allow_repeated_content}
            manifest, left_out = publish_without_repeats(writer, **allowed, progress=progress)
        said = (
            f"manifest {manifest.number}: {left_out:,} copies of documents left out, {manifest.documents:,} documents"
        )
        answer(said, {"manifest": manifest.number, "left_out": left_out, "documents": manifest.documents}, json_)
        return
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
    answer(
        f"manifest {done.manifest.number}: {done.files_before} files of {done.bytes_before:,} bytes are now "
        f"{done.files_after} of {done.bytes_after:,}; {done.removed} records removed",
        dataclasses.asdict(done) | {"manifest": done.manifest.number},
        json_,
    )


@app.command()
def thin(
    url: Url,
    out: Annotated[
        str, typer.Argument(help="Where the smaller cache goes, or is: a folder or s3://…", show_default=False)
    ],
    entries: Annotated[
        int, typer.Option(min=2, help="Entries of a row, fewer than the cache has.", show_default=False)
    ],
    exact: Annotated[int | None, typer.Option(min=1, help="Least number of exact entries; default: a quarter.")] = None,
    codec: Annotated[
        str | None, typer.Option(help=f"Write this codec: {', '.join(CODECS)}; default: as it is.")
    ] = None,
    manifest: ManifestNumber = None,
    json_: Json = False,
) -> None:
    """Draw a sampled cache with fewer entries a row from a sampled cache, without a teacher, and publish it.

    The rows stay an unbiased estimate of the teacher. The same command again resumes, and takes over what was added to
    the cache or taken out of it. A top-K cache is refused: it does not say how its tail is spread.

    Example: teachercache thin s3://bucket/cache s3://bucket/cache-12 --entries 12
    """
    cache = opened(url, manifest)
    with progress_bar("thinning") as progress:
        done = run_thin(cache, out, entries=entries, exact=exact, codec=codec, progress=progress)
    answer(
        f"manifest {done.manifest.number} of {out}: {done.rows:,} rows of {entries} entries, {done.bytes_after:,} bytes "
        f"instead of {done.bytes_before:,}; {done.shards} shards added",
        dataclasses.asdict(done) | {"manifest": done.manifest.number},
        json_,
    )


@app.command()
def gc(
    url: Url,
    delete: Annotated[bool, typer.Option("--delete", help="Really remove; without it nothing is touched.")] = False,
    keep_manifests: Annotated[int | None, typer.Option(min=1, help="Expire all but this many of the newest.")] = None,
    grace_days: Annotated[float, typer.Option(help="Age at which an upload without a commit goes.")] = GRACE_DAYS,
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
    kinds = ("manifests", "void", "orphans", "replaced", "scratch")
    counts = {"deleted": delete, "bytes": found.bytes, "kept_files": found.kept_files, "waiting": found.waiting}
    lines = [f"{'deleted' if delete else 'would delete'} {item.path} {item.size:,}" for item in found.objects]
    lines.append(
        f"{len(found.objects)} objects, {found.bytes:,} bytes; {found.kept_files} data files kept, "
        f"{found.waiting} uploads without a commit still within {grace_days:g} days"
    )
    answer("\n".join(lines), counts | {kind: [o.path for o in getattr(found, kind)] for kind in kinds}, json_)


def main() -> None:
    """Run `teachercache`."""
    run_cli(app)


if __name__ == "__main__":
    main()
