"""Put the CRDs of KubeRay's release into build/tools/kuberay-crds, so that `make test` checks the manifests against them too.

    python3 scripts/fetch_kuberay_crds.py          prints the folder; exits 1 with the reason where they cannot be had

They are in no package registry; this asks the release's tag on GitHub, once. The release is the one that
deploy/helm/kuberay-operator.values.yaml installs.
"""

from __future__ import annotations

import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "tools" / "kuberay-crds"
FILES = ("ray.io_rayjobs.yaml", "ray.io_rayclusters.yaml")
URL = "https://raw.githubusercontent.com/ray-project/kuberay/{tag}/helm-chart/kuberay-operator/crds/{file}"


def release() -> str:
    values = (ROOT / "deploy/helm/kuberay-operator.values.yaml").read_text(encoding="utf-8")
    found = re.search(r"^  tag: (v[\d.]+)$", values, re.M)
    assert found is not None, "deploy/helm/kuberay-operator.values.yaml names no image tag"
    return found[1]


def crds(url: str = URL, folder: Path = FOLDER, timeout_s: float = 10.0) -> Path:
    """The folder with both files; raises RuntimeError with the reason where they cannot be had."""
    if all((folder / file).exists() for file in FILES):
        return folder
    got = {}
    for file in FILES:
        source = url.format(tag=release(), file=file)
        try:
            with urllib.request.urlopen(source, timeout=timeout_s) as answer:
                got[file] = answer.read()
        except (urllib.error.URLError, OSError) as error:
            raise RuntimeError(f"KubeRay's CRDs are in no package registry, and {source} gave: {error}") from error
        if b"kind: CustomResourceDefinition" not in got[file]:
            raise RuntimeError(f"{source} is no CRD")
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in got.items():
        (folder / file).write_bytes(data)
    return folder


if __name__ == "__main__":
    try:
        print(crds())
    except RuntimeError as error:
        sys.exit(str(error))
