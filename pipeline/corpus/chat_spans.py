"""Which characters of a rendered conversation a student learns: the assistant's words, calls and end markers.

The whole conversation is rendered once, with notes of where each message's words and turn went (provenance.py). Of a
turn's text, the header is left out: the generation prompt where the turn begins with all of it, else what plain answers
have in front of their words, and never a character of the message's own words. The end marker behind the last word is
taken along: the last special token of the turn. Where a template says itself what the assistant generates
(`{% generation %}`), that is taken, from the first word to the end marker.

A wrong mask is worse than none, so the result is checked: every turn's words and calls are learnt, and no character
of another message. What fails a check raises Dropped with its reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pipeline.corpus.dropped import Dropped
from pipeline.corpus.provenance import (
    CONTENT,
    HEADER,
    NAME,
    THOUGHT,
    Enter,
    Generation,
    Leave,
    Owned,
    Words,
    plain,
)

Message = dict[str, Any]
Span = tuple[int, int]
FLAGS = ("weight", "train", "loss_mask", "loss")  # keys of a turn that say whether it is learnt
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of a turn that hold its thoughts
_UNIT = re.compile(r"<[^<>]*>|\[[^\[\]\s]*\]|\w+|\s|.", re.DOTALL)  # what two texts agree on as a whole or not at all


@dataclass(frozen=True)
class Habits:
    """What a template puts around plain answers.

    prompt: the generation prompt. header: the text between a turn's beginning and its words; None: not known.
    end: what follows the last answer. openers: the text between the header and a call, or a thought. needs_parts,
    takes_parts: whether content must, or may, be a list of parts; takes_several: of more than one.
    """

    prompt: str = ""
    header: str | None = None
    end: str = ""
    openers: tuple[str, ...] = ()
    needs_parts: bool = False
    takes_parts: bool = False
    takes_several: bool = False

    @cached_property
    def headers(self) -> tuple[str, ...]:
        """What the assistant's turn may begin with: the generation prompt, or as much of it as plain answers have."""
        return tuple(h for h in (self.prompt, common(self.prompt, self.header or "")) if h.strip())


class Run(NamedTuple):
    """Text that was written for one message, in one stretch. `inside` another's: something looked up, not a turn."""

    start: int
    stop: int
    owner: int | None
    inside: bool = False


class Word(NamedTuple):
    """Text that a message brought."""

    start: int
    stop: int
    owner: int
    kind: int
    part: int = 0


class Layout:
    """A noted rendering, taken apart: runs in their order, words by their place, spans of generation blocks."""

    def __init__(self, noted: str) -> None:
        self.text = plain(noted)
        self.runs: list[Run] = []
        self.words: list[Word] = []
        self.generated: list[Span] = []
        stack: list[tuple[int, int | None]] = []
        owner: tuple[int | None, bool] = (None, False)
        since, begun = 0, 0
        for start, stop, what in noted.notes if type(noted) is Owned else ():
            if type(what) is Words:
                self.words.append(Word(start, stop, *what))
                continue
            if type(what) is Generation:
                if what.begins:
                    begun = start
                elif start > begun:
                    self.generated.append((begun, start))
                continue
            assert isinstance(what, (Enter, Leave))
            depth = next((d for d, (place, _) in enumerate(stack) if place == what.place), None)
            if depth is not None:
                del stack[depth:]
            if isinstance(what, Enter):
                stack.append((what.place, what.owner))
            owners = [o for _, o in stack if o is not None]
            new = (owners[-1], owners[0] != owners[-1]) if owners else (None, False)
            if new != owner or depth is None:
                self._close(since, start, owner)
                owner, since = new, start
        self._close(since, len(self.text), owner)
        self.words.sort()

    def _close(self, start: int, stop: int, owner: tuple[int | None, bool]) -> None:
        if stop > start:
            if self.runs and self.runs[-1][2:] == owner and self.runs[-1].stop == start:
                start = self.runs.pop().start
            self.runs.append(Run(start, stop, *owner))


def common(a: str, b: str) -> str:
    """Return what two texts begin with in common, in whole words and marks: `<think>` and `<tool>` share nothing."""
    length = 0
    for left, right in zip(_UNIT.finditer(a), _UNIT.finditer(b), strict=False):
        if left[0] != right[0]:
            break
        length = left.end()
    return a[:length]


def behind_header(before: str, habits: Habits) -> int | None:
    """Return where a header ends in the text before a turn's words; None where there is none that is known."""
    plain_header = habits.header or ""
    for header in (*habits.headers, plain_header):
        if header.strip() and (place := before.find(header)) >= 0:
            return place + len(header)
    if habits.header is not None and not plain_header.strip():
        return 0
    shared = common(before, plain_header)
    return len(shared) if shared.strip() else None


def is_learnt(message: Message) -> bool:
    """Return whether a turn is the assistant's and no flag takes it out."""
    return message["role"] == "assistant" and not any(
        message.get(flag) in (0, False) for flag in FLAGS if flag in message
    )


def content_parts(message: Message) -> dict[int, str]:
    """Return the texts of a message's content, which is a string, a list of parts, or nothing, by their places."""
    content = message.get("content")
    if isinstance(content, list):
        return {
            place: part["text"]
            for place, part in enumerate(content)
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        }
    return {0: content} if isinstance(content, str) else {}


def content_texts(message: Message) -> list[str]:
    """Return the texts of a message's content."""
    return list(content_parts(message).values())


def spelt(text: str) -> set[str]:
    """Return how a text may be printed: as it is, or inside a JSON string."""
    return {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}


def call_names(message: Message) -> list[str]:
    """Return the names of a turn's calls; a call without one counts as an empty name."""
    calls = message.get("tool_calls")
    functions = (
        c.get("function", c) if isinstance(c, dict) else {} for c in (calls if isinstance(calls, list) else ())
    )
    return [str(f.get("name", "")) if isinstance(f, dict) else "" for f in functions]


def thoughts_of(message: Message) -> list[str]:
    """Return the keys of a turn, and of the parts of its content, that hold thoughts."""
    content = message.get("content")
    holders = (
        [message, *(part for part in content if isinstance(part, dict))] if isinstance(content, list) else [message]
    )
    return [key for key in THOUGHTS if any(isinstance(h.get(key), str) and h[key].strip() for h in holders)]


class Spans:
    """Finds the learnt spans of one rendered conversation.

    alone(i): the same conversation up to message i, rendered; asked only where another message's words are inside a turn.
    """

    def __init__(
        self,
        layout: Layout,
        messages: Sequence[Message],
        habits: Habits,
        special: re.Pattern[str],
        alone: Callable[[int], Layout],
    ) -> None:
        self.layout, self.text, self.messages = layout, layout.text, messages
        self.habits, self.special, self.alone = habits, special, alone
        self.learnt = {i for i, message in enumerate(messages) if is_learnt(message)}
        self.unprinted: set[str] = set()  # what the template does not print of these messages

    def find(self) -> list[Span]:
        """Return the spans, in their order. Raises Dropped where one is not certain, or where a check fails."""
        spans: list[Span] = []
        for index in sorted(self.learnt):
            found = [part for span in self._of_turn(index) for part in self._without_headers(span)]
            self._check_turn(index, found)
            spans += found
        spans = _merged(spans)
        self._check_others(spans)
        return spans

    # -- one turn ------------------------------------------------------------------------------------------------

    def _of_turn(self, index: int) -> Iterator[Span]:
        runs = [run for run in self.layout.runs if run.owner == index and not run.inside]
        if self.layout.generated:
            yield from self._generated(index, runs)
            return
        own = [w for w in self.layout.words if w.owner == index and w.kind != HEADER]
        with_words = [r for r in runs if any(r.start <= w.start and w.stop <= r.stop for w in own)]
        if with_words:
            last = runs[-1]
            for run in with_words:
                yield from self._of_run(run, ends=run is last)
        elif any(w.kind == CONTENT for w in own):
            yield from self._without_run(own)
        elif runs and not self._has_something(index):
            yield from self._empty_answer(max(runs, key=lambda r: r.stop - r.start))

    def _without_headers(self, span: Span) -> Iterator[Span]:
        """Yield a span without headers in it: what follows the end marker of an answer is another turn's beginning."""
        start, stop = span
        for header in self.habits.headers[-1:]:
            for end in self.special.finditer(self.habits.end.strip()):
                again = re.compile(re.escape(end[0]) + r"(\s*" + re.escape(header) + ")")
                while (found := again.search(self.text, start, stop)) and not self._is_word(found.start(1)):
                    yield start, found.start(1)
                    start = found.end(1)
        yield start, stop

    def _is_word(self, place: int) -> bool:
        return any(w.start <= place < w.stop for w in self.layout.words)

    def _has_something(self, index: int) -> bool:
        message = self.messages[index]
        return not isinstance(message.get("content"), str) or bool(
            call_names(message) or thoughts_of(message) or any(t.strip() for t in content_texts(message))
        )

    def _generated(self, index: int, runs: list[Run]) -> Iterator[Span]:
        """Yield what the template marks in a turn, less a header in front and the white space behind its end marker."""
        for begin, end in self.layout.generated:
            run = next((r for r in runs if r.start <= begin < r.stop), None)
            if run is None:
                continue
            own = [w for w in self.layout.words if w.owner == index and w.kind != HEADER and begin <= w.start < end]
            first, last = (own[0].start, max(w.stop for w in own)) if own else (end, begin)
            header = behind_header(self.text[run.start : first], self.habits)
            start = max(begin, run.start + header) if header is not None else (begin if begin > run.start else first)
            yield start, self._end_of_turn(max(last, start), end)

    def _of_run(self, run: Run, *, ends: bool) -> Iterator[Span]:
        """Yield the spans of one run: its stretches of learnt words, between words of other messages.

        ends: whether the turn is over behind this run.
        """
        words = [w for w in self.layout.words if run.start <= w.start and w.stop <= run.stop and not self._is_header(w)]
        stretches: list[list[Word]] = []
        previous: Word | None = None
        for word in words:
            if self._is_ours(word, run.owner):
                if previous is None or not self._is_ours(previous, run.owner):
                    stretches.append([])
                stretches[-1].append(word)
            previous = word
        if not stretches:
            return
        mixed = len(stretches) > 1 or not ends or not self._is_ours(words[-1], run.owner)
        expected = self._alone_words(run.owner) if mixed else []
        for place, stretch in enumerate(stretches):
            start, stop = stretch[0].start, max(w.stop for w in stretch)
            if words[0] is stretch[0]:
                start = self._start_of_turn(run.start, start)
            elif not expected or expected[0].kind != stretch[0].kind:
                continue  # said once more, by what another message's text needs: a tool's header with the call's name
            follows = next((w.start for w in words if w.start >= stop and not self._is_ours(w, run.owner)), None)
            if follows is None and ends and place + 1 == len(stretches):
                yield start, self._end_of_turn(stop, run.stop)
                continue
            stop = self._end_before_others(run, stretch, run.stop if follows is None else follows, expected)
            yield start, stop
            del expected[: len(stretch)]

    def _is_header(self, word: Word) -> bool:
        return word.kind == HEADER and word.owner in self.learnt

    def _is_ours(self, word: Word, owner: int | None) -> bool:
        return word.owner == owner or (word.owner in self.learnt and word.kind == CONTENT)

    def _start_of_turn(self, border: int, word: int) -> int:
        """Return where a turn begins to be the assistant's, in text[border:word]."""
        before = self.text[border:word]
        found = behind_header(before, self.habits)
        if found is None:  # the turn goes on behind a tool's result, or has a header that plain answers do not have
            return word - max((len(o) for o in self.habits.openers if before.endswith(o)), default=0)
        return border + found

    def _end_of_turn(self, word: int, stop: int) -> int:
        """Return the end of a turn whose last word ends at `word`: the end marker is the last special token up to `stop`."""
        tail = self.text[word:stop]
        for header in self.habits.headers:
            if (again := tail.find(header)) >= 0:  # the header of an answer without words
                tail = tail[:again]
        marks = [m.end() for m in self.special.finditer(tail)]
        if marks:
            return word + marks[-1]
        end = self.habits.end.strip()
        if not tail.strip() and end:
            place = self.text.find(end, word)
            if place >= 0 and not self.text[word:place].strip():
                return place + len(end)
        return word + len(tail.rstrip())

    def _alone_words(self, owner: int | None) -> list[Word]:
        """Return the words of a turn where nothing follows it."""
        assert owner is not None
        return [w for w in self.alone(owner).words if w.owner == owner and w.kind != HEADER]

    def _end_before_others(self, run: Run, stretch: list[Word], stop: int, expected: list[Word]) -> int:
        """Return the end of a stretch that another message's text follows: as far as it is written without that.

        expected: the words of the turn from this stretch on, where nothing follows the turn.
        """
        assert run.owner is not None
        if [w.kind for w in expected[: len(stretch)]] != [w.kind for w in stretch]:
            raise Dropped("template_mixes_turns", f"the end of turn {run.owner} is not certain")
        shorter = self.alone(run.owner)
        last = max(w.stop for w in expected[: len(stretch)])
        rest = [w.start for w in shorter.words if w.start >= last] + [r.stop for r in shorter.runs if r.stop >= last]
        word = max(w.stop for w in stretch)
        shared = common(self.text[word:stop], shorter.text[last : min(rest, default=last)])
        marks = [m.end() for m in self.special.finditer(shared)]
        return word + (marks[-1] if marks else len(shared.rstrip()))

    def _without_run(self, own: list[Word]) -> Iterator[Span]:
        """Yield the span of an answer whose turn left no note (a template that counts in steps of two)."""
        start, stop = min(w.start for w in own), max(w.stop for w in own)
        others = [w for w in self.layout.words if w.owner != own[0].owner]
        if any(start <= w.start < stop for w in others):
            raise Dropped("template_mixes_turns", f"turn {own[0].owner} cannot be kept apart from others")
        border = max((w.stop for w in others if w.stop <= start), default=0)
        before = self.text[border:start]
        for header in self.habits.headers:
            if (place := before.rfind(header)) >= 0:
                start = border + place + len(header)
                break
        end = self.habits.end.strip()
        place = self.text.find(end, stop) if end else -1
        if place >= 0 and not self.text[stop:place].strip():
            stop = place + len(end)
        yield start, stop

    def _empty_answer(self, run: Run) -> Iterator[Span]:
        """Yield the end marker of an answer of no words."""
        found = behind_header(self.text[run.start : run.stop], self.habits)
        if found is not None and (stop := self._end_of_turn(run.start + found, run.stop)) > run.start + found:
            yield run.start + found, stop

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_turn(self, index: int, spans: list[Span]) -> None:
        """Raise Dropped where words or calls of a turn are not in its spans."""
        message = self.messages[index]
        learnt = "".join(self.text[a:b] for a, b in spans)
        words = [w for w in self.layout.words if w.owner == index and any(a < w.stop and w.start < b for a, b in spans)]
        kinds = {w.kind for w in words}
        for number, name in enumerate(call_names(message)):
            if NAME + number not in kinds and not (name and name in learnt):
                raise Dropped("template_drops_call", f"the template does not print tool_calls of turn {index}")
        noted = 0
        for place, text in content_parts(message).items():
            found = [self.text[w.start : w.stop] for w in words if w.kind == CONTENT and w.part == place]
            if text.strip() and not found:
                # printed through %, format, or character by character
                if any(t in self.text for t in spelt(text.strip())):
                    raise Dropped("template_unclear", f"which text is the content of turn {index} is not certain")
                raise Dropped("template_drops_turn", f"the template does not print the content of turn {index}")
            noted += sum(map(len, found))
        texts = "".join(content_texts(message))
        if noted < len(texts.strip()) and _letters(self.special.sub("", learnt)) < _letters(texts):
            self.unprinted.add("a part of the content")
        unprinted = [key for key in thoughts_of(message) if THOUGHT not in kinds]
        self.unprinted.update(unprinted)
        if unprinted and not (call_names(message) or CONTENT in kinds):
            raise Dropped("template_drops_thought", f"the template does not print {unprinted[0]} of turn {index}")

    def _check_others(self, spans: list[Span]) -> None:
        """Raise Dropped where a span holds anything of a message that is not learnt."""
        seen = set()
        for word in self.layout.words:
            if word.owner in self.learnt:
                continue
            if word.kind != HEADER:
                seen.add(word.owner)
            if any(a < word.stop and word.start < b for a, b in spans):
                raise Dropped("template_mixes_turns", f"words of message {word.owner} are inside an assistant's turn")
        for index, message in enumerate(self.messages):
            if index in seen or index in self.learnt:
                continue
            # its words lost their notes, or were not printed: then they must not be in what is learnt
            for text in filter(None, (t.strip() for t in content_texts(message))):
                if any(t in self.text[a:b] for a, b in spans for t in spelt(text)):
                    raise Dropped("template_mixes_turns", f"words of message {index} may be inside an assistant's turn")
                if not any(t in self.text for t in spelt(text)):
                    self.unprinted.add(f"the content of {message['role']} turns")


def _letters(text: str) -> int:
    """Return the number of characters without white space."""
    return sum(map(len, text.split()))


def _merged(spans: list[Span]) -> list[Span]:
    """Return spans in their order, without overlaps."""
    result: list[Span] = []
    for start, stop in sorted(spans):
        if stop <= start:
            continue
        if result and start < result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result
