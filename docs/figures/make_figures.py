"""Draw every figure of the documentation as SVG.

    python docs/figures/make_figures.py            write them
    python docs/figures/make_figures.py --check    write nothing; exit 1 and name those that are out of date

Each figure is a function that returns a Figure. Numbers come from benchmarks/results/. The output is plain SVG text: the
same input gives the same bytes, and one style sheet follows the reader's light or dark setting.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks/results"

LIGHT = {
    "bg": "#ffffff",
    "card": "#f6f8fa",
    "line": "#d0d7de",
    "ink": "#1f2328",
    "muted": "#59636e",
    "blue": "#0969da",
    "green": "#1a7f37",
    "orange": "#bc4c00",
    "grey": "#afb8c1",
    "bluet": "#ddf4ff",
    "greent": "#dafbe1",
    "oranget": "#fff1e5",
}
DARK = {
    "bg": "#0d1117",
    "card": "#161b22",
    "line": "#3d444d",
    "ink": "#e6edf3",
    "muted": "#9198a1",
    "blue": "#58a6ff",
    "green": "#3fb950",
    "orange": "#f0883e",
    "grey": "#6e7681",
    "bluet": "#12263f",
    "greent": "#12261e",
    "oranget": "#2d1c0d",
}
FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, 'Liberation Mono', monospace"


def load(name: str) -> dict[str, Any]:
    """Return one file of benchmarks/results/."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def number(value: float) -> str:
    """Return a coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


class Figure:
    """An SVG picture in the making. Colours are names of the palette; coordinates are pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, w: float, h: float, *, fill: str = "card", line: str = "line", r: int = 6
    ) -> None:
        """Draw a rectangle with round corners."""
        at = f'x="{number(x)}" y="{number(y)}" width="{number(w)}" height="{number(h)}" rx="{r}"'
        self.parts.append(f'<rect {at} fill="var(--{fill})" stroke="var(--{line})"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 13,
        fill: str = "ink",
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Write one line; y is its baseline."""
        more = ' font-weight="600"' if bold else ""
        more += ' class="m"' if mono else ""
        more += f' text-anchor="{anchor}"' if anchor != "start" else ""
        at = f'x="{number(x)}" y="{number(y)}" font-size="{size}" fill="var(--{fill})"'
        self.parts.append(f"<text {at}{more}>{escape(text)}</text>")

    def card(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        title: str,
        lines: Sequence[str] = (),
        *,
        fill: str = "card",
        line: str = "line",
        mono: bool = False,
    ) -> None:
        """Draw a box with a bold title and smaller lines below it, centred."""
        self.box(x, y, w, h, fill=fill, line=line)
        top = y + h / 2 + 5 - 8.5 * len(lines)
        self.text(x + w / 2, top, title, bold=True, anchor="middle")
        for index, text in enumerate(lines):
            self.text(x + w / 2, top + 17 * (index + 1), text, size=11, fill="muted", anchor="middle", mono=mono)

    def path(
        self,
        points: Sequence[tuple[float, float]],
        *,
        line: str = "muted",
        arrow: bool = True,
        dash: bool = False,
        width: float = 1.5,
    ) -> None:
        """Draw a line through the points, with an arrow head at its end."""
        at = "M" + " L".join(f"{number(x)} {number(y)}" for x, y in points)
        more = f' marker-end="url(#{line})"' if arrow else ""
        more += ' stroke-dasharray="4 4"' if dash else ""
        self.parts.append(f'<path d="{at}" fill="none" stroke="var(--{line})" stroke-width="{width}"{more}/>')

    def dot(self, x: float, y: float, *, fill: str) -> None:
        """Draw the mark of a data point."""
        self.parts.append(f'<circle cx="{number(x)}" cy="{number(y)}" r="4.5" fill="var(--{fill})"/>')

    def svg(self) -> str:
        """Return the file's text."""

        def variables(palette: dict[str, str]) -> str:
            return ";".join(f"--{name}:{value}" for name, value in palette.items())

        style = f"svg{{{variables(LIGHT)}}}text{{font-family:{FONT}}}.m{{font-family:{MONO}}}"
        style += f"@media(prefers-color-scheme:dark){{svg{{{variables(DARK)}}}}}"
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="var(--{name})"/></marker>'
            for name in ("muted", "blue", "green", "orange")
            if any(f"url(#{name})" in part for part in self.parts)
        )
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        ground = f'<rect width="{self.width}" height="{self.height}" rx="8" fill="var(--bg)"/>'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{style}</style>",
                *([f"<defs>{heads}</defs>"] if heads else []),
                ground,
                *self.parts,
                "</svg>\n",
            ]
        )


def open_bytes_per_row(name: str) -> float:
    """Return bytes a row of codec `open` in a result of benchmarks/encodings.py."""
    return load(name)["real"]["variants"]["open (as shipped)"]["bytes_per_row"]


def whole_logits() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the run that measured the four loss methods side by side, and its results by method."""
    run = next(run for run in load("loss_h200.json")["runs"] if "whole_logits" in run)
    return run, {result["method"]: result for result in run["whole_logits"]}


def overview() -> Figure:
    """Return the picture of the README: cache once, many students."""
    teacher = load("teacher_rows_h200.json")
    rate, date = teacher["pipeline"]["tokens_per_s"], teacher["host"]["date"]
    sizes = [open_bytes_per_row(name) for name in ("encodings.json", "encodings_gemma3_270m.json")]
    memory = {method: result["extra_gib"] for method, result in whole_logits()[1].items()}
    figure = Figure(860, 236, "A teacher runs once and fills a cache; many students train from the cache")
    figure.text(120, 30, "once", size=12, fill="muted", anchor="middle")
    figure.card(
        20, 44, 200, 132, "Teacher", ["large model in vLLM", "on Ray actors with GPUs"], fill="oranget", line="orange"
    )
    figure.text(120, 200, f"{rate:,.0f} tokens/s committed", size=12, anchor="middle")
    figure.text(120, 218, f"8 B shape, one H200, {date}", size=11, fill="muted", anchor="middle")
    figure.path([(222, 110), (296, 110)], line="orange")
    figure.text(430, 30, "kept", size=12, fill="muted", anchor="middle")
    figure.card(
        300,
        44,
        260,
        132,
        "Cache",
        [
            "top-100 log-probabilities of every token",
            "plain Parquet on S3, immutable",
            "readable by DuckDB, pandas, Spark",
        ],
        fill="bluet",
        line="blue",
    )
    figure.text(430, 200, f"{min(sizes):.0f} to {max(sizes):.0f} bytes a token", size=12, anchor="middle")
    figure.text(430, 218, f"{sum(sizes) / 2e3:.1f} TB for a billion tokens", size=11, fill="muted", anchor="middle")
    figure.text(750, 30, "as often as you like", size=12, fill="muted", anchor="middle")
    for index, name in enumerate(("Student A", "Student B", "Student C, next month")):
        y = 44 + 46 * index
        figure.card(660, y, 180, 40, name, fill="greent", line="green")
        figure.path([(562, 110), (612, 110), (612, y + 20), (656, y + 20)], line="green")
    figure.text(750, 200, "one GPU each, no teacher", size=12, anchor="middle")
    text = f"loss: {memory['fused']:.1f} GiB where dense takes {memory['dense']:.1f}"
    figure.text(750, 218, text, size=11, fill="muted", anchor="middle")
    return figure


def architecture() -> Figure:
    """Return the path of the data through the three packages."""
    figure = Figure(
        960, 484, "The way of the data: corpus, plan, actors, cache, stream, packed batches, loss, checkpoint"
    )
    lanes = (
        (
            "pipeline/",
            "cache team: a Ray cluster with GPUs",
            "orange",
            "oranget",
            (
                ("corpus/", "files → documents → token ids"),
                ("planning/", "cut files into shards"),
                ("running/", "dispatch, retry, resume"),
                ("teachers/", "token ids → top-K rows"),
            ),
        ),
        (
            "teachercache/",
            "the contract: one bucket, no server",
            "blue",
            "bluet",
            (
                ("write/", "attempt: build, upload, commit"),
                ("the bucket", "data, commits, manifests"),
                ("read/", "pin a manifest, stream"),
                ("views/, upkeep/", "show, report, verify, gc"),
            ),
        ),
        (
            "trainer/",
            "student team: one GPU and a URL",
            "green",
            "greent",
            (
                ("data/", "pack whole documents"),
                ("model/", "hidden states"),
                ("losses/", "fused sparse KL"),
                ("fit, checkpoint", "exact resume, HF folder"),
            ),
        ),
    )
    for row, (name, who, line, fill, cards) in enumerate(lanes):
        y = 12 + 168 * row
        figure.box(10, y, 940, 124, fill=fill, line=line, r=8)
        figure.text(24, y + 24, name, bold=True, mono=True)
        figure.text(936, y + 24, who, size=11, fill="muted", anchor="end")
        for index, (title, text) in enumerate(cards):
            figure.card(24 + 233 * index, y + 38, 213, 72, title, [text], fill="bg", line=line)
            if index < 3 and (line, index) != ("blue", 2):
                figure.path([(238 + 233 * index, y + 74), (256 + 233 * index, y + 74)], line=line)
    for y, x, line, text in (
        (122, 829, "orange", "records of one shard: token ids, top-K ids, log-probabilities, tail"),
        (290, 596, "green", "records, shuffled by seed; the state resumes exactly"),
    ):
        figure.path([(x, y), (x, y + 36), (200, y + 36), (200, y + 93)], line=line)
        figure.text((x + 200) / 2, y + 30, text, size=11, fill="muted", anchor="middle")
    return figure


def bucket() -> Figure:
    """Return the objects of a cache, and which of them can change."""
    rows = (
        ("spec.json", "which teacher, tokenizer and K", "once", True),
        ("tokenizer/<digest>/…", "the tokenizer's files", "once", True),
        ("plans/<digest>.json", "what a job set out to do", "once each", True),
        ("data/codec=…/split=…/source=…/<shard>-<attempt>.parquet", "the rows", "once each", True),
        ("commits/<shard>.json", "makes one attempt's files part of the cache", "once each", True),
        ("manifests/00000001.json", "a snapshot that readers pin", "once each", True),
        ("quarantine/<shard>/<attempt>.json", "why a shard failed; a commit wins over it", "any time", False),
        ("leases/…", "saves work when two jobs race; never needed", "any time", False),
    )
    figure = Figure(900, 424, "Objects of a cache: what is immutable and what is advisory")
    figure.text(20, 30, "s3://bucket/cache/", bold=True, mono=True)
    figure.text(500, 30, "holds", size=12, fill="muted")
    figure.text(880, 30, "written", size=12, fill="muted", anchor="end")
    y = 44
    for index, (name, what, written, immutable) in enumerate(rows):
        if index == 6:
            figure.text(20, y + 18, "Advisory: deleting these loses no data", size=11, fill="muted")
            y += 28
        figure.box(20, y, 860, 34, fill="bluet" if immutable else "card", line="blue" if immutable else "line")
        figure.text(32, y + 22, name, size=12, mono=True)
        figure.text(500, y + 22, what, size=12)
        figure.text(868, y + 22, written, size=12, fill="muted", anchor="end")
        y += 39
    figure.text(
        20, y + 18, "Blue objects are created with If-None-Match: * and never overwritten.", size=11, fill="blue"
    )
    return figure


def attempt() -> Figure:
    """Return the life of an attempt at a shard: the states of teachercache/write/attempt.py."""
    figure = Figure(900, 250, "Life of an attempt: NEW, BUILT, UPLOADED, then COMMITTED or LOST")
    states = (
        ("NEW", "fresh uuid4", 20),
        ("BUILT", "local Parquet, verified", 230),
        ("UPLOADED", "objects created", 460),
    )
    for name, what, x in states:
        figure.card(x, 84, 160, 62, name, [what])
    figure.card(730, 30, 150, 62, "COMMITTED", ["part of the cache"], fill="greent", line="green")
    figure.card(730, 142, 150, 62, "LOST", ["another attempt won"], fill="oranget", line="orange")
    figure.path([(182, 115), (226, 115)])
    figure.text(204, 106, "build", size=11, anchor="middle")
    figure.path([(392, 115), (456, 115)])
    figure.text(424, 106, "upload", size=11, anchor="middle")
    figure.path([(622, 106), (660, 106), (660, 61), (726, 61)], line="green")
    figure.text(666, 52, "HEAD, then", size=11)
    figure.text(666, 77, "commit", size=11)
    figure.path([(622, 124), (660, 124), (660, 173), (726, 173)], line="orange")
    figure.text(666, 164, "name taken", size=11)
    for x, lines in (
        (100, ("killed here:", "nothing exists")),
        (310, ("killed here:", "a local folder is left")),
        (540, ("killed here: orphans,", "which gc removes later")),
    ):
        for index, text in enumerate(lines):
            figure.text(x, 168 + 16 * index, text, size=11, fill="muted", anchor="middle")
    figure.text(
        20,
        232,
        "Losing is no error. Until the commit object exists, readers see no change; an upload older than half "
        "the grace period is refused.",
        size=11,
        fill="muted",
    )
    return figure


LOSS_NAMES = (
    ("fused", "fused (default)", "blue"),
    ("closed_form", "closed form, recomputed", "grey"),
    ("forward_chunked", "forward-chunked", "grey"),
    ("dense", "dense", "grey"),
)


def loss_methods() -> Figure:
    """Return memory and time of four loss methods as bars."""
    run, by_method = whole_logits()
    figure = Figure(860, 244, "Memory and time of four loss methods")
    figure.text(20, 28, "The fused loss never holds the logits", bold=True, size=15)
    panels = ((190, "extra_gib", "extra memory, GiB", "{:.1f}"), (560, "time_ms", "forward + backward, ms", "{:.0f}"))
    for x, field, label, pattern in panels:
        figure.text(x, 56, label, size=12, fill="muted")
        largest = max(result[field] for result in by_method.values())
        for index, (method, name, colour) in enumerate(LOSS_NAMES):
            y, value = 68 + 34 * index, by_method[method][field]
            if x == 190:
                figure.text(180, y + 17, name, size=12, anchor="end")
            width = max(3.0, 230 * value / largest)
            figure.box(x, y, width, 24, fill=colour, line=colour, r=2)
            figure.text(x + width + 6, y + 17, pattern.format(value), size=12, bold=colour == "blue")
    figure.text(
        20,
        230,
        f"32,768 rows, d = 3,072, V = 128,256, K = 100, bf16; gradients included. One H200, {run['machine']['date']}.",
        size=11,
        fill="muted",
    )
    return figure


def loss_rows() -> Figure:
    """Return extra memory of the loss against rows, on logarithmic axes."""
    runs = load("loss_h200.json")["runs"]
    committed = next(run for run in runs if "long" in run)
    whole = next(run for run in runs if "whole_logits" in run)
    points: dict[str, dict[int, float]] = {method: {} for method, *_ in LOSS_NAMES}
    for result in (*committed["all_methods"], *whole["whole_logits"]):
        if result["method"] in points and result["extra_gib"] is not None:
            points[result["method"]][result["rows"]] = result["extra_gib"]
    for name, (_, gib, _) in committed["long"].items():
        rows, method = name.split(" ", 1)
        points[method][int(rows)] = gib
    figure = Figure(860, 396, "Extra memory of the loss against rows")
    figure.text(
        20,
        28,
        f"A million rows fit in {max(points['fused'].values()):.1f} GiB: only the gradient of the hidden states grows",
        bold=True,
        size=15,
    )
    left, right, top, bottom = 70.0, 660.0, 60.0, 320.0
    ticks_x, ticks_y = (4_096, 32_768, 262_144, 1_048_576), (1, 3, 10, 30, 100)

    def at(rows: float, gib: float) -> tuple[float, float]:
        x = left + 30 + (right - left - 60) * math.log(rows / ticks_x[0]) / math.log(ticks_x[-1] / ticks_x[0])
        return x, bottom - (bottom - top) * math.log(gib) / math.log(160)

    figure.text(20, 50, "extra memory, GiB", size=12, fill="muted")
    for gib in ticks_y:
        y = at(4_096, gib)[1]
        figure.path([(left, y), (right, y)], line="line", arrow=False, width=1)
        figure.text(left - 8, y + 4, str(gib), size=11, fill="muted", anchor="end")
    for rows in ticks_x:
        figure.text(at(rows, 1)[0], bottom + 18, f"{rows:,}", size=11, fill="muted", anchor="middle")
    figure.text((left + right) / 2, bottom + 38, "rows (tokens) in one call", size=12, fill="muted", anchor="middle")
    colours = {"fused": "blue", "closed_form": "green", "forward_chunked": "orange", "dense": "muted"}
    for method, name, _ in LOSS_NAMES:
        line = sorted(points[method].items())
        spots = [at(rows, gib) for rows, gib in line]
        figure.path(spots, line=colours[method], arrow=False, width=2.5 if method == "fused" else 1.5)
        for (_, gib), (x, y) in zip(line, spots, strict=True):
            figure.dot(x, y, fill=colours[method])
            figure.text(x, y - 9, f"{gib:.1f}", size=11, anchor="middle", bold=method == "fused")
        x, y = spots[-1]
        if method == "closed_form":  # the line of `fused` passes on the right
            figure.text(x, y - 26, name, size=12, fill=colours[method], anchor="middle")
        else:
            figure.text(x + 12, y + 4, name, size=12, fill=colours[method], bold=method == "fused")
    date = committed["machine"]["date"]
    note = f"d = 3,072, V = 128,256, K = 100, bf16; gradients included. One H200, {date}. Missing points were not run."
    figure.text(20, 386, note, size=11, fill="muted")
    return figure


def step_lengths() -> Figure:
    """Return memory and time of one training step by sequence length, as bars."""
    lengths, rate = load("step_h200_lengths.json"), load("step_h200_rate_documents.json")
    kept = next(row for row in rate["rows"] if row["group"] == "rate" and row["case"]["policy"] == "none")
    rows = sorted([*lengths["rows"], kept], key=lambda row: row["case"]["tokens"])
    figure = Figure(860, 328, "A training step of a 3.2 B student on one H200, by sequence length")
    figure.text(20, 28, "One H200 trains a 3.2 B student on up to 262,144 tokens a step", bold=True, size=15)
    figure.text(20, 56, "tokens", size=12, fill="muted")
    figure.text(110, 56, "peak memory, GiB", size=12, fill="muted")
    figure.text(600, 56, "seconds", size=12, fill="muted", anchor="end")
    figure.text(630, 56, "what is kept for the backward pass", size=12, fill="muted")
    for index, row in enumerate(rows):
        y, case = 68 + 36 * index, row["case"]
        figure.text(90, y + 17, f"{case['tokens']:,}", size=12, anchor="end")
        width = 330 * row["memory_gib"] / 140
        figure.box(110, y, width, 24, fill="blue", line="blue", r=2)
        figure.text(116 + width, y + 17, f"{row['memory_gib']:.0f}", size=12, bold=True)
        figure.text(600, y + 17, f"{row['seconds']:.1f}", size=12, anchor="end")
        policy = {"none": "everything", "keep-attention": "attention outputs"}[case["policy"]]
        figure.text(630, y + 17, policy + (", tiled MLP" if case["mlp_tile"] else ""), size=12)
    machine = lengths["machine"]
    torch = machine["torch"].partition("+")[0]
    note = f"Llama shape, bf16, AdamW included, fused loss. One H200, torch {torch}, {machine['date']}."
    figure.text(20, 312, note, size=11, fill="muted")
    return figure


def parity() -> Figure:
    """Return held-out KL of students over that of the live teacher's student, as bars."""
    report = load("parity_h200.json")
    results = {result["run"]: result["heldout_kl_full_vocabulary"] for result in report["results"]}
    live = results["online"]
    cut = results["fused/bucket"] / live - 1
    rows = (
        ("online/seed1", "live teacher, documents in another order", "grey"),
        ("online/bucket", "live teacher, its top 100 and the tail", "grey"),
        ("fused/bucket", "cache, top 100 and the tail (default)", "blue"),
        ("fused/bucket/compact", "cache, codec compact", "blue"),
        ("fused/renormalize", "cache, tail: renormalize", "blue"),
        ("fused/none", "cache, tail: none", "blue"),
        ("fused/bucket/K50", "cache, top 50", "blue"),
        ("fused/bucket/K10", "cache, top 10", "blue"),
    )
    figure = Figure(860, 372, "Held-out KL over the live teacher's student: the cache costs nothing, truncation does")
    figure.text(
        20,
        28,
        f"Reading rows from a cache costs nothing; cutting them to 100 entries costs {cut:.1%}",
        bold=True,
        size=15,
    )
    label = f"held-out full-vocabulary KL above that of the live teacher's student ({live:.3f} nats)"
    figure.text(300, 54, label, size=12, fill="muted")
    chance = results["online/seed1"] / live - 1
    scale = 420 / 0.23
    figure.box(300, 62, scale * chance, 272, fill="oranget", line="oranget", r=0)
    for index, (run, name, colour) in enumerate(rows):
        y, over = 68 + 33 * index, results[run] / live - 1
        figure.text(290, y + 16, name, size=12, anchor="end")
        figure.box(300, y, scale * over, 22, fill=colour, line=colour, r=2)
        figure.text(306 + scale * over, y + 16, f"+{over:.1%}", size=12, bold=run == "fused/bucket")
    note = (
        "SmolLM2-135M to every second layer, 500 steps of 2,048 tokens, one H200, "
        f"{report['machine']['date']}. Pale band: what another order of documents changes."
    )
    figure.text(20, 358, note, size=11, fill="muted")
    return figure


def parity_rows() -> Figure:
    """Return held-out KL of students against the bytes of a row that they were trained from, on a log axis."""
    report = load("parity_rows_h200.json")
    measured = {result["run"]: result["heldout_kl_full_vocabulary"] for result in report["results"]}
    # the mean of both orders of the documents, where there are two
    results = {run: (kl + measured.get(f"{run}/seed1", kl)) / 2 for run, kl in measured.items() if "seed1" not in run}
    live, sizes = results["online"], report["bytes_per_row"]
    kinds = {
        "blue": [
            ("fused/bucket/K10", "top-10/open", "top 10"),
            ("fused/bucket/K50", "top-50/open", "top 50"),
            ("fused/bucket", "top-100/open", "top 100"),
            ("fused/bucket/compact", "top-100/compact", "top 100, compact"),
        ],
        "green": [(f"sampled/{n}", f"sampled-{n}/open", f"sampled {n}") for n in (12, 24, 50, 100)],
        "orange": [("thin/24", "thin-24/open", "24 of 100")],
    }
    points = [
        (colour, sizes[size], results[run], label)
        for colour, runs in kinds.items()
        for run, size, label in runs
        if run in results and size in sizes
    ]
    figure = Figure(860, 420, "Held-out KL of students against bytes a row: sampled rows need a quarter of the bytes")
    figure.text(20, 28, "Sampled rows: the whole distribution from a quarter of the bytes", bold=True, size=15)
    figure.text(20, 52, "held-out full-vocabulary KL, nats", size=12, fill="muted")
    low, high = min(live, *(kl for _, _, kl, _ in points)), max(kl for _, _, kl, _ in points)
    span = (high - low) or 1.0

    def across(size: float) -> float:
        return 70 + 740 * math.log(size / 25) / math.log(400 / 25)

    def down(kl: float) -> float:
        return 340 - 250 * (kl - low) / span

    for tick in (30, 50, 100, 200, 300):
        figure.path([(across(tick), 356), (across(tick), 362)], arrow=False)
        figure.text(across(tick), 376, str(tick), size=11, fill="muted", anchor="middle")
    figure.text(440, 394, "bytes a row, all columns and footers (log scale)", size=12, fill="muted", anchor="middle")
    figure.path([(70, down(live)), (810, down(live))], arrow=False)
    figure.text(70, down(live) - 6, f"student of the live teacher: {live:.4f}", size=12)
    for colour, size, kl, label in points:
        x, y = across(size), down(kl)
        figure.box(x - 5, y - 5, 10, 10, fill=colour, line=colour, r=5)
        below = colour == "orange"  # the one of 24 entries is at the same place
        figure.text(x + 10, y + 16 if below else y - 6, f"{label} {kl / live - 1:+.1%}", size=12)
    note = f"SmolLM2-135M to every second layer, 500 steps of 2,048 tokens, one H200, {report['machine']['date']}."
    figure.text(20, 410, note, size=11, fill="muted")
    return figure


def packing() -> Figure:
    """Return documents packed into sequences, and the attention mask of one sequence."""
    figure = Figure(860, 300, "Packing: whole documents in a sequence; attention stays inside each document")
    figure.text(20, 28, "Whole documents share a sequence; none sees another", bold=True, size=15)
    sequences = (
        (("A", 7, "blue"), ("B", 4, "green"), ("C", 5, "orange")),
        (("D", 11, "blue"), ("E", 5, "green")),
        (("F", 8, "blue"), ("G", 6, "orange"), ("", 2, "grey")),
    )
    unit = 24
    for row, sequence in enumerate(sequences):
        x, y = 110.0, 70 + 62 * row
        figure.text(20, y + 22, f"sequence {row + 1}", size=12, fill="muted")
        for name, length, colour in sequence:
            fill = {"blue": "bluet", "green": "greent", "orange": "oranget", "grey": "card"}[colour]
            figure.box(x, y, unit * length, 34, fill=fill, line=colour, r=3)
            figure.text(
                x + unit * length / 2, y + 22, name or "pad", size=13 if name else 11, anchor="middle", bold=bool(name)
            )
            if name:
                figure.text(x + 2, y + 48, "0", size=10, fill="muted")
                figure.text(x + unit * length - 2, y + 48, f"{length - 1}", size=10, fill="muted", anchor="end")
            x += unit * length
    figure.text(
        110,
        266,
        "Positions restart at 0 in each document. Best fit: 0.14 % padding at 4,096 tokens,",
        size=11,
        fill="muted",
    )
    figure.text(110, 282, "0.02 % at 32,768 (100,000 log-normal lengths, median 500).", size=11, fill="muted")
    cell, left, top = 12.5, 610.0, 62.0
    figure.box(left, top, 16 * cell, 16 * cell, fill="card", r=0)
    start = 0
    for name, length, colour in sequences[0]:
        for query in range(start, start + length):
            figure.box(
                left + cell * start, top + cell * query, cell * (query - start + 1), cell, fill=colour, line="bg", r=0
            )
        figure.text(left - 10, top + cell * (start + length / 2) + 4, name, size=12, anchor="end", bold=True)
        figure.text(left + cell * (start + length / 2), top - 8, name, size=12, anchor="middle", bold=True)
        start += length
    figure.text(left + 8 * cell, top + 16 * cell + 20, "keys of sequence 1 →", size=11, fill="muted", anchor="middle")
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "overview": overview,
    "architecture": architecture,
    "bucket": bucket,
    "attempt": attempt,
    "loss-methods": loss_methods,
    "loss-rows": loss_rows,
    "step-lengths": step_lengths,
    "parity": parity,
    **({"parity-rows": parity_rows} if (RESULTS / "parity_rows_h200.json").exists() else {}),
    "packing": packing,
}


def main() -> int:
    """Write or check all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a figure is out of date")
    check = parser.parse_args().check
    stale = 0
    for name, draw in FIGURES.items():
        path, text = HERE / f"{name}.svg", draw().svg()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            stale += 1
            print(f"{path.name} is out of date: run `python docs/figures/make_figures.py`", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.name}")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
