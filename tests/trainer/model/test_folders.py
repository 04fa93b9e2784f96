"""A student's folder: nothing of it is random, left over or half there, and its tokenizer and settings travel whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from teachercache.errors import UsageError
from tests.trainer import runs, tiny
from trainer.model.init_student import init_student
from trainer.model.student import load_student, tokenizer_files, write_files

CPU = torch.device("cpu")
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
# What transformers reads with a warning and refuses to write
SETTINGS = '{"do_sample": false, "temperature": 1e-06, "top_p": 0.6}'


def weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    found = load_file(folder / "model.safetensors")
    change(found)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


def teacher_with_everything(folder: Path) -> Path:
    tiny.make_model(folder)
    (folder / "generation_config.json").write_text(SETTINGS)
    (folder / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    (folder / "vocab.txt").write_text("a\n")
    return folder


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), "lacks 1 weights .*layers.1.mlp.up_proj"),
        (lambda w: w.update(new=torch.zeros(2)), "has, unused, 1 weights .*: new;"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(7)}), "cannot load"),
    ],
)
def test_weights_that_are_missing_left_over_or_of_another_shape_are_refused(tmp_path: Path, change, says: str) -> None:
    folder = tiny.make_model(tmp_path / "teacher")
    weights(folder, change)
    with pytest.raises(UsageError, match=says):
        load_student(folder, dtype=torch.float32, device=CPU)
    with pytest.raises(UsageError, match=says):
        init_student(folder, tmp_path / "student")
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_count_once(tmp_path: Path, tied: bool) -> None:
    folder = tiny.make_model(tmp_path / "teacher", tie_word_embeddings=tied)
    if tied:  # some folders hold the head a second time
        weights(folder, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    load_student(folder, dtype=torch.float32, device=CPU)
    init_student(folder, tmp_path / "student")


@pytest.mark.parametrize("content", [POINTER.encode(), b"\x10\x00\x00\x00\x00\x00\x00\x00{"], ids=["pointer", "cut"])
def test_files_that_are_not_whole_end_init_and_loading_in_one_line(tmp_path: Path, content: bytes) -> None:
    folder = tiny.make_model(tmp_path / "teacher")
    (folder / "model.safetensors").write_bytes(content)
    for action in (
        lambda: init_student(folder, tmp_path / "student"),
        lambda: load_student(folder, dtype=torch.float32, device=CPU),
    ):
        with pytest.raises(UsageError, match=r"model\.safetensors is (a pointer of Git LFS|cut short)"):
            action()
    assert not (tmp_path / "student").exists()


def test_a_failure_while_writing_leaves_nothing_and_the_next_try_succeeds(tmp_path: Path, monkeypatch) -> None:
    folder = tiny.make_model(tmp_path / "teacher")
    out = tmp_path / "new" / "student"
    monkeypatch.setattr("trainer.model.init_student._largest_gap", lambda ours, theirs: 0.5)
    with pytest.raises(UsageError, match=r"other logits than the cut teacher, by 5\.0e-01"):
        init_student(folder, out)
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]
    monkeypatch.undo()
    out.mkdir(parents=True)  # empty: as good as none
    init_student(folder, out)
    assert (out / "config.json").is_file()


def same_files(folder: Path, teacher: Path) -> None:
    for name in tokenizer_files(teacher):
        assert (folder / name).read_bytes() == (teacher / name).read_bytes(), name


def test_settings_tokenizer_and_named_templates_travel_byte_for_byte_to_every_checkpoint(tmp_path: Path) -> None:
    teacher = teacher_with_everything(tmp_path / "teacher")
    assert {"additional_chat_templates/tool_use.jinja", "generation_config.json", "vocab.txt"} <= set(
        tokenizer_files(teacher)
    )
    init_student(teacher, tmp_path / "student")
    same_files(tmp_path / "student", teacher)
    url = tiny.make_cache(str(tmp_path / "cache"), teacher, documents=12)
    for name, extra in {"run": {}, "adapters": {"lora": {"rank": 2}}}.items():
        output = tmp_path / name
        config = runs.write_config(
            tmp_path / f"{name}.yaml", cache=url, student=str(tmp_path / "student"), output=str(output),
            data={"seq_len": 64}, train={"max_steps": 2, "device": "cpu"}, checkpoint={"every_steps": 1}, **extra,
        )  # fmt: skip
        runs.fit_here(config)
        folders = [path for path in output.iterdir() if (path / "config.json").is_file()]
        assert {path.name for path in folders} >= {"step-00000002", "final"}
        for folder in folders:
            same_files(folder, teacher)


def test_a_template_of_the_student_that_the_teacher_lacks_does_not_stay(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("old")
    write_files({"tokenizer.json": b"{}"}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
