"""Output for a person: a live line while a job runs (plain lines without a terminal), the preview and the summary."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from pipeline.planning.plan import Planned
    from pipeline.running.driver import Outcome, Tally
    from pipeline.running.tasks import PoolState
    from teachercache.format.spec import Rows

# Bytes of a row in the open layout: 20, and these for each entry. Measured: 280 of top-100, 222, 69 and 42 of sampled 100,
# 24 and 12.
BYTES_OF_AN_ENTRY = {"top_k": 2.6, "sampled": 2.0}


def human(number: float, unit: str = "") -> str:
    """Spell a number with a unit prefix: 1234567 → 1.23 M."""
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g} {suffix}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def duration(seconds: float) -> str:
    """Spell a duration: 90 → 1 min 30 s."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"


def say(console: Console, text: str) -> None:
    """Print a line as it is: not wrapped, nothing highlighted, brackets kept."""
    console.print(text, soft_wrap=True)


class Progress:
    """Prints progress: a live line on a terminal, a plain line for every report elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._began = time.monotonic()
        self._last = (time.monotonic(), 0)
        self._busy: dict[str, tuple[float, float]] = {}
        self._status = console.status("starting") if console.is_terminal else None
        if self._status is not None:
            self._status.start()

    def __call__(self, tally: Tally, state: PoolState) -> None:
        """Print a report; the rate is that of the interval since the last one."""
        now = time.monotonic()
        then, tokens = self._last
        rate = (tally.tokens - tokens) / max(now - then, 1e-9)
        self._last = (now, tally.tokens)
        line = self.line(tally, state, rate, now - self._began)
        line += self._engines(state.workers, now)
        if self._status is not None:
            self._status.update(line)
        else:
            say(self.console, line)

    def _engines(self, workers: list[dict[str, Any]], now: float) -> str:
        """Return the share of the last interval in which engines held work: the mean, and the idlest by name."""
        shares: dict[str, float] = {}
        for worker in workers:
            name, busy = worker["name"], worker["busy_s"]
            if name in self._busy:
                then, before = self._busy[name]
                shares[name] = min(1.0, (busy - before) / max(now - then, 1e-9))
            self._busy[name] = (now, busy)
        if not shares:
            return ""
        mean = sum(shares.values()) / len(shares)
        idlest = min(shares, key=lambda name: shares[name])
        return f"  ·  engines busy {mean:.0%}" + (f" (least: {idlest} {shares[idlest]:.0%})" if len(shares) > 1 else "")

    def line(self, tally: Tally, state: PoolState, rate: float, elapsed: float) -> str:
        """Return the line of a report; `rate` is tokens/s of the last interval, `elapsed` seconds since the start."""
        overall = tally.tokens / max(elapsed, 1e-9)
        parts = [
            f"{tally.done}/{tally.total} shards",
            f"{human(tally.tokens)} tokens",
            f"{human(rate)}/s now, {human(overall)}/s overall",
            f"{state.ready}/{state.wanted} actors" + (f" ({state.starting} starting)" if state.starting else ""),
        ]
        if overall > 0 and tally.estimated_tokens_left > 0:
            parts.append(f"about {duration(tally.estimated_tokens_left / overall)} left")
        if tally.retries:
            parts.append(f"{tally.retries} retries")
        if tally.quarantined:
            parts.append(f"{tally.quarantined} quarantined")
        if tally.drops:
            parts.append(f"{sum(tally.drops.values())} documents dropped")
        return "  ·  ".join(parts)

    def event(self, name: str, details: dict[str, Any]) -> None:
        """Print an event that a person should see: a failure, a quarantine, an outage of the store."""
        if name in ("failed", "quarantined", "store"):
            say(self.console, f"{name}: " + "  ".join(f"{key}={value}" for key, value in details.items()))

    def close(self) -> None:
        """Remove the live line."""
        if self._status is not None:
            self._status.stop()


def show_plan(console: Console, planned: Planned, kept: Rows, tokens_per_s: float | None, gpus: float = 1.0) -> None:
    """Print the preview of a plan, whose rows are `kept`. `tokens_per_s` is of one teacher, which holds `gpus`."""
    table = Table(title="Plan (documents, tokens, rows and drops are estimates from a sample of each file)")
    for name in ("source", "files", "bytes", "shards", "≈ documents", "≈ tokens", "≈ rows", "≈ dropped"):
        table.add_column(name, justify="left" if name == "source" else "right")
    for e in planned.estimates:
        dropped = ", ".join(f"{reason} {count}" for reason, count in e.drops.most_common(4)) or "none"
        counts = map(human, (e.documents, e.tokens, e.rows))
        table.add_row(e.source, str(e.files), human(e.bytes, "B"), str(e.shards), *counts, dropped)
    console.print(table)
    rows, tokens = sum(e.rows for e in planned.estimates), sum(e.tokens for e in planned.estimates)
    each = round(20 + kept.entries * BYTES_OF_AN_ENTRY[kept.kind])
    console.print(f"storage: about {human(rows * each, 'B')} ({each} bytes a row in the open layout)")
    if tokens_per_s:
        console.print(
            f"teacher time: about {gpus * tokens / tokens_per_s / 3600:.2f} GPU-hours at {human(tokens_per_s)} tokens/s"
            + (f" of a teacher over {gpus:g} GPUs" if gpus != 1 else "")
        )
    else:
        console.print("teacher time: unknown until a first shard is committed; give --rate TOKENS_PER_S")
    for warning in planned.warnings:
        say(console, f"warning: {warning}")


def show_outcome(console: Console, outcome: Outcome) -> None:
    """Print the summary of a run."""
    tally = outcome.tally
    copied = f" of which {human(tally.reused_rows)} copied from other plans" if tally.reused_rows else ""
    made = f"{human(tally.documents)} documents, {human(tally.tokens)} tokens, {human(tally.rows)} rows{copied}"
    say(
        console,
        f"{tally.committed} shard{'s' * (tally.committed != 1)} committed ({made}, {human(tally.bytes, 'B')}), "
        f"{tally.found} found committed, "
        f"{tally.quarantined} quarantined, {tally.retries} retries, {tally.conflicts} lost races, {duration(outcome.seconds)}",
    )
    if tally.drops:
        say(console, "dropped: " + ", ".join(f"{reason} {count}" for reason, count in sorted(tally.drops.items())))
    for shard, message in list(outcome.quarantined.items())[:20]:
        say(console, f"quarantined {shard}: {message}")
