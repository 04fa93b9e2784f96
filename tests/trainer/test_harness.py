"""`eval --tasks`: lm-evaluation-harness scores a student's folder as transformers does, without a network."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.trainer import runs
from tests.trainer.test_cli import Done, run  # noqa: F401  a fixture

FOLDER = Path(__file__).resolve().parents[2] / "trainer/tasks"
QUESTIONS = [json.loads(line) for line in (FOLDER / "questions.jsonl").read_text().splitlines()]
ASKED = 12


def expected_answers(folder: Path) -> list[int]:
    """The choice with the largest summed log-probability, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for question in QUESTIONS[:ASKED]:
        scores = []
        start = len(tokenizer(question["prompt"]).input_ids)
        for choice in question["choices"]:
            ids = tokenizer(f"{question['prompt']} {choice}", return_tensors="pt").input_ids
            with torch.no_grad():
                logprobs = model(ids).logits[0, :-1].log_softmax(-1)
            scores.append(logprobs.gather(1, ids[0, 1:, None])[start - 1 :].sum().item())
        answers.append(max(range(len(scores)), key=scores.__getitem__))
    return answers


@pytest.fixture
def config(tmp_path: Path, student: Path) -> Path:
    return runs.write_config(
        tmp_path / "train.yaml", cache="s3://unread/cache", student=str(student), train={"threads": 1}
    )


def test_our_task_is_scored_as_transformers_does_and_asks_no_server(
    run: Callable[..., Done],  # noqa: F811
    config: Path,
    student: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import socket

    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    pytest.importorskip("lm_eval", reason="needs the package lm-eval")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    done = run("eval", config, "--tasks", "teachercache_choice", "--limit", ASKED, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["tasks"]
    answers = expected_answers(student)
    right = [answer == question["label"] for answer, question in zip(answers, QUESTIONS, strict=False)]
    assert found["teachercache_choice.acc"] == pytest.approx(sum(right) / ASKED)
    assert found["teachercache_choice.questions"] == ASKED
    assert 0 < sum(right) < ASKED


def test_the_questions_are_whole_and_their_labels_balanced() -> None:
    assert len(QUESTIONS) == len({question["prompt"] for question in QUESTIONS}) == 48
    assert all(len(set(question["choices"])) == 4 for question in QUESTIONS)
    assert all(question.keys() == {"prompt", "choices", "label"} for question in QUESTIONS)
    counts = [sum(question["label"] == label for question in QUESTIONS) for label in range(4)]
    assert sum(counts) == 48
    assert min(counts) >= 10


def test_an_unknown_task_is_refused_by_name(
    run: Callable[..., Done],  # noqa: F811
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = pytest.importorskip("lm_eval.tasks", reason="needs the package lm-eval")
    ours_alone = partial(tasks.TaskManager, include_path=str(FOLDER), include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", lambda **_: ours_alone())  # the index of all takes 20 s
    done = run("eval", config, "--tasks", "teachercache_choice,teachercache_chioce")
    assert done.returncode == 2
    assert "no task teachercache_chioce; expected teachercache_choice" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tasks", "teachercache_choice", "--text", "book.txt"], "give one of them"),
        (["--limit", "3"], "--limit goes with --tasks"),
    ],
)
def test_misuse_is_refused(
    run: Callable[..., Done],  # noqa: F811
    config: Path,
    arguments: list[str],
    said: str,
) -> None:
    done = run("eval", config, *arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_without_the_package_the_message_names_the_extra(
    run: Callable[..., Done],  # noqa: F811
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    done = run("eval", config, "--tasks", "teachercache_choice")
    assert done.returncode == 2
    assert ".[harness]" in done.stderr
