"""A date that a template prints is one date in a cache, and part of a shard's id only where it is printed."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import teachercache
from pipeline.config import load_job
from pipeline.running import job as jobs
from tests.pipeline.conftest import write_jsonl

DATED = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "<|im_start|>system\nToday is {{ date_string }}.<|im_end|>\n"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chats(count: int, words: str = "answer") -> list[dict]:
    return [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"{words} {i}. " * 8}]}
        for i in range(count)
    ]


@pytest.fixture
def dated(job_file, tmp_path):
    """Return a maker of a job of three shards whose template prints the day, with further keys of recipe.chat."""
    path = write_jsonl(tmp_path / "chats.jsonl", chats(30))
    template = tmp_path / "dated.jinja"
    template.write_text(DATED)

    def make(**chat):
        return load_job(
            job_file(
                tmp_path / "cache",
                [path],
                corpus={"fields": {"messages": "messages"}},
                recipe={"eos": False, "chat": {"template": str(template), **chat}},
                run={"shard_bytes": path.stat().st_size // 3 + 1},
            )
        )

    return make


def days(url: Path, tokenizer_folder: Path) -> set[str]:
    backend = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    records = teachercache.open(str(url)).records()
    texts = [backend.decode(r.input_ids.tolist(), skip_special_tokens=False) for r in records]
    return {text.split("Today is ")[1].split(".")[0] for text in texts}


def test_a_resumed_job_prints_the_day_of_the_first_run(dated, tmp_path, tokenizer_folder, monkeypatch):
    monkeypatch.setattr(jobs, "today", lambda: "2026-11-01")
    stop = threading.Event()
    first = jobs.run_job(dated(), on_event=lambda *_: stop.set(), stop=stop)
    done = teachercache.Ledger.open(str(tmp_path / "cache")).committed()
    assert 0 < len(done) < 3, first
    monkeypatch.setattr(jobs, "today", lambda: "2026-11-02")
    second = jobs.run_job(dated())
    assert second.manifest is not None
    assert second.manifest.complete
    assert days(tmp_path / "cache", tokenizer_folder) == {"01 Nov 2026"}
    plans = [json.loads(p.read_text()) for p in (tmp_path / "cache/plans").iterdir()]
    assert {p["job"]["recipes"][0]["chat"]["date"] for p in plans} == {"2026-11-01"}


def test_a_date_changes_shard_ids_only_where_it_is_printed(dated, monkeypatch):
    def ids(**chat):
        return {s.shard_id for s in jobs.prepare(dated(**chat)).planned.plan.shards}

    monkeypatch.setattr(jobs, "today", lambda: "2026-11-01")
    first = ids()
    assert ids(date="2026-11-01") == first
    monkeypatch.setattr(jobs, "today", lambda: "2026-11-02")
    assert not ids() & first
    assert ids(date="2026-11-01") == first
    fixed = ids(template_args={"date_string": "1 May"})
    monkeypatch.setattr(jobs, "today", lambda: "2026-11-03")
    assert ids(template_args={"date_string": "1 May"}) == fixed
    plain = Path(dated().recipe.chat.template)
    plain.write_text(DATED.replace("strftime_now('%d %b %Y')", "'1 May'"))
    assert ids() == ids(date="2026-11-01")
