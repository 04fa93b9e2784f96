"""One digest for one tokenizer however it was saved, another for one that gives other ids or renders otherwise."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import teachercache
from teachercache import fingerprint_tokenizer
from teachercache.errors import UnsafeManifest, UsageError
from teachercache.testing import synthetic_records
from tests.teachercache.caches import spec_of

LEAD = ["<s>", "</s>"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w")]
TOOL = {"id": 263, "content": "<tool>", "special": True, "normalized": False} | dict.fromkeys(
    ("single_word", "lstrip", "rstrip"), False
)


@pytest.fixture
def folder(tmp_path) -> Path:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*LEAD, *letters, *("".join(merge) for merge in MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([*LEAD, "<extra>"])
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer/tokenizer.json"))
    edit(tmp_path / "tokenizer", {}, name="tokenizer_config.json", bos_token="<s>", chat_template="D")
    return tmp_path / "tokenizer"


def read(folder):
    return json.loads((folder / "tokenizer.json").read_text())


def edit(folder, table=None, *, name="tokenizer.json", **changes):
    (folder / name).write_text(json.dumps((read(folder) if table is None else table) | changes))


def template_processing(*before):
    part = {"Sequence": {"id": "A", "type_id": 0}}
    single = [*({"SpecialToken": {"id": token, "type_id": 0}} for token in before), part]
    tokens = {token: {"id": token, "ids": [LEAD.index(token)], "tokens": [token]} for token in before}
    pair = [part, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def shuffled(vocab):
    return dict(random.Random(0).sample(list(vocab.items()), len(vocab)))


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
SAME = {
    "merges as strings": lambda t: {"model": t["model"] | {"merges": [" ".join(m) for m in t["model"]["merges"]]}},
    "merges as pairs": lambda t: {"model": t["model"] | {"merges": [list(m) for m in t["model"]["merges"]]}},
    "order of the vocabulary": lambda t: {"model": t["model"] | {"vocab": shuffled(t["model"]["vocab"])}},
    "order of the keys": lambda t: {"model": dict(reversed(t["model"].items()))},
    "order of the added tokens": lambda t: {"added_tokens": t["added_tokens"][::-1]},
    "defaults left out": lambda t: {"model": {k: v for k, v in t["model"].items() if v}},
    "nothing, written out": lambda t: {"model": t["model"] | {"unk_token": None, "end_of_word_suffix": "", "dropout": 0.0}},
    "a template that adds nothing": lambda t: {"post_processor": template_processing()},
    "a post-processor of offsets": lambda t: {"post_processor": BYTES},
    "both of them": lambda t: {"post_processor": {"type": "Sequence", "processors": [BYTES, template_processing()]}},
    "offsets": lambda t: {"pre_tokenizer": BYTES},
    "one step as a chain": lambda t: {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES]}},
    "an empty chain": lambda t: {"normalizer": {"type": "Sequence", "normalizers": []}},
    "a decoder": lambda t: {"decoder": BYTES},
    "padding": lambda t: {"padding": {"strategy": {"Fixed": 7}, "direction": "Right", "pad_to_multiple_of": None,
                                      "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"}},
}  # fmt: skip
OTHER = {
    "order of the merges": lambda t: {"model": t["model"] | {"merges": t["model"]["merges"][::-1]}},
    "a merge less": lambda t: {"model": t["model"] | {"merges": t["model"]["merges"][:-1]}},
    "a blank in front": lambda t: {"pre_tokenizer": BYTES | {"add_prefix_space": True}},
    "no regular expression": lambda t: {"pre_tokenizer": BYTES | {"use_regex": False}},
    "ignore_merges": lambda t: {"model": t["model"] | {"ignore_merges": True}},
    "a post-processor that adds": lambda t: {"post_processor": template_processing("<s>")},
    "a normaliser": lambda t: {"normalizer": {"type": "Lowercase"}},
    "an added token": lambda t: {"added_tokens": [*t["added_tokens"], TOOL | {"id": 264}]},
    "where an added token is found": lambda t: {
        "added_tokens": [token | {"lstrip": token["id"] == 263} for token in t["added_tokens"]]
    },
    "two ids": lambda t: {"model": t["model"] | {"vocab": t["model"]["vocab"] | {"!": 3, '"': 2}}},
}  # fmt: skip


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_another_way_to_save_a_tokenizer_is_no_other_identity(folder, change):
    before = fingerprint_tokenizer(folder)
    edit(folder, **change(read(folder)))
    assert fingerprint_tokenizer(folder) == before


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_what_gives_other_ids_is_another_identity(folder, change):
    before = fingerprint_tokenizer(folder)
    edit(folder, **change(read(folder)))
    assert fingerprint_tokenizer(folder).digest != before.digest


def test_saving_by_the_library_keeps_the_identity(folder):
    before = fingerprint_tokenizer(folder)
    for pretty in (True, False):
        Tokenizer.from_file(str(folder / "tokenizer.json")).save(str(folder / "tokenizer.json"), pretty=pretty)
        assert fingerprint_tokenizer(folder) == before


def test_an_added_token_of_the_configuration_alone_is_refused_by_name(folder):
    stated = {key: value for key, value in TOOL.items() if key != "id"}
    edit(folder, {}, name="tokenizer_config.json", added_tokens_decoder={"320": stated})
    with pytest.raises(UsageError, match=r"tokenizer_config\.json adds the token '<tool>'"):
        fingerprint_tokenizer(folder)


# -- templates -----------------------------------------------------------------------------------------------------


def named(folder, **templates):
    (folder / "additional_chat_templates").mkdir(exist_ok=True)
    for name, text in templates.items():
        (folder / f"additional_chat_templates/{name}.jinja").write_text(text)


def test_each_named_template_is_part_of_the_identity_however_it_was_saved(folder):
    first = fingerprint_tokenizer(folder)
    named(folder, tool_use="T")
    (folder / "chat_template.jinja").write_text("D")
    both = fingerprint_tokenizer(folder)
    assert both.digest == first.digest
    assert both.chat_template_digest != first.chat_template_digest
    named(folder, tool_use="U")
    assert fingerprint_tokenizer(folder).chat_template_digest != both.chat_template_digest
    (folder / "additional_chat_templates/tool_use.jinja").unlink()
    (folder / "chat_template.jinja").unlink()
    for templates in ({"default": "D", "tool_use": "T"}, {"tool_use": "T", "default": "D"}):
        entries = [{"name": name, "template": text} for name, text in templates.items()]
        edit(folder, {}, name="tokenizer_config.json", bos_token="<s>", chat_template=entries)
        assert fingerprint_tokenizer(folder) == both
    edit(
        folder, {}, name="tokenizer_config.json", bos_token="<s>", chat_template=[{"name": "default", "template": "D"}]
    )
    assert fingerprint_tokenizer(folder) == first


def test_chat_template_json_alone_is_the_template(folder):
    first = fingerprint_tokenizer(folder)
    edit(folder, {}, name="tokenizer_config.json", bos_token="<s>")
    assert fingerprint_tokenizer(folder).chat_template_digest is None
    edit(folder, {}, name="chat_template.json", chat_template="D")
    assert fingerprint_tokenizer(folder) == first


@pytest.mark.parametrize(
    ("name", "content", "error", "says"),
    [
        ("additional_chat_templates/a b.jinja", b"x", UnsafeManifest, "no plain file name"),
        ("additional_chat_templates/a.jinja", b"\xff", UsageError, r"a\.jinja is not UTF-8"),
        ("chat_template.jinja", b"version https://git-lfs.github.com/spec/v1\n", UsageError, "pointer of Git LFS"),
        ("tokenizer_config.json", b'{"chat_template": [1]}', UsageError, "no list of names and templates"),
    ],
)
def test_templates_that_cannot_be_taken_are_refused_by_name(folder, name, content, error, says):
    named(folder)
    (folder / name).write_bytes(content)
    with pytest.raises(error, match=says):
        fingerprint_tokenizer(folder)


def test_a_cache_carries_named_templates_byte_for_byte(teacher, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    named(teacher, tool_use="{{ tools }}\r\n", rag="R")
    spec = spec_of(teacher)
    writer = teachercache.create(tmp_path / "cache", spec, tokenizer_files=teacher)
    writer.commit("s", synthetic_records(spec, 2))
    writer.publish()
    found = teachercache.open(tmp_path / "cache").tokenizer_path()
    for name in ("tool_use", "rag"):
        file = f"additional_chat_templates/{name}.jinja"
        assert (found / file).read_bytes() == (teacher / file).read_bytes()
    assert fingerprint_tokenizer(found) == spec.tokenizer
