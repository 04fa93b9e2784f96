"""Fixtures of these tests alone."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers


def safetensors(data: bytes) -> bytes:
    """A file of one tensor of bytes."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    return len(header).to_bytes(8, "little") + header + data


@pytest.fixture
def teacher(tmp_path):
    """A Hugging Face folder in miniature."""
    folder = tmp_path / "teacher"
    folder.mkdir()
    words = ["<s>", "</s>", "hello", "world", *(chr(97 + i) for i in range(26))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<extra>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(
        json.dumps({"hidden_size": 64, "transformers_version": "5.0", "rope_theta": 1e4})
    )
    (folder / "model.safetensors").write_bytes(safetensors(bytes(range(256))))
    return folder
