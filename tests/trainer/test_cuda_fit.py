"""`fit` on a GPU: killed and continued it is the same run, and every option that only a GPU has trains.

Runs without the other tests' fixtures (`pytest --noconftest`), so a bare GPU machine can run it. About two minutes on
an H200; with pytest-xdist, `-n 4` halves that. TEACHERCACHE_TEST_DEVICE=cpu runs the same code small on a CPU.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import teachercache
from teachercache.testing import synthetic_record, synthetic_spec
from tests.servers import serve
from tests.trainer import runs
from trainer.checkpoint import CheckpointFolder

ON_CPU = os.environ.get("TEACHERCACHE_TEST_DEVICE") == "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_CPU and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
VOCAB, SEQ_LEN, TOP_K = (512, 128, 16) if ON_CPU else (32_000, 2_048, 100)
SHAPE: dict[str, Any] = (
    {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    if ON_CPU
    else {"hidden_size": 512, "intermediate_size": 1_408, "num_hidden_layers": 8, "num_attention_heads": 8}
)
STEPS, EVERY, COMPARED = 80, 10, 50


def make_student(folder: Path) -> Path:
    """A random Llama (54 M parameters on a GPU, heads of 64) and a tokenizer of one word an id."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(**SHAPE, num_key_value_heads=2, vocab_size=VOCAB, tie_word_embeddings=False)
    LlamaForCausalLM(shape).save_pretrained(folder)
    words = {"<unk>": 0, **{f"w{index}": index for index in range(1, VOCAB)}}
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def make_cache(url: str, student: Path) -> str:
    """Documents of log-normal length whose rows use a sixteenth of the vocabulary: a student learns which within a few
    steps, so an optimiser that does nothing shows."""
    tokenizer = teachercache.fingerprint_tokenizer(student)
    spec = synthetic_spec(vocab_size=VOCAB, top_k=TOP_K).model_copy(update={"tokenizer": tokenizer})
    narrow = synthetic_spec(vocab_size=VOCAB // 16, top_k=TOP_K)
    rng = np.random.default_rng(0)
    records: list[teachercache.Record] = []
    while sum(len(record.input_ids) for record in records) < STEPS * SEQ_LEN:  # the run reads it twice
        length = int(np.clip(rng.lognormal(np.log(SEQ_LEN / 8), 1.0), 8, SEQ_LEN))
        records.append(synthetic_record(rng, narrow, f"doc-{len(records):05d}", length=length))
    writer = teachercache.create(url, spec, tokenizer_files=student, probe=False)
    for shard in range(4):
        writer.commit(f"shard-{shard}", records[shard::4])
    writer.publish(allow_partial=True)
    return url


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("cuda-fit")
    student = make_student(folder / "student")
    return {
        "cache": make_cache(str(folder / "cache"), student),
        "student": str(student),
        "data": {"seq_len": SEQ_LEN, "batch_tokens": 2 * SEQ_LEN},
        "optim": {"lr": 1e-3, "warmup_steps": 5},
        "train": {"dtype": "bfloat16", "max_steps": STEPS, "threads": 2},
        "checkpoint": {"every_steps": EVERY},
        "log": {"tensorboard": False},
    }


class Interrupted:
    """A run that is killed at a random step after its first checkpoint, and then finished by the same command."""

    def __init__(self, name: str, settings: dict[str, Any], folder: Path, output: str, killed_at: int | None) -> None:
        self.name, self.folder, self.output, self.killed_at = name, folder, output, killed_at
        folder.mkdir()
        self.config = runs.write_config(folder / "train.yaml", **settings, output=output)
        self.resumed_from = 0

    def begin(self) -> None:
        """To the kill, or to the end where there is none."""
        logs = self.folder / "first"
        logs.mkdir()
        if self.killed_at is None:
            self._run_to_the_end(logs)
            return
        # What is watched is the log: the output folder of a local run, TMPDIR of one that writes to S3.
        code = runs.kill_at_step(self.config, self.folder, self.killed_at, signal.SIGKILL, TMPDIR=str(logs))
        assert code == -signal.SIGKILL
        latest = CheckpointFolder(self.output).index().latest
        assert latest is not None
        self.resumed_from = latest.step

    def finish(self) -> None:
        logs = self.folder / "second"
        logs.mkdir()
        self._run_to_the_end(logs)

    def _run_to_the_end(self, logs: Path) -> None:
        done = runs.trainer("fit", self.config, timeout=400, TMPDIR=str(logs))
        assert done.returncode == 0, done.stderr[-4000:]

    def losses(self) -> list[float]:
        lines = CheckpointFolder(self.output).get_text("metrics.jsonl").splitlines()
        entries = [entry for entry in map(json.loads, lines) if entry["kind"] == "train"]
        assert [entry["step"] for entry in entries] == list(range(1, STEPS + 1)), self.name
        return [entry["loss"] for entry in entries]


def test_a_killed_run_continues_with_the_losses_of_the_uninterrupted_one(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 at a random step, the same command again, checkpoints on disk and on S3: fifty steps after resumption
    the losses agree to 1e-4, with train.deterministic too. The runs share the GPU, to save time."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "2")
    exact = {**settings, "train": {**settings["train"], "deterministic": True}}
    rng = random.Random(runs.random_seed())
    latest_kill = STEPS - COMPARED - 5  # a few steps pass between the log line and the signal

    def killed_at() -> int:
        return rng.randrange(EVERY + 1, latest_kill)

    (tmp_path / "s3" / "runs").mkdir(parents=True)  # localbucket: a folder is a bucket
    with serve("localbucket", tmp_path / "s3") as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        whole = Interrupted("whole", settings, tmp_path / "whole", str(tmp_path / "whole/run"), None)
        whole_exact = Interrupted("whole exact", exact, tmp_path / "exact", str(tmp_path / "exact/run"), None)
        killed = [
            Interrupted("local", settings, tmp_path / "local", str(tmp_path / "local/run"), killed_at()),
            Interrupted("S3", settings, tmp_path / "s3-run", "s3://runs/a", killed_at()),
            Interrupted("local, deterministic", exact, tmp_path / "d", str(tmp_path / "d/run"), killed_at()),
        ]
        with ThreadPoolExecutor() as pool:
            list(pool.map(Interrupted.begin, [whole, whole_exact, *killed]))
            list(pool.map(Interrupted.finish, killed))
        found = {}
        for run in killed:
            straight = (whole_exact if "deterministic" in run.name else whole).losses()
            ours = run.losses()
            gaps = [abs(a - b) / b for a, b in zip(ours, straight, strict=True)]
            found[run.name] = max(gaps[run.resumed_from :])
            print(
                f"{run.name}: killed after step {run.killed_at}, resumed after {run.resumed_from}; largest "
                f"relative difference before {max(gaps[: run.resumed_from]):.1e}, in the {STEPS - run.resumed_from} steps "
                f"after {found[run.name]:.1e}; loss {straight[0]:.3f} -> {straight[-1]:.3f}"
            )
            assert STEPS - run.resumed_from >= COMPARED
            assert straight[-1] < 0.9 * straight[0]
    assert max(found.values()) <= 1e-4, found  # the default runs were bitwise equal on an H200; see docs/LOG.md


def ten_steps(settings: dict[str, Any], folder: Path, *overrides: str, alone: bool = False) -> list[float]:
    """Losses of ten steps; `alone` takes them in a separate process."""
    config = runs.write_config(folder / "train.yaml", **settings, output=str(folder / "run"))
    options = ("train.max_steps=10", "checkpoint.every_steps=null", *overrides)
    if alone:
        done = runs.trainer("fit", config, *options, timeout=400)
        assert done.returncode == 0, done.stderr[-4000:]
    else:
        runs.fit_here(config, *options)
    return [entry["loss"] for entry in runs.metrics(folder / "run")]


@pytest.fixture(scope="module")
def plain(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    losses = ten_steps(settings, tmp_path_factory.mktemp("plain"), "train.checkpointing=none")
    assert losses[-1] < 0.95 * losses[0]
    return losses


def close(losses: list[float], plain: list[float], tolerance: float) -> None:
    gap = max(abs(a - b) / b for a, b in zip(losses, plain, strict=True))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; largest relative difference from the plain run {gap:.1e}")
    assert all(map(math.isfinite, losses))
    assert gap <= tolerance


@pytest.mark.parametrize("policy", ["full", "keep-attention", "keep-matmuls", "offload"])
def test_every_activation_policy_gives_the_plain_runs_losses(
    settings: dict[str, Any], plain: list[float], tmp_path: Path, policy: str
) -> None:
    close(ten_steps(settings, tmp_path, f"train.checkpointing={policy}"), plain, 1e-5)


@pytest.mark.parametrize(
    "option", ["train.mlp_tile=512", "train.compile=true", "train.attention=varlen", "train.attention=mixed"]
)
def test_every_way_to_run_a_layer_gives_the_plain_runs_losses(
    settings: dict[str, Any], plain: list[float], tmp_path: Path, option: str
) -> None:
    if ON_CPU and "attention" in option:
        pytest.skip(f"{option} needs a CUDA device")
    # liger-kernel has put its layers into transformers for this whole process, and torch cannot compile those.
    close(ten_steps(settings, tmp_path, option, alone="compile" in option), plain, 2e-3)


@pytest.mark.parametrize(
    ("option", "tolerance"),
    [
        ("optim.state=offload", 1e-3),
        ("optim.state=bfloat16", 1e-2),
        ("optim.state=8bit", 2e-2),
        ("optim.master=stochastic", 1e-2),
        ("optim.master=float32", 1e-3),
    ],
)
def test_every_way_to_keep_the_optimizers_state_trains_alike_and_resumes(
    settings: dict[str, Any], plain: list[float], tmp_path: Path, option: str, tolerance: float
) -> None:
    if option == "optim.state=8bit" and not find_spec("torchao"):
        pytest.skip("torchao is not installed")
    if ON_CPU and option == "optim.state=offload":
        pytest.skip("optim.state=offload needs a CUDA device")
    config = runs.write_config(tmp_path / "train.yaml", **settings, output=str(tmp_path / "run"))
    # The learning rate looks ahead to the last step: a run that ends earlier is stopped, not shortened.
    stop_after(6, lambda: runs.fit_here(config, "train.max_steps=10", "checkpoint.every_steps=6", option))
    close(ten_steps(settings, tmp_path, option), plain, tolerance)


def stop_after(steps: int, fit: Callable[[], Any]) -> None:
    """Run `fit`, and break it off right after this many steps."""
    from trainer.step import Step

    real, taken = Step.run, 0

    def run(*arguments: Any, **options: Any) -> Any:
        nonlocal taken
        if taken == steps:
            raise KeyboardInterrupt
        taken += 1
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "run", run)
        with pytest.raises(KeyboardInterrupt):
            fit()


def test_low_rank_adapters_train(settings: dict[str, Any], plain: list[float], tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs the package peft")
    adapters = {**settings, "lora": {"rank": 8}}
    losses = ten_steps(adapters, tmp_path, "optim.lr=1e-2")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    assert all(map(math.isfinite, losses))
    assert losses[0] == pytest.approx(plain[0], rel=1e-3)  # new adapters change nothing
    assert losses[-1] < losses[0]
