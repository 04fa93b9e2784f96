"""What a run may be continued with, what is said, and that a checkpoint of someone else's making does no harm."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from teachercache.errors import UsageError
from tests.trainer import runs, tiny
from tests.trainer.test_cli import Done, run  # noqa: F401  a fixture
from trainer import resume
from trainer.checkpoint import CheckpointFolder
from trainer.model.student import load_student
from trainer.optim import MixedAdamW


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, cache_url: str, student: Path) -> Path:
    """A folder with a student and a run of two of its steps; tests work on copies."""
    folder = tmp_path_factory.mktemp("begun")
    shutil.copytree(student, folder / "student")
    runs.fit_here(config(folder, cache_url), "train.max_steps=2")
    return folder


@pytest.fixture
def copy(begun: Path, tmp_path: Path) -> Path:
    shutil.copytree(begun, tmp_path / "copy")
    return tmp_path / "copy"


def config(folder: Path, cache_url: str) -> Path:
    return runs.write_config(
        folder / "train.yaml", cache=cache_url, student=str(folder / "student"), output=str(folder / "run"),
        data={"seq_len": 128}, train={"threads": 1, "max_steps": 3}, log={"tensorboard": False},
    )  # fmt: skip


def checkpoint(folder: Path) -> Path:
    latest = CheckpointFolder(str(folder / "run")).index().latest
    assert latest is not None
    return folder / "run" / latest.folder


def resized(folder: Path) -> None:
    """Let checkpoints.json say what is there now: whoever plants a file can do that too."""
    index = json.loads((folder / "run/checkpoints.json").read_text())
    index["checkpoints"][-1]["files"] = {path.name: path.stat().st_size for path in checkpoint(folder).iterdir()}
    (folder / "run/checkpoints.json").write_text(json.dumps(index))


def other_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def other_shape(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "rope_theta": 123.0}))


def other_tokenizer(folder: Path) -> None:
    tiny.make_tokenizer(folder, vocab_size=300, text=["quite another text, with other merges"])


@pytest.mark.parametrize(
    ("change", "part"), [(other_weights, "weights"), (other_shape, "configuration"), (other_tokenizer, "tokenizer")]
)
def test_a_resumed_run_with_another_student_is_refused(
    copy: Path, cache_url: str, change: Callable[[Path], None], part: str
) -> None:
    change(copy / "student")
    before = {path: path.stat().st_mtime_ns for path in (copy / "run").rglob("*")}
    with pytest.raises(UsageError, match=rf"began from another student.*\(the {part} of .* differs\)"):
        runs.fit_here(config(copy, cache_url))
    assert {path: path.stat().st_mtime_ns for path in (copy / "run").rglob("*")} == before


def test_the_same_student_may_move_or_be_gone(copy: Path, cache_url: str, tmp_path: Path) -> None:
    file, moved = config(copy, cache_url), f"student={tmp_path / 'moved'}"
    shutil.move(copy / "student", tmp_path / "moved")
    with pytest.raises(UsageError, match="there is no folder"):
        runs.fit_here(file, "output=" + str(tmp_path / "new"))
    assert runs.fit_here(file, moved)["steps"] == 3
    shutil.rmtree(tmp_path / "moved")
    assert runs.fit_here(file, moved, "train.max_steps=4")["steps"] == 4


def test_a_resumed_run_with_another_live_teacher_is_refused(
    copy: Path, cache_url: str, teacher: Path, tmp_path: Path
) -> None:
    shutil.copytree(teacher, tmp_path / "teacher")
    online = [f"teacher={tmp_path / 'teacher'}", "loss={method: online, tail: null}", f"output={tmp_path / 'online'}"]
    runs.fit_here(config(copy, cache_url), *online, "train.max_steps=1")
    other_weights(tmp_path / "teacher")
    with pytest.raises(UsageError, match=r"began from another teacher.*the weights of .* differs"):
        runs.fit_here(config(copy, cache_url), *online)


def test_changed_settings_are_said_in_one_line_and_hold(
    copy: Path, cache_url: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    real = resume.Checkpointer.restore

    def restore(self: resume.Checkpointer, source: Path) -> None:
        real(self, source)
        seen.append(self.optimizer.param_groups[0]["weight_decay"])

    monkeypatch.setattr(resume.Checkpointer, "restore", restore)
    changes = ["optim.lr=1e-3", "optim.schedule=constant", "optim.weight_decay=0.25", "take_over=true"]
    runs.fit_here(config(copy, cache_url), *changes)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("changed since step")]
    assert line == (
        "changed since step 2: optim.lr from 0.0005 to 0.001, optim.weight_decay from 0.0 to 0.25, "
        "optim.schedule from cosine to constant, train.max_steps from 2 to 3"
    )
    assert seen == [0.25]  # what the checkpoint says of it does not come back


class Command:
    """What runs a command when it is unpickled."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> Any:
        return Path.touch, (self.sign,)


def with_command(path: Path) -> None:
    torch.save({"optimizer": {}, "x": Command(path.with_name("sign"))}, path)


def bare_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Command(path.with_name("sign"))))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-400])


def compressed(path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as stored, zipfile.ZipFile(path, "w") as out:
        for item in stored.infolist():
            out.writestr(item.filename, stored.read(item), compress_type=zipfile.ZIP_DEFLATED)


def expanded(path: Path) -> None:
    """A terabyte of moments in a few bytes: a tensor that repeats one number."""
    state = torch.load(path, weights_only=True)
    state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(1).expand(2**38)
    torch.save(state, path)


def of_another_model(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    state["optimizer"]["param_groups"] = state["optimizer"]["param_groups"][:1]
    torch.save(state, path)


@pytest.mark.parametrize(
    "harm",
    [with_command, bare_pickle, truncated, compressed, expanded, of_another_model, lambda path: path.write_bytes(b"")],
    ids=["command", "bare-pickle", "truncated", "compressed", "expanded", "another-model", "empty"],
)
def test_a_harmful_or_broken_optimizer_state_is_one_line_and_status_1(
    copy: Path,
    cache_url: str,
    run: Callable[..., Done],  # noqa: F811
    harm: Callable[[Path], None],
) -> None:
    file = checkpoint(copy) / "optimizer.pt"
    harm(file)
    resized(copy)
    done = run("fit", config(copy, cache_url))
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert "optimizer.pt is damaged (" in line
    assert "remove this checkpoint from checkpoints.json" in line
    assert "weights_only" not in line
    assert list(copy.rglob("sign")) == []


def test_moments_of_every_optimiser_state_come_back(student: Path) -> None:
    """The check of shapes takes what our own optimisers write."""
    model = load_student(student, dtype=torch.bfloat16, device=torch.device("cpu"))
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    options = {"lr": 1e-3, "betas": (0.9, 0.9), "eps": 1e-8, "state_dtype": torch.bfloat16}
    for master in ("split", "float32", "stochastic"):
        optimizer = MixedAdamW(parameters, **options, master=master)
        optimizer.step()
        checkpointer = object.__new__(resume.Checkpointer)
        checkpointer.optimizer = optimizer
        checkpointer._check_shapes(optimizer.state_dict()["state"])


def damaged(tree: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    """The state of a run with another value in the position of its cache."""
    data = tree["data"]
    return tree | {"data": {**data, "caches": [{**data["caches"][0], key: value}]}}


@pytest.mark.parametrize(
    "state",
    [
        b"", b"\xff", b"[]", b"[" * 100_000, b'{"step": "x"}',
        lambda tree: tree | {"step": -1}, lambda tree: tree | {"step": 7}, lambda tree: tree | {"data": {"a": 1}},
        lambda tree: tree | {"caches": []}, lambda tree: damaged(tree, "used", -1),
        lambda tree: tree | {"config": {}}, lambda tree: tree | {"config": {**tree["config"], "optim": 3}},
        lambda tree: damaged(tree, "counts", {"x": 1}),
        lambda tree: damaged(tree, "stream", {"manifest": 3}),
        lambda tree: damaged(tree, "epoch", "x"),
    ],
)  # fmt: skip
def test_a_broken_training_state_is_one_line(
    copy: Path,
    cache_url: str,
    run: Callable[..., Done],  # noqa: F811
    state: bytes | Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    file = checkpoint(copy) / "trainer_state.json"
    content = state if isinstance(state, bytes) else json.dumps(state(json.loads(file.read_bytes()))).encode()
    file.write_bytes(content)
    resized(copy)
    done = run("fit", config(copy, cache_url))
    assert done.returncode in (1, 2), done.stderr
    assert done.stderr.startswith("error: ") or "\nerror: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_is_a_pickle_with_a_command_is_one_line_and_not_run(
    student: Path,
    cache_url: str,
    tmp_path: Path,
    run: Callable[..., Done],  # noqa: F811
) -> None:
    shutil.copytree(student, tmp_path / "student")
    (tmp_path / "student/model.safetensors").unlink()
    torch.save({"x": Command(tmp_path / "sign")}, tmp_path / "student/pytorch_model.bin")
    for command in ("fit", "eval"):
        done = run(command, config(tmp_path, cache_url))
        assert done.returncode == 1
        assert "more than tensors; nothing of it was run" in done.stderr
        assert "weights_only" not in done.stderr
        assert done.stderr.strip().count("\n") == 0
    assert not (tmp_path / "sign").exists()
    shutil.copy(student / "model.safetensors", tmp_path / "student/model.safetensors")
    (tmp_path / "student/model.safetensors").write_bytes(b"\xff" * 100)
    assert run("fit", config(tmp_path, cache_url)).returncode == 2
