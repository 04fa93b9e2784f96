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
import os
import re
import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field

from teachercache import console
from teachercache.errors import MissingObject, TeacherCacheError, UnsafeManifest, UsageError
from teachercache.format.layout import FILE_NAME, check_name
from teachercache.store.failures import retry_while_unavailable
from teachercache.store.store import ObjectInfo, Store
from trainer import hub

INDEX = "checkpoints.json"
FINAL = "final"
STEP_FOLDER = re.compile(r"step-[0-9]{1,20}(-[0-9a-f]{1,32})?")
STORE_PATIENCE_S = 600.0
"""How long a run waits for an object store that does not answer before it gives up."""
T = TypeVar("T")


def wait_for_store(action: Callable[[], T], what: str) -> T:
    """Run `action`, again after growing pauses while the store is away, for STORE_PATIENCE_S; say so on stderr."""

    def say(error: Exception, wait_s: float) -> None:
        console.say(f"{what}: the store does not answer ({type(error).__name__}), again in {wait_s:.1f} s")

    return retry_while_unavailable(action, patience_s=STORE_PATIENCE_S, on_retry=say)


class CheckpointEntry(BaseModel):
    """One checkpoint of a run; `files` are sizes in bytes, with which a download is compared."""

    model_config = ConfigDict(frozen=True)
    step: int = Field(ge=0)
    folder: str
    files: dict[str, int]
    heldout_kl: float | None = None
    heldout_kl_of: dict[str, float] = {}
    """Of a run over several caches: that of each, by its name."""


class CheckpointIndex(BaseModel):
    """The contents of checkpoints.json, by step."""

    checkpoints: list[CheckpointEntry] = []
    finished: bool = False

    @property
    def latest(self) -> CheckpointEntry | None:
        """The newest checkpoint."""
        return self.checkpoints[-1] if self.checkpoints else None

    @property
    def best(self) -> CheckpointEntry | None:
        """The checkpoint with the lowest held-out KL, of those that were evaluated."""
        measured = [entry for entry in self.checkpoints if entry.heldout_kl is not None]
        return min(measured, key=lambda entry: entry.heldout_kl or 0.0) if measured else None


class CheckpointFolder:
    """A run's output folder, local or on an object store.

    Raises UsageError for a URL with credentials in it, before anything is opened. While the store is away every
    operation waits (STORE_PATIENCE_S).
    """

    def __init__(self, url: str) -> None:
        self.url, self.store = url, Store.open(url)
        self.local = Path(self.store.root) if self.store.is_local else None

    @property
    def disk(self) -> Path:
        """Where checkpoints are written first: the folder, or TMPDIR for one on an object store."""
        return self.local or Path(tempfile.gettempdir())

    def index(self) -> CheckpointIndex:
        """Return what counts, by step; empty when there is nothing yet.

        Raises TeacherCacheError when the file is damaged, and UnsafeManifest when it names what is no checkpoint of
        this run: folders of this index are read and removed, so this is where each of its names is judged.
        """
        try:
            text = self.get_text(INDEX)
            index = CheckpointIndex.model_validate_json(text) if text else CheckpointIndex()
        except ValueError as error:
            raise TeacherCacheError(f"{self.url}/{INDEX} is damaged: remove it to start anew, or restore it") from error
        named = Counter(name for entry in index.checkpoints for name in (entry.folder, f"step {entry.step}"))
        if twice := [name for name, count in named.items() if count > 1]:
            raise TeacherCacheError(f"{self.url}/{INDEX} is damaged: it has {ascii(twice[0])[1:-1]} twice; restore it")
        for entry in index.checkpoints:
            if STEP_FOLDER.fullmatch(entry.folder) is None:
                raise UnsafeManifest(
                    f"{self.url}/{INDEX} names {ascii(entry.folder)[:120]}, which is no checkpoint of this run (step-NUMBER): "
                    "nothing was written or removed; restore the file, or do not trust it"
                )
            for name in entry.files:
                check_name(name, f"{self.url}/{INDEX}")
        return index.model_copy(update={"checkpoints": sorted(index.checkpoints, key=lambda entry: entry.step)})

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        *,
        heldout_kl: float | None,
        keep_last: int,
        heldout_kl_of: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Let `write` fill an empty local folder, store it as the newest checkpoint, and drop the ones not kept.

        The `keep_last` newest are kept, and the one with the lowest held-out KL. Does nothing where `step` is stored.
        """
        index = self.index()
        if any(entry.step == step for entry in index.checkpoints):
            return
        with self._staging() as staging:
            write(staging)
            files = {path.name: path.stat().st_size for path in sorted(staging.iterdir())}
            folder = f"step-{step:08d}" if self.local else f"step-{step:08d}-{uuid.uuid4().hex[:8]}"
            self._store(staging, folder)
        entry = CheckpointEntry(
            step=step, folder=folder, files=files, heldout_kl=heldout_kl, heldout_kl_of=dict(heldout_kl_of)
        )
        index = CheckpointIndex(checkpoints=sorted([*index.checkpoints, entry], key=lambda entry: entry.step))
        kept = index.checkpoints[-keep_last:]
        if index.best is not None and index.best not in kept:
            kept = [index.best, *kept]
        self._switch(CheckpointIndex(checkpoints=kept))
        for old in index.checkpoints:  # after the switch: a crash here leaves a folder too many, never one too few
            if old not in kept:
                self._remove(old.folder)

    def finish(self, write: Callable[[Path], None]) -> None:
        """Store the final weights under `final` and mark the run finished."""
        with self._staging() as staging:
            write(staging)
            self._remove(FINAL)
            self._store(staging, FINAL)
        self._switch(self.index().model_copy(update={"finished": True}))

    def sweep(self) -> None:
        """Remove what a killed run left on an object store: checkpoints that were uploaded in part and never named.

        For the start of a run, when no one else writes here. (Locally `_staging` and `_store` clear up as they go.)
        """
        named = {entry.folder for entry in self.index().checkpoints}
        if self.local is None:
            for folder in self._patiently(partial(self.store.folders, ""), "listing"):
                if folder.startswith("step-") and folder.rstrip("/") not in named:
                    self._remove(folder.rstrip("/"))

    def fetch(self, entry: CheckpointEntry) -> Path:
        """Return the checkpoint as a local folder. TeacherCacheError names a file that is missing or has another size."""
        target = self.fetch_model(entry.folder)
        for name, size in entry.files.items():
            found = (target / name).stat().st_size if (target / name).is_file() else None
            if found != size:
                raise TeacherCacheError(
                    f"checkpoint file {self.url}/{entry.folder}/{name} should have {size} bytes, found "
                    f"{'none' if found is None else found}: remove this checkpoint from {INDEX} to use an older one"
                )
        return target

    def fetch_model(self, folder: str = "") -> Path:
        """Return a local folder with the files of a model folder of this output, or of the URL itself.

        Of a remote one only plain file names are downloaded: a key such as `step-1/..` makes no path here.
        """
        if self.local:
            return self.local / folder
        target = Path(tempfile.mkdtemp(prefix="checkpoint-"))
        _downloads.add(target)
        prefix = f"{folder}/" if folder else ""

        def copy(info: ObjectInfo) -> None:
            with (target / info.path.removeprefix(prefix)).open("wb") as out:
                self.store.download(info.path, info.size, out)

        for info in self._patiently(partial(self.store.list, prefix), "listing"):
            if FILE_NAME.fullmatch(info.path.removeprefix(prefix)):
                self._patiently(partial(copy, info), "reading")
        return target

    def put(self, name: str, data: bytes | Path) -> None:
        """Replace a file of the run (its logs, its summary) by bytes or a local file."""
        self._patiently(partial(self.store.replace, name, data), "writing")

    def get_text(self, name: str) -> str:
        """Return a small file of the run, or "" if there is none."""
        try:
            return self._patiently(partial(self.store.read, name), "reading").decode()
        except MissingObject:
            return ""

    def kept_id(self, name: str) -> str:
        """Return the id that the run keeps in a file, or ""."""
        kept = self.get_text(name)
        return check_name(kept, f"{self.url}/{name}") if kept else ""

    def _patiently(self, action: Callable[[], T], doing: str) -> T:
        return action() if self.local else wait_for_store(action, f"{doing} {self.url}")

    @contextmanager
    def _staging(self) -> Iterator[Path]:
        """Yield an empty folder on the file system of a local output; remove it afterwards unless it was renamed."""
        if self.local:
            self.local.mkdir(parents=True, exist_ok=True)
            for stale in self.local.glob(".writing-*"):  # of a run that was killed
                shutil.rmtree(stale, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=".writing-", dir=self.local))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _store(self, staging: Path, folder: str) -> None:
        if self.local is None:
            for path in sorted(staging.iterdir()):
                self.put(f"{folder}/{path.name}", path)
            return
        target = self.local / folder
        if target.exists():  # left by a crash between the rename and the switch
            shutil.rmtree(target)
        for path in [*staging.iterdir(), staging]:
            _fsync(path)
        os.rename(staging, target)
        _fsync(self.local)

    def _switch(self, index: CheckpointIndex) -> None:
        self.put(INDEX, index.model_dump_json(indent=1).encode())

    def _remove(self, folder: str) -> None:
        if self.local:
            shutil.rmtree(self.local / folder, ignore_errors=True)
            return
        for info in self._patiently(partial(self.store.list, f"{folder}/"), "listing"):
            self._patiently(partial(self.store.delete, info.path), "removing from")


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
    """Return the local model folder that a configuration means: a Hugging Face folder, a Hub id, or what a run trained.

    Of a run that is `final` if the run finished, otherwise its newest checkpoint. Remote folders are downloaded; `discard`
    removes the copy. Raises UsageError when there is neither.
    """
    if hub.is_hub_id(url):
        return hub.snapshot(url)
    run = CheckpointFolder(url)
    if run.local and not run.local.is_dir():
        raise UsageError(
            f"there is no folder {url}; expected a Hugging Face model folder, an output of this trainer, or a Hub id "
            "(owner/model, owner/model@revision)"
        )
    if run.get_text("config.json"):
        return run.fetch_model()
    index = run.index()
    if index.latest is None:
        raise UsageError(f"{url} holds neither config.json nor {INDEX}: it is no model folder and no trainer output")
    if index.finished:
        return run.fetch_model(FINAL)
    if "adapter_model.safetensors" in index.latest.files:
        raise UsageError(
            f"{url} is a LoRA run that has not finished, so its checkpoints hold adapters alone: finish it (the same "
            "command continues), and its merged model is in `final`"
        )
    return run.fetch(index.latest)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
