"""What goes wrong outside costs a pause or one clear line: an absent store, a corrupted file, wrong credentials."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import s3fs
import torch
from transformers import LlamaForCausalLM

import teachercache
from teachercache import Record
from teachercache.errors import TeacherCacheError, UsageError
from teachercache.parquet import datafile
from tests.servers import Server, serve
from tests.trainer import runs, tiny
from tests.trainer.small_blocks import small_blocks
from tests.trainer.test_cli import Done, run  # noqa: F401  a fixture
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


def top_k_id_beyond(record: Record) -> Record:
    ids = record.topk_ids.copy()
    ids[1, -1] = 10**6
    return replace(record, topk_ids=ids)


def negative_top_k_id(record: Record) -> Record:
    ids = record.topk_ids.copy()
    ids[0, 0] = -5
    return replace(record, topk_ids=ids)


def first_id_beyond_the_vocabulary(record: Record) -> Record:
    ids = record.topk_ids.copy()
    ids[0, 0] = 320  # the vocabulary has 320
    return replace(record, topk_ids=ids)


def input_id_beyond(record: Record) -> Record:
    return replace(record, input_ids=np.where(np.arange(len(record.input_ids)) == 2, 10**6, record.input_ids))


def position_beyond(record: Record) -> Record:
    return replace(record, row_pos=record.row_pos + len(record.input_ids))


def negative_position(record: Record) -> Record:
    return replace(record, row_pos=record.row_pos - 1)


def nan_row(record: Record) -> Record:
    return replace(record, tail_logprob=np.full_like(record.tail_logprob, np.nan))


def mass_of_sixteen(record: Record) -> Record:
    return replace(record, topk_logprobs=np.zeros_like(record.topk_logprobs))


@pytest.mark.parametrize(
    "harm",
    [
        top_k_id_beyond, negative_top_k_id, first_id_beyond_the_vocabulary, input_id_beyond, position_beyond,
        negative_position, nan_row, mass_of_sixteen,
    ],
)  # fmt: skip
def test_a_value_that_no_teacher_gives_ends_fit_with_its_document_before_a_step(
    teacher: Path,
    student: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., Done],  # noqa: F811
    harm: Callable[[Record], Record],
) -> None:
    """A cache of someone who can seal what they like: on a GPU such an id would be written to beyond its tensor."""
    url = str(tmp_path / "cache")
    spec = tiny.spec_for(teacher)
    writer = teachercache.create(url, spec, tokenizer_files=teacher, probe=False)
    model = LlamaForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    ids = np.random.default_rng(0).integers(3, 300, size=(6, 12))
    records = [tiny.teacher_record(model, f"doc-{i}", row, top_k=16, split="train") for i, row in enumerate(ids)]
    records[3] = harm(records[3])
    with monkeypatch.context() as patch:
        patch.setattr(datafile, "check_record", lambda *_, **__: None)
        patch.setattr(datafile.FileBuilder, "_verify", lambda self: None)
        writer.commit("shard", records)
    writer.publish(allow_partial=True)
    config = runs.write_config(tmp_path / "t.yaml", **settings(url, student, str(tmp_path / "run")))
    monkeypatch.setattr(fit.Step, "run", lambda *_, **__: pytest.fail("a step was taken"))
    done = run("fit", config, "data.seq_len=512")  # all documents are in the first step
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "doc-3" in last
    assert "[TC-E101]" in last or "[TC-E102]" in last
    assert "Traceback" not in done.stderr
