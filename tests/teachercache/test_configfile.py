"""Every key of a configuration is described and printed as YAML that means the same."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from teachercache import configfile
from teachercache.errors import UsageError


class Part(BaseModel):
    """A section."""

    model_config = ConfigDict(extra="forbid")
    size: int | None = Field(None, description="How large.")
    kind: Literal["a", "b"] = Field("a", description="Which kind.")


class Whole(BaseModel):
    """A configuration."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(description="What it is called.")
    shares: list[float] = Field(default_factory=lambda: [0.5, 0.5], description="Of what.")
    part: Part = Part()
    extra: Part | None = Field(None, description="A section that is off by default.")
    parts: list[Part] = Field(default_factory=list, description="Several sections.")


def test_every_key_is_described_in_order_with_its_type_and_default() -> None:
    found = configfile.describe(Whole)
    assert [(key.key, key.type, key.default) for key in found] == [
        ("name", "str", configfile.REQUIRED),
        ("shares", "list[float]", [0.5, 0.5]),
        ("part", "section", {}),
        ("part.size", "int | null", None),
        ("part.kind", "a | b", "a"),
        ("extra", "section", None),
        ("extra.size", "int | null", None),
        ("extra.kind", "a | b", "a"),
        ("parts", "list of sections", []),
        ("parts.*.size", "int | null", None),
        ("parts.*.kind", "a | b", "a"),
    ]
    assert [key.description for key in found[:4]] == ["What it is called.", "Of what.", "A section.", "How large."]


def test_the_printed_yaml_is_a_configuration_with_every_default() -> None:
    text = configfile.commented_yaml(Whole)
    assert "# What it is called. (str, required)\nname:\n" in text
    assert configfile.validate(Whole, yaml.safe_load(text) | {"name": "x"}, "it") == Whole(name="x")


def test_a_section_that_is_off_is_a_comment_that_can_be_uncommented() -> None:
    lines = configfile.commented_yaml(Whole).splitlines()
    start = lines.index("# extra:")
    block = [line.removeprefix("# ") for line in lines[start : start + 5]]
    assert yaml.safe_load("\n".join(block)) == {"extra": {"size": None, "kind": "a"}}
    shown = "\n".join(line.removeprefix("# ") for line in lines[lines.index("# parts:") :])
    assert yaml.safe_load(shown) == {"parts": [{"size": None, "kind": "a"}]}  # one entry, to show its keys


def test_common_names_of_a_key_are_known_to_the_owner_of_the_configuration() -> None:
    assert configfile.nearest_key(Whole, ("title",), {"title": "name"}) == "name"


class Inner(configfile.Section):
    """Numbers, as configurations have them."""

    count: int | None = None
    pairs: list[tuple[float, int]] = Field(default_factory=list)
    shares: dict[str, float] = Field(default_factory=dict)
    either: Literal["auto"] | int = "auto"


class Numbers(configfile.Section):
    """A configuration with numbers, switches and choices."""

    count: int = 1
    rate: float = 1.0
    on: bool = False
    choice: Literal["auto", "on", "off"] = "auto"
    name: str = "x"
    inner: Inner = Inner()
    many: list[Inner] = Field(default_factory=list)
    free: dict[str, Any] = Field(default_factory=dict)


def load(tmp_path, text: str, *overrides: str, name: str = "it.yaml") -> Numbers:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return configfile.load(Numbers, tmp_path / name, overrides)


def refused(tmp_path, text: str, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text, *overrides)
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    return said


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        ("count: 1\nname: a\ncount: 2\n", "count", (1, 3)),
        ("inner: {count: 8, count: 4}\n", "count", (1, 1)),
        ("inner:\n  count: 8\n  'count': 4\n", "count", (2, 3)),
        ("many:\n- {}\n- count: 1\n  count: 1\n", "count", (3, 4)),
        ("free: {a: [{b: {c: 1,\n c: 2}}]}\n", "c", (1, 2)),
        ("free:\n  a: &a {x: 1}\n  b:\n    <<: *a\n    <<: *a\n", "<<", (4, 5)),
        ('{"count": 1,\n"count": 2}', "count", (1, 2)),
        ("name: a\nname: a\n", "name", (1, 2)),
    ],
)
def test_a_key_that_is_set_twice_is_refused_with_both_lines(tmp_path, text, key, lines):
    assert f"the key {key} is set twice, in line {lines[0]} and line {lines[1]}" in refused(tmp_path, text)


def test_a_key_that_is_set_twice_in_an_override_or_by_two_of_them_is_refused(tmp_path):
    assert "the key count is set twice" in refused(tmp_path, "", "inner={count: 1, count: 2}")
    assert "count is set twice on the command line" in refused(tmp_path, "", "count=1", "rate=1", "count=2")
    assert load(tmp_path, "count: 3\n", "count=2", "count=2").count == 2


def test_a_merge_key_gives_what_is_not_set(tmp_path):
    free = load(tmp_path, "free:\n  a: &a {x: 1, y: 2}\n  b: {<<: *a, x: 3}\n").free
    assert free["b"] == {"x": 3, "y": 2}


NO_NUMBERS = (  # most of them are numbers or dates in YAML 1.1
    *("true", "no_number", "010", "-010", "5:00", "1:30:00", ".inf", "-.inf", ".nan", "inf", "nan"),
    *("0x10", "0o7", "yes", "2026-01-01", "''"),
)


@pytest.mark.parametrize("number", NO_NUMBERS)
@pytest.mark.parametrize(
    "where",
    ["count: {}", "rate: {}", "inner: {{count: {}}}", "inner: {{pairs: [[{}, 1]]}}", "inner: {{shares: {{a: {}}}}}",
     "many: [{{count: {}}}]"],
)  # fmt: skip
def test_what_only_looks_like_a_number_is_refused_where_one_is_meant(tmp_path, where, number):
    key = where.split(":")[0]
    assert key in refused(tmp_path, where.format(number))


@pytest.mark.parametrize(
    ("number", "value"),
    [
        ("0", 0),
        ("12", 12),
        ("1_000_000", 10**6),
        ("1.5", 1.5),
        ("1e-3", 1e-3),
        ("1.0E+3", 1e3),
        ("-.5", -0.5),
        ("+3", 3),
    ],
)
def test_a_plain_number_is_one(tmp_path, number, value):
    for text in (f"rate: {number}", json.dumps({"rate": value})):
        assert load(tmp_path, text).rate == value
    assert load(tmp_path, "", f"rate={number}").rate == value


@pytest.mark.parametrize(
    "word", ["yes", "no", "on", "off", "2026-01-01", "5:00", "010", "0x10", "1e5", "y", "<<x", "="]
)
def test_a_word_is_the_text_that_it_looks_like(tmp_path, word):
    assert load(tmp_path, f"name: {word}").name == word


def test_switches_and_choices_mean_what_they_say(tmp_path):
    for word, value in (("true", True), ("False", False), ("on", True), ("no", False)):
        assert load(tmp_path, f"on: {word}").on is value
    assert [load(tmp_path, f"choice: {word}").choice for word in ("on", "off")] == ["on", "off"]
    assert "'auto', 'on' or 'off' (found true)" in refused(tmp_path, "choice: true")
    assert "(found true)" in refused(tmp_path, "name: true")
    assert load(tmp_path, "inner: {either: auto}").inner.either == "auto"
    assert "either" in refused(tmp_path, "inner: {either: true}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 3000, "nested more than"),
        ("{a: " * 3000, "nested more than"),
        ("\n".join(" " * n + "a:" for n in range(3000)), "nested more than"),
        ("free: &a [*a]", "aliases make it too large"),
        (
            "a: &a [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1 or str()}'] * 9)}]\n" for n in range(1, 9)),
            "aliases",
        ),
        ("count: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("count: 1\n---\ncount: 2\n", "another document"),
        ("count: [1\n", "expected"),
        ("\tcount: 1\n", "cannot start any token"),
        ("name: a\x07b", "special characters are not allowed"),
        ('name: "\\ud83d"', "unexpected end of data"),
    ],
    ids=["lists", "maps", "blocks", "recursion", "aliases", "objects", "two", "open", "tab", "bell", "surrogate"],
)
def test_yaml_that_is_none_or_too_much_is_one_line(tmp_path, text, says):
    assert says in refused(tmp_path, text)


def test_json_is_read_with_tabs_and_its_own_escapes(tmp_path):
    tree = {"name": "\U0001f600 é", "inner": {"count": 3}}
    for indent in (None, 2, "\t"):
        found = load(tmp_path, "\ufeff" + json.dumps(tree, indent=indent), name="it.json")
        assert (found.name, found.inner.count) == ("\U0001f600 é", 3)


SECRET = "s3://key:hushhush@bucket/x"


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (f"name: {SECRET}", ()),
        (f"unknown: {SECRET}", ()),
        (f"count: {SECRET}", ()),
        (f"free: {{a: [{{b: {SECRET}}}]}}", ()),
        (f"many: [{{count: {SECRET}}}]", ()),
        (f"name: {SECRET}: x", ()),
        (f"name:{SECRET}\ncount: 1", ()),
        (f"name: [{SECRET}", ()),
        (f"{{name:{SECRET}}}", ()),
        ("", (f"name={SECRET}",)),
        ("", (SECRET,)),
        ("", (f"name=[{SECRET}",)),
        ("", (f"{SECRET}=1",)),
    ],
)
def test_no_message_repeats_a_secret_of_a_file_or_an_override(tmp_path, text, overrides):
    assert "hush" not in refused(tmp_path, text, *overrides)


def test_credentials_name_their_key_and_the_file_is_a_path_without_them(tmp_path):
    assert "free.a.0.b: a URL names a place" in refused(tmp_path, f"free: {{a: [{{b: {SECRET}}}]}}")
    with pytest.raises(UsageError, match="holds no credentials"):
        configfile.load(Numbers, f"{SECRET}.yaml")
