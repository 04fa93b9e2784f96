"""Jinja templates that say of every character which message it came from, without a change of the text.

A string of a message becomes an `Owned` string: a str with notes (start, end, what) that survive slicing, trimming,
splitting and joining. A dict becomes an `OwnedDict`. The template's syntax tree is changed before compilation: loops,
macros and variables that hold a message leave notes of no width, and so do `{% generation %}` blocks. Notes are no
characters, so a template cannot see them: what it renders is what it renders without them, to the letter.

Where an operation loses the notes (`%`, `format`, a reversed string), characters have no owner; callers treat those
with suspicion. Rendering costs about twice the plain one.
"""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, SupportsIndex, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup

# kinds of words; NAME + n is the name of a message's call n
HEADER, CONTENT, THOUGHT, CALL, NAME = 0, 1, 2, 3, 16


class Words(NamedTuple):
    """What a message brought: `owner` is its index, `part` the place in a content of several parts."""

    owner: int
    kind: int
    part: int = 0


class Enter(NamedTuple):
    """From here on a loop (or macro) writes the message `owner`; None: whatever is written around the loop."""

    place: int
    owner: int | None


class Leave(NamedTuple):
    """The end of a loop or macro."""

    place: int


class Generation(NamedTuple):
    """The beginning (True) or end of a `{% generation %}` block."""

    begins: bool


What = Words | Enter | Leave | Generation
Note = tuple[int, int, What]


class Owned(str):
    """A string with notes about its parts, in the order in which they were written."""

    __slots__ = ("notes",)
    notes: tuple[Note, ...]

    def __str__(self) -> str:
        return self

    def _part(self, start: int, stop: int, *, clamp: bool = False) -> str:
        """Return self[start:stop]. clamp: keep also the notes of no width that lie outside (for trimming)."""
        found: list[Note] = []
        for begin, end, what in self.notes:
            if begin == end:
                if start <= begin <= stop:
                    found.append((begin - start, end - start, what))
                elif clamp:
                    place = 0 if begin < start else stop - start
                    found.append((place, place, what))
            elif begin < stop and end > start:
                found.append((max(begin, start) - start, min(end, stop) - start, what))
        return owned(str.__getitem__(self, slice(start, stop)), found)

    def _parts(self, pieces: list[str], separator: int | None) -> list[str]:
        """Return pieces of self, in their order, with notes; `separator` characters apart, or by search."""
        result, place = [], 0
        for piece in pieces:
            if separator is None:
                place = str.find(self, piece, place)
            result.append(self._part(place, place + len(piece)))
            place += len(piece) + (separator or 0)
        return result

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step == 1:
                return self._part(start, max(start, stop))
        return str.__getitem__(self, key)

    def __add__(self, other: str) -> str:
        return join((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return join((other, self)) if isinstance(other, str) else NotImplemented

    def strip(self, chars: str | None = None, /) -> str:
        """As str.strip."""
        start = len(self) - len(str.lstrip(self, chars))
        return self._part(start, max(start, len(str.rstrip(self, chars))), clamp=True)

    def lstrip(self, chars: str | None = None, /) -> str:
        """As str.lstrip."""
        return self._part(len(self) - len(str.lstrip(self, chars)), len(self), clamp=True)

    def rstrip(self, chars: str | None = None, /) -> str:
        """As str.rstrip."""
        return self._part(0, len(str.rstrip(self, chars)), clamp=True)

    def removeprefix(self, prefix: str, /) -> str:
        """As str.removeprefix."""
        return self._part(len(prefix), len(self), clamp=True) if prefix and self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> str:
        """As str.removesuffix."""
        return self._part(0, len(self) - len(suffix), clamp=True) if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """As str.split."""
        return self._parts(str.split(self, sep, maxsplit), None if sep is None else len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """As str.rsplit."""
        return self._parts(str.rsplit(self, sep, maxsplit), None if sep is None else len(sep))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        """As str.partition."""
        return cast("tuple[str, str, str]", tuple(self._parts(list(str.partition(self, sep)), 0)))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        """As str.rpartition."""
        return cast("tuple[str, str, str]", tuple(self._parts(list(str.rpartition(self, sep)), 0)))

    def splitlines(self, keepends: bool = False) -> list[str]:
        """As str.splitlines."""
        lines = self._parts(str.splitlines(self, True), 0)
        bare = str.splitlines(self)
        return lines if keepends else [line[: len(plain)] for line, plain in zip(lines, bare, strict=True)]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        """As str.replace."""
        if not old:
            return str.replace(self, old, new, count)
        return join(self.split(old, count), new) if old in self else self

    def _mapped(self, text: str) -> str:
        return owned(text, self.notes) if len(text) == len(self) else text

    def upper(self) -> str:
        """As str.upper."""
        return self._mapped(str.upper(self))

    def lower(self) -> str:
        """As str.lower."""
        return self._mapped(str.lower(self))

    def title(self) -> str:
        """As str.title."""
        return self._mapped(str.title(self))

    def capitalize(self) -> str:
        """As str.capitalize."""
        return self._mapped(str.capitalize(self))

    def join(self, iterable: Iterable[str], /) -> str:
        """As str.join."""
        return join(iterable, self)


class OwnedDict(dict[str, Any]):
    """A dict of a message, or the message itself."""

    what: Words
    message: int | None = None


def owned(text: str, notes: Iterable[Note]) -> str:
    """Return text with notes; plain text where there are none."""
    kept = tuple(notes)
    if not kept:
        return text
    made = Owned(text)
    made.notes = kept
    return made


def plain(text: str) -> str:
    """Return a str without notes."""
    return str.__getitem__(text, slice(None)) if type(text) is not str else text


def join(pieces: Iterable[str], separator: str = "") -> str:
    """Return separator.join(pieces) with the notes of all."""
    pieces = list(pieces)
    if separator:
        pieces = [p for piece in pieces for p in (separator, piece)][1:]
    notes: list[Note] = []
    place = 0
    for piece in pieces:
        if type(piece) is Owned:
            notes += [(begin + place, end + place, what) for begin, end, what in piece.notes]
        place += len(piece)
    return owned("".join(pieces), notes)


# -- what a message becomes ------------------------------------------------------------------------------------------

_HEADERS = frozenset({"role", "name", "id", "type", "tool_call_id"})


def owned_messages(messages: Iterable[dict[str, Any]]) -> list[OwnedDict]:
    """Return messages whose strings know their message and their kind."""
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: dict[str, Any]) -> OwnedDict:
    made = OwnedDict()
    made.what, made.message = Words(index, HEADER), index
    for key, value in message.items():
        if key in _HEADERS:
            made[key] = _own(value, Words(index, HEADER))
        elif key == "content" and isinstance(value, list):
            made[key] = [_own(part, Words(index, CONTENT, place)) for place, part in enumerate(value)]
        elif key == "content":
            made[key] = _own(value, Words(index, CONTENT))
        elif key == "tool_calls" and isinstance(value, list):
            made[key] = [_call(index, n, call) for n, call in enumerate(value)]
        else:
            made[key] = _own(value, Words(index, THOUGHT))
    return made


def _call(index: int, number: int, call: Any) -> Any:
    made = _own(call, Words(index, CALL))
    for holder in (made, made.get("function")) if isinstance(made, dict) else ():
        if isinstance(holder, dict) and isinstance(holder.get("name"), str):
            holder["name"] = _own(plain(holder["name"]), Words(index, NAME + number))
    return made


def _own(value: Any, what: Words) -> Any:
    if isinstance(value, str):
        return owned(value, ((0, len(value), what),)) if value else value
    if isinstance(value, dict):
        made = OwnedDict()
        made.what = what
        for key, item in value.items():
            if what.kind == CONTENT and key == "type":
                made[key] = item
            elif what.kind == CONTENT and key in ("thinking", "reasoning"):
                made[key] = _own(item, Words(what.owner, THOUGHT))
            else:
                made[key] = _own(item, what)
        return made
    if isinstance(value, (list, tuple)):
        return [_own(item, what) for item in value]
    return value


def message_of(value: Any) -> int | None:
    """Return the index of the message that a value is: itself, or a copy that kept its role."""
    if isinstance(value, OwnedDict) and value.message is not None:
        return value.message
    role = value.get("role") if isinstance(value, dict) else None
    if type(role) is Owned:
        return next((what.owner for _, _, what in role.notes if isinstance(what, Words)), None)
    return None


def _all_words(value: Any) -> Iterator[Words]:
    if type(value) is Owned:
        yield from (what for _, _, what in value.notes if isinstance(what, Words))
    elif isinstance(value, dict):
        if isinstance(value, OwnedDict):
            yield value.what
        for item in value.values():
            yield from _all_words(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _all_words(item)


# -- the environment -------------------------------------------------------------------------------------------------


class _GenerationBlocks(Extension):
    """`{% generation %}` as transformers has it, with notes at its beginning and end."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's declaration

    def parse(self, parser: Any) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        edges = [
            nodes.Output([nodes.Filter(nodes.Const(begins), "_tc_generation", [], [], None, None)]).set_lineno(line)
            for begins in (True, False)
        ]
        return [edges[0], nodes.Scope(body).set_lineno(line), edges[1]]


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers' filter; the whole text belongs to whoever owns anything in the value."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return owned(text, [(0, len(text), what) for what in dict.fromkeys(_all_words(value))])


def _loop_note(place: int, *values: Any) -> str:
    """Return the note that a loop's body begins with: its variables are `values`."""
    owner = next((m for m in map(message_of, values) if m is not None), None)
    return owned("", ((0, 0, Enter(place, owner)),)) if owner is not None or isinstance(values[0], dict) else ""


def _set_note(value: Any, place: int, *loop: Any) -> str:
    """Return the note behind `{% set x = value %}`: in a loop that is not over messages it names what is written."""
    owner = message_of(value)
    if owner is None or any(message_of(v) is not None for v in loop):
        return ""
    return owned("", ((0, 0, Enter(place, owner)),))


def _argument_note(place: int, *values: Any) -> str:
    owner = next((m for m in map(message_of, values) if m is not None), None)
    return "" if owner is None else owned("", ((0, 0, Enter(place, owner)),))


@jinja2.pass_context  # otherwise a call with a constant would be replaced by its text while compiling
def _leave_note(_: Any, place: int) -> str:
    return owned("", ((0, 0, Leave(place)),))


@jinja2.pass_context
def _generation_note(_: Any, begins: bool) -> str:
    return owned("", ((0, 0, Generation(begins)),))


def _join_filter(value: Iterable[Any], separator: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = [item[attribute] if isinstance(item, dict) else getattr(item, attribute) for item in value]
    return join(map(str, value), str(separator))


def _safe(value: Any) -> Any:
    """As jinja2's, which would lose the notes; what a message brought stays as it is."""
    return value if type(value) is Owned else Markup(value)  # nosec B704: a prompt of tokens, which no browser sees


def _join_method(separator: Any, *arguments: Any) -> Any:
    return join(arguments[0], separator) if isinstance(separator, str) else separator.join(*arguments)


class _Environment(ImmutableSandboxedEnvironment):
    concat = staticmethod(join)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols])
    env.filters |= {
        "tojson": _tojson, "join": _join_filter, "safe": _safe,
        "_tc_loop": _loop_note, "_tc_set": _set_note, "_tc_argument": _argument_note, "_tc_join": _join_method,
        "_tc_leave": _leave_note, "_tc_generation": _generation_note,
        "_tc_concat": lambda *values: join(map(str, values)),
    }  # fmt: skip
    env.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    }
    return env


def _filter(name: str, first: nodes.Expr, *others: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(first, name, list(others), [], None, None)


def _load(names: Iterable[str]) -> list[nodes.Expr]:
    return [nodes.Name(name, "load") for name in names]


class _Noting:
    """Changes a syntax tree so that rendering leaves notes."""

    def __init__(self) -> None:
        self._places: Callable[[], int] = itertools.count().__next__

    def visit(self, node: nodes.Node, loop: tuple[int, list[str]] | None = None) -> None:
        for name, value in list(node.iter_fields()):
            if isinstance(value, list):
                setattr(node, name, [new for old in value for new in self._changed(old, loop)])
            elif isinstance(value, nodes.Node):
                (changed,) = self._changed(value, loop)
                setattr(node, name, changed)

    def _changed(self, node: Any, loop: tuple[int, list[str]] | None) -> list[Any]:
        if not isinstance(node, nodes.Node):
            return [node]
        line = node.lineno
        if isinstance(node, nodes.For):
            targets = [n.name for n in ([node.target] if isinstance(node.target, nodes.Name) else
                                        node.target.find_all(nodes.Name))]  # fmt: skip
            place = self._places()
            self.visit(node, (place, targets))
            node.body.insert(0, _output(_filter("_tc_loop", nodes.Const(place), *_load(targets)), line))
            return [node, _output(_filter("_tc_leave", nodes.Const(place)), line)]
        if isinstance(node, nodes.Macro):
            place = self._places()
            self.visit(node, None)
            if node.args:
                names = [argument.name for argument in node.args]
                node.body.insert(0, _output(_filter("_tc_argument", nodes.Const(place), *_load(names)), line))
                node.body.append(_output(_filter("_tc_leave", nodes.Const(place)), line))
            return [node]
        self.visit(node, loop)
        if isinstance(node, nodes.Concat):
            return [_filter("_tc_concat", *node.nodes).set_lineno(line)]
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "join":
            return [_filter("_tc_join", node.node.node, *node.args).set_lineno(line)]
        if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name) and loop is not None:
            value = [nodes.Name(node.target.name, "load"), nodes.Const(loop[0]), *_load(loop[1])]
            return [node, _output(_filter("_tc_set", *value), line)]
        return [node]


def _output(expression: nodes.Expr, line: int) -> nodes.Node:
    made = nodes.Output([expression])
    for node in (made, *made.find_all(nodes.Node)):
        node.set_lineno(line)
    return made


@lru_cache(maxsize=64)
def compile_noting(template: str) -> jinja2.Template:
    """Return a template whose render() gives an Owned string. Raises jinja2.TemplateSyntaxError."""
    env = _environment()
    tree = env.parse(template)
    _Noting().visit(tree)
    tree.set_environment(env)
    return env.from_string(tree)
