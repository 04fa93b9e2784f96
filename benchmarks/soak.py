"""`make soak`: the chaos test over many seeds with half a minute of S3 errors each. Output: benchmarks/results/soak.json.

python benchmarks/soak.py [--seeds 20] [--first 100] [--errors-s 30]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import RESULTS, ROOT, host, parser, write


def main() -> int:
    options = parser(__doc__, seeds=20, first=100, errors_s=30.0).parse_args()
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
    asked = {"errors_s": options.errors_s, "seeds": options.seeds}
    write(RESULTS / "soak.json", {**host(), **asked, "failed": failed, "runs": reports})
    print(f"{options.seeds - failed} of {options.seeds} seeds passed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
