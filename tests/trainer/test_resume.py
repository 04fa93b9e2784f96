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
from tests.trainer.small_blocks import small_blocks
from trainer import evaluate, fit, resume
from trainer.checkpoint import CheckpointFolder
from trainer.data import MixedCaches
from trainer.step import Step

EPOCHS = 3
STEPS_PER_EPOCH = 10  # of 128 tokens; about


SMALL_BLOCKS = "tests.trainer.small_blocks"


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Iterator[None]:
    with small_blocks():
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def settings(cache_url: str, student: Path) -> dict[str, Any]:
    return {
        "cache": cache_url,
        "student": str(student),
        "data": {"seq_len": 128},
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


@pytest.mark.slow
def test_killed_twice_at_random_steps_the_run_is_bitwise_the_uninterrupted_one(
    uninterrupted: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    total = len(losses(uninterrupted))
    assert total > 2 * STEPS_PER_EPOCH
    rng = random.Random(runs.random_seed())
    first, second = rng.randrange(2, total // 3), rng.randrange(total // 2, total - 2)  # after the first epoch's end
    print(f"SIGKILL after steps {first} and {second} of {total}")
    config = runs.write_config(tmp_path / "train.yaml", **settings, output=str(tmp_path / "run"))
    for step in (first, second):
        assert runs.kill_at_step(config, tmp_path / "run", step, signal.SIGKILL, module=SMALL_BLOCKS) == -signal.SIGKILL
    done = runs.trainer("fit", config, module=SMALL_BLOCKS)
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_sigterm_saves_at_once_and_the_same_command_continues(
    uninterrupted: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**settings, "checkpoint": {"every_steps": None}}
    config = runs.write_config(tmp_path / "train.yaml", **settings, output=str(tmp_path / "run"))
    assert runs.kill_at_step(config, tmp_path / "run", 5, signal.SIGTERM, module=SMALL_BLOCKS) == 1
    latest = CheckpointFolder(str(tmp_path / "run")).index().latest
    assert latest is not None
    assert latest.step >= 5
    done = runs.trainer("fit", config, module=SMALL_BLOCKS)
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
    seen, heldout_sequences = 0, evaluate.heldout_sequences

    def heldout(*arguments: Any, **options: Any) -> Iterator[Any]:
        nonlocal seen
        for sequence in heldout_sequences(*arguments, **options):
            seen += 1
            if seen == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield sequence

    monkeypatch.setattr(evaluate, "heldout_sequences", heldout)
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
    real = MixedCaches.with_states

    def with_states(*arguments: Any, **options: Any) -> Iterator[Any]:
        for number, pair in enumerate(real(*arguments, **options)):
            if number == 7:  # three steps of two, and one of the fourth
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
                away.wait(20)
            yield pair

    with monkeypatch.context() as patch:
        patch.setattr(MixedCaches, "with_states", with_states)
        # The save lets the store come back, or the reading thread would be waited for at the end.
        save = resume.Checkpointer.save
        patch.setattr(resume.Checkpointer, "save", lambda checkpoints: (away.set(), save(checkpoints)))
        with pytest.raises(fit.Stopped, match="saved step 3"):
            runs.fit_here(config)
    runs.fit_here(config)
    straight = runs.write_config(tmp_path / "straight.yaml", **accumulated, output=str(tmp_path / "straight"))
    runs.fit_here(straight)
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def test_a_length_curriculum_by_steps_is_the_same_after_a_kill(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reading thread is ahead by another number of steps then."""
    data = {"seq_len": 128, "length_curriculum": [[0, 32], [0.5, 128]]}
    steps = {"train": settings["train"] | {"epochs": None, "max_steps": 28}, "checkpoint": {"every_steps": 1}}
    straight, config = (
        runs.write_config(tmp_path / f"{name}.yaml", **(settings | steps | {"data": data}), output=str(tmp_path / name))
        for name in ("straight", "run")
    )
    runs.fit_here(straight)
    taken, real = iter(range(1, 19)), Step.run

    def killed(*arguments: Any, **options: Any) -> Any:
        if next(taken) == 18:
            raise MemoryError
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "run", killed)
        with pytest.raises(MemoryError):
            runs.fit_here(config)
    runs.fit_here(config)
    assert_same_run(tmp_path / "run", tmp_path / "straight")
    rows = [entry["rows"] for entry in runs.metrics(tmp_path / "run")]
    assert max(rows[:12]) <= 32 < max(rows[20:])


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


@pytest.mark.slow
def test_killed_twice_with_checkpoints_on_s3_the_run_is_bitwise_the_uninterrupted_one(
    uninterrupted: Path, settings: dict[str, Any], tmp_path: Path, s3_url: str
) -> None:
    """Once within the first epoch and once after its end; a kill may fall into the writing of a checkpoint."""
    total = len(losses(uninterrupted))
    rng = random.Random(runs.random_seed())
    kills = rng.randrange(2, total // 3), rng.randrange(total // 2, total - 2)
    print(f"SIGKILL after steps {kills[0]} and {kills[1]} of {total}")
    output = f"{s3_url}/runs/killed"
    config = runs.write_config(tmp_path / "train.yaml", **settings, output=output)
    for number, step in enumerate(kills):
        logs = tmp_path / f"logs-{number}"
        logs.mkdir()
        killed = runs.kill_at_step(config, logs, step, signal.SIGKILL, module=SMALL_BLOCKS, TMPDIR=str(logs))
        assert killed == -signal.SIGKILL
    folder = CheckpointFolder(output)
    folder.put("step-00000003-0badc0de/model.safetensors", b"half")  # of a kill while uploading
    runs.fit_here(config)
    assert_same_run(downloaded(output, tmp_path / "from-s3"), uninterrupted)
    left = {name.rstrip("/") for name in folder.store.folders("") if name.startswith("step-")}
    assert left == {c.folder for c in folder.index().checkpoints}


@pytest.mark.slow
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
    assert sum(name.startswith("step-") for name in folder.store.folders("")) == 2


def downloaded(output: str, local: Path) -> Path:
    """What `assert_same_run` compares, from a run on an object store."""
    folder = CheckpointFolder(output)
    (local / "final").mkdir(parents=True)
    (local / "metrics.jsonl").write_text(folder.get_text("metrics.jsonl"))
    final = folder.fetch_model("final") / "model.safetensors"
    (local / "final" / "model.safetensors").write_bytes(final.read_bytes())
    return local
