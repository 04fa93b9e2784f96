"""Running `python -m trainer` as a child process, as a user does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def environment(**extra: str) -> dict[str, str]:
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", **extra}


def write_config(path: Path, **sections: Any) -> Path:
    """A training configuration as YAML (JSON is YAML)."""
    path.write_text(json.dumps(sections), encoding="utf-8")
    return path


def trainer(*arguments: str | Path, timeout: float = 200, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment(**extra))


def fit_here(config: Path, *overrides: str) -> dict[str, Any]:
    """`fit` in this process: the same code without the seconds of imports."""
    from trainer.config import load_config
    from trainer.fit import fit

    return fit(load_config(config, overrides))


def start_trainer(*arguments: str | Path, **extra: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trainer", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(**extra)
    )


def kill_at_step(config: Path, folder: Path, step: int, number: signal.Signals, **extra: str) -> int:
    """Start `fit`, send the signal once `step` is logged below `folder`, and return the exit status.

    A run whose output is remote logs into its temporary folder: give it TMPDIR=folder.
    """
    process = start_trainer("fit", config, **extra)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        log = next(folder.rglob("metrics.jsonl"), None)
        if log and log.read_text().count('"train"') >= step:
            process.send_signal(number)
            break
        time.sleep(0.002)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0, f"the run ended before step {step}: {output}"
    return process.returncode


def metrics(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]
