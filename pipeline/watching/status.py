"""The state of a cache from its store alone: everyone with read access may watch a job."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.watching.progress import duration, human
from teachercache import Commit, Ledger
from teachercache.errors import NotACache
from teachercache.store.liveness import live_commits, planned_shards, resolve_replacements


def read_status(url: str) -> dict[str, Any]:
    """Count over all plans of a cache: what its newest manifest says, and what was committed since.

    Cost: the manifest, the plans, a listing, and one small read for each commit that the manifest did not settle. What
    was replaced (by `optimize`) counts once, as what replaced it.
    """
    ledger = Ledger.open(url)
    ledger.spec()  # NotACache before anything else is read
    seen = ledger.snapshot()
    newest, done = seen.newest, seen.listed.keys()
    planned = planned_shards(ledger.plans().values(), done)
    shards, broken = 0, 0
    for shard_id, entry in ledger.quarantines().items():
        if entry.scope == "document":
            broken += len(entry.documents)
        elif shard_id not in done:
            shards += 1
    commits = [commit for commit, _ in seen.fresh]
    replaced = resolve_replacements(commits, newest.replaced if newest else {}, seen.settled)
    live = live_commits(commits, replaced)
    kept = [entry for entry in (newest.files if newest else ()) if entry.shard_id not in replaced]
    documents = newest.documents if newest and len(kept) == len(newest.files) else sum(f.documents for f in kept)
    drops = Counter(newest.drops if newest else {})
    winners = set(replaced.values())
    for commit in commits:
        if not commit.replaces or commit.shard_id in winners:
            drops.update(commit.drops)
    left = sum(s.estimated_tokens for i, s in planned.items() if i not in done)
    return {
        "url": url,
        "time": time.time(),
        "planned": len(planned),
        "committed": len(done & planned.keys()) if planned else len(done),
        "quarantined": shards,
        "documents": documents + sum(c.documents for c in live),
        "tokens": sum(f.tokens for f in kept) + sum(c.tokens for c in live),
        "rows": sum(f.rows for f in kept) + sum(c.rows for c in live),
        "reused_rows": (newest.reused_rows if newest else 0) + sum(_reused(c, "rows") for c in commits),
        "bytes": sum(f.size for f in kept) + sum(f.size for c in live for f in c.files),
        "drops": dict(drops),
        "broken_documents": broken,
        "estimated_tokens_left": left,
        "complete": bool(planned) and planned.keys() <= done,
    }


def _reused(commit: Commit, what: str) -> int:
    """Return the records, rows or tokens of a commit that were copied from commits of other plans."""
    return int((commit.provenance.get("reused") or {}).get(what, 0))


def measured_rate(url: str, most: int = 50) -> float | None:
    """Return tokens/s of one teacher as the cache's commits record it; None where there is none yet."""
    ledger = Ledger.open(url)
    try:
        ledger.spec()
    except NotACache:
        return None
    tokens = seconds = 0.0
    for commit in ledger.commits(most):
        tokens += commit.tokens - _reused(commit, "tokens")
        seconds += float(commit.provenance.get("teacher_seconds") or 0.0)
    return tokens / seconds if seconds > 0 else None


def show_status(console: Console, report: dict[str, Any], before: dict[str, Any] | None) -> None:
    """Print what read_status returned, with the rate since `before`."""
    """Print what read_status returned, with the rate since `before`."""
    table = Table(title=report["url"], show_header=False)
    left = f"about {human(report['estimated_tokens_left'])} tokens left (estimate)"
    shards = f"{report['committed']} of {report['planned']} committed, {report['quarantined']} quarantined"
    said = f"{shards}; {'complete' if report['complete'] else left}"
    table.add_row("shards", said if report["planned"] else f"{report['committed']} committed, none was planned")
    table.add_row("documents", human(report["documents"]))
    table.add_row("tokens, rows", f"{human(report['tokens'])}, {human(report['rows'])}")
    if report["reused_rows"]:
        table.add_row("rows re-used", f"{human(report['reused_rows'])} copied from other plans instead of computed")
    table.add_row("size", human(report["bytes"], "B"))
    for reason, count in sorted(report["drops"].items()):
        table.add_row(f"dropped: {reason}", str(count))
    if before is not None:
        rate = (report["tokens"] - before["tokens"]) / max(report["time"] - before["time"], 1e-9)
        left = f", about {duration(report['estimated_tokens_left'] / rate)} left" if rate > 0 else ""
        table.add_row("rate", f"{human(rate)} tokens/s{left}")
    console.print(table)


def read_quarantine(url: str) -> list[dict[str, Any]]:
    """Return quarantined shards without a commit, and documents left out of committed shards."""
    ledger = Ledger.open(url)
    ledger.spec()
    committed = ledger.committed()
    return [
        entry.model_dump(include={"scope", "shard_id", "reason", "message", "documents"})
        for shard_id, entry in sorted(ledger.quarantines().items())
        if entry.scope == "document" or shard_id not in committed
    ]
