"""What killed workers leave on a disk is removed by the next one; what live ones hold is not."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pipeline.running.scratch import PREFIX, Scratch, sweep
from tests.pipeline.conftest import ROOT

WORKER = """
import sys, time
from pipeline.running.scratch import Scratch
scratch = Scratch()
(scratch.folder / "half.parquet").write_bytes(b"x" * 1000)
print(scratch.folder, flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_folder_of_a_killed_worker_is_removed_and_that_of_a_live_one_is_not(folder):
    process = subprocess.Popen([sys.executable, "-c", WORKER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    theirs = Path(process.stdout.readline().strip())  # empty where the process failed at once
    assert (theirs / "half.parquet").exists()
    mine = Scratch()
    assert theirs.exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert sweep(folder) == [theirs]
    assert not theirs.exists()
    assert mine.folder.exists()
    mine.close()
    assert not list(folder.glob(f"{PREFIX}*"))
