"""Of two runs into one output the second is refused and names the first; a run that was taken over saves nothing more."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from teachercache.console import printable
from teachercache.errors import UsageError
from teachercache.store.store import Store
from tests.trainer import runs
from tests.waiting import wait_for
from trainer import fit, lease
from trainer.checkpoint import CheckpointFolder
from trainer.lease import Lease, LeaseLost


def elsewhere(store: Store, number: int = 1, *, age_s: float = 0.0, **fields: object) -> None:
    """The lease of a run on another machine, whose last heartbeat is so old (on a local disk)."""
    holder = {
        "host": "gpu-17", "pid": 4242, "process": "another boot 1", "token": "t", "started": "2026-12-01T09:00:00+00:00",
        "beat": 3, "released": False, **fields,
    }  # fmt: skip
    store.replace(f"lease/{number:08d}.json", json.dumps(holder).encode())
    if age_s:
        path = Path(store.root) / f"lease/{number:08d}.json"
        then = path.stat().st_mtime - age_s
        os.utime(path, (then, then))


def test_one_holder_at_a_time_and_a_released_lease_is_free(any_url: str) -> None:
    store = Store.open(any_url)
    first = Lease(store, take_over=False)
    first.peek()
    first.acquire()
    for take_over in (False, True):
        second = Lease(store, take_over=take_over)
        for attempt in (second.peek, second.acquire):
            with pytest.raises(UsageError) as caught:
                attempt()
            said = str(caught.value)
            assert f"a run on {socket.gethostname()} (process {os.getpid()}, started 2" in said
            assert "last heartbeat" in said
            assert "choose another output" in said
    first.check()
    first.release()
    first.release()
    second = Lease(store, take_over=False)
    second.acquire()
    second.check()
    second.release()
    assert [o.path for o in store.list("lease/")] == ["lease/00000002.json"]


def test_of_eight_that_begin_together_one_gets_it(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    elsewhere(store, 7, age_s=1000)  # all eight may take this one over
    start, won, lost = threading.Barrier(8), [], []

    def begin() -> None:
        mine = Lease(store, take_over=True)
        start.wait()
        try:
            mine.acquire()
            won.append(mine)
        except UsageError as error:
            lost.append(str(error))

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    won[0].check()
    won[0].release()


def test_a_stale_lease_is_taken_over_on_request_alone(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    elsewhere(store, 3, age_s=lease.STALE_S - 60)
    with pytest.raises(UsageError, match=r"being written by a run on gpu-17 \(process 4242, started 2026-12-01T09"):
        Lease(store, take_over=True).peek()
    elsewhere(store, 3, age_s=lease.STALE_S + 60)
    with pytest.raises(UsageError, match=r"left by a run on gpu-17.*last heartbeat 18\d s ago.*--take-over"):
        Lease(store, take_over=False).acquire()
    mine = Lease(store, take_over=True)
    mine.acquire()
    assert [o.path for o in store.list("lease/")] == ["lease/00000004.json"]
    mine.release()


def test_the_lease_of_a_dead_process_of_this_machine_is_free_at_once(tmp_path: Path) -> None:
    program = "import sys; from trainer.lease import Lease; from teachercache.store.store import Store\n"
    program += (
        "mine = Lease(Store.open(sys.argv[1]), take_over=False); mine.acquire(); print('held', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=runs.environment(),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        mine = Lease(Store.open(str(tmp_path)), take_over=False)
        with pytest.raises(UsageError, match=f"process {process.pid},"):
            mine.acquire()
        process.kill()
        process.wait()
        mine.acquire()
    mine.release()


def test_a_run_that_was_asleep_finds_that_it_was_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.01)
    store = Store.open(str(tmp_path))
    mine = Lease(store, take_over=False)
    mine.acquire()
    elsewhere(store, 2)
    wait_for(lambda: mine.lost, 20, "a heartbeat that finds the other run")
    with pytest.raises(LeaseLost, match=r"taken over by a run on gpu-17 \(process 4242"):
        mine.check()
    mine.release()
    assert not json.loads(store.read("lease/00000002.json"))["released"]


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"host": 3}', b"[" * 10_000])
def test_a_lease_that_is_not_understood_is_somebodys(tmp_path: Path, content: bytes) -> None:
    store = Store.open(str(tmp_path))
    store.replace("lease/00000001.json", content)
    with pytest.raises(UsageError, match="written by a run on an unknown host"):
        Lease(store, take_over=True).acquire()


def test_strange_names_and_control_characters_do_no_harm(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    store.replace("lease/._00000009.json", b"x")
    store.replace("lease/٠٠٠٠٠٠٠٩.json", b"x")
    elsewhere(store, 1, host="\x1b]0;owned\x07")
    with pytest.raises(UsageError) as caught:
        Lease(store, take_over=False).peek()
    assert "\x1b" not in printable(str(caught.value))  # what every command prints an error through


def settings(cache_url: str, student: Path, output: object) -> dict[str, object]:
    return {
        "cache": cache_url, "student": str(student), "output": str(output), "data": {"seq_len": 128},
        "train": {"threads": 1}, "log": {"tensorboard": False}, "checkpoint": {"every_steps": 2},
    }  # fmt: skip


def test_a_second_fit_into_one_output_ends_at_once_and_the_first_goes_on(
    cache_url: str, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = runs.write_config(tmp_path / "t.yaml", **settings(cache_url, student, tmp_path / "run"))
    real, refused = fit.Step.run, []

    def run(self: fit.Step, *arguments: object, **options: object) -> object:
        if not refused:
            refused.append(runs.trainer("fit", config, "--take-over"))
        return real(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(fit.Step, "run", run)
    assert runs.fit_here(config, "train.max_steps=3")["steps"] == 3
    (second,) = refused
    assert second.returncode == 2
    assert second.stderr.count("\n") == 1
    assert f"process {os.getpid()}, started" in second.stderr
    assert [entry.step for entry in CheckpointFolder(str(tmp_path / "run")).index().checkpoints] == [2, 3]


def test_a_fit_that_was_taken_over_writes_no_further_checkpoint(
    cache_url: str, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = runs.write_config(tmp_path / "t.yaml", **settings(cache_url, student, tmp_path / "run"))
    folder, real, steps = CheckpointFolder(str(tmp_path / "run")), fit.Step.run, []

    def run(self: fit.Step, *arguments: object, **options: object) -> object:
        steps.append(1)
        if len(steps) == 3:
            elsewhere(folder.store, 2)
        return real(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(fit.Step, "run", run)
    with pytest.raises(LeaseLost, match="gpu-17"):
        runs.fit_here(config)
    assert [entry.step for entry in folder.index().checkpoints] == [2]
