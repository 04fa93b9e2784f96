"""lm-evaluation-harness takes a folder that `fit` wrote, as docs/TRAINING.md says; on a small local task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.trainer import runs

pytestmark = pytest.mark.skipif(
    not find_spec("lm_eval"), reason="lm-eval is not installed: it brings 300 MB for one test (pip install lm-eval)"
)
TASK = "teachercache_choice"
QUESTIONS = [
    {"prompt": "the cat sat on the", "choices": [" mat", " teacher", " function"], "label": 0},
    {"prompt": "a student learns from a", "choices": [" sequence", " teacher", " mat"], "label": 1},
    {"prompt": "packing puts documents one after the", "choices": [" cat", " row", " other"], "label": 2},
    {"prompt": "def add(a, b): return a +", "choices": [" b", " none of them", " token"], "label": 0},
]


def expected_answers(folder: Path) -> list[int]:
    """The choice with the largest summed log-probability, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for question in QUESTIONS:
        scores = []
        for choice in question["choices"]:
            start = len(tokenizer(question["prompt"]).input_ids)
            ids = tokenizer(question["prompt"] + choice, return_tensors="pt").input_ids
            with torch.no_grad():
                logprobs = model(ids).logits[0, :-1].log_softmax(-1)
            scores.append(logprobs.gather(1, ids[0, 1:, None])[start - 1 :].sum().item())
        answers.append(max(range(len(scores)), key=scores.__getitem__))
    return answers


def test_the_harness_scores_a_trained_folder_as_transformers_does(
    cache_url: str, student: Path, tmp_path: Path
) -> None:
    config = runs.write_config(
        tmp_path / "train.yaml", cache=cache_url, student=str(student), output=str(tmp_path / "run"),
        data={"seq_len": 128}, train={"max_steps": 5, "threads": 1}, log={"tensorboard": False},
    )  # fmt: skip
    runs.fit_here(config)
    final = tmp_path / "run" / "final"
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tasks / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    (tasks / "choice.yaml").write_text(json.dumps(task))
    command = [
        sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={final},dtype=float32",
        "--tasks", TASK, "--include_path", str(tasks), "--device", "cpu", "--output_path", str(tmp_path / "out"),
        "--log_samples",
    ]  # fmt: skip
    environment = runs.environment(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(tmp_path / "hf"))
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    found = {}
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        scores = [float(answer[0]) for answer in sample["filtered_resps"]]
        found[sample["doc_id"]] = max(range(len(scores)), key=scores.__getitem__)
    expected = expected_answers(final)
    assert [found[index] for index in range(len(QUESTIONS))] == expected
    (results,) = (tmp_path / "out").rglob("results_*.json")
    accuracy = json.loads(results.read_text())["results"][TASK]["acc,none"]
    print(f"{TASK}: accuracy {accuracy} over {len(QUESTIONS)} questions")
    correct = [a == question["label"] for a, question in zip(expected, QUESTIONS, strict=True)]
    assert accuracy == pytest.approx(sum(correct) / len(correct))
