"""show and head: print a cache and its records for people."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text
from tokenizers import Tokenizer

from teachercache.errors import TeacherCacheError, UsageError
from teachercache.format.objects import COUNTS
from teachercache.format.record import Record
from teachercache.format.spec import Rows
from teachercache.read.cache import Cache, incomplete_message


def summary(cache: Cache) -> dict[str, Any]:
    """Return which teacher made a cache, and what the manifest holds, by split and source, as JSON-able values."""
    m = cache.manifest
    groups: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for entry in m.files:
        group = groups[entry.split, entry.source]
        for name in COUNTS:
            group[name] += getattr(entry, name)
        group["files"] += 1
        group["bytes"] += entry.size
    size = sum(entry.size for entry in m.files)
    return {
        "url": cache.url,
        "manifest": m.number,
        "created": m.created,
        "complete": m.complete,
        "teacher": cache.spec.teacher.model_dump(mode="json"),
        "tokenizer": cache.spec.tokenizer.model_dump(mode="json"),
        "rows_kind": cache.spec.rows.model_dump(mode="json"),
        "top_k": cache.spec.top_k,
        "spec_digest": cache.spec.digest,
        "manifest_digest": m.digest,
        "shards": {"planned": m.shards_planned, "committed": m.shards_committed, "quarantined": m.shards_quarantined},
        **{name: getattr(m, name) for name in COUNTS},
        "bytes": size,
        "bytes_per_row": round(size / m.rows, 1) if m.rows else None,
        "codecs": sorted({entry.codec for entry in m.files}),
        "drops": m.drops,
        "repeated_content": m.repeated_content,
        "parts": [{"split": s, "source": c, **dict(group)} for (s, c), group in sorted(groups.items())],
    }


def rows_in_words(rows: Rows) -> str:
    """Return what a row of a cache holds, as a phrase."""
    if rows.kind == "sampled":
        return f"{rows.entries} weights, sampled without bias from the whole distribution (at least {rows.exact} exact)"
    return f"the {rows.entries} most probable tokens"


def shards_in_words(data: dict[str, Any]) -> str:
    """Return how many of a summary's shards are in the cache, as a phrase; one that a writer or `thin` made has no plan."""
    shards = data["shards"]
    if not shards["planned"]:
        return f"{shards['committed']:,} committed, none was planned"
    return (
        f"{shards['committed']:,} of {shards['planned']:,} planned committed, {shards['quarantined']:,} in quarantine"
    )


def print_summary(cache: Cache, console: Console) -> None:
    """Print `summary` as two tables."""
    data, m, teacher, tokenizer = summary(cache), cache.manifest, cache.spec.teacher, cache.spec.tokenizer
    how = f"{teacher.engine}, {teacher.dtype}, head {teacher.head_dtype}"
    grid = Table.grid(padding=(0, 2))
    for name, value in {
        "cache": cache.url,
        "manifest": f"{m.number}, {m.created}, {'complete' if m.complete else 'INCOMPLETE'}",
        "teacher": f"{teacher.name} {teacher.revision} ({how})",
        "weights": teacher.weights_digest[:16],
        "tokenizer": f"{tokenizer.digest[:16]}, {tokenizer.vocab_size:,} tokens",
        "a row": rows_in_words(cache.spec.rows),
        "rows": f"{m.rows:,} in {m.documents:,} documents ({m.tokens:,} tokens)",
        "size": f"{data['bytes']:,} bytes, {data['bytes_per_row'] or 0} a row, codec {', '.join(data['codecs'])}",
        "shards": shards_in_words(data),
        "drops": ", ".join(f"{reason} {count:,}" for reason, count in m.drops.items()) or "none",
    }.items():
        grid.add_row(Text(name, style="bold"), str(value))
    numbers = ("files", "documents", "records", "tokens", "rows", "bytes")
    columns: tuple[Column | str, ...] = ("split", "source", *(Column(name, justify="right") for name in numbers))
    parts = Table(*columns, box=None, header_style="bold", padding=(0, 2, 0, 0))
    for part in data["parts"]:
        parts.add_row(part["split"], part["source"], *(f"{part[name]:,}" for name in numbers))
    console.print(Group(grid, Text(""), parts))
    if not m.complete:
        console.print(incomplete_message(cache), style="yellow")


class TokenText:
    """Turn ids into printable text; into plain numbers where the cache holds no tokenizer, as `note` then says."""

    def __init__(self, cache: Cache) -> None:
        """Use the tokenizer that a cache holds."""
        self._tokenizer: Tokenizer | None = None
        try:
            self._tokenizer = Tokenizer.from_file(str(cache.tokenizer_path() / "tokenizer.json"))
            self.note = ""
        except UsageError as error:
            self.note = str(error)
        except TeacherCacheError:
            raise
        except Exception as error:  # tokenizers raises nothing finer for a file that is no tokenizer
            self.note = f"{cache.url} holds a tokenizer.json that cannot be read ({error}); ids are shown instead."

    def __call__(self, token: int) -> str:
        """Return one token's text, with a blank as a middle dot."""
        if self._tokenizer is None:
            return f"#{token}"
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if not text or "\ufffd" in text:  # part of a character: show the vocabulary's own entry
            text = self._tokenizer.id_to_token(token) or f"#{token}"
        return repr(text)[1:-1].replace(" ", "·")

    def pieces(self, ids: list[int]) -> list[str]:
        """Return the text of each token within its document; of a character of several tokens the last has it."""
        if self._tokenizer is None:
            return [f"#{token} " for token in ids]
        found, start, done = [], 0, ""
        for end in range(1, len(ids) + 1):
            text = self._tokenizer.decode(ids[start:end], skip_special_tokens=False)
            if text.endswith("\ufffd") and end < len(ids) and end - start < 8:
                found.append("")
                continue
            found.append(text[len(done) :].replace("\t", "    "))
            start = end - 1  # one token of context: decoders drop a blank in front of the first
            done = self._tokenizer.decode(ids[start:end], skip_special_tokens=False)
        return found


def known(values: Any, i: int) -> float | None:
    """Return one number of a column, or None where it is not known."""
    return None if values is None or math.isnan(values[i]) else float(values[i])


def head_rows(record: Record, text: TokenText, *, positions: int, top: int) -> list[dict[str, Any]]:
    """Return one JSON-able row a position: the token, what followed, and the teacher's best next tokens."""
    rows = []
    for i in range(min(positions, len(record.row_pos))):
        p = int(record.row_pos[i])
        after = int(record.input_ids[p + 1]) if p + 1 < len(record.input_ids) else None
        target = float(record.target_logprob[i])
        rows.append(
            {
                "position": record.start + p,
                "token": text(int(record.input_ids[p])),
                "next": None if after is None else text(after),
                "next_probability": None if after is None or math.isnan(target) else math.exp(target),
                "loss_mask": bool(record.loss_mask[i]),
                "best": [
                    {"token": text(int(t)), "id": int(t), "probability": math.exp(float(lp))}
                    | ({} if record.exact is None else {"drawn": k >= int(record.exact[i])})
                    for k, (t, lp) in enumerate(
                        zip(record.topk_ids[i, :top], record.topk_logprobs[i, :top], strict=True)
                    )
                ],
                "entropy": known(record.entropy, i),
                "tail_probability": math.exp(float(record.tail_logprob[i])),
            }
        )
    return rows


def head_table(record: Record, rows: list[dict[str, Any]], top: int) -> RenderableType:
    """Return one record as a table; the token that really followed is green where it is among the teacher's best.

    A drawn entry of a sampled row has a ~ before its weight, which is not its probability.
    """
    counts = f"{len(record.input_ids)} tokens, {len(record.row_pos)} rows"
    title = f"{record.doc_id} window {record.window} · {record.split}/{record.source} · {counts}"
    shown = f"teacher's {top} best" if record.exact is None else f"{top} of the teacher's entries, ~ drawn"
    columns = (
        Column("pos", justify="right", style="dim"), "token", "next", Column("p(next)", justify="right"),
        Column(shown, overflow="fold"), Column("outside", justify="right", style="dim"),
        Column("entropy", justify="right", style="dim"),
    )  # fmt: skip
    layout: dict[str, Any] = {"header_style": "bold", "box": None, "padding": (0, 2, 0, 0)}
    table = Table(*columns, title=title, title_justify="left", **layout)
    for row in rows:
        best = Text()
        for item in row["best"]:
            style = "green" if item["token"] == row["next"] else ""
            best.append(f"{item['token']} ", style=style)
            best.append(f"{'~' * bool(item.get('drawn'))}{item['probability']:.3f}  ", style="dim")
        probability = "" if row["next_probability"] is None else f"{row['next_probability']:.3f}"
        after = Text(row["next"] or "", style="" if row["loss_mask"] else "dim")
        outside = f"{row['tail_probability']:.3f}"
        entropy = "" if row["entropy"] is None else f"{row['entropy']:.2f}"
        table.add_row(str(row["position"]), Text(row["token"]), after, probability, best, outside, entropy)
    return table
