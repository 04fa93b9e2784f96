"""Running `python -m trainer` as a child process, as a user does."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]


def environment(**extra: str) -> dict[str, str]:
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", **extra}


def write_config(path: Path, **sections: Any) -> Path:
    """A training configuration as YAML (JSON is YAML)."""
    path.write_text(json.dumps(sections), encoding="utf-8")
    return path


def trainer(
    *arguments: str | Path, module: str = "trainer", timeout: float = 200, **extra: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment(**extra))


def fit_here(config: Path, *overrides: str) -> dict[str, Any]:
    """`fit` in this process: the same code without the seconds of imports."""
    from trainer.config import load_config
    from trainer.fit import fit

    return fit(load_config(config, overrides))


def start_trainer(*arguments: str | Path, module: str = "trainer", **extra: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(**extra)
    )


def kill_at_step(
    config: Path, folder: Path, step: int, number: signal.Signals, *, module: str = "trainer", **extra: str
) -> int:
    """Start `fit`, send the signal once `step` is logged below `folder`, and return the exit status.

    A run whose output is remote logs into its temporary folder: give it TMPDIR=folder.
    """
    process = start_trainer("fit", config, module=module, **extra)

    def reached() -> bool:
        log = next(folder.rglob("metrics.jsonl"), None)
        return process.poll() is not None or (log is not None and log.read_text().count('"train"') >= step)

    try:
        wait_for(reached, 240, f"step {step}", interval_s=0.01)
    finally:
        if process.poll() is None:
            process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode != 0, f"the run ended before step {step}: {output}"
    return process.returncode


def random_seed() -> int:
    """A new seed each time, printed; TEACHERCACHE_TEST_SEED repeats one."""
    seed = int(os.environ.get("TEACHERCACHE_TEST_SEED") or random.randrange(10**6))
    print(f"TEACHERCACHE_TEST_SEED={seed}")
    return seed


def metrics(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]
