"""What a user sees: one line and exit status 2 for misuse, nothing written; a whole small run that works."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml

from tests.trainer import runs, tiny
from trainer.cli import main
from trainer.config import TrainerConfig

SETTINGS = {
    "data": {"seq_len": 128},
    "optim": {"lr": 3e-3, "warmup_steps": 2},
    "train": {"threads": 1},
}


@pytest.fixture
def config(tmp_path: Path, cache_url: str, student: Path) -> Path:
    return runs.write_config(
        tmp_path / "train.yaml", cache=cache_url, student=str(student), output=str(tmp_path / "run"), **SETTINGS
    )


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command line in this process: the same code as `python -m trainer`, without the seconds of imports."""

    def call(*arguments: str | Path) -> Done:
        capfd.readouterr()
        code: object = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as done:
            code = done.code
        return Done(int(str(code)), *capfd.readouterr())

    return call


def refused(run: Callable[..., Done], config: Path, *overrides: str, command: str = "fit") -> str:
    """The one line of a refusal; asserts the exit status and that nothing was written."""
    before = sorted(config.parent.rglob("*"))
    done = run(command, config, *overrides)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert sorted(config.parent.rglob("*")) == before
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert "hushhush" not in done.stderr
    return lines[0]


@pytest.mark.slow
def test_fit_lowers_the_heldout_kl_and_writes_a_plain_hugging_face_folder(
    run: Callable[..., Done], config: Path
) -> None:
    before = run("eval", config, "split=heldout", "--json")
    assert before.returncode == 0, before.stderr
    done = run("fit", config, "train.epochs=12", "optim.lr=1e-2", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    folder = config.parent / "run"
    assert json.loads((folder / "summary.json").read_text()) == summary
    after = run("eval", config, f"student={folder}", "split=heldout", "--json")
    kl_before, kl_after = (json.loads(result.stdout)["heldout_kl"] for result in (before, after))
    print(f"held-out KL {kl_before:.3f} -> {kl_after:.3f} in {summary['steps']} steps")
    assert kl_after < 0.7 * kl_before
    assert list((folder / "tensorboard").glob("events.*"))

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    prompt = tokenizer("the cat", return_tensors="pt").input_ids
    text = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert text.shape == (1, prompt.shape[1] + 5)


def test_eval_against_a_live_teacher_adds_the_full_vocabulary_kl(
    run: Callable[..., Done], config: Path, teacher: Path
) -> None:
    done = run("eval", config, f"teacher={teacher}", f"student={teacher}", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert abs(result["heldout_kl_full_vocabulary"]) < 1e-5
    assert abs(result["heldout_kl"]) < 1e-4  # cached log-probabilities are rounded to float16 precision
    assert result["top1_agreement"] > 0.99


def test_eval_on_a_text_file_agrees_with_transformers(
    run: Callable[..., Done], config: Path, student: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(tiny.TEXT))
    done = run("eval", config, "--text", text, "--json", "data.seq_len=512")
    assert done.returncode == 0, done.stderr
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(student)(text.read_text(), return_tensors="pt").input_ids
    loss = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)(ids, labels=ids).loss
    assert json.loads(done.stdout)["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-4)


def test_a_student_with_another_tokenizer_is_refused(
    run: Callable[..., Done], config: Path, student: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(student, other)
    tiny.make_tokenizer(other, vocab_size=300, text=["quite another text, with other merges"])
    assert "was made with tokenizer" in refused(run, config, f"student={other}")
    assert "was made with tokenizer" in refused(run, config, f"student={other}", command="eval")


def test_a_student_with_too_small_a_head_is_refused(
    run: Callable[..., Done], config: Path, student: Path, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    shutil.copytree(student, small)
    settings = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**settings, "vocab_size": 100}))
    assert "has 100 rows in its head" in refused(run, config, f"student={small}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.learning_rate=1"], "did you mean optim.lr?"),
        (["student=/nowhere"], "there is no folder /nowhere"),
        (["cache=/nowhere"], "/nowhere"),
        (["split=validation"], "validation"),
        (["eval.split=held-out", "eval.every_steps=200"], "no records of split 'held-out'"),
        (["manifest=7"], "no manifest 7"),
        (["train.device=cuda"], "no CUDA device"),
        (["train.attention=flex"], "needs a CUDA device"),
        (["output=null"], "fit needs output"),
        (["output=s3://AKIAKEY:hushhush@bucket/run"], "credentials"),
        (["output=s3://bucket/run?sig=hushhush"], "credentials"),
        (["log.mlflow.tracking_uri=https://me:hushhush@host/"], "credentials"),
        (["eval.split=heldot"], "eval.split: file:///.* has no records of split 'heldot'.*did you mean heldout?"),
        (["split=trian"], "did you mean train?"),
        (["data.weights={web: 1.0, defualt: 2.0}"], "data.weights names defualt, web"),
        (["data.weights={defualt: 2.0}"], "did you mean default?"),
        (["data.weights={default: 0.0}"], "one of them above 0"),
    ],
)
def test_misuse_is_one_line_with_exit_status_2_and_nothing_written(
    run: Callable[..., Done], config: Path, overrides: list[str], message: str
) -> None:
    assert re.search(message.replace("?", r"\?"), refused(run, config, *overrides))


def test_eval_names_the_nearest_split(run: Callable[..., Done], config: Path) -> None:
    assert "did you mean heldout?" in refused(run, config, "split=held_out", command="eval")


def test_an_output_on_s3_without_credentials_is_one_line(
    run: Callable[..., Done], config: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setattr("trainer.setup.load_for_training", lambda *_, **__: pytest.fail("the model was loaded"))
    assert "[TC-E203]" in refused(run, config, f"output={s3_url}/run")


def test_a_piped_run_prints_short_lines_units_and_its_last_loss(run: Callable[..., Done], config: Path) -> None:
    done = run("fit", config, "train.max_steps=3")
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert (
        max(len(line) for line in [*lines, *done.stdout.splitlines()] if str(config.parent.parent) not in line) <= 160
    )
    assert "TFLOP/s" not in done.stderr  # of a CPU it would be 0.00
    assert sum("in nats" in line for line in lines) == 1
    assert any(
        line.startswith("kernels: layers plain (liger-kernel has layers for a GPU alone); attention") for line in lines
    )
    assert any(line.startswith("data: 40 records and ") for line in lines)
    assert next(line for line in reversed(lines) if line.startswith("step ")).startswith("step 3 (100%): loss ")


def test_keys_without_effect_are_notes_at_the_start_of_a_run(run: Callable[..., Done], config: Path) -> None:
    done = run("fit", config, "train.max_steps=1", "optim.decay_fraction=0.5")
    assert done.returncode == 0, done.stderr
    assert "note: optim.decay_fraction has no effect: optim.schedule is cosine" in done.stderr
    plain = run("fit", config, "train.max_steps=1", f"output={config.parent / 'plain'}")
    assert (plain.returncode, "no effect" in plain.stderr) == (0, False)


def test_a_resumed_run_that_would_be_another_run_is_refused(run: Callable[..., Done], config: Path) -> None:
    assert run("fit", config).returncode == 0
    assert "data.seq_len = 128, found 64" in refused(run, config, "data.seq_len=64")
    assert "seed = 0, found 1" in refused(run, config, "seed=1")
    assert "optim.state = float32, found bfloat16" in refused(run, config, "optim.state=bfloat16")
    assert "train.dtype = auto, found bfloat16" in refused(run, config, "train.dtype=bfloat16")
    done = run("fit", config)
    assert done.returncode == 0
    assert "finished" in done.stderr


def test_init_student_refuses_to_overwrite_and_unknown_layers(
    run: Callable[..., Done], student: Path, teacher: Path, tmp_path: Path
) -> None:
    for arguments in (["--out", student], ["--out", tmp_path / "new", "--layers", "0-9"]):
        done = run("init-student", "--teacher", teacher, *arguments)
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1


def test_init_student_takes_no_url_and_repeats_none(run: Callable[..., Done], teacher: Path) -> None:
    url = "s3://key:topsecret@bucket/x"
    for arguments in (["--teacher", url, "--out", "new"], ["--teacher", teacher, "--out", url]):
        done = run("init-student", *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "topsecret" not in done.stderr


def test_init_student_takes_a_teacher_by_its_id_on_the_hub(
    run: Callable[..., Done], teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: {"owner/tiny": str(teacher)}[name])
    done = run("init-student", "--teacher", "owner/tiny", "--layers", "0", "--out", tmp_path / "new")
    assert done.returncode == 0
    assert (tmp_path / "new/config.json").exists()
    done = run("init-student", "--teacher", "owner/other", "--out", tmp_path / "other")
    assert done.returncode == 2
    assert "owner/other: no folder here" in done.stderr


def test_as_a_process_a_refusal_is_one_line_too(config: Path) -> None:
    done = runs.trainer("fit", config, "studnet=x")
    assert done.returncode == 2
    assert done.stderr == f"error: unknown key studnet in {config}; did you mean student? [TC-E200]\n"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["fit", "--help"], ["config"], ["fit", "nowhere.yaml"], ["eval", "{config}", "seed=x"]]
)
def test_help_and_a_wrong_configuration_need_neither_torch_nor_transformers(config: Path, arguments: list[str]) -> None:
    """Their import takes seconds, which a misspelt key should not cost."""
    program = """
import sys
from trainer.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
heavy = {"torch", "transformers", "triton", "trainer.fit", "trainer.bench.loss", "trainer.bench.step"}
print("imported", sorted(heavy & sys.modules.keys()))
"""
    command = [sys.executable, "-c", program, *(argument.format(config=config) for argument in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=runs.environment())
    assert done.stdout.splitlines()[-1] == "imported []", done.stderr


def test_the_printed_configuration_is_one_with_every_default(run: Callable[..., Done]) -> None:
    tree = yaml.safe_load(run("config").stdout)
    assert TrainerConfig.model_validate({**tree, "cache": "a", "student": "b"}) == TrainerConfig.model_validate(
        {"cache": "a", "student": "b"}
    )


@pytest.mark.parametrize(
    "command", [[], ["fit"], ["eval"], ["plan"], ["init-student"], ["bench-step"], ["bench-loss"], ["config"]]
)
def test_every_command_has_a_help_that_teaches(run: Callable[..., Done], command: list[str]) -> None:
    done = run(*command, "--help")
    assert done.returncode == 0
    assert len(done.stdout) > 300
