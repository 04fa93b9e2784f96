"""Checkpoints: Hugging Face folders plus optimiser and data state, written aside and switched atomically.

    <output>/checkpoints.json        which checkpoints count; replaced atomically, and nothing else decides
    <output>/step-00000200/          config.json, model.safetensors, tokenizer files: loads in plain transformers
                                     (with LoRA adapter_model.safetensors instead of the weights)
                                     optimizer.pt (moments, RNG), trainer_state.json (step, data state, configuration)
    <output>/final/                  the last weights (adapters merged) and tokenizer, without optimiser state

A folder is written under another name, made durable, renamed, and only then named in checkpoints.json, so a crash at
any moment leaves the previous checkpoint. On S3 a folder carries a random suffix instead of being renamed, and the
PUT of checkpoints.json is the switch.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
from pydantic import BaseModel, ConfigDict

from teachercache.errors import TeacherCacheError, UsageError
from trainer.patience import patiently

INDEX = "checkpoints.json"
STATE = "trainer_state.json"
OPTIMIZER = "optimizer.pt"


class CheckpointEntry(BaseModel):
    model_config = ConfigDict(frozen=True)

    step: int
    folder: str
    files: dict[str, int]
    """Size in bytes of each file: a download is compared with it."""
    heldout_kl: float | None = None


class CheckpointIndex(BaseModel):
    """The contents of checkpoints.json, oldest first."""

    checkpoints: list[CheckpointEntry] = []
    finished: bool = False

    @property
    def latest(self) -> CheckpointEntry | None:
        return self.checkpoints[-1] if self.checkpoints else None

    @property
    def best(self) -> CheckpointEntry | None:
        measured = [entry for entry in self.checkpoints if entry.heldout_kl is not None]
        return min(measured, key=lambda entry: entry.heldout_kl or 0.0) if measured else None


class CheckpointFolder:
    """A run's output folder, local or on an object store."""

    def __init__(self, url: str, *, patience_s: float = 600.0) -> None:
        self.url, self._patience_s = url, patience_s
        self.fs, self.root = fsspec.core.url_to_fs(url, **({"use_listings_cache": False} if _remote(url) else {}))
        self.local = Path(self.root) if not _remote(url) else None

    def _patiently(self, action: Callable[[], Any], what: str) -> Any:
        return patiently(action, patience_s=self._patience_s, what=f"{what} {self.url}") if not self.local else action()

    def exists(self, name: str) -> bool:
        return bool(self._patiently(lambda: self.fs.exists(f"{self.root}/{name}"), "looking at"))

    def index(self) -> CheckpointIndex:
        """What counts; empty when there is nothing yet. Raises TeacherCacheError when the file is damaged."""
        path = f"{self.root}/{INDEX}"
        try:
            text = self._patiently(lambda: self.fs.cat_file(path), "reading")
        except FileNotFoundError:
            return CheckpointIndex()
        try:
            return CheckpointIndex.model_validate_json(text)
        except ValueError as error:
            raise TeacherCacheError(f"{path} is damaged: remove it to start anew, or restore it") from error

    def save(
        self, step: int, write: Callable[[Path], None], *, heldout_kl: float | None, keep_last: int, keep_best: bool
    ) -> CheckpointEntry:
        """Let `write` fill an empty local folder, store it as the newest checkpoint, and drop the ones not kept."""
        index = self.index()
        known = [entry for entry in index.checkpoints if entry.step == step]
        if known:
            return known[0]
        with self._staging() as staging:
            write(staging)
            files = {path.name: path.stat().st_size for path in sorted(staging.iterdir())}
            folder = f"step-{step:08d}" if self.local else f"step-{step:08d}-{uuid.uuid4().hex[:8]}"
            self._store(staging, folder)
        entry = CheckpointEntry(step=step, folder=folder, files=files, heldout_kl=heldout_kl)
        index.checkpoints.append(entry)
        kept = index.checkpoints[-keep_last:]
        if keep_best and index.best is not None and index.best not in kept:
            kept = [index.best, *kept]
        dropped = [old for old in index.checkpoints if old not in kept]
        self._write_index(CheckpointIndex(checkpoints=kept, finished=False))
        for old in dropped:  # after the switch: a crash here leaves a folder too many, never one too few
            self._patiently(partial(self._remove, old.folder), "removing from")
        return entry

    def finish(self, write: Callable[[Path], None]) -> None:
        """Store the final weights under `final` and mark the run finished."""
        index = self.index()
        with self._staging() as staging:
            write(staging)
            self._remove("final")
            self._store(staging, "final")
        self._write_index(index.model_copy(update={"finished": True}))

    def sweep(self) -> None:
        """Remove what a killed run left on an object store: checkpoints that were uploaded in part and never named.

        For the start of a run, when nobody else writes here. (Locally `_Staging` and `_store` clear up as they go.)
        """
        if self.local is not None:
            return
        named = {entry.folder for entry in self.index().checkpoints}
        try:
            names = self._patiently(lambda: self.fs.ls(self.root, detail=False), "listing")
        except FileNotFoundError:
            return
        for folder in (str(name).rstrip("/").rsplit("/", 1)[-1] for name in names):
            if folder.startswith("step-") and folder not in named:
                self._patiently(partial(self._remove, folder), "removing from")

    def fetch(self, entry: CheckpointEntry) -> Path:
        """A local folder with the checkpoint's files; downloaded if it is remote.

        Raises TeacherCacheError, naming the file, when one is missing or has another size.
        """
        target = self.local / entry.folder if self.local else self._download(entry.folder, list(entry.files))
        for name, size in entry.files.items():
            path = target / name
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                raise TeacherCacheError(
                    f"checkpoint file {self.root}/{entry.folder}/{name} should have {size} bytes, found "
                    f"{'none' if found is None else found}: remove this checkpoint from {INDEX} to use an older one"
                )
        return target

    def fetch_model(self, folder: str = "") -> Path:
        """A local folder with the files of a model folder of this output, or of the URL itself; no sizes are known."""
        if self.local:
            return self.local / folder
        found = self._patiently(lambda: self.fs.ls(f"{self.root}/{folder}".rstrip("/"), detail=True), "listing")
        return self._download(folder, [entry["name"].rsplit("/", 1)[-1] for entry in found if entry["type"] == "file"])

    def _download(self, folder: str, names: list[str]) -> Path:
        target = Path(tempfile.mkdtemp(prefix="checkpoint-"))
        _downloads.add(target)
        for name in names:
            source = "/".join(part for part in (self.root, folder, name) if part)
            self._patiently(partial(self.fs.get_file, source, str(target / name)), "reading")
        return target

    def put_file(self, name: str, path: Path) -> None:
        """Replace a file of the run by a local one."""
        self._patiently(lambda: self.fs.put_file(str(path), f"{self.root}/{name}"), "writing")

    def put_text(self, name: str, text: str) -> None:
        """Replace a small file of the run (its logs, on an object store)."""
        self._patiently(lambda: self.fs.pipe_file(f"{self.root}/{name}", text.encode()), "writing")

    def get_text(self, name: str) -> str:
        """A small file of the run, or "" if there is none."""
        try:
            return self._patiently(lambda: self.fs.cat_file(f"{self.root}/{name}"), "reading").decode()
        except FileNotFoundError:
            return ""

    def _staging(self) -> _Staging:
        return _Staging(self.local)

    def _store(self, staging: Path, folder: str) -> None:
        if self.local:
            target = self.local / folder
            if target.exists():  # left by a crash between the rename and the switch
                shutil.rmtree(target)
            for path in [*staging.iterdir(), staging]:
                _fsync(path)
            os.rename(staging, target)
            _fsync(self.local)
            return
        for path in sorted(staging.iterdir()):
            remote = f"{self.root}/{folder}/{path.name}"
            self._patiently(partial(self.fs.put_file, str(path), remote), "writing")

    def _write_index(self, index: CheckpointIndex) -> None:
        text = index.model_dump_json(indent=1)
        if not self.local:
            self.put_text(INDEX, text)
            return
        aside = self.local / f".{INDEX}.{uuid.uuid4().hex}"
        aside.write_text(text, encoding="utf-8")
        _fsync(aside)
        os.replace(aside, self.local / INDEX)
        _fsync(self.local)

    def _remove(self, folder: str) -> None:
        if self.local:
            shutil.rmtree(self.local / folder, ignore_errors=True)
            return
        for name in self.fs.find(f"{self.root}/{folder}"):
            self.fs.rm_file(name)  # one by one: not every S3 server deletes many in one request


class _Staging:
    """An empty folder on the same file system as `parent`, gone afterwards unless it was renamed."""

    def __init__(self, parent: Path | None) -> None:
        self._parent = parent

    def __enter__(self) -> Path:
        if self._parent:
            self._parent.mkdir(parents=True, exist_ok=True)
            for stale in self._parent.glob(".writing-*"):  # of a run that was killed
                shutil.rmtree(stale, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=".writing-", dir=self._parent))
        return self.path

    def __exit__(self, *_exception: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


_downloads: set[Path] = set()
"""Local copies of remote folders that this process made."""


def discard(folder: Path) -> None:
    """Remove a local copy of a remote folder once it was read; anything else is left alone."""
    if folder in _downloads:
        _downloads.remove(folder)
        shutil.rmtree(folder, ignore_errors=True)


@atexit.register
def _discard_all() -> None:
    for folder in list(_downloads):
        discard(folder)


def resolve_model_folder(url: str) -> Path:
    """The local model folder that a configuration means: a Hugging Face folder, or what a run trained.

    Of a finished run that is `final`, of any other its newest checkpoint. Remote folders are downloaded; `discard`
    removes the copy. Raises UsageError when there is neither.
    """
    run = CheckpointFolder(url)
    if run.local and not run.local.is_dir():
        raise UsageError(f"there is no folder {url}; expected a Hugging Face model folder or an output of this trainer")
    if run.exists("config.json"):
        return run.fetch_model()
    index = run.index()
    if index.latest is None:
        raise UsageError(f"{url} holds neither config.json nor {INDEX}: it is no model folder and no trainer output")
    if index.finished:
        return run.fetch_model("final")
    if "adapter_model.safetensors" in index.latest.files:
        raise UsageError(
            f"{url} is a LoRA run that has not finished, so its checkpoints hold adapters alone: finish it (the same "
            "command continues), and its merged model is in `final`"
        )
    return run.fetch(index.latest)


def read_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / STATE).read_text(encoding="utf-8"))


def write_state(folder: Path, state: dict[str, Any]) -> None:
    (folder / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")


def _remote(url: str) -> bool:
    return "://" in url and not url.startswith("file://")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
