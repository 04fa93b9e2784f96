"""Compare the pins of constraints/ with a clone of https://github.com/pypa/advisory-database, where no network is.

    python scripts/check_advisories.py CLONE

Prints each pin that an advisory covers, and ends with status 1 where there is one. `make audit` asks pip-audit's services.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent


def pins() -> dict[str, set[str]]:
    """Return package -> its versions in the constraints files."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "constraints").glob("*.txt")):
        for name, version in re.findall(r"^([\w.-]+)(?:\[.*?\])?==([^\s;#]+)", path.read_text(), re.M):
            found.setdefault(canonicalize_name(name), set()).add(version)
    return found


def covers(advisory: dict[str, Any], name: str, pin: str) -> bool:
    """Return whether an advisory is about this version; its ranges are pairs of events, as OSV's schema has them."""
    version = Version(Version(pin).public)
    for affected in advisory["affected"]:
        if canonicalize_name(affected["package"]["name"]) != name:
            continue
        if pin in affected.get("versions", ()):
            return True
        for events in (part["events"] for part in affected.get("ranges", ()) if part["type"] == "ECOSYSTEM"):
            inside = False
            for event in events:
                ((kind, at),) = event.items()
                if kind == "introduced":
                    inside = inside or version >= Version(at)
                elif version >= Version(at) and (kind == "fixed" or version > Version(at)):
                    inside = False
            if inside:
                return True
    return False


def advisories(clone: str) -> Iterator[tuple[str, str]]:
    """Yield package and path of each advisory of the newest commit."""
    listed = subprocess.run(
        ["git", "-C", clone, "ls-tree", "-r", "--name-only", "HEAD", "vulns/"],
        capture_output=True,
        text=True,
        check=True,
    )
    for path in listed.stdout.split():
        yield path.split("/")[1], path


def main(clone: str) -> int:
    """Print what is covered, and how much was compared."""
    pinned, everything, hits, about = pins(), list(advisories(clone)), 0, 0
    for name, path in everything:
        if name not in pinned:
            continue
        about += 1
        shown = subprocess.run(["git", "-C", clone, "show", f"HEAD:{path}"], capture_output=True, text=True, check=True)
        advisory = yaml.safe_load(shown.stdout)
        for pin in sorted(pinned[name]):
            if not advisory.get("withdrawn") and covers(advisory, name, pin):
                hits += 1
                print(f"{name}=={pin}: {advisory['id']}")
    date = subprocess.run(["git", "-C", clone, "log", "-1", "--format=%cs"], capture_output=True, text=True, check=True)
    print(
        f"{len(pinned)} pinned packages, {len(everything):,} advisories of {date.stdout.strip()}, {about} about them: {hits} hits"
    )
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
