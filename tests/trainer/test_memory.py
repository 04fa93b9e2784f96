"""`trainer plan` predicts the peaks that were measured on an H200, and counts bytes that a plain count gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import GptOssConfig, LlamaConfig

from teachercache.errors import UsageError
from tests.deploy.manifests import ROOT
from tests.trainer.test_cli import Done, run  # noqa: F401  a fixture
from trainer import memory
from trainer.bench.shapes import SHAPES
from trainer.config import TrainerConfig
from trainer.limits import POLICIES, state_bytes

RESULTS = ROOT / "benchmarks/results"
GIB = memory.GIB
LLAMA = LlamaConfig(**SHAPES["llama-3.2b"])


def settings(tokens: int = 4096, **sections: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"cache": "a", "student": "b", "data": {"seq_len": tokens}, **sections})


def measured() -> Iterator[Any]:
    """Every peak of a whole step on one GPU that benchmarks/results has: (settings, GiB)."""
    for name in ("step_h200_rate_documents.json", "step_h200_lengths.json"):
        for row in json.loads((RESULTS / name).read_text())["rows"]:
            case, state = row["case"], "float32" if row["group"] == "rate" else "bfloat16"
            train = {"checkpointing": case["policy"], "mlp_tile": case["mlp_tile"], "compile": case["compile"]}
            label = f"{row['group']}-{case['tokens']}-{case['policy']}-{case['attention']}-{case['documents']}"
            yield pytest.param(
                settings(case["tokens"], optim={"state": state}, train=train), row["memory_gib"], id=label
            )
    for row in json.loads((RESULTS / "redesign_h200.json").read_text())["step"]:
        sections = {"optim": {"state": "bfloat16"}, "train": {"checkpointing": row["policy"]}}
        yield pytest.param(settings(32_768, **sections), row["peak_gib"], id=f"redesign-{row['tree']}-{row['policy']}")
    streamed = json.loads((RESULTS / "stream_h200.json").read_text())
    sections = {"optim": {"state": streamed["moments"]}, "train": {"checkpointing": "none"}}
    yield pytest.param(settings(32_768, **sections), streamed["cases"]["full:none"]["peak_gib"], id="streamed-none")


def test_plain_layers_in_float32_and_bf16_are_predicted_too() -> None:
    """The students of the parity runs: half of SmolLM2-135M's layers, its float32 teacher next to them."""
    teacher = 134_515_008 * 4 / GIB
    config = LlamaConfig(**SHAPES["smollm2-135m"] | {"num_hidden_layers": 15}, tie_word_embeddings=True)
    runs = {row["run"]: row for row in json.loads((RESULTS / "parity_h200.json").read_text())["results"]}
    for name, train, optim in (
        ("fused/bucket", {"dtype": "float32"}, {}),
        ("fused/bucket/bf16-split", {"dtype": "bfloat16"}, {}),
        ("fused/bucket/bf16-stochastic", {"dtype": "bfloat16"}, {"master": "stochastic"}),
    ):
        asked = settings(2048, train=train | {"liger": "off"}, optim=optim)
        found = memory.step_memory(asked, memory.on_meta(config, asked), "none").peak / GIB + teacher
        print(f"{name}: predicted {found:.2f} GiB, measured {runs[name]['peak_gib']:.2f}")
        assert found == pytest.approx(runs[name]["peak_gib"], rel=0.1), name


@pytest.mark.parametrize(("config", "peak_gib"), measured())
def test_the_prediction_is_within_a_tenth_of_the_measured_peak(config: TrainerConfig, peak_gib: float) -> None:
    model = memory.on_meta(LLAMA, config)
    found = memory.step_memory(config, model, config.train.checkpointing).peak / GIB
    print(f"predicted {found:.1f} GiB, measured {peak_gib:.1f}: {found / peak_gib - 1:+.1%}")
    assert found == pytest.approx(peak_gib, rel=0.1)


def test_the_parts_are_plain_counts() -> None:
    config = settings(16_384, optim={"state": "bfloat16"})
    d, inner, layers, _, kv_heads, vocab = SHAPES["llama-3.2b"].values()
    kv = 2 * kv_heads * 128
    parameters = 2 * vocab * d + layers * (2 * d * d + d * kv + 3 * d * inner + 2 * d) + d
    found = memory.step_memory(config, memory.on_meta(LLAMA, config), "none")
    assert (found.weights, found.gradients, found.gathered) == (2 * parameters, 2 * parameters, 0)
    assert found.states == parameters * 6
    assert found.loss == vocab * d * (4 + 2)  # the float32 gradient of the head, a chunk of d rows of logits
    per_token = layers * (2 * (4 * d + 2 * d + kv + 3 * inner) + 24 * 4) + 8 * d + 816
    assert found.activations == 16_384 * per_token


def test_several_gpus_share_what_is_kept_and_gather_a_layer() -> None:
    config = settings(4096)
    model = memory.on_meta(LLAMA, config)
    one, four = (memory.step_memory(config, model, "full", gpus) for gpus in (1, 4))
    assert (four.weights, four.states) == (one.weights // 4, one.states // 4)
    assert (four.activations, four.loss) == (one.activations, one.loss)
    assert four.gathered > 0
    assert four.peak < one.peak


def test_policies_from_the_fastest_to_the_smallest_need_less() -> None:
    experts = GptOssConfig(
        num_hidden_layers=2, num_local_experts=8, hidden_size=512, intermediate_size=512, vocab_size=9_000
    )
    for shape in (LLAMA, experts):
        config = settings(32_768)
        model = memory.on_meta(shape, config)
        peaks = [memory.step_memory(config, model, policy).peak for policy in POLICIES]
        assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("state", ["float32", "bfloat16", "8bit", "offload"])
def test_states_accumulation_and_adapters_count(state: str) -> None:
    config = settings(4096, optim={"state": state})
    model = memory.on_meta(LLAMA, config)
    trained = sum(parameter.numel() for parameter in model.parameters())
    plain = memory.step_memory(config, model, "full")
    assert plain.states == (0 if state == "offload" else trained * state_bytes(config.optim, model.dtype))
    summed = settings(4096, optim={"state": state}).model_copy(
        update={"data": config.data.model_copy(update={"batch_tokens": 8192})}
    )
    assert memory.step_memory(summed, model, "full").gradients == 4 * trained


def test_adapters_leave_frozen_weights_without_gradient_and_state() -> None:
    pytest.importorskip("peft", reason="needs the package peft")
    config = settings(4096, lora={"rank": 16})
    found = memory.step_memory(config, memory.on_meta(LLAMA, config), "full")
    whole = memory.step_memory(settings(4096), memory.on_meta(LLAMA, settings(4096)), "full")
    assert found.weights > whole.weights
    assert found.states < 0.02 * whole.states
    assert found.loss < whole.loss


@pytest.fixture
def train_file(tmp_path: Path) -> Path:
    LLAMA.save_pretrained(tmp_path / "student")  # config.json alone
    (tmp_path / "train.yaml").write_text(f"cache: s3://unread/cache\nstudent: {tmp_path / 'student'}\n")
    return tmp_path / "train.yaml"


def test_the_command_needs_a_configuration_alone_and_says_whether_it_fits(
    run: Callable[..., Done],  # noqa: F811
    train_file: Path,
) -> None:
    found = json.loads(run("plan", train_file, "data.seq_len=32768", "--json").stdout)
    assert (found["fits"], found["checkpointing"]) == (True, "none")
    small = run("plan", train_file, "data.seq_len=32768", "--gpu-gib", "79", "--json")
    assert json.loads(small.stdout)["checkpointing"] == "keep-attention"
    tight = run("plan", train_file, "--gpu-gib", "24", "--json")
    assert (tight.returncode, json.loads(tight.stdout)["fits"]) == (1, False)
    shared = run("plan", train_file, "--gpu-gib", "24", "--gpus", "8")
    assert shared.returncode == 0
    assert "peak_gib" in shared.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["loss.method=dense"], "loss.method=fused, found dense"),
        (["--gpus", "0"], "found 0"),
        (["student=nowhere/at/all"], "holds no config.json"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    run: Callable[..., Done],  # noqa: F811
    train_file: Path,
    arguments: list[str],
    said: str,
) -> None:
    done = run("plan", train_file, *arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_model_that_transformers_does_not_know_is_an_error_of_one_line(train_file: Path) -> None:
    config = train_file.parent / "student/config.json"
    config.write_text('{"model_type": "unheard-of"}')
    with pytest.raises(UsageError, match="unheard-of"):
        memory.read_config(str(config.parent))
