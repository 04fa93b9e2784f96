"""report: one self-contained page about a cache, in the order of a student team's questions."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from xml.etree.ElementTree import Element

import numpy as np
from rich import filesize

from teachercache.errors import MissingObject
from teachercache.format.record import Record
from teachercache.read.cache import Cache, incomplete_message, made_up_message
from teachercache.store.ledger import Ledger
from teachercache.views.page import Cell, Number, bars, code, facts, folded, page, section, table, tag, tiles
from teachercache.views.plots import calibration, histogram
from teachercache.views.show import TokenText, rows_in_words, shards_in_words, summary
from teachercache.views.statistics import (
    CUTS,
    Sample,
    calibration_bins,
    costs,
    losses_by_length,
    per_million_rows,
    take_sample,
)
from teachercache.views.usage import usage

SAMPLE_FILES = 64
COMMITS = 256  # whose provenance is read; names of shards are hashes, so the first are a fair sample
PLANS = 8
INPUTS = 12
TOKENS = 300  # of a document that is shown
LEVELS = ((0.9, "p4"), (0.5, "p3"), (0.1, "p2"), (0.01, "p1"), (0.0, "p0"))  # probability of a token from, its shade


def report(
    cache: Cache,
    *,
    sample_files: int = SAMPLE_FILES,
    progress: Callable[[int, int], None] | None = None,
    back: str | None = None,
) -> str:
    """Return the page; `back` is the address of the catalog that links to it.

    Cost: the first row group of at most `sample_files` files, 256 commits, the plans, the entries of runs.
    """
    data, ledger = summary(cache), Ledger(cache.store, cache.spec)
    sample = take_sample(cache, sample_files, progress)
    word, kind = ("complete", "good") if data["complete"] else ("incomplete", "bad")
    since = f" manifest {data['manifest']} of {data['created'][:16].replace('T', ' ')} UTC"
    lead = tag(
        "p", tag("span", word, class_=f"badge {kind}"), since, tag("br"), tag("code", data["url"]), class_="lead"
    )
    parts = [
        lead,
        None if data["complete"] else tag("p", incomplete_message(cache), class_="warn"),
        tag("p", made_up_message(cache), class_="warn") if cache.made_up else None,
        _tiles(data, sample),
        _use_it(cache),
        _teacher(cache, data, ledger, sample),
        _documents(cache, sample),
        _lengths(sample),
        _quality(data, sample),
        _students(ledger),
        _left_out(data),
        _storage(data, sample),
        _identity(data),
    ]
    foot = (
        f"Statistics of {sample.rows:,} rows, the first row group of {sample.files:,} of {len(cache.manifest.files):,} files, "
        "weighted by the rows of each split and source. Written by `teachercache report`."
    )
    title = f"{data['teacher']['name']} · {cache.url.rsplit('/', 1)[-1]}"
    return page(title, parts, foot=foot, back=back)


def _tiles(data: dict[str, Any], sample: Sample) -> Element:
    loss, mass = sample.mean("loss"), sample.mean("coverage")
    return tiles(
        [
            (f"rows of {data['top_k']} entries", f"{data['rows']:,}"),
            ("documents", f"{data['documents']:,}"),
            ("size", filesize.decimal(data["bytes"])),
            ("bytes a row", f"{data['bytes_per_row'] or 0:g}"),
            (f"mass in the {_kept(data)}", "–" if mass is None else f"{mass:.1%}"),
            ("teacher's perplexity", "–" if loss is None else f"{math.exp(loss):.2f}"),
        ]
    )


def _kept(data: dict[str, Any]) -> str:
    """Return what is outside the tail of a row."""
    return "exact entries" if data["rows_kind"]["kind"] == "sampled" else f"top {data['top_k']}"


def _use_it(cache: Cache) -> Element:
    blocks = [code(title, text) for title, text in usage(cache)]
    note = "docs/FORMAT.md, section 3, explains every column."
    if "compact" in {entry.codec for entry in cache.manifest.files}:
        note += " This cache has compact files: for plain columns, `teachercache optimize --codec open` first."
    return section("Use it", tag("div", *blocks, class_="codes"), tag("p", note, class_="note"), id_="use")


def _teacher(cache: Cache, data: dict[str, Any], ledger: Ledger, sample: Sample) -> Element:
    teacher, commits = data["teacher"], ledger.commits(COMMITS)
    lines = costs(commits)
    rate = per_million_rows(lines)
    licences: Counter[str] = sum((part.licences for part in sample.parts.values()), Counter())
    known = ", ".join(name for name, _ in licences.most_common(5)) or "not in the rows (no column `licence`)"
    made = sorted(commit.created[:10] for commit in commits)
    inputs: set[str] = set()
    for digest in cache.manifest.plans[:PLANS]:
        with suppress(MissingObject):  # a copy may have left the plans out
            inputs |= {shard.input for shard in ledger.plan(digest).shards}
    how = f"{teacher['engine']}, {teacher['dtype']}, head {teacher['head_dtype']}"
    how += f", quantised {teacher['quantization']}" if teacher["quantization"] else ""
    items: list[tuple[str, Element | str | None]] = [
        ("model", " ".join(filter(None, (teacher["name"], teacher["revision"], f"({how})")))),
        ("tokenizer", f"{data['tokenizer']['vocab_size']:,} tokens; a student must have the same"),
        ("a row", rows_in_words(cache.spec.rows)),
        ("licence of the text", f"{known}. The teacher's own licence: see its model card."),
        ("made", " to ".join(sorted({made[0], made[-1]})) if made else "–"),
    ]
    if rate is not None:
        whole = rate * data["rows"] / 1e6
        items.append(("cost", f"{hours(whole)} on one {lines[0].device} in all, {hours(rate)} for a million rows"))
    head = ("engine", "device", "shards read", "rows a second", "hours for a million rows")
    rows: list[list[Cell]] = [
        [c.engine, c.device, Number(c.commits), Number(c.median_rate), Number(c.per_million, hours(c.per_million))]
        for c in lines
    ]
    listed = tag("ul", *(tag("li", tag("code", name)) for name in sorted(inputs)[:INPUTS]))
    more = f"Input files: {len(inputs):,}" + (f", the first {INPUTS}" if len(inputs) > INPUTS else "")
    return section(
        "Teacher, licence, cost",
        facts(items),
        table("Speed and cost by engine", head, rows) if rows else None,
        tag("details", tag("summary", more), listed) if inputs else None,
        id_="teacher",
    )


def hours(value: float) -> str:
    """Return hours as hours, minutes or seconds, to three digits."""
    for unit, seconds in (("h", 3600), ("min", 60)):
        if 3600 * value >= seconds:
            return f"{3600 * value / seconds:,.3g} {unit}" if value < 1000 else f"{value:,.0f} h"
    return f"{3600 * value:.3g} s"


def _documents(cache: Cache, sample: Sample) -> Element | None:
    if not sample.examples:
        return None
    text = TokenText(cache)
    names = ("90 % or more", "50 to 90 %", "10 to 50 %", "1 to 10 %", "below 1 %")
    key = [tag("span", name, class_=shade) for name, (_, shade) in zip(names, LEVELS, strict=True)]
    shown: list[Element] = []
    for record in sample.examples:
        many = f", the first {TOKENS} of {len(record.input_ids):,} tokens" if len(record.input_ids) > TOKENS else ""
        window = f" window {record.window}" if record.window else ""
        title = tag("h3", f"{record.doc_id[:300]}{window} · {record.split}/{record.source}{many}")
        shown.append(tag("div", title, tag("p", *_shaded(record, text), class_="text", tabindex=0)))
    said = "The shade is the teacher's probability of each token; underlined with dots: not learnt, such as a prompt in a chat."
    note = tag("p", text.note, class_="note") if text.note else None
    return section(
        "Three documents" if len(shown) == 3 else "Documents",
        tag("p", said),
        tag("p", *key, class_="key"),
        note,
        tag("div", *shown, class_="texts"),
        id_="documents",
    )


def _shaded(record: Record, text: TokenText) -> list[Element | str]:
    """Return the first tokens as text, each shaded by its probability and underlined where the loss leaves it out."""
    row_of = {int(p) + 1: i for i, p in enumerate(record.row_pos)}
    pieces: list[Element | str] = []
    for at, piece in enumerate(text.pieces(record.input_ids[:TOKENS].tolist())):
        i = row_of.get(at)
        if i is None or not piece:
            pieces.append(tag("span", piece, class_="off") if piece and at else piece)
            continue
        logprob = min(float(record.target_logprob[i]), 0.0)
        best = f"best {text(int(record.topk_ids[i, 0]))} {math.exp(float(record.topk_logprobs[i, 0])):.3f}"
        said = "outside what was kept" if math.isnan(logprob) else f"{math.exp(logprob):.3f}"
        shade = "p0" if math.isnan(logprob) else next(name for low, name in LEVELS if math.exp(logprob) >= low)
        shade = shade if record.loss_mask[i] else "off"
        pieces.append(tag("span", piece, class_=shade, title=f"{said}; {best}"))
    return pieces


def _lengths(sample: Sample) -> Element | None:
    lines = losses_by_length(sample)
    if not lines:
        return None
    rows: list[list[Cell]] = [[Number(n), *(Number(x, _share(x)) for x in shares)] for n, *shares in lines]
    head = ("data.seq_len", "records that are longer", "rows lost: truncate", "rows lost: drop")
    said = "The lost rows are those of data.long_documents=truncate and =drop; split, the default, loses none."
    return section(
        "Which seq_len",
        table("Records cut and rows lost by sequence length", head, rows),
        tag("p", said, class_="note"),
        id_="lengths",
    )


def _share(x: float) -> str:
    return "none" if x == 0 else f"{x:.2%}" if x < 0.1 else f"{x:.1%}"


def _quality(data: dict[str, Any], sample: Sample) -> Element:
    if not sample.rows:
        return section("Quality", tag("p", "There are no rows."))
    drawn = data["rows_kind"]["kind"] == "sampled"
    cuts = [] if drawn else [k for k in CUTS if k <= data["top_k"]]
    head = ["split", "source", "rows", "tokens", "best token followed", "perplexity", "calibration error"]
    head += ["exact entries", "mass of the exact", "noise of a row"] if drawn else [f"mass of {k}" for k in cuts]
    counts = {(p["split"], p["source"]): p for p in data["parts"]}
    rows: list[list[Cell]] = []
    for key, part in sample.parts.items():
        hit, loss, mass = part.values("hit"), part.values("loss"), part.values("coverage")
        _, error = calibration_bins(part.values("believed"), hit, np.ones(len(hit)))
        beyond = "≥ " if len(loss) < len(hit) else ""  # what followed is outside of what was kept
        line: list[Cell] = [*key, Number(counts[key]["rows"]), Number(counts[key]["tokens"]), _mean(hit, "{:.1%}")]
        line += [_mean(loss, beyond + "{:.2f}", math.exp), Number(error, f"{error:.1%}") if len(hit) else Number(None)]
        if drawn:
            noise = (1 - mass) ** 2 / np.maximum(data["top_k"] - part.values("exact"), 1)
            line += [_mean(part.values("exact"), "{:.1f}"), _mean(mass, "{:.1%}"), _mean(noise, "≤ {:.1e}")]
        else:
            line += [_mean(part.values(f"mass{k}"), "{:.1%}") for k in cuts]
        rows.append(line)
    notes = [
        "Of rows that are learnt. Calibration error: how far the probability of the best token is from how often it followed.",
        "≥: some of the tokens that followed are outside of what was kept, and are left out.",
        "Noise: at most P²/m is the sum of the variances of a row's weights; P is the mass of its m drawn entries."
        if drawn
        else "The mass of 10 is what data.top_k=10 would keep.",
    ]
    return section(
        "Quality by split and source",
        table("Quality by split and source", head, rows),
        tag("p", " ".join(notes), class_="note"),
        tag("div", *_plots(data, sample), class_="plots"),
        id_="quality",
    )


def _plots(data: dict[str, Any], sample: Sample) -> list[Element]:
    hit, weights = sample.weighted("hit")
    points, error = calibration_bins(sample.weighted("believed")[0], hit, weights)
    plots = [calibration(points, error)] if points else []
    drawn = data["rows_kind"]["kind"] == "sampled"  # another plot in place of the first
    shapes: list[tuple[str, str, str, float | None]] = [
        *([] if drawn else [("top1", "Probability of the best token", "probability", 1.0)]),
        ("coverage", f"Mass in the {_kept(data)}", "probability", 1.0),
        ("exact", "Exact entries of a row", "entries", None),
        ("entropy", "Entropy of the teacher", "nats", None),
        ("loss", "Loss of the teacher on what followed", "nats", None),
        ("length", "Length of a record", "tokens", None),
    ]
    for name, title, unit, high in shapes:
        values, weights = sample.weighted(name)
        if weights.sum() > 0:
            plots.append(histogram(values, weights, title, unit, high=high))
    return plots


def _mean(values: Any, form: str, of: Callable[[float], float] = float) -> Number:
    return Number(found := of(values.mean()), form.format(found)) if len(values) else Number(None)


def _students(ledger: Ledger) -> Element:
    runs, bad = ledger.runs()
    head = ("student", "parameters", "steps", "rows", "held-out KL, nats", "manifest", "registered")
    rows: list[list[Cell]] = [
        [
            r.student, Number(r.parameters, f"{r.parameters / 1e6:,.0f} M"), Number(r.steps), Number(r.rows),
            Number(r.heldout_kl, "" if r.heldout_kl is None else f"{r.heldout_kl:.4f}"), Number(r.manifest), r.created[:10],
        ]
        for r in runs
    ]  # fmt: skip
    missing = f" {bad} entries cannot be read; `teachercache verify` names them." if bad else ""
    how = (
        "None has registered. A" if not rows else "A",
        " run is listed with ",
        tag("code", "train.register: true"),
        "." + missing,
    )
    return section(
        "Students trained from it",
        table("Students trained from this cache", head, rows) if rows else None,
        tag("p", *how, class_="note"),
        id_="students",
    )


def _left_out(data: dict[str, Any]) -> Element:
    counts = [(reason, n, f"{n:,}") for reason, n in sorted(data["drops"].items(), key=lambda item: -item[1])]
    return section(
        "Left out and repeated",
        bars(counts) if counts else tag("p", "No document was dropped."),
        tag(
            "p",
            f"Shards: {shards_in_words(data)}. {data['repeated_content']:,} windows have the same content as one in another "
            "split.",
            class_="note",
        ),
        id_="drops",
    )


def _storage(data: dict[str, Any], sample: Sample) -> Element | None:
    if not sample.rows:
        return None
    whole = sum(sample.column_bytes.values())
    items = [(name, size, f"{size / whole:.1%}") for name, size in sample.column_bytes.most_common(10)]
    return folded(f"Bytes by column, codec {', '.join(data['codecs'])}", bars(items))


def _identity(data: dict[str, Any]) -> Element:
    skip: tuple[Any, ...] = (None, "", {}, [])
    items = [(f"teacher {k}".replace("_", " "), v) for k, v in data["teacher"].items()]
    items += [(f"tokenizer {k}".replace("_", " "), v) for k, v in data["tokenizer"].items()]
    items += [("spec digest", data["spec_digest"]), ("manifest digest", data["manifest_digest"])]
    body = facts((name, json.dumps(v) if isinstance(v, (dict, list)) else str(v)) for name, v in items if v not in skip)
    body.set("class", "digests")
    return folded("Identity", body)
