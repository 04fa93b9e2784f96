"""Several ranks are one run: the same batches, losses and weights on 1, 2 and 3, resumed on any number, whoever dies."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.trainer import ranks, runs, tiny
from tests.waiting import wait_for
from trainer.checkpoint import CheckpointFolder

LLAMA = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.3,
    "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "gpt_oss": ("gpt_oss", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }),
}  # fmt: skip
LORA = 'lora={"rank": 4, "alpha": 8}'


@pytest.fixture(scope="module")
def students(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random student of each family."""
    folder = tmp_path_factory.mktemp("students")
    for name, (model_type, changes) in FAMILIES.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**LLAMA | changes), dtype=torch.float32)
        model.save_pretrained(folder / name)
        tiny.make_tokenizer(folder / name)
    return folder


def write_config(folder: Path, cache_url: str, student: Path, **sections: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    common: dict[str, Any] = {
        "cache": cache_url,
        "student": str(student),
        "data": {"seq_len": 80, "batch_tokens": 6 * 80},
        "optim": {"lr": 1e-2, "warmup_steps": 1},
        "train": {"epochs": 1, "threads": 1},
        "checkpoint": {"every_steps": 2},
        "log": {"tensorboard": False},
    }
    return runs.write_config(folder / "train.yaml", **common | sections)


def state(run: Path) -> dict[str, Any]:
    (newest,) = sorted(run.glob("step-*"))[-1:]
    found: dict[str, Any] = json.loads((newest / "trainer_state.json").read_text())
    return found


def assert_alike(ours: Path, theirs: Path, tolerance: float = 2e-5) -> None:
    """The same batches (their rows, tokens, learning rates, the state after them), and losses and weights to rounding."""
    exact = ("step", "lr", "rows", "tokens", "padding", "progress", "epoch")
    for a, b in zip(runs.metrics(ours), runs.metrics(theirs), strict=True):
        assert {key: a[key] for key in exact} == {key: b[key] for key in exact}
        assert [a["loss"], a["grad_norm"]] == pytest.approx([b["loss"], b["grad_norm"]], rel=tolerance)
    for a, b in zip(runs.metrics(ours, "eval"), runs.metrics(theirs, "eval"), strict=True):
        assert (a["step"], a["rows"]) == (b["step"], b["rows"])
        for key in ("heldout_kl", "perplexity", "top1_agreement"):
            assert a[key] == pytest.approx(b[key], rel=1e-3)
    assert state(ours)["data"] == state(theirs)["data"]
    assert_weights_alike(ours, theirs, 10 * tolerance)


def assert_weights_alike(ours: Path, theirs: Path, tolerance: float) -> None:
    a, b = load_file(ours / "final" / "model.safetensors"), load_file(theirs / "final" / "model.safetensors")
    assert a.keys() == b.keys()
    for name in a:
        error = (a[name] - b[name]).norm() / b[name].norm().clamp_min(1e-9)
        assert error <= tolerance, f"{name}: {error:.1e}"


def logits(folder: Path) -> torch.Tensor:
    """By plain transformers, of a few tokens."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(3, 40)[None], use_cache=False).logits
    return found


def test_one_two_and_three_ranks_train_alike(students: Path, cache_url: str, tmp_path: Path) -> None:
    """Full fine-tuning and adapters; the last batch is not full, so that some ranks have nothing to do in it."""
    at_the_end = {"checkpoint": {"every_steps": None}, "eval": {"every_steps": 4, "max_rows": 200}}
    configs = {name: write_config(tmp_path / name, cache_url, students / name, **at_the_end) for name in FAMILIES}
    kinds = {
        f"{name}-{kind}": (configs[name], extra)
        for name in FAMILIES
        for kind, extra in (("full", ()), ("lora", (LORA,)))
    }

    def outputs(count: int) -> list[tuple[Path, Sequence[str]]]:
        return [(config, (f"output={tmp_path / kind}-{count}", *extra)) for kind, (config, extra) in kinds.items()]

    for config, overrides in outputs(1):
        runs.fit_here(config, *overrides)
    for count in (2, 3):
        summaries = ranks.run(count, ranks.fits, *outputs(count))
        assert all(not summary for of_rank in summaries[1:] for summary in of_rank)
        for kind, (_, extra) in kinds.items():
            one, several = tmp_path / f"{kind}-1", tmp_path / f"{kind}-{count}"
            assert_alike(several, one)
            torch.testing.assert_close(logits(several / "final"), logits(one / "final"), atol=1e-3, rtol=1e-3)
            if not extra:  # adapters alone need their base
                newest = sorted(several.glob("step-*"))[-1]
                torch.testing.assert_close(logits(newest), logits(several / "final"), atol=0, rtol=0)
    first, *_, last = runs.metrics(tmp_path / "llama-full-1")
    assert last["rows"] < first["rows"] / 2  # two sequences of six


def test_a_run_goes_on_with_another_number_of_ranks(students: Path, cache_url: str, tmp_path: Path) -> None:
    """2, 1 and 3 ranks one after the other, each to the next checkpoint; as one rank without a stop."""
    configs = {name: write_config(tmp_path / name, cache_url, students / name) for name in FAMILIES}
    constant = 'optim={"lr": 1e-2, "schedule": "constant"}'
    kinds = {"tied": (configs["tied"], ()), "gpt_oss": (configs["gpt_oss"], ()), "lora": (configs["llama"], (LORA,))}
    for kind, (config, extra) in kinds.items():
        runs.fit_here(config, f"output={tmp_path / kind}-straight", constant, "train.max_steps=3", *extra)
    for count, steps in ((2, 1), (1, 2), (3, 3)):
        overrides = (constant, f"train.max_steps={steps}")
        todo = [
            (config, (f"output={tmp_path / kind}-run", *overrides, *extra)) for kind, (config, extra) in kinds.items()
        ]
        if count == 1:
            for config, each in todo:
                runs.fit_here(config, *each)
        else:
            ranks.run(count, ranks.fits, *todo)
    for kind in kinds:
        run, straight = tmp_path / f"{kind}-run", tmp_path / f"{kind}-straight"
        assert [m["loss"] for m in runs.metrics(run)] == pytest.approx(
            [m["loss"] for m in runs.metrics(straight)], rel=2e-5
        )
        assert_weights_alike(run, straight, 2e-4)


STATES = [
    {"train.dtype": "float32", "optim.state": "float32"},
    {"train.dtype": "bfloat16", "optim.state": "float32"},
    {"train.dtype": "bfloat16", "optim.state": "bfloat16", "optim.master": "float32"},
]


def whole_state(config: Path, overrides: Sequence[str], save_to: Path | None, load_from: Path | None) -> dict[str, Any]:
    """A rank's body: the optimiser's whole state, after a step or as a checkpoint holds it; of rank 0."""
    from trainer import setup, shards
    from trainer.config import load_config
    from trainer.model import parallel
    from trainer.optim import apply_step, build_optimizer, make_state

    settings = load_config(config, overrides)
    compute = setup.choose_compute(settings.train)
    with parallel.joined(compute.device):
        model = setup.load_for_training(settings, Path(settings.student), compute, resumed=False)
        optimizer = build_optimizer(model, settings.optim)
        if load_from is None:
            for parameter in model.parameters():
                parameter.grad = parameter.detach().sin()
            apply_step(optimizer, torch.ones(()), None)
        else:
            saved = torch.load(load_from / "optimizer.pt", weights_only=True)
            make_state(optimizer)
            shards.load(optimizer, load_from, saved)
        if save_to is not None and parallel.count() > 1:
            shards.save(optimizer, save_to)
        numbers = shards.numbers_of(optimizer) if parallel.count() > 1 else optimizer.state_dict()
        if save_to is not None and parallel.rank() == 0:
            torch.save(numbers, save_to / "optimizer.pt")
        steps = [float(state["step"]) for state in optimizer.state.values()]
        found = {}
        for number, key, _, value in shards.state_tensors(optimizer):
            found[f"{number}.{key}"] = torch.cat(parallel.gathered(value))
        return {"tensors": found, "steps": steps} if parallel.rank() == 0 else {}


def test_moments_and_low_bits_come_back_bit_for_bit_on_any_number_of_ranks(
    students: Path, cache_url: str, tmp_path: Path
) -> None:
    """Written by 3 ranks and by one: each is read by others. With 3, some ranks hold nothing of the smallest vectors."""
    config = write_config(tmp_path, cache_url, students / "gpt_oss")
    settings = [[f"{key}={value}" for key, value in each.items()] for each in STATES]
    for writers, others in ((3, (1, 2)), (1, (2,))):
        folders = [tmp_path / f"by-{writers}-{number}" for number in range(len(settings))]
        for folder in folders:
            folder.mkdir()
        arguments = [(config, each, folder, None) for each, folder in zip(settings, folders, strict=True)]
        written = ranks.run(writers, ranks.each, whole_state, arguments)[0]
        assert all(len(list(folder.glob("*.shard"))) == (writers if writers > 1 else 0) for folder in folders)
        arguments = [(config, each, None, folder) for each, folder in zip(settings, folders, strict=True)]
        for readers in others:
            read = ranks.run(readers, ranks.each, whole_state, arguments)[0]
            for ours, theirs in zip(read, written, strict=True):
                assert len(theirs["tensors"]) >= 2 * len(theirs["steps"]) > 20
                assert set(ours["steps"]) == set(theirs["steps"]) == {1.0}
                assert ours["tensors"].keys() == theirs["tensors"].keys()
                assert all(torch.equal(value, theirs["tensors"][name]) for name, value in ours["tensors"].items())
    victim = next((tmp_path / "by-3-0").glob("*.shard"))
    victim.write_bytes(b"x" * victim.stat().st_size)
    with pytest.raises(SafetensorError):  # an Exception, which torch's is not: `restore` says that the file is damaged
        whole_state(config, settings[0], None, tmp_path / "by-3-0")


def test_a_rank_that_is_killed_ends_the_run_and_the_same_command_goes_on(
    students: Path, cache_url: str, tmp_path: Path
) -> None:
    config = write_config(tmp_path, cache_url, students / "llama", train={"epochs": 4, "threads": 1})
    run = tmp_path / "run"
    for victim in (1, 0):
        steps = len(runs.metrics(run)) if run.exists() else 0
        started = ranks.start(2, ranks.fits, (config, [f"output={run}"]))
        wait_for(lambda: (run / "metrics.jsonl").exists() and len(runs.metrics(run)) >= steps + 3, 60, "steps", 0.02)  # noqa: B023
        os.kill(started[victim][0].pid, signal.SIGKILL)
        with pytest.raises(ranks.RankFailed) as caught:
            ranks.finish(started)
        assert caught.value.ends[victim] == -signal.SIGKILL
        assert f"RankLost: rank {1 - victim} of 2 lost another rank" in caught.value.ends[1 - victim]
    ranks.run(2, ranks.fits, (config, [f"output={run}"]))
    ranks.run(2, ranks.fits, (config, [f"output={tmp_path / 'straight'}"]))
    assert [(m["step"], m["loss"]) for m in runs.metrics(run)] == [
        (m["step"], m["loss"]) for m in runs.metrics(tmp_path / "straight")
    ]
    assert_weights_alike(run, tmp_path / "straight", 0.0)


@pytest.mark.slow
def test_a_run_on_s3_goes_from_two_ranks_to_one_and_back(
    students: Path, cache_url: str, tmp_path: Path, s3_url: str
) -> None:
    config = write_config(tmp_path, cache_url, students / "tied")
    constant, output = 'optim={"lr": 1e-2, "schedule": "constant"}', f"{s3_url}/runs/several"
    for count, steps in ((2, 1), (1, 2), (2, 3)):
        ranks.run(count, ranks.fits, (config, [f"output={output}", constant, f"train.max_steps={steps}"]))
    straight = tmp_path / "straight"
    runs.fit_here(config, f"output={straight}", constant, "train.max_steps=3")
    folder = CheckpointFolder(output)
    final = folder.fetch_model("final")
    ours, theirs = load_file(final / "model.safetensors"), load_file(straight / "final" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all((ours[name] - theirs[name]).norm() <= 2e-4 * theirs[name].norm() for name in ours)
    files = [entry.files for entry in folder.index().checkpoints]
    assert [sum(name.endswith(".shard") for name in names) for names in files] == [0, 2]  # keep_last


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_torchrun_and_kills_at_random_give_the_run_without_a_stop(
    students: Path, cache_url: str, tmp_path: Path
) -> None:
    """As a user does it: torchrun, SIGKILL of any rank at any time, the same command; 2 and 3 ranks, twice."""
    rng = random.Random(runs.random_seed())
    for count in (2, 3):
        folder = tmp_path / str(count)
        config = write_config(folder, cache_url, students / "gpt_oss", train={"epochs": 6, "threads": 1})
        run, straight = folder / "run", folder / "straight"
        for output, kills in ((straight, 0), (run, 4)):
            command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m", "trainer", "fit"]
            command = [sys.executable, "-m", *command, str(config), f"output={output}"]
            for kill in range(kills + 1):
                process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=runs.environment()
                )
                if kill < kills:
                    victims = wait_for(partial(ranks_of, process.pid, count), 120, "ranks")
                    time.sleep(rng.uniform(5, 60))  # importing takes the first of them
                    with suppress(ProcessLookupError):  # it may have ended
                        os.kill(rng.choice(victims), signal.SIGKILL)
                said, _ = process.communicate(timeout=300)
                log = output / "metrics.jsonl"
                print(f"{count} ranks, {log.read_text().count('train') if log.exists() else 0} steps")
        assert process.returncode == 0, said[-3000:]
        assert [(m["step"], m["loss"]) for m in runs.metrics(run)] == [
            (m["step"], m["loss"]) for m in runs.metrics(straight)
        ]
        assert_weights_alike(run, straight, 0.0)


def ranks_of(torchrun: int, count: int) -> list[int]:
    """The processes of the ranks that a torchrun has started, or none before it has."""
    import psutil

    found = [child.pid for child in psutil.Process(torchrun).children() if "trainer" in child.cmdline()]
    return found if len(found) == count else []


def stopped(config: Path, overrides: Sequence[str], rank: int) -> None:
    """A rank's body: a signal comes to one rank in the middle of a step."""
    from trainer.step import Step

    real, calls = Step.run, 0

    def run(self: Step, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3 and os.environ["RANK"] == str(rank):
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *arguments, **options)

    Step.run = run  # type: ignore[method-assign]
    ranks.fits((config, overrides))


def diverged(config: Path, overrides: Sequence[str], rank: int) -> None:
    """A rank's body: a loss of one rank is not finite."""
    from trainer.step import Step

    real = Step.loss

    def loss(self: Step, *arguments: Any, **options: Any) -> Any:
        found = real(self, *arguments, **options)
        return found * float("nan") if os.environ["RANK"] == str(rank) else found

    Step.loss = loss  # type: ignore[method-assign]
    ranks.fits((config, overrides))


def full(config: Path, overrides: Sequence[str], rank: int) -> None:
    """A rank's body: the disk is full while one rank writes its share."""
    from trainer import shards

    def write_data(self: Any, *_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    if os.environ["RANK"] == str(rank):
        shards.HuggingFaceStorageWriter.write_data = write_data  # type: ignore[method-assign]
    ranks.fits((config, overrides))


def without_a_word(config: Path, overrides: Sequence[str], rank: int) -> None:
    """A rank's body: one rank alone meets an error."""
    from teachercache.errors import TeacherCacheError
    from trainer.step import Step

    if os.environ["RANK"] == str(rank):

        def run(*_: Any, **__: Any) -> Any:
            raise TeacherCacheError("a file of mine is damaged")

        Step.run = run  # type: ignore[method-assign]
    ranks.fits((config, overrides))


@pytest.mark.parametrize(
    ("body", "batch", "says"),
    [
        (stopped, 6, "Stopped: stopped by a signal: saved step 3"),
        (diverged, 6, r"TrainingDiverged: the loss is nan .* documents "),
        (full, 6, r"^DiskFull: the disk of .* is full"),
        (without_a_word, 6, "TeacherCacheError: rank 1: a file of mine is damaged"),
        (
            stopped,
            5,
            "UsageError: a step's 5 sequences cannot be shared by 2 ranks: set data.batch_tokens to a multiple",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_ends_a_run_is_said_once(
    students: Path, cache_url: str, tmp_path: Path, body: Any, batch: int, says: str
) -> None:
    """All ranks end; the one that says why is rank 0 where all know it, else the one that does."""
    data = {"seq_len": 80, "batch_tokens": batch * 80}
    config = write_config(tmp_path, cache_url, students / "llama", data=data)
    with pytest.raises(ranks.RankFailed) as caught:
        ranks.run(2, body, config, [f"output={tmp_path / 'run'}"], 1)
    assert sum(bool(re.search(says, str(end))) for end in caught.value.ends) == 1
    if body is stopped and batch == 6:
        assert (tmp_path / "run" / "step-00000003").is_dir()
        ranks.run(2, ranks.fits, (config, [f"output={tmp_path / 'run'}"]))
        assert runs.metrics(tmp_path / "run")[-1]["step"] == 4


def loss_and_gradients(config: Path, overrides: Sequence[str], sequences_per_step: int = 6) -> dict[str, Any]:
    """A rank's body: loss and gradients of one step over the first sequences of the cache; of rank 0, whole."""
    import teachercache
    from trainer import setup
    from trainer.config import load_config
    from trainer.data import PackedCache
    from trainer.model import parallel, student
    from trainer.optim import build_optimizer
    from trainer.step import Step

    settings = load_config(config, overrides)
    compute = setup.choose_compute(settings.train)
    with parallel.joined(compute.device):
        model = setup.load_for_training(settings, Path(settings.student), compute, resumed=False)
        (cache,) = setup.open_caches(settings)
        teacher = setup.load_teacher(settings, compute, cache) if settings.teacher else None
        step = Step(
            model, build_optimizer(model, settings.optim), settings, attention_kind="documents", vocab_size=320,
            teacher=teacher,
        )  # fmt: skip
        packed = iter(
            PackedCache(
                teachercache.open(settings.cache), seq_len=80, rank=parallel.rank(), world_size=parallel.count()
            )
        )
        sequences = [next(packed) for _ in range(sequences_per_step // parallel.count())]
        rows = sum(parallel.gathered(sum(sequence.num_rows for sequence in sequences)))
        loss = 0.0
        for sequence in sequences:
            part = step.loss(sequence, num_valid=rows)
            part.backward()
            loss += part.item()
        found, head = {}, student.base(model).get_output_embeddings().weight
        exact = None
        if parallel.count() == 1 and head.dtype == torch.bfloat16:
            head.main_grad = torch.zeros(head.shape)
            kept, head.grad = head.grad, None
            for sequence in sequences:
                step.loss(sequence, num_valid=rows).backward()
            exact, head.grad = head.main_grad, kept
        for name, parameter in model.named_parameters():
            if (grad := parameter.grad) is not None:
                found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
        return {"loss": sum(parallel.gathered(loss)), "grads": found, "head_in_float32": exact}


def test_the_heads_gradient_is_summed_over_ranks_in_float32(students: Path, cache_url: str, tmp_path: Path) -> None:
    """In bf16, one sequence a rank: the sum of both heads' float32 gradients, rounded once."""
    config = write_config(tmp_path, cache_url, students / "llama")
    overrides = ["train.dtype=bfloat16", "data.batch_tokens=160"]
    arguments = [(config, overrides, 2)]
    one, two = (ranks.run(count, ranks.each, loss_and_gradients, arguments)[0][0] for count in (1, 2))
    whole = one["head_in_float32"].bfloat16()
    assert torch.equal(two["grads"]["lm_head.weight"], whole)
    assert not torch.equal(one["grads"]["lm_head.weight"], whole)  # bf16 gradients that were added up


VARIANTS = [
    ("llama", 'train={"checkpointing": "full", "mlp_tile": 16}'),
    ("llama", 'train={"checkpointing": "offload"}'),
    ("tied", 'train={"checkpointing": "keep-attention"}'),
    ("gpt_oss", 'train={"checkpointing": "keep-matmuls", "mlp_tile": 32}'),
    ("gpt_oss", 'loss={"method": "forward_chunked", "ce_weight": {"default": 0.3}}'),
    ("tied", 'loss={"method": "dense", "tail": "renormalize"}'),
    ("llama", 'loss={"method": "online", "tail": null}'),
    ("tied", 'loss={"method": "online", "rows": {"kind": "sampled", "entries": 12}, "tail": "sampled"}'),
    ("llama", 'loss={"recompute": true}'),
]


def test_every_policy_and_loss_has_the_gradients_of_one_rank(
    students: Path, cache_url: str, teacher: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, cache_url, students / "llama")
    each = [
        (config, (f"student={students / family}", extra, *([f"teacher={teacher}"] if "online" in extra else [])))
        for family, extra in VARIANTS
    ]
    one, two = (ranks.run(count, ranks.each, loss_and_gradients, each)[0] for count in (1, 2))
    for variant, ours, theirs in zip(VARIANTS, two, one, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5), variant
        assert ours["grads"].keys() == theirs["grads"].keys()
        for name, value in theirs["grads"].items():
            error = (ours["grads"][name] - value).norm() / value.norm().clamp_min(1e-9)
            assert error < 1e-5, f"{variant} {name}: {error:.1e}"
