"""report: make one self-contained HTML page about a cache. Inline SVG, no script, no network; readable on a phone."""

from __future__ import annotations

import html
import itertools
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter
from rich import filesize

from teachercache.console import printable
from teachercache.format.objects import ManifestFile
from teachercache.format.spec import Rows
from teachercache.read.cache import Cache, incomplete_message
from teachercache.store.ledger import Ledger
from teachercache.views.show import rows_in_words, summary

Floats = npt.NDArray[np.float64]
SAMPLE_FILES = 64
WIDTH, HEIGHT, LEFT, BOTTOM = 400, 190, 42, 34  # of one plot, in SVG units


@dataclass
class Sampled:
    """Statistics of the rows of some files."""

    files: int = 0
    rows: int = 0
    column_bytes: Counter[str] = field(default_factory=Counter)
    parts: dict[str, list[Floats]] = field(default_factory=lambda: defaultdict(list))

    def values(self, name: str) -> Floats:
        """Return all values of a statistic that `_sample` takes."""
        return np.concatenate([np.empty(0), *self.parts[name]])


def report(
    cache: Cache, *, sample_files: int = SAMPLE_FILES, progress: Callable[[int, int], None] | None = None
) -> str:
    """Return the page. Reads at most `sample_files` files, chosen by a fixed seed, and one row group of each."""
    everything, sampled = cache.manifest.files, Sampled()
    files = sorted(random.Random(0).sample(everything, min(sample_files, len(everything))), key=lambda f: f.path)
    for done, entry in enumerate(files, 1):
        _sample(cache, entry, sampled)
        if progress:
            progress(done, len(files))
    data = summary(cache)
    sections = [
        _tiles(data, sampled),
        _teacher_section(data),
        _corpora_section(data),
        _distributions_section(sampled, data),
        _bytes_section(sampled),
        _drops_section(data),
        _throughput_section(cache),
    ]
    if not data["complete"]:
        sections.insert(0, f'<p class="warn">{escape(incomplete_message(cache))}</p>')
    template = resources.files("teachercache").joinpath("templates/report.html").read_text(encoding="utf-8")
    title = escape(f"{data['teacher']['name']} · teacher cache")
    foot = escape(
        f"{data['url']} · manifest {data['manifest']} of {data['created']} · distributions from {sampled.rows:,} rows "
        f"of {sampled.files} of {len(everything)} files"
    )
    parts = {"title": title, "body": "\n".join(sections), "foot": foot}
    return re.sub(r"\{\{(\w+)\}\}", lambda hole: parts[hole[1]], template)  # in one pass: a name may hold {{body}}


def escape(text: str) -> str:
    """Return text for HTML, in which no character controls a terminal that shows the page's source."""
    return html.escape(printable(text))


def _sample(cache: Cache, entry: ManifestFile, into: Sampled) -> None:
    with cache.open_file(entry) as file:
        footer = file.footer
        for g, c in itertools.product(range(footer.num_row_groups), range(footer.num_columns)):
            column = footer.row_group(g).column(c)
            into.column_bytes[column.path_in_schema.split(".")[0]] += column.total_compressed_size
        if not file.num_groups:
            return
        block = file.read_group(0, {"input_ids", "topk_logprobs", "tail_logprob", "target_logprob", "entropy", "exact"})
    p, tail = np.exp(block.topk_logprobs.astype(np.float64)), block.tail_logprob.astype(np.float64)
    everything = np.zeros(0) if block.exact is None else block.exact
    into.files += 1
    into.rows += len(p)
    for name, values in {
        "coverage": 1 - np.exp(tail),  # mass of the K, or of the exact entries
        "entropy": block.entropy[~np.isnan(block.entropy)],  # nats
        "exact": everything,  # entries
        "top1": p[:, 0],
        "loss": -block.target_logprob[~np.isnan(block.target_logprob)],  # nats, where the target lies in the request
        "length": np.diff(block.token_offsets),
    }.items():
        into.parts[name].append(values.astype(np.float64))


# ---- pieces of the page ----------------------------------------------------------------------------------------


def _tiles(data: dict[str, Any], sampled: Sampled) -> str:
    loss, coverage = sampled.values("loss"), sampled.values("coverage")
    tiles = [
        ("rows", f"{data['rows']:,}"),
        ("documents", f"{data['documents']:,}"),
        ("bytes a row", f"{data['bytes_per_row'] or 0:g}"),
        ("size", filesize.decimal(data["bytes"])),
        (f"mass in the {_kept(data)}", f"{coverage.mean():.1%}" if coverage.size else "–"),
        ("teacher's perplexity", f"{math.exp(loss.mean()):.2f}" if loss.size else "–"),
    ]
    cells = "".join(f"<div><b>{escape(v)}</b><span>{escape(n)}</span></div>" for n, v in tiles)
    return f'<div class="tiles">{cells}</div>'


def _teacher_section(data: dict[str, Any]) -> str:
    teacher, tokenizer = data["teacher"], data["tokenizer"]
    rows = [(name, value) for name, value in teacher.items() if value not in (None, "", {})]
    rows += [
        ("tokenizer", tokenizer["digest"]),
        ("vocabulary", f"{tokenizer['vocab_size']:,}"),
        ("a row", rows_in_words(TypeAdapter(Rows).validate_python(data["rows_kind"]))),
        ("spec digest", data["spec_digest"]),
        ("manifest digest", data["manifest_digest"]),
        ("codec", ", ".join(data["codecs"])),
    ]
    return _section("The teacher", _table(("field", "value"), [(n, str(v)) for n, v in rows], code=True))


def _corpora_section(data: dict[str, Any]) -> str:
    names = ("files", "documents", "records", "tokens", "rows", "bytes")
    rows = [(p["split"], p["source"], *(f"{p[n]:,}" for n in names)) for p in data["parts"]]
    shards = data["shards"]
    note = f"{shards['committed']:,} of {shards['planned']:,} planned shards committed, {shards['quarantined']:,} in quarantine."
    return _section("Corpora", _table(("split", "source", *names), rows) + f"<p>{note}</p>")


def _kept(data: dict[str, Any]) -> str:
    """Return what is outside the tail of a row."""
    return "exact entries" if data["rows_kind"]["kind"] == "sampled" else f"top {data['top_k']}"


def _distributions_section(sampled: Sampled, data: dict[str, Any]) -> str:
    if not sampled.rows:
        return _section("Distributions", "<p>There are no rows.</p>")
    names = ("coverage", "entropy", "exact", "top1", "loss", "length")
    coverage, entropy, exact, top1, loss, length = map(sampled.values, names)
    plots = [
        histogram(coverage, f"Mass in the {_kept(data)}", "probability", low=min(0.8, float(coverage.min())), high=1.0),
        histogram(top1, "Probability of the teacher's best token", "probability", low=0.0, high=1.0),
        *([histogram(entropy, "Entropy of the teacher", "nats", low=0.0)] if entropy.size else []),
        *([histogram(exact, "Exact entries of a row", "entries", low=0.0)] if exact.size else []),
        histogram(loss, "Teacher's loss on the token that followed", "nats", low=0.0),
        histogram(length, "Length of a record", "tokens", low=0.0),
    ]
    return _section("Distributions", '<div class="plots">' + "".join(plots) + "</div>")


def _bytes_section(sampled: Sampled) -> str:
    if not sampled.rows:
        return ""
    whole = sum(sampled.column_bytes.values())
    items = [(name, size, f"{size / whole:.1%}") for name, size in sampled.column_bytes.most_common(10)]
    return _section("Bytes by column", bars(items))


def _drops_section(data: dict[str, Any]) -> str:
    counts = [(reason, n, f"{n:,}") for reason, n in data["drops"].items()]
    return _section("Dropped documents", bars(counts) if counts else "<p>None was dropped.</p>")


def _throughput_section(cache: Cache) -> str:
    """Return rows a second of each committed shard, by engine and device, from the provenance."""
    rates: dict[str, list[float]] = defaultdict(list)
    for commit in Ledger(cache.store).commits():
        seconds = commit.provenance.get("shard_seconds")
        if isinstance(seconds, (int, float)) and seconds > 0 and commit.rows:
            engine, device = (commit.provenance.get(name, "?") for name in ("engine", "device"))
            rates[f"{engine} on {device}"].append(commit.rows / seconds)
    if not rates:
        return ""
    rows = [
        (name, f"{len(v):,}", f"{min(v):,.0f}", f"{float(np.median(v)):,.0f}", f"{max(v):,.0f}")
        for name, v in sorted(rates.items())
    ]
    return _section(
        "Throughput (rows a second, by shard)", _table(("engine", "shards", "slowest", "median", "fastest"), rows)
    )


# ---- drawing ---------------------------------------------------------------------------------------------------


def histogram(values: Floats, title: str, unit: str, *, low: float, high: float | None = None, bins: int = 40) -> str:
    """Return an SVG histogram with the median marked. The last bin also holds what lies beyond the 99.5th percentile."""
    high = high if high is not None else float(np.quantile(values, 0.995))
    high = high if high > low else low + 1.0
    counts, edges = np.histogram(np.clip(values, low, high), bins=bins, range=(low, high))
    share = counts / max(1, counts.sum())
    top = share.max() or 1.0
    plot_w, plot_h = WIDTH - LEFT - 12, HEIGHT - BOTTOM - 28

    def x(value: float) -> float:
        return LEFT + (value - low) / (high - low) * plot_w

    def y(value: float) -> float:
        return 28 + plot_h * (1 - value / top)

    shapes = []
    for value, a, b in zip(share, edges[:-1], edges[1:], strict=True):
        label = f"{a:.3g} to {b:.3g} {unit}: {value:.1%}"
        box = f'x="{x(a):.1f}" y="{y(value):.1f}" width="{max(x(b) - x(a) - 1, 0.5):.1f}" height="{28 + plot_h - y(value):.1f}"'
        shapes.append(f'<rect class="bar" {box}><title>{escape(label)}</title></rect>')
    for tick in _ticks(low, high):
        shapes.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - 14}" text-anchor="middle">{tick:g}</text>')
    for fraction in (0.0, top / 2, top):
        shapes.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 12}" y1="{y(fraction):.1f}" y2="{y(fraction):.1f}"/>'
        )
        shapes.append(f'<text x="{LEFT - 6}" y="{y(fraction) + 4:.1f}" text-anchor="end">{100 * fraction:.3g}%</text>')
    median = float(np.median(values))
    if low <= median <= high:
        shapes.append(f'<line class="median" x1="{x(median):.1f}" x2="{x(median):.1f}" y1="24" y2="{28 + plot_h}"/>')
    name = escape(title)
    caption = f"{name} <small>median {median:.3g} {escape(unit)}</small>"
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{"".join(shapes)}</svg>'
    return f"<figure><figcaption>{caption}</figcaption>{picture}</figure>"


def bars(items: Sequence[tuple[str, float, str]]) -> str:
    """Draw (name, size, label) as horizontal bars in plain HTML."""
    longest = max(size for _, size, _ in items) or 1
    cells = []
    for name, size, label in items:
        bar = f'<i style="width:{100 * size / longest:.1f}%"></i>'
        cells.append(f"<span>{escape(name)}</span><div>{bar}</div><em>{escape(label)}</em>")
    return f'<div class="bars">{"".join(cells)}</div>'


def _ticks(low: float, high: float) -> list[float]:
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (m * step) <= 6)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, code: bool = False) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(v))}</td>" for v in row) + "</tr>" for row in rows)
    kind = ' class="code"' if code else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'
