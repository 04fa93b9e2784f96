"""Where a worker builds its files before they are uploaded, and what killed workers left there.

A worker that is killed (a spot notice, `ray job stop`, the OOM killer) cannot tidy up, and half a gigabyte a shard fills
the disk of a node that lives for weeks. Each worker holds a lock on its folder while it lives; the next worker on the
machine removes the folders that are not held.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from pathlib import Path

PREFIX = "teachercache-worker-"
LOCK = "held"


class Scratch:
    """A folder below TMPDIR that is removed by `close`, or by the next worker on this machine."""

    def __init__(self) -> None:
        sweep(Path(tempfile.gettempdir()))
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        taken = self.folder / "taken"
        self._lock = taken.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        taken.rename(self.folder / LOCK)  # it is seen only once it is held

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def sweep(parent: Path) -> list[Path]:
    """Remove the folders of workers that are gone and return them. One whose lock cannot be read is left alone."""
    gone = []
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):  # a folder that is being made has no lock yet, and stays
        try:
            with lock.open("r+") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
                gone.append(lock.parent)
        except OSError:  # held by a live worker, another user's, or already removed
            continue
    return gone
