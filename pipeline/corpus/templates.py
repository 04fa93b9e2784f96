"""Chat conversations → text and the character spans that the assistant wrote, for any template.

Most stock templates mark nothing as the assistant's (no `{% generation %}`), and a mask that is all zero would train
nothing. So spans are found by rendering: the start of turn i is where the generation prompt after messages[:i]
ends in the full text; its end is found by putting other content into turn i and seeing where the two texts meet
again, then taking the end marker (the special token that follows) along. Two renderings a turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pipeline.corpus.documents import Dropped

# private-use characters: no template trims them, no conversation ends with them
_SENTINEL = "\ue0f1other\ue0f2"

Render = Callable[..., str]


def make_renderer(tokenizer: Any, template: str | None, arguments: dict[str, Any]) -> Render:
    """Return render(messages, tools=None, add_generation_prompt=False) → text, by the tokenizer's Jinja environment."""

    def render(messages: Sequence[dict[str, Any]], tools: Any = None, add_generation_prompt: bool = False) -> str:
        try:
            options = {"chat_template": template, "add_generation_prompt": add_generation_prompt, "tokenize": False}
            return str(tokenizer.apply_chat_template(list(messages), tools=tools or None, **options, **arguments))
        except Exception as error:  # jinja2 raises its own classes, templates raise through raise_exception()
            raise Dropped("template_error", " ".join(str(error).split())[:200]) from error

    return render


def special_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return what matches special tokens, the longest first; nothing where there are none."""
    return re.compile("|".join(sorted((re.escape(t) for t in tokens if t), key=len, reverse=True)) or r"(?!)")


def end_markers(render: Render, special: re.Pattern[str]) -> list[str]:
    """Return the special token that follows an answer, where the template writes one: what a teacher must stop at."""
    try:
        text = render([{"role": "user", "content": "?"}, {"role": "assistant", "content": _SENTINEL}])
    except Dropped:  # a template that refuses so plain a conversation shows no end
        return []
    found = special.search(text, text.rfind(_SENTINEL)) if _SENTINEL in text else None
    return [found[0]] if found else []


def _common_prefix(a: str, b: str) -> int:
    """Return the length of the longest common prefix, by bisection over slices (no Python loop over characters)."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _end_of_turn(full: str, start: int, other: str, special: re.Pattern[str]) -> int:
    """Return the end of the turn that begins at `start`, end marker included; `other` has other content in that turn."""
    # the suffix may not reach back into what is before the turn
    suffix = _common_prefix(full[start:][::-1], other[::-1])
    end = len(full) - suffix
    written = other.rfind(_SENTINEL) + len(_SENTINEL)
    if written < len(_SENTINEL):
        raise Dropped("template_drops_turn", "the template leaves an assistant turn out")
    if written < len(other) - suffix:
        # the two turns end in different markers (a call and an answer): ours lies before the meeting point
        for match in special.finditer(full, start):
            if match.start() < end <= match.end():
                return match.end()
        return end
    following = special.search(full, end)
    return following.end() if following else end


def assistant_spans(
    messages: Sequence[dict[str, Any]], render: Render, special: re.Pattern[str], tools: Any = None
) -> tuple[str, list[tuple[int, int]]]:
    """Return the rendered conversation and the [start, end) spans of the assistant's turns with end markers.

    Raises Dropped("template_unstable") where the template renders the beginning of a conversation differently once
    more messages follow, in a way that hides where a turn starts.
    """
    full = render(messages, tools=tools)
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:index], tools=tools, add_generation_prompt=True)
        start = _common_prefix(full, before)
        if start < len(before):
            # a generation prompt may add text that a finished turn lacks (an empty thought); never less than a header
            header = render(messages[:index], tools=tools)
            if start <= _common_prefix(full, header):
                raise Dropped("template_unstable", f"turn {index} does not start where its generation prompt ends")
        replaced = [*messages[:index], {"role": "assistant", "content": _SENTINEL}, *messages[index + 1 :]]
        end = _end_of_turn(full, start, render(replaced, tools=tools), special)
        start = max(start, spans[-1][1] if spans else 0)
        if end > start:
            spans.append((start, end))
    return full, spans
