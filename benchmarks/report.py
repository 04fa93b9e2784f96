"""What the benchmarks without a loss share: the command line, the host's record, the file of results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def parser(description: str, **options: Any) -> argparse.ArgumentParser:
    """Return a parser of `--name VALUE` for each option: its default, or (default, help); None is a path."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, option in options.items():
        default, said = option if isinstance(option, tuple) else (option, None)
        kind = Path if default is None else type(default)
        made.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=said)
    return made


def host() -> dict[str, Any]:
    """Return where and when figures were taken."""
    return {"cpus": os.cpu_count(), "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}


def write(path: Path, report: dict[str, Any]) -> None:
    """Write a result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
    print(f"written: {path}")
