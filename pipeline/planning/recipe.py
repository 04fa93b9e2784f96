"""The row recipe: everything that turns a corpus's bytes into rows, and its digest, which shard ids are made of."""

from __future__ import annotations

import hashlib
from typing import Any

from pipeline.config import CorpusConfig, JobConfig
from pipeline.corpus.documents import ascii_json
from pipeline.corpus.templates import may_print_date

RECIPE_VERSION = 2  # raise when the code makes other rows from the same recipe: every shard then gets another id


def recipe_of(job: JobConfig, corpus: CorpusConfig, template: str | None, *, brief: bool = False) -> dict[str, Any]:
    """Return the recipe of a corpus as a tree. `template`: the text that renders its conversations.

    brief: only what differs from the defaults. Shard ids hash that, so adding an option does not change existing ids.
    If you change a default, raise RECIPE_VERSION.
    """
    recipe = job.recipe.model_dump(mode="json", exclude_defaults=brief)
    recipe.setdefault("windows", {})["size"] = job.window_size
    chat = recipe.setdefault("chat", {})
    if corpus.fields.kind == "messages":
        chat["template"] = hashlib.sha256((template or "").encode()).hexdigest()
        if not may_print_date(template or ""):
            chat.pop("date", None)
    else:  # of the options for conversations, this one alone acts on others
        recipe["chat"] = {"rows": chat["rows"]} if chat.get("rows", "all") != "all" else {}
    if job.recipe.mode != "generate":
        recipe.pop("generate", None)
    return {
        "version": RECIPE_VERSION,
        "recipe": recipe,
        "corpus": corpus.model_dump(mode="json", exclude={"files", "storage"}, exclude_defaults=brief),
    }


def recipe_digest(job: JobConfig, corpus: CorpusConfig, template: str | None) -> str:
    """Return the sha256 hex of the brief recipe."""
    return hashlib.sha256(ascii_json(recipe_of(job, corpus, template, brief=True)).encode()).hexdigest()
