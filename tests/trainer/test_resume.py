"""Running the same command again continues exactly: after SIGKILL, SIGTERM, at an epoch's end, from S3 as well."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer import runs
from trainer import checkpoint, fit
from trainer.checkpoint import CheckpointFolder
from trainer.data.dataset import PackedCache
from trainer.evaluate import heldout_sequences

EPOCHS = 3
STEPS_PER_EPOCH = 10  # of 128 tokens; about


@pytest.fixture(autouse=True, scope="module")
def _as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def settings(cache_url: str, student: Path) -> dict[str, Any]:
    return {
        "cache": cache_url,
        "student": str(student),
        "data": {"seq_len": 128, "block_sequences": 2, "blocks_per_flush": 2},
        "optim": {"lr": 3e-3, "warmup_steps": 2},
        "train": {"epochs": EPOCHS, "threads": 1, "deterministic": True},
        "checkpoint": {"every_steps": 4},
        "log": {"tensorboard": False},
    }


@pytest.fixture(scope="module")
def uninterrupted(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    config = runs.write_config(folder / "train.yaml", **settings, output=str(folder / "run"))
    runs.fit_here(config)
    return folder / "run"


def losses(run: Path) -> list[tuple[int, float, float]]:
    return [(entry["step"], entry["loss"], entry["lr"]) for entry in runs.metrics(run)]


def assert_same_run(ours: Path, theirs: Path) -> None:
    """Bitwise: every step's loss and learning rate, and every weight at the end."""
    assert losses(ours) == losses(theirs)
    assert [step for step, _, _ in losses(ours)] == list(range(1, len(losses(ours)) + 1))
    a, b = (load_file(run / "final" / "model.safetensors") for run in (ours, theirs))
    assert a.keys() == b.keys()
    assert all(a[name].equal(b[name]) for name in a)


def test_two_runs_are_bitwise_equal(uninterrupted: Path, settings: dict[str, Any], tmp_path: Path) -> None:
    config = runs.write_config(tmp_path / "train.yaml", **settings, output=str(tmp_path / "run"))
    runs.fit_here(config)
    assert_same_run(tmp_path / "run", uninterrupted)


def test_killed_twice_at_random_steps_the_run_is_bitwise_the_uninterrupted_one(
    uninterrupted: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    total = len(losses(uninterrupted))
    assert total > 2 * STEPS_PER_EPOCH
    seed = random.randrange(10**6)
    first = random.Random(seed).randrange(2, total // 3)
    second = random.Random(seed + 1).randrange(total // 2, total - 2)  # after the first epoch's end
    print(f"seed {seed}: SIGKILL after steps {first} and {second} of {total}")
    config = runs.write_config(tmp_path / "train.yaml", **settings, output=str(tmp_path / "run"))
    for step in (first, second):
        assert runs.kill_at_step(config, tmp_path / "run", step, signal.SIGKILL) == -signal.SIGKILL
    done = runs.trainer("fit", config)
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "run", uninterrupted)


def test_sigterm_saves_at_once_and_the_same_command_continues(
    uninterrupted: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**settings, "checkpoint": {"every_steps": None}}
    config = runs.write_config(tmp_path / "train.yaml", **settings, output=str(tmp_path / "run"))
    assert runs.kill_at_step(config, tmp_path / "run", 5, signal.SIGTERM) == 1
    latest = CheckpointFolder(str(tmp_path / "run")).index().latest
    assert latest is not None
    assert latest.step >= 5
    done = runs.trainer("fit", config)
    assert done.returncode == 0, done.stderr
    assert f"resuming after step {latest.step}" in done.stderr
    assert_same_run(tmp_path / "run", uninterrupted)


def test_a_stop_during_an_evaluation_saves_without_finishing_it(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a minute is what a terminated machine has: the evaluation is broken off, and no number is made of half of it."""
    config = runs.write_config(
        tmp_path / "train.yaml", **{**settings, "data": {**settings["data"], "seq_len": 64}},
        output=str(tmp_path / "run"), eval={"every_steps": 3},
    )  # fmt: skip
    seen = 0

    def heldout(*arguments: Any, **options: Any) -> Iterator[Any]:
        nonlocal seen
        for sequence in heldout_sequences(*arguments, **options):
            seen += 1
            if seen == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield sequence

    monkeypatch.setattr(fit, "heldout_sequences", heldout)
    with pytest.raises(fit.Stopped, match="saved step 3"):
        runs.fit_here(config)
    assert seen == 1
    latest = CheckpointFolder(str(tmp_path / "run")).index().latest
    assert latest is not None
    assert (latest.step, latest.heldout_kl) == (3, None)
    assert runs.metrics(tmp_path / "run", "eval") == []


def test_a_stop_while_the_data_does_not_come_saves_the_last_whole_step(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is away and the machine is about to go: half of a batch was read, and is read again afterwards."""
    accumulated = {**settings, "data": {**settings["data"], "seq_len": 64, "batch_tokens": 128}}
    config = runs.write_config(tmp_path / "train.yaml", **accumulated, output=str(tmp_path / "run"))
    away = threading.Event()
    real = PackedCache.with_states

    def with_states(*arguments: Any, **options: Any) -> Iterator[Any]:
        for number, pair in enumerate(real(*arguments, **options)):
            if number == 7:  # three steps of two, and one of the fourth
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
                away.wait(20)
            yield pair

    with monkeypatch.context() as patch:
        patch.setattr(PackedCache, "with_states", with_states)
        # The save lets the store come back, or the reading thread would be waited for at the end.
        patch.setattr(fit._Fit, "_save", lambda *_, save=fit._Fit._save: (away.set(), save(*_)))
        with pytest.raises(fit.Stopped, match="saved step 3"):
            runs.fit_here(config)
    runs.fit_here(config)
    straight = runs.write_config(tmp_path / "straight.yaml", **accumulated, output=str(tmp_path / "straight"))
    runs.fit_here(straight)
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def test_a_crash_right_after_the_end_leaves_a_run_that_says_it_is_finished(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = runs.write_config(tmp_path / "train.yaml", **settings, output=str(tmp_path / "run"))
    real = CheckpointFolder.finish

    def finish(*arguments: Any) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(CheckpointFolder, "finish", finish)
    with pytest.raises(KeyboardInterrupt):
        runs.fit_here(config, "train.max_steps=2")
    assert runs.fit_here(config, "train.max_steps=2")["steps"] == 2


def test_killed_twice_with_checkpoints_on_s3_the_run_is_bitwise_the_uninterrupted_one(
    uninterrupted: Path, settings: dict[str, Any], tmp_path: Path, s3_url: str
) -> None:
    """Once within the first epoch and once after its end; a kill may fall into the writing of a checkpoint."""
    total = len(losses(uninterrupted))
    seed = random.randrange(10**6)
    kills = random.Random(seed).randrange(2, total // 3), random.Random(seed + 1).randrange(total // 2, total - 2)
    print(f"seed {seed}: SIGKILL after steps {kills[0]} and {kills[1]} of {total}")
    output = f"{s3_url}/runs/killed"
    config = runs.write_config(tmp_path / "train.yaml", **settings, output=output)
    for number, step in enumerate(kills):
        logs = tmp_path / f"logs-{number}"
        logs.mkdir()
        assert runs.kill_at_step(config, logs, step, signal.SIGKILL, TMPDIR=str(logs)) == -signal.SIGKILL
    folder = CheckpointFolder(output)
    folder.fs.pipe_file(f"{folder.root}/step-00000003-0badc0de/model.safetensors", b"half")  # of a kill while uploading
    runs.fit_here(config)
    assert_same_run(downloaded(output, tmp_path / "from-s3"), uninterrupted)
    left = {name.split("/")[-1] for name in folder.fs.ls(folder.root, detail=False)}
    assert {name for name in left if name.startswith("step-")} == {c.folder for c in folder.index().checkpoints}


def test_a_clean_stop_with_checkpoints_on_s3_continues_and_drops_old_ones(
    settings: dict[str, Any], tmp_path: Path, s3_url: str
) -> None:
    output = f"{s3_url}/runs/stopped"
    config = runs.write_config(tmp_path / "train.yaml", **settings, output=output)
    constant = "optim.schedule=constant"  # a run that was stopped by max_steps would have decayed by then
    runs.fit_here(config, "train.max_steps=14", constant)
    folder = CheckpointFolder(output)
    latest = folder.index().latest
    assert latest is not None
    assert latest.step == 14
    runs.fit_here(config, constant)
    straight = runs.write_config(tmp_path / "straight.yaml", **settings, output=str(tmp_path / "run"))
    runs.fit_here(straight, constant)
    assert_same_run(downloaded(output, tmp_path / "from-s3"), tmp_path / "run")
    assert len(folder.index().checkpoints) == 2  # keep_last, and the dropped ones are gone
    names = {entry.split("/")[-1] for entry in folder.fs.ls(folder.root, detail=False)}
    assert sum(name.startswith("step-") for name in names) == 2


def downloaded(output: str, local: Path) -> Path:
    """What `assert_same_run` compares, from a run on an object store."""
    folder = CheckpointFolder(output)
    (local / "final").mkdir(parents=True)
    (local / "metrics.jsonl").write_text(folder.get_text("metrics.jsonl"))
    folder.fs.get_file(f"{folder.root}/final/model.safetensors", str(local / "final" / "model.safetensors"))
    return local


@pytest.mark.parametrize("stage", ["write", "fsync", "rename", "switch", "cleanup"])
def test_a_crash_at_any_stage_of_a_checkpoint_leaves_the_previous_one_loadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    folder = CheckpointFolder(str(tmp_path / "run"))
    options = {"heldout_kl": None, "keep_last": 1, "keep_best": False}

    def write(content: str) -> Any:
        def fill(path: Path) -> None:
            (path / "model.safetensors").write_text(content)
            if stage == "write" and content == "second":
                raise KeyboardInterrupt

        return fill

    folder.save(1, write("first"), **options)

    def crash(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt  # not an Exception: nothing may tidy up, as with SIGKILL

    with monkeypatch.context() as patch:
        if stage == "fsync":
            patch.setattr(checkpoint, "_fsync", crash)
        elif stage == "rename":
            patch.setattr(checkpoint.os, "rename", crash)
        elif stage == "switch":
            patch.setattr(checkpoint.os, "replace", crash)
        elif stage == "cleanup":
            patch.setattr(CheckpointFolder, "_remove", crash)
        with pytest.raises(KeyboardInterrupt):
            folder.save(2, write("second"), **options)
    latest = folder.index().latest
    assert latest is not None
    expected = "second" if stage == "cleanup" else "first"  # after the switch the new one counts
    assert (folder.fetch(latest) / "model.safetensors").read_text() == expected
    entry = folder.save(3, write("third"), **options)  # and the run goes on
    assert (folder.fetch(entry) / "model.safetensors").read_text() == "third"
    assert [old.step for old in folder.index().checkpoints] == [3]
    assert not list((tmp_path / "run").glob(".writing-*"))


def test_the_best_checkpoint_is_kept_beside_the_last(tmp_path: Path) -> None:
    folder = CheckpointFolder(str(tmp_path / "run"))
    for step, kl in enumerate([3.0, 1.0, 2.0, 2.5], start=1):
        folder.save(
            step, lambda path: (path / "x").write_text("x"), heldout_kl=kl, keep_last=1, keep_best=True
        )  # fmt: skip
    assert [entry.step for entry in folder.index().checkpoints] == [2, 4]
    assert folder.index().latest.step == 4
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-00000002", "step-00000004"]


def test_a_damaged_checkpoint_names_its_file(tmp_path: Path) -> None:
    folder = CheckpointFolder(str(tmp_path / "run"))
    entry = folder.save(
        1, lambda path: (path / "model.safetensors").write_text("abc"), heldout_kl=None, keep_last=1, keep_best=False
    )  # fmt: skip
    (tmp_path / "run" / entry.folder / "model.safetensors").write_text("ab")
    with pytest.raises(checkpoint.TeacherCacheError, match=r"model.safetensors should have 3 bytes, found 2"):
        folder.fetch(entry)
