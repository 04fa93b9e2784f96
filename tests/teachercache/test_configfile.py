"""Every key of a configuration is described and printed as YAML that means the same."""

from __future__ import annotations

from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from teachercache import configfile


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
    tree = yaml.safe_load(text)
    assert tree["parts"] == [{"size": None, "kind": "a"}]  # one entry, to show its keys
    tree |= {"name": "x", "parts": []}
    assert configfile.validate(Whole, tree, "it") == Whole(name="x")


def test_a_section_that_is_off_is_a_comment_that_can_be_uncommented() -> None:
    lines = configfile.commented_yaml(Whole).splitlines()
    start = lines.index("# extra:")
    block = [line.removeprefix("# ") for line in lines[start : start + 5]]
    assert yaml.safe_load("\n".join(block)) == {"extra": {"size": None, "kind": "a"}}


def test_common_names_of_a_key_are_known_to_the_owner_of_the_configuration() -> None:
    assert configfile.nearest_key(Whole, ("title",), {"title": "name"}) == "name"
