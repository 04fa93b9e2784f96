"""Names that come from a store: which are taken, and which are refused before a path is made of them."""

from __future__ import annotations

import pytest

from teachercache.errors import UnsafeManifest
from teachercache.format import layout
from teachercache.format.objects import TokenizerIndex
from teachercache.format.sealed import unseal
from teachercache.format.spec import canonical_json
from tests.teachercache.caches import sealed

OUTSIDE = [
    "/etc/passwd", "../x", "..", ".", "", ".bashrc", "a/b", "a\\b", "C:x", "a\n", "\n", "a\0", "-rf", "_x", "~", "a b",
    "a%2fb", "ａ", "step-\u0661", "x" * 201, "a\u202eb", "a\x1b[31m",
]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE, ids=ascii)
def test_a_name_that_leaves_its_folder_is_refused_in_one_printable_line(name):
    with pytest.raises(UnsafeManifest, match="no plain file name") as caught:
        layout.check_name(name, "checkpoints.json")
    assert str(caught.value).isprintable()
    assert str(caught.value).isascii()
    with pytest.raises(UnsafeManifest):
        layout.tokenizer_path("0" * 64, name)
    body = canonical_json({"format_version": 1, "files": [{"name": name, "size": 1, "sha256": "0" * 64}]})
    with pytest.raises(UnsafeManifest, match="the tokenizer index names"):
        unseal(TokenizerIndex, sealed(body), "index.json")


@pytest.mark.parametrize("name", ["", "/../x", "/a/b", "/additional_chat_templates", "/.x", "//x"])
def test_a_tokenizer_has_one_folder_of_plain_names(name):
    folder = "additional_chat_templates"
    path = layout.tokenizer_path("0" * 64, f"{folder}/tool_use.jinja")
    assert path == f"tokenizer/{'0' * 64}/{folder}/tool_use.jinja"
    assert not layout.is_strange(path)
    with pytest.raises(UnsafeManifest):
        layout.tokenizer_path("0" * 64, f"{folder}{name}")


@pytest.mark.parametrize("name", ["tokenizer.json", "step-00000001", "final", "a", "A.b_c-d", "x" * 200, "1.bin"])
def test_plain_names_are_taken(name):
    assert layout.check_name(name, "checkpoints.json") == name


@pytest.mark.parametrize("value", [None, 5, ["a"], b"a"])
def test_what_is_no_string_is_refused_like_a_bad_name(value):
    with pytest.raises(UnsafeManifest):
        layout.check_name(value, "checkpoints.json")


@pytest.mark.parametrize("name", ["٠٠٠٠٠٠٠٩", "1", "000000001", "0000000a", "００００００01", "-0000001", "00000001\n"])
def test_only_eight_ascii_digits_number_a_manifest(name):
    assert layout.manifest_number(f"manifests/{name}.json") is None
    assert layout.manifest_number("manifests/00000009.json") == 9
