"""The tokenizer's files in a cache: put there once, checked by every reader."""

from __future__ import annotations

import json
import shutil

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import teachercache
from teachercache import fingerprint_config, fingerprint_tokenizer, fingerprint_weights
from teachercache.errors import SpecMismatch
from teachercache.format.spec import CacheSpec, TeacherSpec
from teachercache.testing import synthetic_records


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
    (folder / "model.safetensors").write_bytes(bytes(range(256)))
    return folder


def spec_of(folder, top_k=8) -> CacheSpec:
    return CacheSpec(
        teacher=TeacherSpec(
            name="t", weights_digest=fingerprint_weights(folder), config_digest=fingerprint_config(folder), dtype="float32",
            engine="hf", head_dtype="float32",
        ),
        tokenizer=fingerprint_tokenizer(folder),
        top_k=top_k,
    )  # fmt: skip


def change_vocabulary(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"hello"', '"hallo"'))


def test_a_cache_carries_its_tokenizer_and_a_reader_checks_it(teacher, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    spec = spec_of(teacher)
    writer = teachercache.create(tmp_path / "cache", spec, tokenizer_files=teacher)
    writer.commit("s", synthetic_records(spec, 2))
    writer.publish()
    folder = teachercache.open(tmp_path / "cache").tokenizer_path()
    assert fingerprint_tokenizer(folder) == spec.tokenizer
    assert teachercache.open(tmp_path / "cache").tokenizer_path() == folder
    change_vocabulary(teacher)
    with pytest.raises(SpecMismatch, match=r"tokenizer\.digest"):
        teachercache.create(tmp_path / "cache", spec, tokenizer_files=teacher)
    stored = next((tmp_path / "cache").rglob("tokenizer.json"))
    stored.write_bytes(stored.read_bytes().replace(b"hello", b"hallo"))
    shutil.rmtree(tmp_path / "xdg")
    with pytest.raises(teachercache.errors.CorruptFile, match="does not have the digest"):
        teachercache.open(tmp_path / "cache").tokenizer_path()
