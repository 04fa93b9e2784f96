"""Data sets on the Hugging Face Hub: the files of one commit as a file system, and a commit to one.

Endpoint and token come from the Hub's own client: HF_ENDPOINT, HF_TOKEN, or what `hf auth login` stored.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, HfFileSystem, constants
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    disable_progress_bars,
    hf_raise_for_status,
    http_backoff,
)
from huggingface_hub.utils import (
    logging as hub_logging,
)

from teachercache.errors import UsageError
from teachercache.store.failures import explain
from teachercache.urls import refuse_credentials

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
_URL = re.compile(rf"hf://datasets/(?P<repo>{_NAME}/{_NAME})(@(?P<revision>[A-Za-z0-9][A-Za-z0-9_.%-]*))?/?")
READ_TIMEOUT_S = 60.0
for _logger in (
    "httpx",
    "httpx2",
):  # of the Hub's client: their lines quote URLs, which are signed where they lead elsewhere
    logging.getLogger(_logger).setLevel(logging.WARNING)
MOST_FILES = 25_000  # that one commit takes


def parse(url: str) -> tuple[str, str | None]:
    """Return ORG/NAME and the revision, if any, of a URL; UsageError for a URL of another form."""
    match = _URL.fullmatch(url)
    if match is None:
        raise UsageError(
            f"{url!a}: expected hf://datasets/ORG/NAME or hf://datasets/ORG/NAME@REVISION; a model is ORG/NAME."
        )
    return match["repo"], match["revision"]


class HubFiles(HfFileSystem):
    """The files of one commit. They are listed once, by `open_commit`; a read is one range request."""

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Return bytes [start, end) of a file, fewer where it ends before."""
        first = start or 0
        headers = build_hf_headers(token=self.token)
        headers["Range"] = f"bytes={first}-{'' if end is None else end - 1}"
        # A rate limit says how long to wait; every other failure is the store's to repeat.
        answer = http_backoff(
            "GET", self.url(path), headers=headers, timeout=READ_TIMEOUT_S, max_retries=1, retry_on_exceptions=(),
            retry_on_status_codes=429,
        )  # fmt: skip
        hf_raise_for_status(answer)
        data: bytes = answer.content
        return data if answer.status_code == 206 else data[first:end]


def open_commit(files: HubFiles, url: str) -> str:
    """List the commit that a URL means now, and return the path of its root: datasets/ORG/NAME@SHA.

    Cost: two requests, and one for each thousand files.
    """
    repo, revision = parse(url)
    refuse_credentials(files.endpoint, "the Hub's endpoint")
    api = HfApi(endpoint=files.endpoint, token=files.token)
    root = f"datasets/{repo}@{api.repo_info(repo, repo_type='dataset', revision=revision).sha}"
    files.find(root)
    return root


@dataclass(frozen=True, slots=True)
class Head:
    """The newest commit of a data set. `digests` are the sha256 of LFS files, git's own of the others, by path."""

    commit: str
    digests: Mapping[str, str]


class HubWriter:
    """One data set on the Hub, to which a commit is added. Every error is one of ours."""

    def __init__(self, url: str) -> None:
        """Use the data set at `url`, hf://datasets/ORG/NAME. Touches nothing yet."""
        self.url = url
        self.repo, revision = parse(url)
        if revision is not None:
            raise UsageError(f"{url!a}: a push goes to the main branch; expected hf://datasets/ORG/NAME.")
        refuse_credentials(constants.ENDPOINT, "the Hub's endpoint")
        self._api = HfApi()

    def head(self, *, private: bool) -> Head:
        """Return the newest commit; a data set that does not exist is made, `private` or not."""
        with self._explained():
            self._api.create_repo(self.repo, repo_type="dataset", private=private, exist_ok=True)
            commit = str(self._api.repo_info(self.repo, repo_type="dataset", revision="main").sha)
            tree = self._api.list_repo_tree(self.repo, recursive=True, revision=commit, repo_type="dataset")
            digests = {f.path: f.lfs.sha256 if f.lfs else f.blob_id for f in tree if isinstance(f, RepoFile)}
        if ".gitignore" in digests:
            raise UsageError(f"{self.url} has a .gitignore, which would keep files out of the commit; remove it.")
        return Head(commit, digests)

    def upload(self, files: Mapping[str, Path]) -> list[CommitOperationAdd]:
        """Upload files by their path in the data set, for a later `commit`; what the Hub has already is not sent again."""
        with self._explained(), _quiet():
            added = [CommitOperationAdd(path, file) for path, file in files.items()]
            self._api.preupload_lfs_files(self.repo, added, repo_type="dataset", revision="main")
        if kept := [operation.path_in_repo for operation in added if operation.path_or_fileobj != b""]:
            raise UsageError(
                f"{self.url} does not keep {kept[0]} in LFS; add `*.parquet filter=lfs diff=lfs merge=lfs -text` to its "
                ".gitattributes."
            )
        return added

    def commit(
        self, parent: str, uploaded: Sequence[CommitOperationAdd], objects: Mapping[str, bytes], message: str
    ) -> str:
        """Make uploaded files and small objects visible at once, and return the new commit.

        Raises StaleParent where `parent` is not the newest commit any more.
        """
        with self._explained(), _quiet():
            operations = [*uploaded, *(CommitOperationAdd(path, data) for path, data in objects.items())]
            done = self._api.create_commit(
                self.repo, operations, commit_message=message, repo_type="dataset", parent_commit=parent
            )
        return str(done.oid)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            ours = explain(error, self.url, endpoint=constants.ENDPOINT)
            if ours is error:
                raise
            raise ours from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the client's own bars and lines back: its warnings quote upload URLs, which are signed."""
    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)
    disable_progress_bars()
    try:
        yield
    finally:
        hub_logging.set_verbosity(before)


def is_stored(data: bytes, digest: str) -> bool:
    """Return whether a file with a `Head`'s digest has this content."""
    blob = b"blob %d\0" % len(data) + data
    found = (hashlib.sha256(data).hexdigest(), hashlib.sha1(blob, usedforsecurity=False).hexdigest())
    return digest in found
