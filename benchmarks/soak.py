"""`make soak`: the chaos test over many seeds with half a minute of S3 errors each. Output: benchmarks/results/soak.json.

python benchmarks/soak.py [--seeds 20] [--first 100] [--errors-s 30]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=100)
    parser.add_argument("--errors-s", type=float, default=30.0)
    options = parser.parse_args()
    env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    reports, failed = [], 0
    for seed in range(options.first, options.first + options.seeds):
        command = [sys.executable, "-m", "tests.pipeline.chaos", str(seed), str(options.errors_s)]
        result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            report = json.loads(result.stdout.splitlines()[-1])
        else:
            failed += 1
            report = {"seed": seed, "failed": (result.stdout + result.stderr)[-3000:]}
        reports.append(report)
        print(json.dumps(report), flush=True)
    out = ROOT / "benchmarks" / "results" / "soak.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    summary = {
        "date": time.strftime("%Y-%m-%d"),
        "cpus": os.cpu_count(),
        "errors_s": options.errors_s,
        "seeds": options.seeds,
        "failed": failed,
        "runs": reports,
    }
    out.write_text(json.dumps(summary, indent=2) + "\n")
    print(f"{options.seeds - failed} of {options.seeds} seeds passed; {out}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
