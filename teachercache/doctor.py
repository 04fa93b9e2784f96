"""doctor: is this machine fit? Python, packages, disk, shared memory, GPU, and the store's conditions and credentials.

    teachercache doctor s3://bucket/prefix

Every finding says what was looked at, what was found and what to do. What belongs to Ray and vLLM is checked by
`python -m pipeline doctor`, which starts from these findings; this module imports neither (nor torch).
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import asdict, dataclass

from rich.table import Table
from rich.text import Text

from teachercache.console import print_json, text_console
from teachercache.errors import StoreDenied, StoreUnavailable, TeacherCacheError
from teachercache.format import layout
from teachercache.store.store import Store

OK, WARN, FAIL = "ok", "warn", "fail"
GIB = 2**30
GPU_SECONDS = 60.0  # a healthy driver answers within three
SCRATCH_FAIL, SCRATCH_WARN = 2 * GIB, 20 * GIB  # a shard of two million rows is built locally: about 0.6 GB a file
NEEDED = {"pyarrow": (20,), "s3fs": (2025, 3), "fsspec": (2025, 3), "tokenizers": (0, 20)}


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: `status` is ok, warn (works, but read this) or fail (this will not work)."""

    check: str
    status: str
    found: str
    do: str = ""


def examine(url: str | None = None, *, write: bool = True) -> list[Finding]:
    """Run all checks of this module; `write` false leaves the probe of the store's conditions out."""
    found = [check_python(), *check_packages(), check_scratch(), check_shared_memory(), check_gpu()]
    if url is not None:
        found += check_store(url, write=write)
    return found


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    """Check the interpreter's version."""
    shown = ".".join(map(str, version))
    if version < (3, 11):
        return Finding("python", FAIL, shown, "expected 3.11 or newer: make the environment with another interpreter")
    return Finding("python", OK, f"{shown} on {platform.system()} {platform.machine()}")


def check_packages() -> list[Finding]:
    """Check the packages without which no cache can be read."""
    findings = []
    for name, least in NEEDED.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(name, FAIL, "not installed", f"pip install {name}"))
            continue
        old = release(version) < least
        do = f"expected {'.'.join(map(str, least))} or newer: pip install -U {name}" if old else ""
        findings.append(Finding(name, FAIL if old else OK, version, do))
    return findings


def release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 2025.3.2.post1 → (2025, 3, 2)."""
    return tuple(map(int, itertools.takewhile(str.isdigit, version.split("."))))


def check_scratch() -> Finding:
    """Check the scratch disk: files are built and verified locally before they are uploaded whole."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    shown = f"{free / GIB:.1f} GiB free in {folder}"
    if free < SCRATCH_FAIL:
        do = "expected 2 GiB at least: free some, or point TMPDIR at a larger disk"
        return Finding("scratch disk", FAIL, shown, do)
    if free < SCRATCH_WARN:
        return Finding("scratch disk", WARN, shown, "20 GiB are comfortable for large shards: TMPDIR chooses the disk")
    return Finding("scratch disk", OK, shown)


def check_shared_memory(path: str = "/dev/shm") -> Finding:  # nosec B108: asked for its size, never written
    """Check the room of Ray's object store."""
    if not os.path.isdir(path):
        return Finding("shared memory", WARN, f"no {path}", "Ray's object store falls back to /tmp, which is slow")
    free = shutil.disk_usage(path).free
    if free < GIB:
        do = "containers get 64 MiB by default: mount a memory volume at /dev/shm (docker run --shm-size=16g)"
        return Finding("shared memory", WARN, f"{free / 2**20:.0f} MiB free in {path}", do)
    return Finding("shared memory", OK, f"{free / GIB:.1f} GiB free in {path}")


def check_gpu() -> Finding:
    """Check what the NVIDIA driver says, without loading CUDA into this process."""
    if not shutil.which("nvidia-smi"):
        return Finding("gpu", WARN, "no nvidia-smi", "fine for reading and tests; real teachers and students need one")
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=GPU_SECONDS)
    except subprocess.TimeoutExpired:
        said = f"nvidia-smi does not answer within {GPU_SECONDS:g} s"
        return Finding("gpu", FAIL, said, "repair the NVIDIA driver, or reboot")
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not lines:
        said = (done.stderr or done.stdout).strip()[:200]
        return Finding("gpu", FAIL, said or "none listed", "repair the NVIDIA driver")
    return Finding("gpu", OK, f"{len(lines)} × {lines[0]}")


def check_store(url: str, *, write: bool = True) -> list[Finding]:
    """Check reading, then writing under the condition that everything rests on."""
    try:
        store = Store.open(url)
        store.list(layout.MANIFESTS)
    except TeacherCacheError as error:
        return [_store_failure("store: reading", error)]
    findings = [Finding("store: reading", OK, f"{url} can be listed; {_credentials(url)}")]
    if not write or url.startswith("hf://"):
        return findings
    try:
        store.probe()
    except StoreDenied as error:
        do = "enough for students; a cache team needs deploy/storage/iam/writer.json"
        return [*findings, Finding("store: writing", WARN, str(error), do)]
    except TeacherCacheError as error:
        return [*findings, _store_failure("store: conditional writes", error)]
    found = "a second create was refused, alone and in a race of eight"
    return [*findings, Finding("store: conditional writes", OK, found)]


def _store_failure(check: str, error: TeacherCacheError) -> Finding:
    """Make a finding of an error, whose sentence says what to do; the code leads to its incident page."""
    do = f"docs/OPERATIONS.md, {error.code}"
    if isinstance(error, StoreDenied):
        do = f"set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role; {do}"
    elif isinstance(error, StoreUnavailable):
        do = f"check AWS_ENDPOINT_URL and the network; {do}"
    return Finding(check, FAIL, f"{error} [{error.code}]", do)


def _credentials(url: str) -> str:
    """Return where the keys come from; never the keys."""
    if url.startswith("hf://"):
        from huggingface_hub import get_token

        return "with a token" if get_token() else "without a token"
    if not url.startswith(("s3://", "s3a://")):
        return "no credentials needed"
    places = {"ACCESS_KEY_ID": "the environment", "PROFILE": "a profile", "WEB_IDENTITY_TOKEN_FILE": "a web identity"}  # nosec B105: names
    found = (place for name, place in places.items() if os.environ.get(f"AWS_{name}"))
    return "keys from " + next(found, "a shared file or the machine's role")


def print_findings(findings: Collection[Finding], *, as_json: bool = False, indent: int | None = 2) -> int:
    """Print a table and one line that sums it up, or JSON; return the exit status, 1 where something will not work."""
    failures = sum(finding.status == FAIL for finding in findings)
    if as_json:
        print_json({"ok": not failures, "findings": [asdict(finding) for finding in findings]}, indent=indent)
        return int(failures > 0)
    console, table = text_console(), Table("", "check", "found", "do")
    mark = {OK: Text("ok", "green"), WARN: Text("warn", "yellow"), FAIL: Text("fail", "red")}
    for finding in findings:
        table.add_row(mark[finding.status], finding.check, finding.found, finding.do)
    console.print(table)
    console.print("fit" if not failures else f"{failures} of {len(findings)} checks failed")
    return int(failures > 0)
