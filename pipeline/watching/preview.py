"""Documents as the teacher will see them: tokens, special tokens, and which of them a student learns."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from pipeline.corpus.documents import Dropped, extract
from pipeline.corpus.readers import read_documents
from teachercache.console import printable

if TYPE_CHECKING:
    from pipeline.running.job import Prepared

MOST_TOKENS = 400


def show_documents(console: Console, prepared: Prepared, count: int) -> None:
    """Print the first `count` usable documents; learned tokens green, others dim, window borders marked.

    Where there are no colours, what is learned is in «guillemets».
    """
    shown, plain = 0, console.color_system is None
    console.print(f"what a student learns is {'between « and »' if plain else 'green'}", style="green")
    job, encoder = prepared.job, prepared.encoder
    for shard in prepared.planned.plan.shards:
        corpus = job.corpora[shard.corpus]
        for raw in read_documents(shard.input, corpus, shard.start, shard.stop, shard.unit):
            if shown == count:
                return
            try:
                document = extract(raw, corpus, job.recipe.filters, shard.input_digest, shard.input)
                (tokens,) = encoder.tokens([document])
                if isinstance(tokens, Dropped):
                    raise tokens
                windows = list(encoder.windows(document, tokens))
            except Dropped as drop:
                console.print(f"{shard.input}@{raw.ordinal}: dropped, {drop}")
                continue
            shown += 1
            console.print(
                f"\n{document.doc_id}  ({document.source}/{document.split}, {len(tokens.ids)} tokens, {len(windows)} windows)",
                style="bold",
            )
            if job.recipe.mode == "generate":
                text = printable(encoder.backend.decode(tokens.ids[:MOST_TOKENS].tolist(), skip_special_tokens=False))
                console.print(Text(text, style="dim") + Text(" … the teacher goes on from here", style="green"))
                continue
            for window in windows:
                learned = {int(r) + 1 for r, m in zip(window.row_pos, window.loss_mask, strict=True) if m}
                line = Text(f"[window {window.window} from token {window.start}] ", style="cyan")
                ids = window.input_ids[:MOST_TOKENS].tolist()
                for is_learned, run in groupby(enumerate(ids), key=lambda item: item[0] in learned):
                    # token by token: a run that begins inside a character would otherwise lose it
                    piece = "".join(encoder.backend.decode([token], skip_special_tokens=False) for _, token in run)
                    piece = printable(f"«{piece}»" if plain and is_learned else piece)
                    line.append(piece, style="green" if is_learned else "dim")
                if len(window.input_ids) > MOST_TOKENS:
                    line.append(f" … {len(window.input_ids) - MOST_TOKENS} more", style="cyan")
                console.print(line)
