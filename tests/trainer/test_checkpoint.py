"""A checkpoint counts whole or not at all, and a run's URL never holds credentials."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from teachercache.errors import TeacherCacheError, UnsafeManifest, UsageError
from teachercache.store.store import Store
from trainer import checkpoint
from trainer.checkpoint import CheckpointFolder, resolve_model_folder


@pytest.mark.parametrize("stage", ["write", "fsync", "rename", "switch", "cleanup"])
def test_a_crash_at_any_stage_of_a_checkpoint_leaves_the_previous_one_loadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    folder = CheckpointFolder(str(tmp_path / "run"))
    options = {"heldout_kl": None, "keep_last": 1}

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
            patch.setattr(Store, "replace", crash)
        elif stage == "cleanup":
            patch.setattr(CheckpointFolder, "_remove", crash)
        with pytest.raises(KeyboardInterrupt):
            folder.save(2, write("second"), **options)
    latest = folder.index().latest
    assert latest is not None
    expected = "second" if stage == "cleanup" else "first"  # after the switch the new one counts
    assert (folder.fetch(latest) / "model.safetensors").read_text() == expected
    folder.save(3, write("third"), **options)  # and the run goes on
    (entry,) = folder.index().checkpoints
    assert entry.step == 3
    assert (folder.fetch(entry) / "model.safetensors").read_text() == "third"
    assert not list((tmp_path / "run").glob(".writing-*"))


def test_the_best_checkpoint_is_kept_next_to_the_last(tmp_path: Path) -> None:
    folder = CheckpointFolder(str(tmp_path / "run"))
    for step, kl in enumerate([3.0, 1.0, 2.0, 2.5], start=1):
        folder.save(step, lambda path: (path / "x").write_text("x"), heldout_kl=kl, keep_last=1)
    assert [entry.step for entry in folder.index().checkpoints] == [2, 4]
    assert folder.index().latest.step == 4
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-00000002", "step-00000004"]


def test_a_damaged_checkpoint_names_its_file(tmp_path: Path) -> None:
    folder = CheckpointFolder(str(tmp_path / "run"))
    folder.save(1, lambda path: (path / "model.safetensors").write_text("abc"), heldout_kl=None, keep_last=1)
    entry = folder.index().latest
    (tmp_path / "run" / entry.folder / "model.safetensors").write_text("ab")
    with pytest.raises(TeacherCacheError, match=r"model.safetensors should have 3 bytes, found 2"):
        folder.fetch(entry)


@pytest.mark.parametrize("url", ["s3://AKIAKEY:hushhush@bucket/run", "s3://bucket/run?secret=hushhush"])
@pytest.mark.parametrize("use", [CheckpointFolder, resolve_model_folder])
def test_credentials_in_a_url_are_refused_without_repeating_them(url: str, use: Any) -> None:
    with pytest.raises(UsageError) as caught:
        use(url)
    assert "hushhush" not in str(caught.value)


@pytest.mark.slow
def test_a_run_on_an_object_store_is_saved_fetched_and_swept(tmp_path: Path, any_s3_url: str) -> None:
    folder = CheckpointFolder(f"{any_s3_url}/runs/one")
    for step in (1, 2, 3):
        folder.save(step, lambda path: (path / "model.safetensors").write_text("abc"), heldout_kl=None, keep_last=2)
    folder.put("step-00000009-0badc0de/model.safetensors", b"half")  # of a kill while uploading
    folder.sweep()
    index = folder.index()
    assert [entry.step for entry in index.checkpoints] == [2, 3]
    assert [name.rstrip("/") for name in folder.store.folders("")] == [entry.folder for entry in index.checkpoints]
    assert (resolve_model_folder(folder.url) / "model.safetensors").read_text() == "abc"  # the newest
    folder.finish(lambda path: (path / "config.json").write_text("{}"))
    assert folder.index().finished
    assert [path.name for path in resolve_model_folder(folder.url).iterdir()] == ["config.json"]
    assert folder.get_text("nothing") == ""


def planted(run: CheckpointFolder, *entries: dict[str, Any], finished: bool = False) -> None:
    """A checkpoints.json that another user wrote."""
    checkpoints = [{"step": i, "files": {}, "heldout_kl": None, **entry} for i, entry in enumerate(entries, start=1)]
    run.put("checkpoints.json", json.dumps({"checkpoints": checkpoints, "finished": finished}).encode())


@pytest.mark.parametrize("name", ["{victim}/x", "../{folder}/x"])
def test_a_file_name_of_a_checkpoint_that_is_no_plain_name_writes_nothing(
    tmp_path: Path, s3_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to a bucket of students must not get files onto the machine that evaluates one."""
    downloads = tmp_path / "tmp"
    downloads.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(downloads))
    victim = tmp_path / "victim"
    victim.mkdir()
    name = name.format(victim=victim, folder=victim.name)
    run = CheckpointFolder(f"{s3_url}/evil/run")
    planted(run, {"folder": "step-00000001", "files": {"config.json": 2, name: 5}})
    run.put("step-00000001/config.json", b"{}")
    key = f"{run.store.root}/step-00000001/{name}"
    run.store.fs.call_s3("put_object", Bucket=key.split("/")[0], Key=key.split("/", 1)[1], Body=b"owned")
    with pytest.raises(UnsafeManifest, match=r"checkpoints\.json") as caught:
        resolve_model_folder(run.url)
    assert caught.value.exit_code == 2
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("name", ["/x", "..", "", "a/b", "x\n", "x\x00", ".bashrc", "ⅹ"])
def test_checkpoints_name_plain_files_alone(tmp_path: Path, name: str) -> None:
    run = CheckpointFolder(str(tmp_path / "run"))
    planted(run, {"folder": "step-00000001", "files": {name: 5}})
    with pytest.raises(UnsafeManifest, match=r"checkpoints\.json"):
        run.index()


def test_a_model_folder_of_a_store_is_downloaded_without_strange_names(
    tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = tmp_path / "tmp"
    downloads.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(downloads))
    run = CheckpointFolder(f"{s3_url}/students/one")
    run.put("config.json", b"{}")
    for key in ("..", "../x", "/etc/x", "._config.json"):
        full = f"{run.store.root}/{key}"
        run.store.fs.call_s3("put_object", Bucket=full.split("/")[0], Key=full.split("/", 1)[1], Body=b"owned")
    folder = resolve_model_folder(run.url)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [folder / "config.json"]


@pytest.mark.parametrize(
    "folder", ["{victim}", "../victim", "", ".", "..", "final", "step-1/../../victim", "step-١", "tensorboard"]
)
def test_a_folder_that_is_no_checkpoint_of_the_run_is_never_removed(tmp_path: Path, folder: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("kept")
    run = CheckpointFolder(str(tmp_path / "run"))
    options: dict[str, Any] = {"heldout_kl": None, "keep_last": 1}
    run.save(2, lambda path: (path / "x").write_text("x"), **options)
    planted(run, {"folder": folder.format(victim=victim)}, {"folder": "step-00000002", "files": {"x": 1}})
    before = sorted(tmp_path.rglob("*"))
    for use in (lambda: run.save(3, lambda path: None, **options), run.sweep, run.index):
        with pytest.raises(TeacherCacheError, match=r"checkpoints\.json names .*, which is no checkpoint of this run"):
            use()
    with pytest.raises(TeacherCacheError, match="no checkpoint of this run"):
        resolve_model_folder(run.url)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_stands_twice_is_damage_and_checkpoints_go_by_step(tmp_path: Path) -> None:
    run = CheckpointFolder(str(tmp_path / "run"))
    planted(run, {"folder": "step-00000001"}, {"folder": "step-00000001"})
    with pytest.raises(TeacherCacheError, match="step-00000001 twice"):
        run.index()
    planted(run, {"folder": "step-00000009", "step": 9}, {"folder": "step-00000004", "step": 4})
    assert [entry.step for entry in run.index().checkpoints] == [4, 9]
    run.save(6, lambda path: (path / "x").write_text("x"), heldout_kl=None, keep_last=2)
    assert [entry.step for entry in run.index().checkpoints] == [6, 9]
