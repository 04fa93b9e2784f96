"""A tokenizer is taken only where our reader, which has tokenizer.json alone, gives the ids of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from teachercache import fingerprint_tokenizer
from teachercache.errors import UsageError
from tests.pipeline.conftest import make_tokenizer

TEXT = "x <tool> y<tool>z [PAD]<|im_end|> Q"
TOOL = {"content": "<tool>", "special": True, "normalized": False} | dict.fromkeys(
    ("single_word", "lstrip", "rstrip"), False
)
DECODER = {"added_tokens_decoder": {"320": TOOL}}
TYPED = {"__type": "AddedToken", "content": "<tool>"}
# name: (what each file gets, whether tokenizer.json has the token, whether it is taken)
CASES: dict[str, tuple[dict[str, dict], bool, bool]] = {
    "plain": ({}, False, True),
    "in both": ({"tokenizer_config": DECODER}, True, True),
    "decoder": ({"tokenizer_config": DECODER}, False, False),
    "decoder, blanks": ({"tokenizer_config": {"added_tokens_decoder": {"320": TOOL | {"lstrip": True}}}}, True, False),
    "named": ({"tokenizer_config": {"pad_token": "[PAD]"}}, False, False),
    "named, typed": ({"tokenizer_config": {"pad_token": TYPED}}, False, False),
    "extra": ({"tokenizer_config": {"extra_special_tokens": ["<tool>"]}}, False, False),
    "extra, named": ({"tokenizer_config": {"extra_special_tokens": {"tool_token": "<tool>"}}}, False, False),
    "additional": ({"tokenizer_config": {"additional_special_tokens": [TYPED]}}, False, False),
    "of the model": ({"tokenizer_config": {"tool_token": "<tool>"}}, False, False),
    "of the model, listed": ({"tokenizer_config": {"model_specific_special_tokens": {"a": "<tool>"}}}, False, False),
    "added_tokens.json": ({"added_tokens": {"<tool>": 320}}, False, False),
    "added_tokens.json, unread": ({"tokenizer_config": {"added_tokens_decoder": {}}, "added_tokens": {"<tool>": 320}},
                                  False, True),
    "map": ({"special_tokens_map": {"additional_special_tokens": ["<tool>"]}}, False, False),
    "map, known": ({"special_tokens_map": {"additional_special_tokens": ["<tool>"]}}, True, True),
    "map, unread": ({"tokenizer_config": {"added_tokens_decoder": {}}, "special_tokens_map": {"pad_token": "[PAD]"}},
                    False, True),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_tokenizer_gives_the_ids_of_transformers_or_is_refused(tmp_path: Path, case: str) -> None:
    files, has, taken = CASES[case]
    folder = make_tokenizer(tmp_path / "model")
    table = json.loads((folder / "tokenizer.json").read_text())
    if has:
        table["added_tokens"].append(TOOL | {"id": 1 + max(token["id"] for token in table["added_tokens"])})
        (folder / "tokenizer.json").write_text(json.dumps(table))
    for name, changes in files.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))
    ours = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    theirs = AutoTokenizer.from_pretrained(folder).encode(TEXT, add_special_tokens=False)
    assert (ours == theirs) is taken
    if taken:
        fingerprint_tokenizer(folder)
    else:
        with pytest.raises(UsageError, match=r"(adds the token|twice: lstrip)"):
            fingerprint_tokenizer(folder)
