"""`student` and `teacher` may be ids on the Hugging Face Hub, `cache` a data set there: offline, and asked by HTTP."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import teachercache
from teachercache.errors import UsageError
from teachercache.views.push import push
from tests.fake_hub import FakeHub
from tests.trainer import runs
from tests.trainer.test_cli import Done, run  # noqa: F401  a fixture
from trainer import hub as ids
from trainer.checkpoint import CheckpointFolder, resolve_model_folder

COMMITS = ("1" * 40, "2" * 40)


def publish(cache: Path, model: str, folder: Path, commit: str, ref: str) -> Path:
    """Put a folder where the Hub's client keeps a model that it has downloaded."""
    place = cache / f"models--{model.replace('/', '--')}"
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / ref).write_text(commit)
    shutil.copytree(folder, place / "snapshots" / commit)
    return place / "snapshots" / commit


@pytest.fixture
def offline(tmp_path: Path, teacher: Path, student: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub's cache with owner/teacher, and two revisions of owner/student, on a machine that may not ask the Hub."""
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    publish(cache, "owner/teacher", teacher, COMMITS[0], "main")
    publish(cache, "owner/student", student, COMMITS[0], "main")
    publish(cache, "owner/student", teacher, COMMITS[1], "v2")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return cache


def test_ids_are_told_from_paths_and_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build/student").mkdir(parents=True)
    for name in ("owner/model", "Qwen/Qwen2.5-0.5B", "a/b@v1.0", "a/b@refs/pr/3"):
        assert ids.is_hub_id(name), name
    for name in ("build/student", "./a/b", "/a/b", "~/a", "a", "a/b/c", "s3://a/b", "a/b@", "a/../b", "a /b", "../x"):
        assert not ids.is_hub_id(name), name


@pytest.mark.usefixtures("offline")
def test_fit_eval_and_init_student_take_ids(
    run: Callable[..., Done],  # noqa: F811
    cache_url: str,
    tmp_path: Path,
) -> None:
    config = runs.write_config(
        tmp_path / "t.yaml", cache=cache_url, student="owner/student", output=str(tmp_path / "run"),
        data={"seq_len": 128}, train={"threads": 1, "max_steps": 1}, log={"tensorboard": False},
    )  # fmt: skip
    online = ["teacher=owner/teacher", "loss={method: online, tail: null}"]
    for overrides in ([], ["train.max_steps=2"], [f"output={tmp_path / 'online'}", *online]):
        done = run("fit", config, *overrides)
        assert done.returncode == 0, done.stderr
    state = CheckpointFolder(str(tmp_path / "run"))
    assert state.index().finished
    done = run("eval", config, "student=owner/student@v2", "teacher=owner/teacher", "--json")
    assert done.returncode == 0, done.stderr
    assert '"top1_agreement": 0.99' in done.stdout or '"top1_agreement": 1.0' in done.stdout  # v2 is the teacher itself
    done = run("init-student", "--teacher", "owner/teacher", "--out", tmp_path / "cut")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cut/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("owner/other", "hf download owner/other"),
        ("owner/student@v9", "hf download owner/student --revision v9"),
    ],
)
def test_what_is_not_in_the_cache_says_how_to_get_it(offline: Path, name: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_model_folder(name)
    message = str(caught.value)
    assert said in message
    assert str(offline) in message
    assert "no folder here" in message


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_download_is_named(offline: Path, missing: str) -> None:
    (offline / "models--owner--student/snapshots" / COMMITS[0] / missing).unlink()
    with pytest.raises(UsageError, match=f"holds no .*{missing.rsplit('.')[-1]}.*hf download owner/student"):
        resolve_model_folder("owner/student")


# ---- by HTTP -------------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_fit_resumes_and_evaluates_with_everything_on_the_hub(
    run: Callable[..., Done],  # noqa: F811
    hub: FakeHub,
    cache_url: str,
    student: Path,
    teacher: Path,
    tmp_path: Path,
) -> None:
    push(teachercache.open(cache_url), "hf://datasets/owner/rows")
    hub.publish("models", "owner/student", files_of(student), private=True)
    hub.publish("models", "owner/teacher", files_of(teacher))
    here, there = (tmp_path / name for name in ("here", "there"))
    for output, cache, name in (
        (here, cache_url, str(student)), (there, "hf://datasets/owner/rows", "owner/student"),
    ):  # fmt: skip
        config = runs.write_config(
            tmp_path / f"{output.name}.yaml", cache=cache, student=name, output=str(output), data={"seq_len": 128},
            train={"threads": 1, "max_steps": 2}, log={"tensorboard": False},
        )  # fmt: skip
        for steps in (2, 3):  # the second run resumes
            done = run("fit", config, f"train.max_steps={steps}")
            assert done.returncode == 0, done.stderr
        assert "hf_write" not in done.stdout + done.stderr
    ours, theirs = (files_of(folder / "final")["model.safetensors"] for folder in (here, there))
    assert ours == theirs, "where the rows and the weights come from changes nothing"
    done = run("eval", config, "teacher=owner/teacher", "--json")
    assert done.returncode == 0, done.stderr
    for override in ("output=hf://datasets/owner/run", "train.register=true"):
        done = run("fit", config, override)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "is read only" in done.stderr


@pytest.mark.parametrize("name", ["../../../evil.json", "a/../../../../evil.json", "/tmp/teachercache-evil/evil.json"])
def test_a_model_with_a_hostile_file_name_writes_nothing_outside(
    hub: FakeHub, student: Path, tmp_path: Path, name: str
) -> None:
    hub.publish("models", "owner/student", files_of(student) | {name: b"evil"})
    with pytest.raises(UsageError, match="Invalid filename") as caught:
        resolve_model_folder("owner/student")
    assert "hf download" not in str(caught.value), "another machine would not help"
    assert list(tmp_path.rglob("evil.json")) == []
    assert not Path("/tmp/teachercache-evil").exists()


@pytest.mark.parametrize(
    ("name", "token", "said"),
    [
        ("owner/none", "hf_write", "neither a folder here nor a model on the Hugging Face Hub"),
        ("owner/student", "", "neither a folder here nor a model on the Hugging Face Hub"),
        ("owner/student@v9", "hf_write", "RevisionNotFoundError"),
        ("owner/student", "hf_wrong_secret", "401"),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_one_line(
    hub: FakeHub, student: Path, monkeypatch: pytest.MonkeyPatch, name: str, token: str, said: str
) -> None:
    hub.publish("models", "owner/student", files_of(student), private=True)
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UsageError, match=said) as caught:
        resolve_model_folder(name)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)
