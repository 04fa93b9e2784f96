"""A folder that `fit` wrote is served by vLLM, and answers as transformers does. One engine start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer import runs, tiny

SMOLLM2 = runs.ROOT / "build/models/smollm2-135m"
PROMPTS = [
    "The object model of Python is simple: everything is an object, and",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Names refer to objects. Names are introduced by",
]
NEW_TOKENS = 16
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

# A separate process: an engine's memory and threads are gone with it.
SERVE = """
import json, sys
from vllm import LLM, SamplingParams

folder, prompts, new_tokens = json.loads(sys.argv[1])
llm = LLM(model=folder, dtype="float32", max_model_len=256, enforce_eager=True, enable_prefix_caching=False)
options = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, prompt_logprobs=1, logprobs=1)
answers = []
for output in llm.generate(prompts, options, use_tqdm=False):
    prompt, (completion,) = output.prompt_token_ids, output.outputs
    answers.append({
        "prompt": prompt,
        "prompt_logprobs": [row[i].logprob for row, i in zip(output.prompt_logprobs[1:], prompt[1:])],
        "new": list(completion.token_ids),
        "new_logprobs": [row[i].logprob for row, i in zip(completion.logprobs, completion.token_ids)],
        "text": completion.text,
    })
print("ANSWERS " + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's output: a student of two of SmolLM2's layers, trained on a cache of a teacher of four."""
    from trainer.model.init_student import init_student

    if not (SMOLLM2 / "model.safetensors").exists():
        pytest.skip(f"{SMOLLM2} is not there; `make model` makes it")
    root = tmp_path_factory.mktemp("served")
    init_student(SMOLLM2, root / "teacher", layers="0,10,20,29")
    init_student(root / "teacher", root / "student", layers="0,3")
    cache = tiny.make_cache(str(root / "cache"), root / "teacher", documents=12, heldout=0)
    config = runs.write_config(
        root / "train.yaml", cache=cache, student=str(root / "student"), output=str(root / "run"),
        data={"seq_len": 128}, optim={"lr": 1e-3, "warmup_steps": 0}, train={"max_steps": 3, "threads": 2},
        log={"tensorboard": False},
    )  # fmt: skip
    runs.fit_here(config)
    return root / "run"


def reference(folder: Path, prompt: list[int]) -> dict[str, Any]:
    """Greedy continuation and log-probabilities by transformers, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        logprobs = model(ids).logits[0].log_softmax(-1)
    taken = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    return {
        "new": ids[0, len(prompt) :].tolist(),
        "prompt_logprobs": taken[: len(prompt) - 1],
        "new_logprobs": taken[len(prompt) - 1 :],
    }


def test_vllm_answers_as_transformers_does(trained: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = trained / "final"
    environment = runs.environment(
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="2"
    )
    done = subprocess.run(
        [sys.executable, "-c", SERVE, json.dumps([str(folder), PROMPTS, NEW_TOKENS])],
        capture_output=True, text=True, timeout=500, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("ANSWERS "))
    answers = json.loads(line.removeprefix("ANSWERS "))
    assert len(answers) == len(PROMPTS)
    largest = 0.0
    for answer in answers:
        expected = reference(folder, answer["prompt"])
        assert answer["new"] == expected["new"]
        for name in ("prompt_logprobs", "new_logprobs"):
            pairs = zip(answer[name], expected[name], strict=True)
            largest = max(largest, *(abs(a - b) for a, b in pairs))
    print(f"{len(answers)} prompts, {NEW_TOKENS} greedy tokens each equal, largest log-probability gap {largest:.1e}")
    assert largest <= 1e-3
