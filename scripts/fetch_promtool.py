"""Put Debian's promtool into build/tools, so that `make test` can check the Prometheus rules: no root, nothing installed.

    python3 scripts/fetch_promtool.py          prints the program's path; exits 1 with the reason where it cannot be had

Takes a promtool on the PATH first. Otherwise `apt-get download prometheus` and `dpkg-deb --extract`, once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TOOLS = Path(__file__).resolve().parent.parent / "build" / "tools"


def promtool() -> Path:
    """The program; raises RuntimeError with the reason where there is none."""
    installed = shutil.which("promtool")
    if installed:
        return Path(installed)
    target = TOOLS / "promtool"
    if target.exists():
        return target
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise RuntimeError("promtool is not installed, and this is no Debian or Ubuntu to take the package from")
    with tempfile.TemporaryDirectory() as folder:
        got = download(folder)
        if got.returncode and os.geteuid() == 0:  # a fresh machine has no package lists yet
            subprocess.run(["apt-get", "-q", "update"], capture_output=True)
            got = download(folder)
        packages = list(Path(folder).glob("prometheus_*.deb"))
        if got.returncode or not packages:
            why = (got.stderr.strip().splitlines() or ["no package"])[-1]
            raise RuntimeError(f"promtool is not installed, and `apt-get download prometheus` failed: {why}")
        subprocess.run(["dpkg-deb", "--extract", str(packages[0]), folder], check=True)
        TOOLS.mkdir(parents=True, exist_ok=True)
        shutil.copy2(Path(folder) / "usr/bin/promtool", target)
    return target


def download(folder: str) -> subprocess.CompletedProcess[str]:
    command = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", "prometheus"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


if __name__ == "__main__":
    try:
        print(promtool())
    except RuntimeError as error:
        sys.exit(str(error))
