"""A run that does not fit says what it needs, what there is and what to try; a full disk costs nothing that was saved."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from teachercache.errors import UsageError
from tests.trainer import ranks, runs, tiny
from tests.trainer.test_cli import Done, run  # noqa: F401  a fixture
from trainer import evaluate, fit, limits, resume
from trainer.checkpoint import CheckpointFolder
from trainer.config import load_config

SAID = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.72 GiB of which 1.25 GiB is free. "
    "Process 1 has 138.47 GiB memory in use."
)


@pytest.fixture
def config(tmp_path: Path, cache_url: str, student: Path) -> Path:
    return runs.write_config(
        tmp_path / "train.yaml", cache=cache_url, student=str(student), output=str(tmp_path / "run"),
        data={"seq_len": 128}, train={"threads": 1, "max_steps": 4}, log={"tensorboard": False},
        checkpoint={"every_steps": 2},
    )  # fmt: skip


def test_out_of_gpu_memory_is_one_line_with_the_next_three_settings(
    config: Path,
    run: Callable[..., Done],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, steps = fit.Step.run, []

    def step(self: fit.Step, *arguments: Any, **options: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            raise torch.OutOfMemoryError(SAID)
        return real(self, *arguments, **options)

    monkeypatch.setattr(fit.Step, "run", step)
    done = run("fit", config, "data.seq_len=32768")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        "error: out of GPU memory: 2.50 GiB more were needed, with 1.25 GiB free of 139.72 GiB; try, in this order: "
        "train.checkpointing=full; train.mlp_tile=8192; optim.state=offload [TC-T104]"
    )
    monkeypatch.undo()
    assert runs.fit_here(config, "data.seq_len=32768", "train.checkpointing=full")["steps"] >= 2  # what it says to try


def test_an_evaluation_out_of_gpu_memory_is_one_line_too(
    config: Path,
    run: Callable[..., Done],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hidden_states(*_: Any) -> None:
        raise torch.OutOfMemoryError(SAID)

    monkeypatch.setattr(evaluate.student, "hidden_states", hidden_states)
    done = run("eval", config, "eval.split=train")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        "error: out of GPU memory: 2.50 GiB more were needed, with 1.25 GiB free of 139.72 GiB; try, in this order: "
        "data.seq_len=64; no other process on this GPU; a larger GPU [TC-T104]"
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], ["train.checkpointing=full", "optim.state=offload", "train.checkpointing=offload"]),
        (["train.checkpointing=none"], ["train.checkpointing=keep-matmuls", "optim.state=offload"]),
        (["train.checkpointing=offload", "optim.state=bfloat16"], ["lora.rank=16 (a new output)", "data.seq_len=1024 (a"]),
        (["train.checkpointing=offload", "lora.rank=4", "data.seq_len=65536"], ["train.mlp_tile=16384", "optim.state=offload"]),
    ],
)  # fmt: skip
def test_what_to_try_follows_from_what_is_set(overrides: list[str], expected: list[str]) -> None:
    tries = limits.next_settings(load_config(None, ["cache=c", "student=s", *overrides]))
    assert [said.startswith(start) for said, start in zip(tries, expected, strict=False)] == [True] * len(expected)
    assert len(tries) >= 3
    for setting in tries:
        if "=" in setting:  # each of them is a setting
            kept = [other for other in overrides if other.split("=")[0] != setting.split("=")[0]]
            load_config(None, ["cache=c", "student=s", *kept, setting.split(" ")[0]])


@pytest.fixture(scope="module")
def larger_student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough for weights and states to be nearly all of a checkpoint."""
    folder = tmp_path_factory.mktemp("larger") / "model"
    return tiny.make_model(folder, layers=2, hidden_size=256, intermediate_size=768)


def predicted(config: Path, *overrides: str) -> int:
    """Train; return the bytes of a checkpoint that the disk was asked for: a rank's body."""
    asked: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "check_room", lambda _, needed: asked.append(needed))
        runs.fit_here(config, *overrides)
    return sum(asked)  # the first rank asks


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        ["train.dtype=float32"],
        ["train.dtype=bfloat16"],
        ["train.dtype=bfloat16", "optim.master=float32"],
        ["train.dtype=bfloat16", "optim.master=stochastic", "optim.state=bfloat16"],
        ["train.dtype=bfloat16", "lora.rank=64"],
        ["train.dtype=float32", "optim.state=8bit"],
        ["train.dtype=bfloat16", "optim.state=8bit"],
        ["train.dtype=bfloat16", "optim.state=8bit", "lora.rank=64"],
    ],
    ids=" ".join,
)
def test_a_checkpoint_is_as_large_as_predicted(
    count: int, settings: list[str], config: Path, larger_student: Path
) -> None:
    if "optim.state=8bit" in settings:
        pytest.importorskip("torchao", reason="torchao is not installed: it is part of the CUDA environment only")
    where = [f"student={larger_student}", "train.max_steps=1", "data.batch_tokens=256"]
    found, *_ = ranks.run(count, predicted, config, *where, *settings)
    (entry,) = CheckpointFolder(str(config.parent / "run")).index().checkpoints
    parts = [size for name, size in entry.files.items() if Path(name).suffix in (".safetensors", ".pt", ".shard")]
    assert found == pytest.approx(sum(parts), rel=0.02)


def test_a_run_whose_checkpoints_cannot_fit_is_refused_before_the_first_step(
    config: Path,
    run: Callable[..., Done],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fit.Step, "run", lambda *_, **__: pytest.fail("a step was taken"))
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda place: SimpleNamespace(free=100_000))
    done = run("fit", config)
    assert done.returncode == 2
    assert "run has 0.1 MiB free, and two checkpoints of " in done.stderr.strip().splitlines()[-1]
    assert CheckpointFolder(str(config.parent / "run")).index().checkpoints == []


def fill_disk(folder: Path, what: str) -> None:
    """Fail as the writers do where no space is left: Python's, torch's (which does not say why) and safetensors'."""
    if what == "python":
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "trainer_state.json"))
    (folder / "optimizer.pt").symlink_to("/dev/full")
    torch.save({"a": torch.zeros(100_000)}, folder / "optimizer.pt")


@pytest.mark.parametrize("what", ["python", "torch"])
def test_a_disk_that_fills_up_is_one_line_and_the_last_checkpoint_stays(
    config: Path,
    run: Callable[..., Done],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    real = resume.Checkpointer._write

    def write(self: resume.Checkpointer, folder: Path) -> None:
        real(self, folder)
        if self.progress.step == 4:
            (folder / "optimizer.pt").unlink()
            monkeypatch.setattr(limits.shutil, "disk_usage", lambda place: SimpleNamespace(free=4096))
            fill_disk(folder, what)

    with monkeypatch.context() as patch:
        patch.setattr(resume.Checkpointer, "_write", write)
        done = run("fit", config)
    monkeypatch.undo()
    assert done.returncode == 1
    assert "is full (0.0 MiB free, a checkpoint has about 0." in done.stderr.strip().splitlines()[-1]
    assert "[TC-T105]" in done.stderr
    output = CheckpointFolder(str(config.parent / "run"))
    assert [entry.step for entry in output.index().checkpoints] == [2]
    assert sorted(path.name for path in (config.parent / "run").iterdir() if path.is_dir()) == [
        "lease",
        "step-00000002",
    ]
    assert runs.fit_here(config)["steps"] == 4  # space was freed: the same command goes on


def test_other_failures_of_a_write_keep_their_own_words(config: Path, tmp_path: Path) -> None:
    settings = load_config(config, [])
    with pytest.raises(RuntimeError, match="quite another"), limits.explained(settings, tmp_path, 100):
        raise RuntimeError("quite another problem")
    with pytest.raises(UsageError), limits.explained(settings, tmp_path, 100):
        raise UsageError("of ours")
