"""Typed configuration: one YAML file, `key=value` overrides, and an unknown key that names its nearest neighbour.

The pipeline's job file and the trainer's configuration are read by this. Everything wrong in them is a UsageError (exit
status 2) of one sentence, because a misspelt option that is silently ignored costs a run.
"""

from __future__ import annotations

import difflib
import inspect
import json
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from teachercache.errors import UsageError

M = TypeVar("M", bound=BaseModel)
ANY_ENTRY = "*"  # in place of an index of a list in a dotted key


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
        try:
            tree = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            said = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
            raise UsageError(f"{path} is not valid YAML: {said}") from error
        if not isinstance(tree, dict):
            expected = ", ".join(list(model.model_fields)[:3])
            raise UsageError(f"{path} holds a {type(tree).__name__}; expected keys such as {expected}")
    for override in overrides:
        apply_override(tree, override)
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
    if not equals or not key:
        raise UsageError(f"expected key=value, found {override!r}; for example seed=1")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"the value of {key} is not valid YAML: {text!r}") from error
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
    problem = error.errors(include_url=False)[0]
    location = problem["loc"]
    dotted = ".".join(repr(str(part))[1:-1] for part in location)  # a key may hold a line feed
    if problem["type"] == "extra_forbidden":
        return f"unknown key {dotted} in {where}; did you mean {nearest_key(model, location, other_names)}?"
    if problem["type"] == "missing" or (problem["input"] is None and problem["type"].endswith("_type")):
        return f"{where} lacks {dotted}: set it in the YAML file or as {dotted}=VALUE"
    message = problem["msg"].removeprefix("Value error, ")
    found = problem["input"]
    shown = "" if isinstance(found, (dict, list, BaseModel)) else f" (found {found!r})"
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
    absent: str | None = None  # a section that is null by default: its keys are printed as a comment
    for key, kind, default, description in describe(model):
        absent = None if absent is None or not key.startswith(f"{absent}.") else absent
        parts = key.split(".")
        indent = "  " * (len(parts) - 1)
        section = kind in ("section", "list of sections")
        if section and default is None:
            absent = key
        value = "" if section or default == REQUIRED else " " + json.dumps(_plain(default), ensure_ascii=False)
        notes = [kind] * (not section) + [REQUIRED] * (default == REQUIRED) + ["null by default"] * (absent == key)
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
