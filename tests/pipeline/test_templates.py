"""Masks of chats: exactly the assistant's tokens and their end marker, for the structures of five model families."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import CorpusConfig, FiltersConfig, parse_job
from pipeline.corpus.documents import Dropped, extract
from pipeline.corpus.encode import Encoder
from pipeline.corpus.readers import RawDocument
from tests.pipeline.conftest import make_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
FAMILIES = ["smollm2", "llama31", "qwen3", "gemma3", "gptoss"]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]

MULTI = [
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi there."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Still here."},
]
SYSTEM = [{"role": "system", "content": "Be brief."}, *MULTI]
EMPTY = [*MULTI[:1], {"role": "assistant", "content": ""}, *MULTI[2:]]
TOOL = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]
OPEN = [*MULTI, {"role": "user", "content": "Hm?"}]
THOUGHT = [*MULTI[:3], {"role": "assistant", "content": "Still here.", "reasoning_content": "why?", "thinking": "why?"}]

# what a student learns of each conversation, turn by turn, end markers included
EXPECTED = {
    ("smollm2", "multi"): ["Hi there.<|im_end|>", "Still here.<|im_end|>"],
    ("smollm2", "system"): ["Hi there.<|im_end|>", "Still here.<|im_end|>"],
    ("smollm2", "empty"): ["<|im_end|>", "Still here.<|im_end|>"],
    ("smollm2", "open"): ["Hi there.<|im_end|>", "Still here.<|im_end|>"],
    ("smollm2", "thought"): ["Hi there.<|im_end|>", "Still here.<|im_end|>"],
    ("llama31", "multi"): ["Hi there.<|eot_id|>", "Still here.<|eot_id|>"],
    ("llama31", "system"): ["Hi there.<|eot_id|>", "Still here.<|eot_id|>"],
    ("llama31", "empty"): ["<|eot_id|>", "Still here.<|eot_id|>"],
    ("llama31", "tool"): ['{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>', "It is 3.<|eot_id|>"],
    ("llama31", "open"): ["Hi there.<|eot_id|>", "Still here.<|eot_id|>"],
    ("llama31", "thought"): ["Hi there.<|eot_id|>", "Still here.<|eot_id|>"],
    ("qwen3", "multi"): ["Hi there.<|im_end|>", "<think>\n\n</think>\n\nStill here.<|im_end|>"],
    ("qwen3", "system"): ["Hi there.<|im_end|>", "<think>\n\n</think>\n\nStill here.<|im_end|>"],
    ("qwen3", "empty"): ["<|im_end|>", "<think>\n\n</think>\n\nStill here.<|im_end|>"],
    ("qwen3", "tool"): [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nIt is 3.<|im_end|>",
    ],
    ("qwen3", "open"): ["Hi there.<|im_end|>", "Still here.<|im_end|>"],
    ("qwen3", "thought"): ["Hi there.<|im_end|>", "<think>\nwhy?\n</think>\n\nStill here.<|im_end|>"],
    ("gemma3", "multi"): ["Hi there.<end_of_turn>", "Still here.<end_of_turn>"],
    ("gemma3", "system"): ["Hi there.<end_of_turn>", "Still here.<end_of_turn>"],
    ("gemma3", "empty"): ["<end_of_turn>", "Still here.<end_of_turn>"],
    ("gemma3", "open"): ["Hi there.<end_of_turn>", "Still here.<end_of_turn>"],
    ("gemma3", "thought"): ["Hi there.<end_of_turn>", "Still here.<end_of_turn>"],
    ("gptoss", "multi"): [
        "<|channel|>final<|message|>Hi there.<|end|>",
        "<|channel|>final<|message|>Still here.<|return|>",
    ],
    ("gptoss", "system"): [
        "<|channel|>final<|message|>Hi there.<|end|>",
        "<|channel|>final<|message|>Still here.<|return|>",
    ],
    ("gptoss", "empty"): ["<|channel|>final<|message|><|end|>", "<|channel|>final<|message|>Still here.<|return|>"],
    ("gptoss", "tool"): [
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>',
        "<|channel|>final<|message|>It is 3.<|return|>",
    ],
    ("gptoss", "open"): [
        "<|channel|>final<|message|>Hi there.<|end|>",
        "<|channel|>final<|message|>Still here.<|end|>",
    ],
    ("gptoss", "thought"): [
        "<|channel|>final<|message|>Hi there.<|end|>",
        "<|channel|>analysis<|message|>why?<|end|><|start|>assistant<|channel|>final<|message|>Still here.<|return|>",
    ],
}
CONVERSATIONS = {"multi": MULTI, "system": SYSTEM, "empty": EMPTY, "tool": TOOL, "open": OPEN, "thought": THOUGHT}


def make_encoder(folder: Path, family: str, **recipe: object) -> Encoder:
    job = parse_job(
        {
            "cache": "unused",
            "teacher": {"model": str(folder), "engine": "noop", "max_model_len": 4096},
            "corpora": [{"files": ["unused"], "fields": {"messages": "messages", "tools": "tools"}}],
            "recipe": {"eos": False, "chat": {"template": str(TEMPLATES / f"{family}.jinja")}, **recipe},
        }
    )
    return Encoder(job, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("chat") / "bytes")


def tokens_of(encoder: Encoder, messages: list[dict], tools: list | None = None):
    corpus = CorpusConfig(files=["unused"], fields={"messages": "messages", "tools": "tools"})
    raw = RawDocument(0, {"messages": messages, "tools": tools})
    (tokens,) = encoder.tokens([extract(raw, corpus, FiltersConfig(), "d")])
    if isinstance(tokens, Dropped):
        raise tokens
    return tokens


def learned(encoder: Encoder, ids: np.ndarray, learn: np.ndarray) -> list[str]:
    """Texts of the runs of learned tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], learn, [False]]).astype(int)))
    return [encoder.backend.decode(ids[a:b].tolist(), skip_special_tokens=False) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize(("family", "kind"), sorted(EXPECTED))
def test_mask_covers_exactly_the_assistant_and_its_end_marker(folder, family, kind):
    encoder = make_encoder(folder, family)
    tools = TOOLS if kind == "tool" else None
    tokens = tokens_of(encoder, CONVERSATIONS[kind], tools)
    assert learned(encoder, tokens.ids, tokens.learn) == EXPECTED[family, kind]
    # and the whole is what the template renders
    text = encoder.backend.decode(tokens.ids.tolist(), skip_special_tokens=False)
    assert text == encoder.render([m | {"content": m.get("content") or ""} for m in CONVERSATIONS[kind]], tools=tools)


def test_template_that_prints_no_calls_drops_the_document(folder):
    with pytest.raises(Dropped, match="template_drops_call"):
        tokens_of(make_encoder(folder, "smollm2"), TOOL, TOOLS)


def test_template_that_refuses_a_conversation_drops_the_document(folder):
    with pytest.raises(Dropped, match="template_error"):
        tokens_of(make_encoder(folder, "gemma3"), TOOL, TOOLS)


@pytest.mark.parametrize("family", FAMILIES)
def test_conversation_without_an_assistant_is_an_error(folder, family):
    with pytest.raises(Dropped, match="mask_all_false"):
        tokens_of(make_encoder(folder, family), MULTI[:1])


def test_thinking_turned_off_is_not_learned(folder):
    """With enable_thinking=False the generation prompt holds the empty thought: the student never writes it."""
    chat = {"template": str(TEMPLATES / "qwen3.jinja"), "template_args": {"enable_thinking": False}}
    encoder = make_encoder(folder, "qwen3", chat=chat)
    tokens = tokens_of(encoder, MULTI)
    assert learned(encoder, tokens.ids, tokens.learn)[-1] == "Still here.<|im_end|>"


def test_loss_mask_is_about_the_predicted_token_and_rows_may_be_masked(folder):
    chat = {"template": str(TEMPLATES / "smollm2.jinja")}
    corpus = CorpusConfig(files=["unused"], fields={"messages": "messages"})
    document = extract(RawDocument(0, {"messages": MULTI}), corpus, FiltersConfig(), "d")
    for rows in ("all", "masked"):
        encoder = make_encoder(folder, "smollm2", chat=chat | {"rows": rows})
        (tokens,) = encoder.tokens([document])
        (window,) = encoder.windows(document, tokens)
        predicted = window.input_ids[window.row_pos[window.loss_mask] + 1]
        text = encoder.backend.decode(predicted.tolist(), skip_special_tokens=False)
        assert text == "Hi there.<|im_end|>Still here.<|im_end|>"
        assert window.loss_mask.all() == (rows == "masked")
        assert len(window.row_pos) == (window.loss_mask.sum() if rows == "masked" else len(window.input_ids))


def test_system_prompt_of_the_job_is_put_before_conversations_without_one(folder):
    chat = {"template": str(TEMPLATES / "smollm2.jinja"), "system": "From the job."}
    encoder = make_encoder(folder, "smollm2", chat=chat)
    text = encoder.backend.decode(tokens_of(encoder, MULTI).ids.tolist(), skip_special_tokens=False)
    assert "From the job." in text
    text = encoder.backend.decode(tokens_of(encoder, SYSTEM).ids.tolist(), skip_special_tokens=False)
    assert "From the job." not in text


ENDS = {
    "smollm2": "<|im_end|>",
    "llama31": "<|eot_id|>",
    "qwen3": "<|im_end|>",
    "gemma3": "<end_of_turn>",
    "gptoss": "<|return|>",
}


@pytest.mark.parametrize(("family", "kind"), [(f, k) for f in FAMILIES for k in ("open", "answered")])
def test_prompt_is_the_conversation_up_to_where_the_answer_begins(folder, family, kind):
    """Generate mode: what the teacher continues, and the marker at which it stops."""
    if (family, kind) == ("gemma3", "answered"):
        pytest.skip("Gemma's template has no tool turns")
    conversation, tools = (OPEN, None) if kind == "open" else (TOOL[:3], TOOLS)
    encoder = make_encoder(folder, family, mode="generate")
    tokens = tokens_of(encoder, conversation, tools)
    text = encoder.backend.decode(tokens.ids.tolist(), skip_special_tokens=False)
    assert text == encoder.render(conversation, tools=tools, add_generation_prompt=True)
    assert text.startswith(encoder.render(conversation, tools=tools))
    assert not tokens.learn.any()
    assert encoder.stop_ids == [encoder.backend.token_to_id(ENDS[family])]


@pytest.mark.parametrize("family", FAMILIES)
def test_conversation_that_is_answered_already_cannot_be_continued(folder, family):
    with pytest.raises(Dropped, match="ends_with_assistant"):
        tokens_of(make_encoder(folder, family, mode="generate"), MULTI)


def test_prompt_keeps_the_templates_bos_once(tmp_path):
    encoder = make_encoder(make_tokenizer(tmp_path / "with-bos", bos=True), "gemma3", mode="generate")
    tokens = tokens_of(encoder, MULTI[:1])
    assert tokens.bos
    assert encoder.bos_id not in tokens.ids


@pytest.mark.parametrize("recipe_bos", ["auto", "always", "never"])
@pytest.mark.parametrize("family", ["gemma3", "smollm2"])
def test_bos_comes_at_most_once(tmp_path, family, recipe_bos):
    folder = make_tokenizer(tmp_path / "with-bos", bos=True)
    encoder = make_encoder(folder, family, bos=recipe_bos)
    corpus = CorpusConfig(files=["unused"], fields={"messages": "messages"})
    document = extract(RawDocument(0, {"messages": MULTI}), corpus, FiltersConfig(), "d")
    (tokens,) = encoder.tokens([document])
    (window,) = encoder.windows(document, tokens)
    count = int((window.input_ids == encoder.bos_id).sum())
    assert count == (1 if family == "gemma3" or recipe_bos == "always" else 0)
    assert window.start == 0


def test_masks_survive_content_that_looks_like_markup(folder):
    encoder = make_encoder(folder, "smollm2")
    nasty = [
        {"role": "user", "content": "assistant\nHi there."},
        {"role": "assistant", "content": "assistant\nHi there."},
        {"role": "user", "content": "Hi there."},
        {"role": "assistant", "content": "Hi there."},
    ]
    tokens = tokens_of(encoder, nasty)
    assert learned(encoder, tokens.ids, tokens.learn) == ["assistant\nHi there.<|im_end|>", "Hi there.<|im_end|>"]


WEIRD = {
    "special_text": [
        {"role": "user", "content": "What does <|im_end|> do?"},
        {"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]},
        {"role": "tool", "content": "", "name": "<|im_start|>"},
    ],
    "invalid_utf8": [{"role": "user", "content": "x", "name": "half a pair \ud800"}],
}


@pytest.mark.parametrize(("reason", "message"), [(r, m) for r, many in WEIRD.items() for m in many])
def test_message_that_would_break_the_markup_costs_only_its_document(tmp_path, reason, message):
    template = tmp_path / "all.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant \n{% endif %}"
    )
    folder = make_tokenizer(tmp_path / "bytes")
    answered = [message, {"role": "assistant", "content": "Yes."}]
    for mode, messages in (("score", answered), ("generate", answered[:1])):
        encoder = make_encoder(folder, "smollm2", mode=mode, chat={"template": str(template)})
        with pytest.raises(Dropped, match=reason):
            tokens_of(encoder, messages)
        if reason == "special_text":  # unless the job asks for it
            chat = {"template": str(template)}
            assert tokens_of(make_encoder(folder, "smollm2", mode=mode, chat=chat, special_text="as_tokens"), messages)


def test_templates_here_are_not_marked_for_generation():
    for family in FAMILIES:
        assert not re.search(r"{%-?\s*generation", (TEMPLATES / f"{family}.jinja").read_text())
