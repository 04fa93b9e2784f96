"""The questions of teachercache_choice.yaml, as the harness wants a dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def load(**_: Any) -> dict[str, Any]:
    """Return the split `test`: a datasets.Dataset with columns prompt, choices (four) and label (index of the right one)."""
    from datasets import Dataset

    lines = Path(__file__).with_name("questions.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}
