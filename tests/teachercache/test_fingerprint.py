"""One different byte in tokenizer, template, weights, config or K is another identity, named by its field."""

from __future__ import annotations

import json
import shutil

import pytest
from tokenizers import Tokenizer

import teachercache
from teachercache import fingerprint_config, fingerprint_tokenizer, fingerprint_weights
from teachercache.errors import SpecMismatch, UsageError
from teachercache.fingerprint import check_model_files
from tests.teachercache.caches import spec_of


def change_weights(folder):
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[100] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def change_vocabulary(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"hello"', '"hallo"'))


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_template(folder):
    edit_json(folder / "tokenizer_config.json", chat_template="{{ messages}}")


def change_config(folder):
    edit_json(folder / "config.json", rope_theta=10001.0)


def change_eos(folder):
    edit_json(folder / "tokenizer_config.json", eos_token="<s>")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (change_weights, "teacher.weights_digest"),
        (change_config, "teacher.config_digest"),
        (change_vocabulary, "tokenizer.digest"),
        (change_template, "tokenizer.chat_template_digest"),
        (change_eos, "tokenizer.eos_id"),
    ],
)
def test_one_byte_is_another_identity_and_its_field_is_named(teacher, tmp_path, change, field):
    before = spec_of(teacher)
    teachercache.create(tmp_path / "cache", before)
    change(teacher)
    after = spec_of(teacher)
    assert after.digest != before.digest
    with pytest.raises(SpecMismatch) as caught:
        teachercache.create(tmp_path / "cache", after)
    assert [d[0] for d in caught.value.differences] == [field]
    assert field in str(caught.value)


def test_another_k_is_another_identity(teacher):
    assert [d[0] for d in spec_of(teacher, 8).differences(spec_of(teacher, 9))] == ["rows.entries"]


def test_what_does_not_matter_does_not_move_the_identity(teacher):
    before = spec_of(teacher)
    edit_json(teacher / "config.json", transformers_version="6.1", _name_or_path="/elsewhere")
    tokenizer = Tokenizer.from_file(str(teacher / "tokenizer.json"))
    tokenizer.enable_padding(length=7)
    tokenizer.enable_truncation(99)
    tokenizer.save(str(teacher / "tokenizer.json"))
    path = teacher / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1, sort_keys=True))
    assert spec_of(teacher) == before


def test_a_template_in_its_own_file_counts(teacher):
    before = fingerprint_tokenizer(teacher).chat_template_digest
    (teacher / "chat_template.jinja").write_text("{{ messages }}")
    assert fingerprint_tokenizer(teacher).chat_template_digest == before
    (teacher / "chat_template.jinja").write_text("{{ messages }}!")
    assert fingerprint_tokenizer(teacher).chat_template_digest != before


def test_the_vocabulary_size_counts_added_tokens(teacher):
    spec = fingerprint_tokenizer(teacher)
    assert spec.vocab_size == 31
    assert (spec.bos_id, spec.eos_id, spec.pad_id, spec.special_ids) == (0, 1, None, (0, 1, 30))


def test_weights_named_by_the_hubs_own_digest_are_not_read_again(teacher):
    before = fingerprint_weights(teacher)
    import hashlib

    digest = hashlib.sha256((teacher / "model.safetensors").read_bytes()).hexdigest()
    (teacher / "blobs").mkdir()
    shutil.move(teacher / "model.safetensors", teacher / "blobs" / digest)
    (teacher / "model.safetensors").symlink_to(teacher / "blobs" / digest)
    assert fingerprint_weights(teacher) == before


def test_a_folder_without_weights_or_tokenizer_is_a_clear_misuse(tmp_path):
    for function in (fingerprint_weights, fingerprint_config, fingerprint_tokenizer):
        with pytest.raises(UsageError, match="check the"):
            function(tmp_path)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
SHARD = "model-00002-of-00002.safetensors"


def test_a_whole_folder_passes_in_each_of_its_forms(teacher):
    check_model_files(teacher)
    whole = (teacher / "model.safetensors").read_bytes()
    (teacher / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"w": "pytorch_model-1.bin"}}))
    check_model_files(teacher)  # the other format was left out of the download
    (teacher / "model.safetensors").rename(teacher / SHARD)
    (teacher / "model-00001-of-00002.safetensors").write_bytes(whole)
    names = {"w": SHARD, "v": "model-00001-of-00002.safetensors"}
    (teacher / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    check_model_files(teacher)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "config.json", "merges.txt", "adapter_model.safetensors"]
)
def test_a_pointer_of_git_lfs_is_refused_by_name(teacher, name):
    (teacher / name).write_text(POINTER)
    for check in (check_model_files, fingerprint_weights):
        with pytest.raises(UsageError, match=f"{name} is a pointer of Git LFS"):
            check(teacher)
    if name == "tokenizer.json":
        with pytest.raises(UsageError, match="pointer of Git LFS"):
            fingerprint_tokenizer(teacher)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", '{"model_type": "ll', "[]"])
def test_settings_that_are_cut_short_are_refused_by_name(teacher, name, content):
    (teacher / name).write_text(content)
    for check in (check_model_files, fingerprint_weights):
        with pytest.raises(UsageError, match=rf"{name} (is not valid JSON.*download it again|must hold)"):
            check(teacher)


@pytest.mark.parametrize("kept", [0, 7, 8, 40, 200, -1])
def test_weights_that_are_cut_short_are_refused_by_name(teacher, kept):
    path = teacher / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UsageError, match=r"model\.safetensors is (cut short|no safetensors)"):
        fingerprint_weights(teacher)


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", SHARD, "other-shard.safetensors"])
def test_a_shard_that_is_missing_is_refused_by_name(teacher, name):
    names = {"w": SHARD, "v": "model-00001-of-00002.safetensors", "x": name}
    data = (teacher / "model.safetensors").read_bytes()
    (teacher / "model.safetensors").unlink()
    for shard in set(names.values()) - {name}:
        (teacher / shard).write_bytes(data)
    if "of" in name:
        with pytest.raises(UsageError, match=f"lacks {name}"):  # without an index, too
            check_model_files(teacher)
    (teacher / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(UsageError, match=f"lacks {name}"):
        fingerprint_weights(teacher)


def test_an_index_that_names_a_file_elsewhere_is_refused(teacher):
    (teacher / "model.safetensors").unlink()
    (teacher / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../x.safetensors"}}))
    with pytest.raises(UsageError, match="no plain file name"):
        check_model_files(teacher)
