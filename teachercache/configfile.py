"""Typed configuration: one YAML file, `key=value` overrides, and an unknown key that names its nearest neighbour.

The pipeline's job file and the trainer's configuration are read by this. Everything wrong in them is a UsageError (exit
status 2) of one sentence, because a misspelt option that is silently ignored costs a run.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import re
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator

from teachercache.errors import UsageError
from teachercache.urls import refuse_credentials

M = TypeVar("M", bound=BaseModel)
ANY_ENTRY = "*"  # in place of an index of a list in a dotted key
MAX_NODES = 100_000  # of a YAML file, aliases expanded
MAX_DEPTH = 50
_NUMBER = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(e[-+]?[0-9]+)?", re.IGNORECASE)
_OCTAL = re.compile(r"[-+]?0[0-9_]+")


class Section(BaseModel):
    """A part of a configuration: frozen, strict about unknown keys; numbers are plain, and no URL holds credentials."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_credentials(cls, tree: Any) -> Any:
        for key, text in _leaves(tree):
            refuse_credentials(key)
            if isinstance(text, str):
                refuse_credentials(text, key)
        return tree

    @field_validator("*", mode="before")
    @classmethod
    def _plain_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what Python would take for a number where one is meant: a boolean, `010`, `5:00`, `.inf`."""
        kinds = _value_types(cls.model_fields[str(info.field_name)].annotation)
        if kinds & {int, float} and not kinds & {bool, Any}:
            for _, found in _leaves(value):
                text = isinstance(found, str) and str not in kinds
                if isinstance(found, bool) or (text and (not _NUMBER.fullmatch(found) or _OCTAL.fullmatch(found))):
                    raise ValueError("expected a number in plain decimals")
        return value


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every value below a tree, each part of it once however often it is named."""
    seen: set[int] = set()
    left = [("", tree)]
    while left:
        key, node = left.pop()
        if not isinstance(node, (dict, list, tuple)):
            yield key, node
        elif id(node) not in seen:
            seen.add(id(node))
            inside = node.items() if isinstance(node, dict) else enumerate(node)
            left += [(f"{key}.{part}".lstrip("."), value) for part, value in inside]


def _value_types(annotation: Any) -> set[Any]:
    """Return the types that a field's value may have at its leaves; keys of mappings do not count."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return {type(part) for part in parts}
    if origin is None or not parts:
        return {annotation}
    if origin is dict:
        parts = parts[1:]
    elif getattr(origin, "__name__", "") == "Annotated":
        parts = parts[:1]
    return set().union(*map(_value_types, parts))


class _Loader(yaml.SafeLoader):
    """YAML with the scalars of version 1.2: `yes`, `on` and dates are text, `010` and `5:00` are no numbers.

    Refuses a key that a mapping has twice, with both lines; deep nesting; and aliases that multiply.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def get_single_data(self) -> Any:
        node = self.get_single_node()
        if node is None:
            return None
        self._count(node, {})
        return self.construct_document(node)

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested more than {MAX_DEPTH} deep", problem_mark=self.get_mark())
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):  # JSON's way to 4-byte characters
            value = value.encode("utf-16", "surrogatepass").decode("utf-16")
        return value

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            name, line = key.value if isinstance(key, yaml.ScalarNode) else id(key), key.start_mark.line + 1
            if name in lines:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {name} is set twice, in line {lines[name]} and line {line}"
                )
            lines[name] = line
        return node

    def _count(self, node: Any, known: dict[int, float]) -> float:
        """Return the number of nodes below one; inside of itself it is infinite."""
        if id(node) not in known:
            known[id(node)] = math.inf
            inside = node.value if isinstance(node, yaml.CollectionNode) else []
            parts = [part for entry in inside for part in (entry if isinstance(entry, tuple) else (entry,))]
            known[id(node)] = 1 + sum(self._count(part, known) for part in parts)
        if known[id(node)] > MAX_NODES:
            raise yaml.MarkedYAMLError(problem="aliases make it too large", problem_mark=node.start_mark)
        return known[id(node)]


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), ["" if c == "\0" else c for c in _first]
    )


def read_yaml(text: str, what: str) -> Any:
    """Return what a YAML (or JSON) text holds. Raises UsageError of one sentence, which quotes keys but no values."""
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise UsageError(f"{what} is not valid YAML: {error.problem or error.context}{where}") from error
    except (yaml.YAMLError, ValueError) as error:
        said = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
        raise UsageError(f"{what} is not valid YAML: {said}") from error


def load(
    model: type[M],
    path: str | Path | None,
    overrides: Iterable[str] = (),
    *,
    where: str | None = None,
    other_names: Mapping[str, str] | None = None,
) -> M:
    """Read a YAML file (None: overrides alone), apply `a.b=value` overrides, and validate.

    `where` is what messages call the whole; the path by default. `other_names` are common names of keys that no
    distance of spelling finds. Raises UsageError.
    """
    tree: Any = {}
    if path is not None:
        refuse_credentials(str(path))
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is not valid YAML: {error}") from error
        if text.lstrip().startswith("{"):  # JSON, which may be indented with tabs
            text = text.replace("\t", " ")
        tree = read_yaml(text, str(path)) or {}
        if not isinstance(tree, dict):
            expected = ", ".join(list(model.model_fields)[:3])
            raise UsageError(f"{path} holds a {type(tree).__name__}; expected keys such as {expected}")
    set_before: dict[str, str] = {}
    for override in overrides:
        apply_override(tree, override)
        key = override.partition("=")[0]
        if set_before.setdefault(key, override) != override:
            raise UsageError(f"{key} is set twice on the command line, to different values; give it once")
    return validate(model, tree, where or str(path), other_names)


def validate(model: type[M], tree: dict[str, Any], where: str, other_names: Mapping[str, str] | None = None) -> M:
    """Check a tree of plain values. Raises UsageError that explains the first problem."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise UsageError(_explain(error, model, where, other_names or {})) from error


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set `a.b.0.c=value` in place, sections made where missing; the value is read as YAML, so `x=null` works."""
    key, equals, text = override.partition("=")
    refuse_credentials(key)
    refuse_credentials(text, key)
    if not equals or not key:
        raise UsageError(f"expected key=value, found {override!r}; for example seed=1")
    value = read_yaml(text, f"the value of {key}")
    *parents, leaf = key.split(".")
    node: Any = tree
    for depth, parent in enumerate(parents):
        index = _index(node, parent, override, parents[:depth])
        if isinstance(node, dict) and node.get(index) is None:
            node[index] = {}
        node = node[index]
    node[_index(node, leaf, override, parents)] = value


def _index(node: Any, part: str, override: str, above: list[str]) -> str | int:
    """`part` as a key of a section or as a position in a list."""
    if isinstance(node, dict):
        return part
    if not isinstance(node, list):
        raise UsageError(f"override {override!r}: {'.'.join(above)} is a single value, not a section")
    if not part.isdigit() or int(part) >= len(node):
        raise UsageError(f"override {override!r}: {'.'.join(above)} has {len(node)} entries, no {part!r}")
    return int(part)


def _explain(error: ValidationError, model: type[BaseModel], where: str, other_names: Mapping[str, str]) -> str:
    problem = min(error.errors(include_url=False), key=lambda found: found["type"] != "extra_forbidden")
    location = problem["loc"]
    dotted = ".".join(repr(str(part))[1:-1] for part in location)  # a key may hold a line feed
    if problem["type"] == "extra_forbidden":
        return f"unknown key {dotted} in {where}; did you mean {nearest_key(model, location, other_names)}?"
    if problem["type"] == "missing" or (problem["input"] is None and problem["type"].endswith("_type")):
        return f"{where} lacks {dotted}: set it in the YAML file or as {dotted}=VALUE"
    message = problem["msg"].removeprefix("Value error, ")
    found = problem["input"]
    found = json.dumps(found) if isinstance(found, bool) else repr(found)  # as YAML has it
    shown = "" if isinstance(problem["input"], (dict, list, BaseModel)) else f" (found {found})"
    return f"{where}: {dotted + ': ' if dotted else ''}{message}{shown}"


def nearest_key(
    model: type[BaseModel], location: tuple[int | str, ...], other_names: Mapping[str, str] | None = None
) -> str:
    """Return the known key most like `location`: first by its last part, wherever that is, then as a whole."""
    names = other_names or {}
    known = [key.key for key in describe(model)]
    asked = ".".join(ANY_ENTRY if isinstance(part, int) else names.get(part, part) for part in location)
    leaves = {key.rsplit(".", 1)[-1] for key in known}
    alike = difflib.get_close_matches(asked.rsplit(".", 1)[-1], leaves, n=1, cutoff=0.6)
    candidates = [key for key in known if alike and key.rsplit(".", 1)[-1] == alike[0]] or known
    nearest = difflib.get_close_matches(asked, candidates, n=1, cutoff=0.0)[0]
    for part in location:
        if isinstance(part, int):
            nearest = nearest.replace(ANY_ENTRY, str(part), 1)
    return nearest


def _sections(annotation: Any) -> Iterator[tuple[type[BaseModel], bool]]:
    """Yield the configuration sections that a field may hold: itself, one of a union, or the entries of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, False
    in_list = getattr(annotation, "__origin__", None) is list
    for part in getattr(annotation, "__args__", ()):
        for section, nested in _sections(part):
            yield section, in_list or nested


class Key(NamedTuple):
    """One documented key of a configuration."""

    key: str
    """Dotted; an entry of a list of sections is called `*`."""
    type: str
    """As YAML has it: `int`, `auto | cpu`, `section`, `list of sections`."""
    default: Any
    """REQUIRED where there is none."""
    description: str


REQUIRED = "required"


def describe(model: type[BaseModel], prefix: str = "") -> list[Key]:
    """Return every key of a configuration in its order, sections ahead of what is in them."""
    keys: list[Key] = []
    for name, field in model.model_fields.items():
        default = REQUIRED if field.is_required() else field.get_default(call_default_factory=True)
        sections = list(_sections(field.annotation))
        for section, in_list in sections:
            said = field.description or inspect.getdoc(section) or ""
            shown = default if in_list or default in (None, REQUIRED) else {}
            keys.append(Key(prefix + name, "list of sections" if in_list else "section", shown, said))
            keys += describe(section, f"{prefix}{name}.{ANY_ENTRY + '.' if in_list else ''}")
        if not sections:
            keys.append(Key(prefix + name, _type_name(field.annotation), default, field.description or ""))
    return keys


def _type_name(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join("null" if part is None else str(part) for part in parts)
    if origin in (Union, types.UnionType):
        return " | ".join(_type_name(part) for part in parts)
    if annotation is type(None):
        return "null"
    if origin is None:
        return str(getattr(annotation, "__name__", annotation))
    if parts and origin.__name__ == "Annotated":
        return _type_name(parts[0])
    inside = ", ".join(_type_name(part) for part in parts if part is not Ellipsis)
    return f"{origin.__name__}[{inside}]"


def changed(section: BaseModel, prefix: str = "") -> list[str]:
    """Return the dotted keys of a configuration whose values are not the defaults, in its order."""
    keys: list[str] = []
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{prefix}{name}"
        entries = value if isinstance(value, list) else []
        inside = {f"{key}.{n}.": entry for n, entry in enumerate(entries) if isinstance(entry, BaseModel)}
        inside |= {f"{key}.": value} if isinstance(value, BaseModel) else {}
        for start, part in inside.items():
            keys += changed(part, start)
        if not inside and (field.is_required() or value != field.get_default(call_default_factory=True)):
            keys.append(key)
    return keys


def without_effect(section: BaseModel, rules: Iterable[tuple[bool, Iterable[str], str]]) -> list[str]:
    """Return a line for each rule that holds and has keys which are set: they are named, and said to have no effect.

    rules  (whether it holds, keys or sections, why they then change nothing)
    """
    keys, lines = changed(section), []
    for holds, named, why in rules:
        found = [key for key in keys if holds and any(f"{key}.".startswith(f"{name}.") for name in named)]
        if found:
            lines.append(f"{', '.join(found)} {'have' if len(found) > 1 else 'has'} no effect: {why}")
    return lines


def sentence(text: str) -> str:
    """Return a description with a capital at its start and a full stop at its end."""
    said = " ".join(text.split()).rstrip(".")
    first, _, rest = said.partition(" ")
    plain = first.strip(",;").isalpha() and not rest.startswith("=")
    return f"{said[:1].upper() if plain else said[:1]}{said[1:]}." if said else ""


def commented_yaml(model: type[BaseModel], *, width: int = 100) -> str:
    """Return every key with its default as a YAML file, each under a comment that says what it does."""
    lines: list[str] = []
    begun: set[str] = set()
    absent: str | None = None  # a section that is not there by default: its keys are printed as a comment
    for key, kind, default, description in describe(model):
        absent = None if absent is None or not key.startswith(f"{absent}.") else absent
        parts = key.split(".")
        indent = "  " * (len(parts) - 1)
        section = kind in ("section", "list of sections")
        if section and default in (None, []):
            absent = key
        value = "" if section or default == REQUIRED else " " + json.dumps(_plain(default), ensure_ascii=False)
        off = "null by default" if default is None else "empty by default"
        notes = [kind] * (not section) + [REQUIRED] * (default == REQUIRED) + [off] * (absent == key)
        said = sentence(description) + (f" ({', '.join(notes)})" if notes else "")
        mark = "# " if absent else ""
        lines += [""] * (len(parts) == 1)
        lines += [f"{mark}{indent}# {line}" for line in textwrap.wrap(said, width - len(indent))]
        if parts[-2:-1] == [ANY_ENTRY] and (entry := ".".join(parts[:-1])) not in begun:
            begun.add(entry)  # the first key of a list's entry carries the dash
            indent = indent[:-2] + "- "
        lines.append(f"{mark}{indent}{parts[-1]}:{value}")
    return "\n".join(lines).strip() + "\n"


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value
