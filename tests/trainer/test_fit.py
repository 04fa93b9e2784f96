"""What goes wrong outside costs a pause or one clear line: an absent store, a corrupted file, wrong credentials."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import s3fs

from teachercache.errors import TeacherCacheError, UsageError
from tests.servers import Server, serve
from tests.trainer import runs, tiny
from tests.trainer.small_blocks import small_blocks
from trainer import fit, setup
from trainer.config import load_config
from trainer.data import Prefetcher

AWAY_S = float(os.environ.get("TEACHERCACHE_TEST_OUTAGE_S", "4"))
"""How long the S3 server stays away; 30 to repeat the figure of the promise."""


def settings(cache: str, student: Path, output: str) -> dict[str, Any]:
    return {
        "cache": cache,
        "student": str(student),
        "output": output,
        "data": {"seq_len": 64},
        "optim": {"lr": 1e-3},
        "train": {"threads": 1, "epochs": 4},
        "checkpoint": {"every_steps": 10},
        "log": {"tensorboard": False},
    }


def server_pid(endpoint: str) -> int:
    """The process that listens on an endpoint's port."""
    port = int(endpoint.rsplit(":", 1)[1])
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return connection.pid
    raise AssertionError(f"nothing listens on {endpoint}")


@pytest.mark.slow
def test_an_s3_server_that_goes_away_costs_a_pause(
    teacher: Path, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's process is stopped (SIGSTOP: connections hang, as with a dead host) and continued later."""
    with serve("moto", tmp_path / "s3") as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()  # a file system of an earlier test knows the earlier test's server
        bucket = server.new_bucket()
        url = tiny.make_cache(f"{bucket}/cache", teacher, documents=30)
        config = load_config(
            runs.write_config(tmp_path / "train.yaml", **settings(url, student, f"{bucket}/run")), []
        )  # fmt: skip
        calls = 0
        real = fit.Step.run
        pid = server_pid(server.endpoint)

        def run(self: Any, *arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 8:
                os.kill(pid, signal.SIGSTOP)
                threading.Timer(AWAY_S, os.kill, (pid, signal.SIGCONT)).start()
            return real(self, *arguments, **options)

        monkeypatch.setattr(fit.Step, "run", run)
        # Little is read ahead, so that the outage falls into the reading.
        monkeypatch.setitem(Prefetcher.__init__.__kwdefaults__, "depth", 1)
        started = time.monotonic()
        with small_blocks(1, 1):
            summary = fit.fit(config)
        seconds = time.monotonic() - started
    print(f"{summary['steps']} steps in {seconds:.1f} s, the store away for {AWAY_S:.0f} s of them")
    assert summary["data"]["documents"] == 4 * 30
    assert calls == summary["steps"]


def test_a_corrupted_file_stops_with_its_name(teacher: Path, student: Path, tmp_path: Path) -> None:
    url = tiny.make_cache(str(tmp_path / "cache"), teacher, documents=30)
    victim = sorted((tmp_path / "cache").rglob("split=train/**/*.parquet"))[0]
    content = bytearray(victim.read_bytes())
    for position in range(100, len(content) - 2000, 97):
        content[position] ^= 0xFF
    victim.chmod(0o644)
    victim.write_bytes(content)
    config = load_config(runs.write_config(tmp_path / "t.yaml", **settings(url, student, str(tmp_path / "run"))), [])
    with pytest.raises(TeacherCacheError, match=victim.name):
        fit.fit(config)


def test_wrong_credentials_fail_before_the_model_loads(
    s3_server: Callable[[str], Server],
    teacher: Path,
    student: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = s3_server("nanio")  # moto checks no keys
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    url = tiny.make_cache(f"{server.new_bucket()}/cache", teacher, documents=5)
    config = load_config(runs.write_config(tmp_path / "t.yaml", **settings(url, student, str(tmp_path / "run"))), [])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-0000000000000000000")
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(setup, "load_for_training", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(UsageError) as caught:
        fit.fit(config)
    assert "wrong-secret" not in str(caught.value)
    assert not (tmp_path / "run").exists()
