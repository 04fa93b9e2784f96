"""`plan` warns of what a chat template does not print, by the name of the key."""

from __future__ import annotations

from pipeline.config import load_job
from pipeline.running.job import prepare
from tests.pipeline.conftest import write_jsonl
from tests.pipeline.corpus.test_chat_spans import CHATML, ONE, answer, user


def warnings(job_file, tmp_path, rows) -> str:
    (tmp_path / "t.jinja").write_text(CHATML)
    job = job_file(
        tmp_path / "cache",
        [write_jsonl(tmp_path / "a.jsonl", rows)],
        corpus={"fields": {"messages": "messages"}},
        recipe={"eos": False, "chat": {"template": str(tmp_path / "t.jinja")}},
    )
    return "\n".join(prepare(load_job(job)).planned.warnings)


def test_plan_names_the_key_that_a_template_drops(job_file, tmp_path):
    plain = [{"messages": [user("q"), answer("a")]}] * 6
    assert warnings(job_file, tmp_path, plain) == ""
    said = warnings(job_file, tmp_path, [*plain, {"messages": ONE}])
    assert "does not print tool_calls" in said
    assert "1 of 7" in said
    assert "template_drops_call" in said
    assert "recipe.chat.template" in said
    thought = {"messages": [user("q"), answer("a", reasoning_content="t")]}
    assert "does not print reasoning_content" in warnings(job_file, tmp_path, [*plain, thought])
