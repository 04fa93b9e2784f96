#!/usr/bin/env bash
# Packs Ray for a machine without network, in files of less than 64 MiB (x86-64, Python 3.12 by default).
#
#   scripts/pack_ray.sh DIR [PYTHON_VERSION]     writes DIR/ray/*.whl (45 MiB) and DIR/deps/*.whl (what ray[default] needs)
#
# On that machine, in a virtual environment (benchmarks/ray_job_h200.py looks for `ray` next to its Python):
#   python -m pip install --no-index --find-links DIR/ray --find-links DIR/deps 'ray[default]' localbucket psutil
# Left out is the wheel's jar, 31 of its 75 MiB: Ray for Java, which no Python process loads.
set -euo pipefail
out=${1:?usage: pack_ray.sh DIR [PYTHON_VERSION]}; python=${2:-3.12}
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out/ray" "$out/deps"
target=(--only-binary=:all: --python-version "$python" --implementation cp)
for tag in _2_28 _2_17 _2_12 _2_5 2014 1; do target+=(--platform "manylinux${tag}_x86_64"); done
python3 -m pip download -q "${target[@]}" -c "$here/constraints/cpu.txt" -d "$out/deps" 'ray[default]' localbucket psutil
python3 - "$out" <<'PYTHON'
import sys, zipfile
from pathlib import Path

out = Path(sys.argv[1])
(wheel,) = (out / "deps").glob("ray-*.whl")
with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(out / "ray" / wheel.name, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as lean:
    for entry in whole.infolist():
        if not entry.filename.startswith("ray/jars/"):
            lean.writestr(entry, whole.read(entry))
wheel.unlink()
PYTHON
du -sm "$out"/*
