"""Every key of the configuration is explained on docs/CONFIG.md, and no page names a key that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.config import JobConfig
from teachercache.configfile import describe
from tests.deploy.manifests import ROOT
from tests.docs.markdown import code_spans
from tests.docs.test_docs import page_name
from tests.docs.test_docs_names import PAGES
from trainer.config import TrainerConfig

KEYS = [*describe(JobConfig), *describe(TrainerConfig)]
NAMES = {key.key for key in KEYS}
SECTIONS = {key.key.rpartition(".")[2] for key in KEYS if "section" in key.type}
NAMED = re.compile(rf"\b(?:{'|'.join(sorted(SECTIONS))})(?:\.(?:\d+|\*))?(?:\.[a-z0-9_]+)+")


def test_every_key_is_explained() -> None:
    assert [key.key for key in KEYS if len(key.description) < 8] == []


def test_the_page_has_every_key() -> None:
    page = (ROOT / "docs/CONFIG.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"`{name}`" not in page and f"### {name}" not in page] == []


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_keys_that_a_page_names_exist(path: Path) -> None:
    """`run.actors`, `data.seq_len=4096`, `corpora.0.limit_documents=100`, and `filters.dedup`, which is below `recipe`."""
    known = {name.replace(".*", "") for name in NAMES}
    named = {re.sub(r"\.(\d+|\*)", "", found) for span in code_spans(path) for found in NAMED.findall(span)}
    named -= {name for name in named if name.endswith((".py", ".yaml", ".yml", ".json", ".jsonl", ".md", ".cli"))}
    assert [name for name in named if not any(f".{key}".endswith(f".{name}") for key in known)] == []
