"""Typed configuration: one YAML file, `key=value` overrides, and an unknown key that names its nearest neighbour.

The pipeline's job file and the trainer's configuration are read by this. Everything wrong in them is a UsageError (exit
status 2) of one sentence, because a misspelt option that is silently ignored costs a run.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from teachercache.errors import UsageError

M = TypeVar("M", bound=BaseModel)
ANY_ENTRY = "*"  # stands for an index of a list in a dotted key
OTHER_NAMES = {"learning_rate": "lr"}  # common names of ours that no distance of spelling finds


def load(model: type[M], path: str | Path | None, overrides: Iterable[str] = (), *, where: str | None = None) -> M:
    """Read a YAML file (None: overrides alone), apply `a.b=value` overrides, and validate.

    `where` is what messages call the whole; the path by default. Raises UsageError.
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
    return validate(model, tree, where or str(path))


def validate(model: type[M], tree: dict[str, Any], where: str) -> M:
    """Check a tree of plain values. Raises UsageError that explains the first problem."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise UsageError(_explain(error, model, where)) from error


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


def _explain(error: ValidationError, model: type[BaseModel], where: str) -> str:
    problem = error.errors(include_url=False)[0]
    location = problem["loc"]
    dotted = ".".join(str(part) for part in location)
    if problem["type"] == "extra_forbidden":
        return f"unknown key {dotted} in {where}; did you mean {nearest_key(model, location)}?"
    if problem["type"] == "missing":
        return f"{where} lacks {dotted}: set it in the YAML file or as {dotted}=VALUE"
    message = problem["msg"].removeprefix("Value error, ")
    found = problem["input"]
    shown = "" if isinstance(found, (dict, list, BaseModel)) else f" (found {found!r})"
    return f"{where}: {dotted + ': ' if dotted else ''}{message}{shown}"


def nearest_key(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """The known key most like `location`: first by its last part, wherever that stands, then as a whole."""
    known = list(_known_keys(model))
    asked = ".".join(ANY_ENTRY if isinstance(part, int) else OTHER_NAMES.get(part, part) for part in location)
    leaves = {key.rsplit(".", 1)[-1] for key in known}
    alike = difflib.get_close_matches(asked.rsplit(".", 1)[-1], leaves, n=1, cutoff=0.6)
    candidates = [key for key in known if alike and key.rsplit(".", 1)[-1] == alike[0]] or known
    nearest = difflib.get_close_matches(asked, candidates, n=1, cutoff=0.0)[0]
    for part in location:
        if isinstance(part, int):
            nearest = nearest.replace(ANY_ENTRY, str(part), 1)
    return nearest


def _known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key; an entry of a list of sections is called `*`."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for section, in_list in _sections(field.annotation):
            yield from _known_keys(section, f"{prefix}{name}.{ANY_ENTRY + '.' if in_list else ''}")


def _sections(annotation: Any) -> Iterator[tuple[type[BaseModel], bool]]:
    """The configuration sections that a field may hold: itself, one of a union, or the entries of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, False
    in_list = getattr(annotation, "__origin__", None) is list
    for part in getattr(annotation, "__args__", ()):
        for section, nested in _sections(part):
            yield section, in_list or nested
