"""`plan` warns of what a chat template does not print, by the name of the key."""

from __future__ import annotations

import pytest

import teachercache
from pipeline.config import load_job
from pipeline.running.job import prepare, run_job
from teachercache.errors import UsageError
from tests.pipeline.conftest import write_jsonl
from tests.pipeline.corpus.test_chat_spans import CHATML, ONE, answer, user


def warnings(job_file, tmp_path, rows, template=CHATML) -> str:
    (tmp_path / "t.jinja").write_text(template)
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
    split = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    cut = {"messages": [user("q"), answer("<think>t</think>a")]}
    assert "does not print a part of the content in 1 of 7 sampled" in warnings(
        job_file, tmp_path, [*plain, cut], split
    )


def test_plan_names_arguments_that_the_template_does_not_read(job_file, tmp_path):
    (tmp_path / "t.jinja").write_text(CHATML + "{% if enable_thinking %}{% endif %}")
    job = job_file(
        tmp_path / "cache",
        [write_jsonl(tmp_path / "a.jsonl", [{"messages": [user("q"), answer("a")]}] * 6)],
        corpus={"fields": {"messages": "messages"}},
        recipe={
            "eos": False,
            "chat": {"template": str(tmp_path / "t.jinja"), "template_args": {"enable_thinking": True, "thinking": 1}},
        },
    )
    assert prepare(load_job(job)).planned.warnings == [
        "recipe.chat.template_args: the chat template does not read thinking, so nothing comes of it: correct the name, "
        "or leave it out"
    ]


@pytest.mark.parametrize(
    ("row", "template", "said"),
    [
        ({"messages": [user("q"), answer("a")]}, "{{ raise_exception('no such roles here') }}", "no such roles here"),
        ({"messages": "no JSON at all"}, CHATML, "messages"),
        ({"messages": "{}"}, CHATML, "messages"),
    ],
    ids=["refused", "words", "object"],
)
def test_a_source_of_unusable_conversations_ends_the_plan_and_leaves_nothing(job_file, tmp_path, row, template, said):
    (tmp_path / "t.jinja").write_text(template)
    job = load_job(
        job_file(
            tmp_path / "cache",
            [write_jsonl(tmp_path / "a.jsonl", [row] * 12)],
            corpus={"fields": {"messages": "messages"}},
            recipe={"eos": False, "chat": {"template": str(tmp_path / "t.jinja")}},
        )
    )
    with pytest.raises(UsageError, match=said):
        prepare(job)
    with pytest.raises(UsageError, match=said):
        run_job(job)
    assert not (tmp_path / "cache").exists()


def test_conversations_of_share_gpt_are_read_and_published(job_file, tmp_path):
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    same = {"messages": [user("q"), answer("a")]}
    found = []
    for name, rows, field in (("share", row, "conversations"), ("plain", same, "messages")):
        (tmp_path / "t.jinja").write_text(CHATML)
        job = job_file(
            tmp_path / name,
            [write_jsonl(tmp_path / f"{name}.jsonl", [{"id": str(i), **rows} for i in range(3)])],
            corpus={"fields": {"messages": field, "id": "id"}},
            recipe={"eos": False, "chat": {"template": str(tmp_path / "t.jinja")}},
        )
        assert run_job(load_job(job)).manifest.complete
        records = teachercache.open(str(tmp_path / name)).records()
        found.append([(r.doc_id, r.input_ids.tolist(), r.loss_mask.tolist()) for r in records])
    assert found[0] == found[1]
    assert len(found[0]) == 3
