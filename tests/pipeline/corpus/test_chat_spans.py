"""What is learnt of conversations under templates that compute over calls, agree by chance, or leave things out."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import CorpusConfig, FiltersConfig, parse_job
from pipeline.corpus.documents import Dropped, extract
from pipeline.corpus.encode import Encoder
from pipeline.corpus.readers import RawDocument, read_documents
from tests.pipeline.conftest import make_tokenizer, write_jsonl
from tests.pipeline.test_templates import learned

H = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
G = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}" + H + "{% endfor %}" + G
CALLS = "<|im_start|>assistant\n[{{ m.tool_calls[0].function.name }}]<|im_end|>\n"
NEEDCALL = (
    "{% set ns=namespace(call=none) %}{% for m in messages %}{% if m.tool_calls %}"
    "{% set ns.call=m.tool_calls[0].function.name %}<|im_start|>assistant\n[{{ ns.call }}]<|im_end|>\n"
    "{% elif m.role=='tool' %}{% if ns.call is none %}{{ raise_exception('a result without a call') }}{% endif %}"
    "<|im_start|>tool\n{{ m.content }}<|im_end|>\n{% else %}" + H + "{% endif %}{% endfor %}" + G
)
ALTERNATE = (
    "{% set ns=namespace(user=true) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != ns.user %}{{ raise_exception('roles must take turns') }}{% endif %}"
    "{% set ns.user = not ns.user %}{% endif %}{% endfor %}" + NEEDCALL
)
TOOLNAME = (
    "{% for m in messages %}{% if m.tool_calls %}" + CALLS + "{% elif m.role == 'tool' %}"
    "{% set before = messages[loop.index0 - 1] %}<|im_start|>tool "
    "{{ before.tool_calls[0].function.name if before.tool_calls else '' }}\n{{ m.content }}<|im_end|>\n"
    "{% else %}" + H + "{% endif %}{% endfor %}" + G
)
INSIDE = (
    "{% for m in messages %}{% if m.tool_calls %}<|im_start|>assistant\n[{{ m.tool_calls[0].function.name }}]"
    "{% if not loop.last and messages[loop.index0 + 1].role == 'tool' %}"
    "(result: {{ messages[loop.index0 + 1].content }}){% else %}<|im_end|>\n{% endif %}"
    "{% elif m.role == 'tool' %}{% elif loop.index0 and messages[loop.index0 - 1].role == 'tool' %}"
    "{{ m.content }}<|im_end|>\n{% else %}" + H + "{% endif %}{% endfor %}" + G
)
THINK = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
STEPS = CHATML.replace("assistant\n{% endif", "assistant\nHere is my plan:\n{% endif")
TOOLSLAST = (
    "{% set ns=namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last=loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if tools and loop.index0 == ns.last %}[TOOLS {{ tools | tojson }}]{% endif %}"
    + H + "{% endfor %}" + G
)  # fmt: skip
BEHIND = (
    "{% set ns=namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last=loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and m.reasoning_content %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}[{{ m.tool_calls[0].function.name }}]{% endif %}<|im_end|>\n{% endfor %}" + G
)
EMPTYBEHIND = (
    "{% for m in messages %}{% if m.tool_calls %}" + CALLS + "{% endif %}{% if m.content is not none %}" + H
    + "{% endif %}{% endfor %}" + G
)  # fmt: skip
NULLCALL = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    "<|im_start|>assistant\n[{{ m.tool_calls[0].function.name }}]<|im_end|>\n{% else %}"
    + H
    + "{% endif %}{% endfor %}"
    + G
)
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "abcdefghi", "content": content}


ONE = [user("q"), answer("", tool_calls=[CALL]), result("RESULT"), answer("done.")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("chat") / "bytes")


class Chat:
    """Encodes conversations by one template."""

    def __init__(self, folder: Path, template: str, tmp_path: Path, **recipe: Any) -> None:
        path = tmp_path / "template.jinja"
        path.write_text(template)
        corpus = {"files": ["unused"], "fields": {"messages": "messages", "tools": "tools"}}
        recipe = {"eos": False, **recipe, "chat": {"template": str(path), **recipe.get("chat", {})}}
        teacher = {"model": str(folder), "engine": "noop", "max_model_len": 4096}
        job = parse_job({"cache": "unused", "teacher": teacher, "corpora": [corpus], "recipe": recipe})
        self.corpus = CorpusConfig(**corpus)
        self.encoder = Encoder(job, folder)

    def tokens(self, row: dict[str, Any], *, arrow: bool = False) -> Any:
        document = extract(RawDocument(0, row, arrow=arrow), self.corpus, FiltersConfig(), "d")
        (tokens,) = self.encoder.tokens([document])
        if isinstance(tokens, Dropped):
            raise tokens
        return tokens

    def learnt(self, messages: Any, tools: Any = None, **row: Any) -> list[str]:
        tokens = self.tokens({"messages": messages, "tools": tools, **row})
        return learned(self.encoder, tokens.ids, tokens.learn)


@pytest.fixture
def chat(folder, tmp_path):
    return lambda template, **recipe: Chat(folder, template, tmp_path, **recipe)


TWO = [user("q1"), answer("a1"), user("q2"), answer("a2")]
THOUGHTS = [
    user("q1"), answer("", tool_calls=[CALL], reasoning_content="t1"), result("R"),
    answer("a1", reasoning_content="t2"), user("q2"), answer("a2", reasoning_content="t3"),
]  # fmt: skip
E = "<|im_end|>"
RIGHT: dict[str, tuple[str, list[dict[str, Any]], list[str]]] = {
    "needcall": (NEEDCALL, ONE, ["[add]" + E, "done." + E]),
    "alternate": (ALTERNATE, ONE, ["[add]" + E, "done." + E]),
    "toolname": (TOOLNAME, ONE, ["[add]" + E, "done." + E]),
    "inside": (INSIDE, ONE, ["[add]", "done." + E]),
    "empty answer behind a call": (EMPTYBEHIND, ONE, ["[add]" + E, "done." + E]),
    "words behind a call": (EMPTYBEHIND, [user("q"), answer("words", tool_calls=[CALL]), *ONE[2:]],
                            ["[add]" + E, "words" + E, "done." + E]),
    "think, <table>": (THINK, [user("q"), answer("<table>x</table>")], ["<table>x</table>" + E]),
    "think, plain": (THINK, [user("q"), answer("plain")], ["plain" + E]),
    "steps, Hello": (STEPS, [user("q"), answer("Hello.")], ["Hello." + E]),
    "steps, yes": (STEPS, [user("q"), answer("yes")], ["yes" + E]),
    "steps, all of it": (STEPS, [user("q"), answer("Here is my plan:\n1")], ["Here is my plan:\n1" + E]),
    "toolslast": (TOOLSLAST, TWO, ["a1" + E, "a2" + E]),
    "behind": (BEHIND, THOUGHTS, ["[add]" + E, "a1" + E, "<think>\nt3\n</think>\n\na2" + E]),
    "opens": (CHATML, [answer("welcome"), user("q"), answer("a")], ["welcome" + E, "a" + E]),
    "in a row": (CHATML, [user("q"), answer("a1"), answer("a2")], ["a1" + E, "a2" + E]),
    "same words": (CHATML, [user("a"), answer("a"), user("a"), answer("a")], ["a" + E, "a" + E]),
    "blanks": (CHATML, [user(" q "), answer("  a \n")], ["  a \n" + E]),
    "trimmed": (CHATML.replace("m.content", "m.content | trim"), [user(" q "), answer("  a \n")], ["a" + E]),
    "unicode": (CHATML, [user("Ç🙂"), answer("é🙂ﬁ")], ["é🙂ﬁ" + E]),
    "weight": (CHATML, [user("q"), answer("bad", weight=0), user("q"), answer("good", weight=1)], ["good" + E]),
    "train": (CHATML, [user("q"), answer("bad", train=False), user("q"), answer("good")], ["good" + E]),
    "loss": (CHATML, [user("q"), answer("bad", loss=False), user("q"), answer("good", loss=0.5)], ["good" + E]),
    "loss_mask": (CHATML, [user("q"), answer("bad", loss_mask=0), user("q"), answer("good")], ["good" + E]),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_learnt_are_the_assistants_words_calls_and_end_markers(chat, name):
    template, messages, expected = RIGHT[name]
    tools = TOOLS if name == "toolslast" else None
    made = chat(template)
    tokens = made.tokens({"messages": copy.deepcopy(messages), "tools": tools})
    assert learned(made.encoder, tokens.ids, tokens.learn) == expected
    text = made.encoder.backend.decode(tokens.ids.tolist(), skip_special_tokens=False)
    assert text == made.encoder.render(messages, tools=tools)


LOOPS = {
    "index": "{% for i in range(messages | length) %}{% set m = messages[i] %}" + H + "{% endfor %}",
    "loop_messages": "{% set loop_messages = messages[0:] %}{% for m in loop_messages %}" + H + "{% endfor %}",
    "copies": "{% set ns = namespace(all=[]) %}{% for m in messages %}"
    "{% set ns.all = ns.all + [dict(role=m.role, content=m.content | trim)] %}{% endfor %}"
    "{% for m in ns.all %}" + H + "{% endfor %}",
    "macro": "{% macro show(m) %}" + H + "{% endmacro %}"
    "{% for i in range(messages | length) %}{{ show(messages[i]) }}{% endfor %}",
    "macro in a loop": "{% macro show(c) %}{{ c }}{% endmacro %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ show(m.content) }}<|im_end|>\n{% endfor %}",
    "set block": "{% for m in messages %}{% set text %}" + H + "{% endset %}{{ text | trim }}\n{% endfor %}",
    "continue": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}" + H
    + "{% if m.role != 'user' %}{% continue %}{% endif %}{% endfor %}",
    "filter": "{% for m in messages | selectattr('role', 'ne', 'system') %}" + H + "{% endfor %}",
    "reversed twice": "{% for m in (messages | reverse | list)[::-1] %}" + H + "{% endfor %}",
    "joined": "{% for m in messages %}{{ ['<|im_start|>', m.role, '\n', m.content, '<|im_end|>\n'] | join }}{% endfor %}",
    "join method": "{% for m in messages %}{{ ''.join(['<|im_start|>', m.role, '\n', m.content, '<|im_end|>\n']) }}{% endfor %}",
    "concatenated": "{% for m in messages %}{{ '<|im_start|>' ~ m.role + '\n' ~ m.content + '<|im_end|>\n' }}{% endfor %}",
    "generation": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("prompt", ["with", "without"])
@pytest.mark.parametrize("name", LOOPS)
def test_turns_are_found_in_every_kind_of_loop(chat, name, prompt):
    made = chat(LOOPS[name] + (G if prompt == "with" else ""))
    assert made.learnt([user("a1"), answer("a1"), user("<|im"), answer("H q2")]) == ["a1" + E, "H q2" + E]


PAIRS = (
    "{% for i in range(0, messages | length, 2) %}<|im_start|>user\n{{ messages[i].content }}<|im_end|>\n"
    "<|im_start|>assistant\n{{ messages[i + 1].content }}<|im_end|>\n{% endfor %}" + G
)


def test_template_that_goes_by_pairs(chat):
    assert chat(PAIRS).learnt([user("q1"), answer("a1"), user("q2"), answer("a2")]) == ["a1" + E, "a2" + E]


FIRST_OR_SHORT = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if loop.first or p.text | length < 6 %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
)
DROPS = {
    "call": (CHATML, ONE, "template_drops_call"),
    "second call": (NEEDCALL, [*ONE[:1], answer("", tool_calls=[CALL, CALL | {"function": {"name": "other"}}])],
                    "template_drops_call"),
    "content": ("{% for m in messages %}{% if m.role == 'user' %}" + H + "{% endif %}{% endfor %}", TWO, "template_drops_turn"),
    "content through %": ("{% for m in messages %}{{ '<|im_start|>%s\n%s<|im_end|>\n' % (m.role, m.content) }}{% endfor %}",
                          TWO, "template_unclear"),
    "content by letters": (CHATML.replace("{{ m.content }}", "{% for c in m.content %}{{ c }}{% endfor %}"), TWO,
                           "template_unclear"),
    "content with a call": (NEEDCALL, [user("q"), answer("words", tool_calls=[CALL])], "template_drops_turn"),
    "thought alone": (CHATML, [user("q"), answer("", reasoning_content="t")], "template_drops_thought"),
    "refused": ("{{ raise_exception('no') }}", TWO, "template_error: no"),
    "nothing to learn": (CHATML, [user("q"), answer("a", weight=0)], "mask_all_false"),
    "weight 0.5": (CHATML, [user("q"), answer("a", weight=0.5)], "wrong_type: weight 0.5"),
    "null": (CHATML.replace("{{ m.content }}", "{{ m.content or '' }}"), [user("q"), answer(None)], "mask_all_false"),
    "second part": (CHATML.replace("{{ m.content }}", FIRST_OR_SHORT),
                    [user("q"), answer([{"type": "text", "text": "one"}, {"type": "text", "text": "two, long"}])],
                    "template_drops_turn"),
    "image": (CHATML, [user([{"type": "text", "text": "q"}, {"type": "image_url", "image_url": {"url": "x.png"}}]),
                       answer("a")], "content_image"),
    "audio": (CHATML, [user([{"type": "input_audio", "input_audio": {}}]), answer("a")], "content_audio"),
    "unknown part": (CHATML, [user([{"type": "tool_result"}]), answer("a")], "content_part"),
}  # fmt: skip


@pytest.mark.parametrize("name", DROPS)
def test_what_would_be_learnt_wrongly_is_dropped_by_name(chat, name):
    template, messages, reason = DROPS[name]
    with pytest.raises(Dropped, match=f"^{reason}"):
        chat(template).learnt(copy.deepcopy(messages))


def test_null_content_is_what_the_template_sees(chat):
    null = [*ONE[:1], answer(None, tool_calls=[CALL]), *ONE[2:]]
    assert chat(NULLCALL).learnt(null) == ["[add]" + E, "done." + E]
    arguments = {"name": "add", "arguments": json.dumps({"x": 1})}
    as_string = [*ONE[:1], answer(None, tool_calls=[CALL | {"function": arguments}]), *ONE[2:]]
    assert chat(NULLCALL).learnt(as_string) == ["[add]" + E, "done." + E]


def test_null_content_that_a_template_prints_or_refuses_is_empty(chat):
    printing = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + (
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}<|im_end|>\n{% endfor %}" + G
    )
    adding = printing.replace("{{ m.content }}", "{{ '' + m.content }}")
    for content in ({"content": None}, {}):
        messages = [*ONE[:1], {"role": "assistant", "tool_calls": [CALL], **content}, *ONE[2:]]
        for template in (printing, adding):
            assert chat(template).learnt(messages) == ["[add]" + E, "done." + E]


def test_arguments_as_a_json_string_are_read_where_the_template_needs_an_object(chat):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}){% endfor %}"
        "<|im_end|>\n{% endfor %}" + G
    )
    call = CALL | {"function": {"name": "add", "arguments": '{"x": 1}'}}
    assert chat(template).learnt([*ONE[:1], answer("", tool_calls=[call]), *ONE[2:]]) == ["add(x=1)" + E, "done." + E]


def test_parts_of_text_are_the_text(chat):
    parts = [user([{"type": "text", "text": "q"}]), answer([{"type": "text", "text": "an answer"}])]
    made = chat(CHATML)
    assert made.tokens({"messages": parts}).ids.tolist() == (
        made.tokens({"messages": [user("q"), answer("an answer")]}).ids.tolist()
    )
    # a template that takes parts alone is given them
    reading = CHATML.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
    made = chat(reading)
    for messages in (parts, [user("q"), answer("an answer")]):
        assert made.learnt(messages) == ["an answer" + E]


PRINTING = {
    "strings": "{{ m.content }}",
    "the first part": "{{ m.content[0].text }}",
    "the first part, or a string": "{{ m.content if m.content is string else m.content[0].text }}",
    "every part": "{% for p in m.content %}{{ p.text }}{% endfor %}",
}


@pytest.mark.parametrize("name", PRINTING)
def test_every_part_of_a_content_is_printed_and_learnt(chat, name):
    """Some stock templates print the first part alone."""

    def parts(one: str, two: str) -> list[dict[str, Any]]:
        return [{"type": "text", "text": one}, {"type": "text", "text": two}]

    made = chat(CHATML.replace("{{ m.content }}", PRINTING[name]))
    tokens = made.tokens({"messages": [user(parts("q1 ", "q2")), answer(parts("one, ", "two"))]})
    assert learned(made.encoder, tokens.ids, tokens.learn) == ["one, two" + E]
    assert made.encoder.backend.decode(tokens.ids.tolist(), skip_special_tokens=False).count("q1 q2") == 1
    assert not tokens.unprinted


def test_thoughts_among_the_parts_are_printed_or_told(chat):
    content = [{"type": "thinking", "thinking": "t1"}, {"type": "text", "text": "a"}]
    tokens = chat(CHATML).tokens({"messages": [user("q"), answer(content)]})
    assert tokens.unprinted == {"reasoning_content"}
    assert chat(BEHIND).learnt([user("q"), answer(content)]) == ["<think>\nt1\n</think>\n\na" + E]
    text_alone = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    tokens = chat(CHATML.replace("{{ m.content }}", text_alone)).tokens({"messages": [user("q"), answer(content)]})
    assert tokens.unprinted == {"thinking"}


def test_other_spellings_of_the_same_conversation(chat):
    made = chat(NEEDCALL)
    expected = made.tokens({"messages": ONE, "tools": TOOLS})
    sharegpt = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"x": 1}})},
        {"from": "observation", "value": "RESULT"},
        {"from": "gpt", "value": "done."},
    ]
    for row in (
        {"messages": json.dumps(ONE), "tools": json.dumps(TOOLS)},
        {"messages": ONE, "tools": [json.dumps(tool) for tool in TOOLS]},
        {"messages": [m | {"tool_calls": json.dumps(m["tool_calls"])} if "tool_calls" in m else m for m in ONE]},
        {"messages": sharegpt},
        {"conversations": sharegpt},
    ):
        tokens = made.tokens(row)
        assert tokens.ids.tolist() == expected.ids.tolist()
        assert tokens.learn.tolist() == expected.learn.tolist()


def test_sharegpt_brings_its_system_prompt(chat):
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "S"}
    tokens = chat(CHATML).tokens(row)
    wanted = chat(CHATML).tokens({"messages": [{"role": "system", "content": "S"}, user("q"), answer("a")]})
    assert tokens.ids.tolist() == wanted.ids.tolist()


TOJSON = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}" + G
)


def test_parquet_gives_the_ids_of_jsonl(chat, tmp_path):
    """Arrow makes one struct of all calls: each gets the others' arguments as nulls."""

    def row(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        parameters = {"type": "object", "properties": {key: {"type": "string"} for key in arguments}}
        tools = [{"type": "function", "function": {"name": name, "parameters": parameters}}]
        return {"messages": [user("q"), answer("", tool_calls=[call]), result("R"), answer("a")], "tools": tools}

    rows = [row("get_weather", {"city": "Oslo"}), row("get_day", {"date": "today"})]
    jsonl = write_jsonl(tmp_path / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    made = chat(TOJSON)
    ids = []
    for path, unit, stop in ((jsonl, "bytes", 1 << 30), (tmp_path / "a.parquet", "rows", 2)):
        raws = list(read_documents(str(path), made.corpus, 0, stop, unit))
        found = [made.encoder.tokens([extract(raw, made.corpus, FiltersConfig(), "d")])[0] for raw in raws]
        ids.append([tokens.ids.tolist() for tokens in found])
        assert [learned(made.encoder, t.ids, t.learn)[0] for t in found] == [
            'get_weather{"city": "Oslo"}' + E, 'get_day{"date": "today"}' + E,
        ]  # fmt: skip
    assert ids[0] == ids[1]


def test_a_null_that_jsonl_says_stays_and_arrows_maps_are_objects(chat):
    call = {"function": {"name": "f", "arguments": {"unit": None}}}
    assert chat(TOJSON).learnt([user("q"), answer("", tool_calls=[call])]) == ['f{"unit": null}' + E]
    call = {"function": {"name": "f", "arguments": [("city", "Oslo")]}}
    tokens = chat(TOJSON).tokens({"messages": [user("q"), answer("", tool_calls=[call])]}, arrow=True)
    assert np.array_equal(
        tokens.ids,
        chat(TOJSON).tokens({"messages": [user("q"), answer("", tool_calls=[CALL | {
            "function": {"name": "f", "arguments": {"city": "Oslo"}}}])]}).ids,
    )  # fmt: skip


def test_keys_that_a_template_does_not_print_are_told(chat):
    tokens = chat(CHATML).tokens({"messages": [user("q"), answer("a", reasoning_content="t")]})
    assert tokens.unprinted == {"reasoning_content"}
    assert not chat(BEHIND).tokens({"messages": [user("q"), answer("a", reasoning_content="t")]}).unprinted


NO_SYSTEM = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role in ('user', 'assistant') %}")
SPLIT = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] | trim }}")
UNSEEN: dict[str, tuple[str, list[dict[str, Any]], set[str]]] = {
    "nothing": (CHATML, [{"role": "system", "content": "S"}, *TWO], set()),
    "system": (NO_SYSTEM, [{"role": "system", "content": "S"}, *TWO], {"the content of system turns"}),
    "developer": (NO_SYSTEM, [{"role": "developer", "content": "S"}, *TWO], {"the content of developer turns"}),
    "result": (NO_SYSTEM, [user("q"), result("R"), answer("a")], {"the content of tool turns"}),
    "blank": (NO_SYSTEM, [{"role": "system", "content": " "}, *TWO], set()),
    "thoughts in the words": (SPLIT, [user("q"), answer("<think>t</think>\n\na")], {"a part of the content"}),
    "trimmed": (SPLIT, [user("q"), answer("\n a b \n")], set()),
    "cut": (CHATML.replace("m.content", "m.content[:5]"), [user("q"), answer("one two")], {"a part of the content"}),
    "replaced": (CHATML.replace("m.content", "m.content | replace('a', 'o')"), [user("q"), answer("a b a")], set()),
    "indented": (CHATML.replace("m.content", "m.content | indent(2)"), [user("q"), answer("a\nb\nc")], set()),
}


@pytest.mark.parametrize("mode", ["spans", "generate"])
@pytest.mark.parametrize("name", UNSEEN)
def test_what_neither_teacher_nor_student_sees_is_told(chat, name, mode):
    template, messages, expected = UNSEEN[name]
    if mode == "generate":
        messages, expected = messages[:-1], expected - {"a part of the content"}
        tokens = chat(template, mode="generate").tokens({"messages": messages})
    else:
        tokens = chat(template).tokens({"messages": messages})
    assert tokens.unprinted == expected


def test_tools_that_a_template_does_not_print_are_told(chat):
    row = {"messages": TWO, "tools": TOOLS}
    assert chat(CHATML).tokens(row).unprinted == {"tools"}
    assert not chat(TOOLSLAST).tokens(row).unprinted


def test_conversations_that_an_assistant_opens_are_learnt_in_mode_all_too(chat):
    tokens = chat(CHATML, chat={"mask": "all"}).tokens({"messages": [answer("w"), user("q")]})
    assert tokens.learn.all()
    with pytest.raises(Dropped, match="template_drops_call"):
        chat(CHATML, chat={"mask": "all"}).tokens({"messages": ONE})
