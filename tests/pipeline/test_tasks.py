"""What a failure means to the driver, and which documents two deaths have in common."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipeline.errors import EngineDied, InputChanged, InputDamaged
from pipeline.running.tasks import Failed, ShardTask, merge_suspects
from teachercache import PlanShard
from teachercache.errors import CommitConflict, StoreUnavailable, UsageError
from tests.pipeline.conftest import ROOT, environment

TASK = ShardTask(PlanShard(shard_id="s1", source="s", input="i", input_digest="d"))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InputDamaged("f", 7, 3, "cut"), "input"),
        (InputChanged("f"), "input"),
        (EngineDied("gone", [3, 4]), "died"),
        (StoreUnavailable("503"), "store"),
        (UsageError("no"), "usage"),
        (CommitConflict("other spec"), "error"),
        (ValueError("a bug"), "error"),
    ],
)
def test_a_failure_is_classified(error, kind):
    failed = Failed.of(TASK, error)
    assert failed.kind == kind
    assert failed.suspects == getattr(error, "suspects", ())
    assert failed.exit_code == (2 if kind == "usage" else 1)


def test_a_bug_is_named_with_its_class():
    assert Failed.of(TASK, ValueError("two\nlines")).message == "ValueError: two lines"
    assert Failed.of(TASK, KeyError()).message == "KeyError: KeyError"


def test_suspects_of_two_deaths_are_those_of_both_else_the_newer():
    assert merge_suspects([1, 2, 3], [3, 2, 9]) == (2, 3)
    assert merge_suspects([1], [4, 5]) == (4, 5)


def test_tasks_are_a_leaf():
    """The driver imports them: they bring no engine loop, teacher or tokenising with them."""
    code = "import sys, pipeline.running.tasks; print(*sorted(m for m in sys.modules if m.startswith('pipeline.')))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment(), check=True
    )
    assert done.stdout.strip() == (
        "pipeline.corpus pipeline.corpus.dropped pipeline.errors pipeline.running pipeline.running.tasks"
    )
