"""The chat template of a job: conversations → text, and which of its characters are learnt, for any template."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.corpus.chat_spans import (
    THOUGHTS,
    Habits,
    Layout,
    Message,
    Span,
    Spans,
    behind_header,
    call_names,
    common,
    content_texts,
    spelt,
    thoughts_of,
)
from pipeline.corpus.dropped import Dropped
from pipeline.corpus.provenance import CONTENT, HEADER, compile_noting, owned_messages

_PROBES = ("Wxyz.", "Vuts.")  # answers that no template says by itself; their first letters differ
_ASK: Message = {"role": "user", "content": "Qrst?"}
_ANSWERS: list[Message] = [{"role": "assistant", "content": probe} for probe in _PROBES]
_CALL = {"id": "Nopq56789", "type": "function", "function": {"name": "jklm", "arguments": {"ghi": "def"}}}
_OPENING: list[Message] = [
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "assistant", "content": _PROBES[0], **dict.fromkeys(THOUGHTS, _PROBES[1])},
]


def special_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return what matches special tokens, the longest first; nothing where there are none."""
    return re.compile("|".join(sorted((re.escape(t) for t in tokens if t), key=len, reverse=True)) or r"(?!)")


def may_print_date(template: str) -> bool:
    """Return whether a template asks for the day."""
    return "strftime_now" in template


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text; spans: what is learnt; unprinted: what of the conversation the template leaves out."""

    text: str
    spans: list[Span]
    unprinted: frozenset[str] = frozenset()


class ChatTemplate:
    """Renders by a tokenizer's Jinja environment, or by `template`.

    arguments: the template's keyword arguments. date: the day that a template prints. Thread-safe; what a template does
    with plain answers is learnt once a template.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        arguments: dict[str, Any],
        special: re.Pattern[str],
        date: datetime.date | None = None,
    ) -> None:
        self._tokenizer, self._template, self._special = tokenizer, template, special
        self._arguments = dict(arguments)
        if date is not None:
            self.set_date(date)
        self._habits: dict[tuple[str, bool], Habits] = {}

    @property
    def source(self) -> str:
        """Return the text of the template; of several by name, as JSON."""
        return self._template or json.dumps(self._tokenizer.chat_template)

    @property
    def prints_date(self) -> bool:
        """Return whether the text depends on the day, unless an argument of the template fixes it."""
        return may_print_date(self.source) and not {"date_string", "strftime_now"} & self._arguments.keys()

    def set_date(self, date: datetime.date) -> None:
        """Let the template print this day, at midnight, instead of the clock's."""
        self._arguments.setdefault("strftime_now", datetime.datetime(date.year, date.month, date.day).strftime)

    def unread(self, arguments: Iterable[str]) -> list[str]:
        """Return a line where the template's text has no mention of some arguments."""
        names = [name for name in arguments if not re.search(rf"\b{re.escape(name)}\b", self.source)]
        said = f"recipe.chat.template_args: the chat template does not read {', '.join(names)}"
        return [f"{said}, so nothing comes of it: correct the name, or leave it out"] if names else []

    # -- rendering -----------------------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], tools: Any = None, add_generation_prompt: bool = False) -> str:
        """Return the text of `apply_chat_template`. Raises Dropped("template_error")."""
        options = {"chat_template": self._template, "add_generation_prompt": add_generation_prompt, "tokenize": False}
        try:
            made = self._tokenizer.apply_chat_template(
                list(messages), tools=tools or None, **options, **self._arguments
            )
        except Exception as error:  # jinja2 raises its own classes, templates raise through raise_exception()
            raise Dropped("template_error", " ".join(str(error).split())[:200]) from error
        return str(made)

    def _layout(self, messages: Sequence[Message], tools: Any = None, add_generation_prompt: bool = False) -> Layout:
        """Return the same rendering with notes, taken apart."""
        try:
            compiled = compile_noting(self._tokenizer.get_chat_template(self._template, tools or None))
            values = {**self._tokenizer.special_tokens_map, **self._arguments}
            noted = compiled.render(
                messages=owned_messages(messages),
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **values,
            )
        except Exception as error:
            raise Dropped("template_error", " ".join(str(error).split())[:200]) from error
        return Layout(noted)

    def prompt(self, messages: Sequence[Message], tools: Any = None) -> Rendered:
        """Return the conversation up to where the assistant's next turn begins; nothing of it is learnt."""
        return self._first_of(messages, tools, lambda m: self._prompt(m, tools))

    def spans(self, messages: Sequence[Message], tools: Any = None) -> Rendered:
        """Return the conversation and what is learnt of it. Raises Dropped where that is not certain."""
        return self._first_of(messages, tools, lambda m: self._spans(m, tools))

    def whole(self, messages: Sequence[Message], tools: Any = None) -> Rendered:
        """Return the conversation, to be learnt as a whole. Raises Dropped where the template leaves out a part of a turn."""
        try:
            return self.spans(messages, tools)
        except Dropped as drop:
            if drop.reason not in ("template_mixes_turns", "template_unclear"):
                raise
            return self._first_of(messages, tools, lambda m: Rendered(self.render(m, tools), []))

    def _prompt(self, messages: Sequence[Message], tools: Any) -> Rendered:
        text = self.render(messages, tools, True)
        unprinted = set(_unprinted_tools(tools, text))
        for index, message in enumerate(messages):
            words = filter(None, (t.strip() for t in content_texts(message)))
            if message["role"] != "assistant" and not all(any(t in text for t in spelt(w)) for w in words):
                layout = self._layout(messages, tools, True)
                if not any(w.owner == index and w.kind == CONTENT for w in layout.words):
                    unprinted.add(f"the content of {message['role']} turns")
        return Rendered(text, [], frozenset(unprinted))

    def _spans(self, messages: Sequence[Message], tools: Any) -> Rendered:
        text = self.render(messages, tools)
        layout = self._layout(messages, tools)
        if layout.text != text:
            raise Dropped("template_unclear", "with notes the template renders another text")
        if _prints_none(layout, messages):
            raise Dropped("template_error", "the template prints None for content that is null")
        spans = Spans(
            layout, messages, self.habits(tools), self._special, lambda i: self._layout(messages[: i + 1], tools)
        )
        found = spans.find()
        return Rendered(text, found, frozenset(spans.unprinted) | _unprinted_tools(tools, text))

    # -- spellings -----------------------------------------------------------------------------------------------

    def _spellings(self, messages: Sequence[Message], tools: Any) -> list[Sequence[Message]]:
        """Return a conversation as it is, and in other spellings of the same, for templates that refuse the first."""
        habits = self.habits(tools)
        lists = any(isinstance(m.get("content"), list) for m in messages)
        if habits.needs_parts:
            messages = [_in_parts(m) for m in messages]
        elif lists and not habits.takes_parts:
            messages = [_in_one(m) for m in messages]
        if lists and not habits.takes_several:
            messages = [_in_one_part(m) for m in messages]
        simpler = [_simple(m) for m in messages]
        if habits.needs_parts:
            simpler = [_in_parts(m) for m in simpler]
        return [messages] if simpler == list(messages) else [messages, simpler]

    def _first_of(
        self, messages: Sequence[Message], tools: Any, make: Callable[[Sequence[Message]], Rendered]
    ) -> Rendered:
        """Return what is made of the first spelling that the template takes."""
        *others, last = self._spellings(messages, tools)
        for spelling in others:
            try:
                return make(spelling)
            except Dropped as drop:
                if drop.reason != "template_error":
                    raise
        return make(last)

    # -- habits --------------------------------------------------------------------------------------------------

    def habits(self, tools: Any = None) -> Habits:
        """Return what the template does with plain answers; learnt once."""
        try:
            template = self._tokenizer.get_chat_template(self._template, tools or None)
        except ValueError as error:
            raise Dropped("template_error", str(error)) from error
        key = (template, bool(tools))
        if key not in self._habits:
            self._habits[key] = self._learn_habits(tools)
        return self._habits[key]

    def _learn_habits(self, tools: Any) -> Habits:
        strings = [_ASK, _ANSWERS[0], _ASK, _ANSWERS[1]]
        lists = [_in_parts(m) for m in strings]
        several = [m | {"content": [*m["content"], *m["content"]]} for m in lists]
        takes, many, needs = (_shows(self._try(form, tools), form) for form in (lists, several, strings))
        needs_parts = takes and not needs
        form = lists if needs_parts else strings
        habits = Habits(needs_parts=needs_parts, takes_parts=takes, takes_several=many)
        with_prompt, without = self._try(form[:1], tools, True), self._try(form[:1], tools)
        if with_prompt is not None:
            shared = common(with_prompt.text, without.text if without is not None else "")
            if without is None or not shared:  # it refuses an open question without a prompt: what follows the question
                last = max((w.stop for w in with_prompt.words), default=0)
                shared = with_prompt.text[:last]
            habits = replace(habits, prompt=with_prompt.text[len(shared) :])
        both = self._try(form, tools)
        if both is not None:
            words = {o: [w for w in both.words if w.owner == o and w.kind == CONTENT] for o in (1, 3)}
            run = next(
                (r for r in both.runs if r.owner == 1 and words[1] and r.start <= words[1][0].start < r.stop), None
            )
            if run is not None:
                habits = replace(habits, header=both.text[run.start : words[1][0].start])
            if words[3]:
                habits = replace(habits, end=both.text[words[3][-1].stop :])
        return replace(habits, openers=tuple(filter(None, (self._opener(m, habits, form, tools) for m in _OPENING))))

    def _opener(self, message: Message, habits: Habits, form: Sequence[Message], tools: Any) -> str:
        """Return the text between a turn's header and its first word."""
        made = self._try([form[0], _in_parts(message) if habits.needs_parts else message], tools)
        own = [w for w in made.words if w.owner == 1 and w.kind != HEADER] if made is not None else []
        run = (
            next((r for r in made.runs if r.owner == 1 and r.start <= own[0].start < r.stop), None)
            if made and own
            else None
        )
        if made is None or run is None:
            return ""
        before = made.text[run.start : own[0].start]
        header = behind_header(before, habits)
        return "" if header is None else before[header:]

    def _try(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool = False) -> Layout | None:
        try:
            return self._layout(messages, tools, add_generation_prompt)
        except Dropped:
            return None

    def end_markers(self) -> list[str]:
        """Return the special token that follows an answer, where the template writes one: a teacher stops at it."""
        found = self._special.search(self.habits().end)
        return [found[0]] if found else []


def _shows(layout: Layout | None, messages: Sequence[Message]) -> bool:
    """Return whether the contents of all messages are in a rendering, with all their parts."""
    count = sum(len(content_texts(message)) for message in messages)
    return layout is not None and len({(w.owner, w.part) for w in layout.words if w.kind == CONTENT}) == count


def _unprinted_tools(tools: Any, text: str) -> frozenset[str]:
    """Return "tools" where a text has the name of none of them."""
    functions = (tool.get("function", tool) for tool in tools or () if isinstance(tool, dict))
    names = [f["name"] for f in functions if isinstance(f, dict) and isinstance(f.get("name"), str) and f["name"]]
    return frozenset({"tools"} if names and not any(name in text for name in names) else ())


def _prints_none(layout: Layout, messages: Sequence[Message]) -> bool:
    """Return whether `None` is printed in the turn of a message without content, where no message says so."""
    for index, message in enumerate(messages):
        if message.get("content") is not None:
            continue
        own = "".join(layout.text[r.start : r.stop] for r in layout.runs if r.owner == index)
        said = "".join(layout.text[w.start : w.stop] for w in layout.words if w.owner == index)
        if own.count("None") > said.count("None"):
            return True
    return False


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _in_one(message: Message) -> Message:
    """Return a message whose content is a string; thoughts among its parts become its reasoning_content."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    thoughts = "".join(part[key] for part in content for key in THOUGHTS if isinstance(part.get(key), str))
    extra = {"reasoning_content": thoughts} if thoughts and not thoughts_of(message | {"content": ""}) else {}
    return {**message, **extra, "content": "".join(content_texts(message))}


def _in_one_part(message: Message) -> Message:
    """Return a message whose content, if it is a list, has no text behind another text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts: list[Any] = []
    for part in content:
        if parts and "text" in part and "text" in parts[-1]:
            part = {**part, "text": parts.pop()["text"] + part["text"]}
        parts.append(part)
    return {**message, "content": parts}


def _simple(message: Message) -> Message:
    """Return a message whose content is a string and whose calls have objects as arguments."""
    made = dict(message)
    if made.get("content") is None:
        made["content"] = ""
    if call_names(made):
        made["tool_calls"] = [_simple_call(call) for call in made["tool_calls"]]
    return made


def _simple_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        value = json.loads(arguments)
    except ValueError:
        return call
    return call | {"function": function | {"arguments": value}} if isinstance(value, dict) else call
